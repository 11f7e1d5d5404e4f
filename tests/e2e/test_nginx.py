"""Real nginx with the shipped configuration in front of the gateway."""

import collections
import concurrent.futures
import contextlib
import http.client
import json
import os
import pathlib
import re
import ssl
import subprocess
import threading
import time

import pytest

from tests.e2e.support import GATEWAY, gateway, need, running, wait_until
from tests.ports import free_port

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
]
SHIPPED = pathlib.Path(__file__).parents[2] / "deploy/nginx/gateway.conf"


def as_shipped(folder, port, *gateways):
    """The shipped file, with the addresses and the certificate of this test."""
    text = SHIPPED.read_text()
    (server,) = re.findall(r"^ +server 127\.0\.0\.1:8080 .*;$", text, re.MULTILINE)
    servers = [server.replace("127.0.0.1:8080", each) for each in gateways]
    openssl = need("openssl", "openssl")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    made = ["-keyout", folder / "privkey.pem", "-out", folder / "fullchain.pem"]
    words = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    subprocess.run([*words, *subject, *made], check=True, capture_output=True)
    for there, here in (
        (server, "\n".join(servers)),
        ("listen 443 ssl http2;", f"listen 127.0.0.1:{port} ssl http2;"),
        ("    listen [::]:443 ssl http2;\n", ""),
        ("/etc/ssl/vllm-gateway/", f"{folder}/"),
    ):
        assert text.count(there) >= 1
        text = text.replace(there, here)
    return text


def connect(port, timeout=30, source="127.0.0.1"):
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection(
        "127.0.0.1", port, timeout=timeout, context=trusting, source_address=(source, 0)
    )


def answers(port):
    with contextlib.suppress(OSError), contextlib.closing(connect(port)) as connection:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    return False


@contextlib.contextmanager
def serving(nginx, folder, site_conf):
    """Run nginx with one site."""
    (folder / "site.conf").write_text(site_conf)
    temp = "".join(
        f"{kind}_temp_path {folder}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    root = "user root; " if os.geteuid() == 0 else ""  # the workers write into our folder
    (folder / "nginx.conf").write_text(
        f"{root}daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log warn; worker_processes 1;\n"
        f"events {{ worker_connections 512; }}\nhttp {{ access_log off; {temp} include {folder}/site.conf; }}\n"
    )
    with running(
        [nginx, "-p", str(folder), "-c", str(folder / "nginx.conf")], log=folder / "nginx.out"
    ):
        yield


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    nginx = need("nginx", "nginx")
    folder = tmp_path_factory.mktemp("nginx")
    sim_port, port = free_port(), free_port()
    with (
        running(
            [
                GATEWAY,
                "sim",
                "--port",
                str(sim_port),
                "--model",
                "m",
                "--max-model-len",
                "100000000",
            ],
            log=folder / "sim.log",
        ),
        gateway(
            folder,
            f"pools: {{m: {{backends: [http://127.0.0.1:{sim_port}]}}}}",
            "trusted_proxies: [127.0.0.1]\nlimits: {failed_keys: 3}",
        ) as behind,
    ):
        site_conf = as_shipped(folder, port, behind.url[7:])
        with serving(nginx, folder, site_conf):
            wait_until(lambda: answers(port), 120, "nginx answers")
            yield port, behind


def post(connection, behind, body, path="/v1/chat/completions"):
    connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body),
                       {"content-type": "application/json", "authorization": f"Bearer {behind.key}"})  # fmt: skip
    return connection.getresponse()


def test_a_stream_arrives_chunk_by_chunk(site):
    port, behind = site
    connection = connect(port, 30)
    reply = post(connection, behind, {
        "model": "m", "stream": True, "max_tokens": 10,
        "messages": [{"role": "user", "content": "[[sim:itl=400ms]] slowly"}],
    })  # fmt: skip
    assert reply.status == 200
    arrived = []
    for line in reply:
        if line.startswith(b"data: "):
            arrived.append(time.monotonic())
    gaps = [after - before for before, after in zip(arrived, arrived[1:], strict=False)]
    assert len([gap for gap in gaps if gap > 0.03]) >= 6, gaps  # of 9; a busy machine joins some


def test_a_body_of_30_mib_passes(site):
    port, behind = site
    connection = connect(port, 60)
    filler = "x" * (30 * 1024 * 1024)
    reply = post(
        connection,
        behind,
        {
            "model": "m",
            "max_tokens": 1,
            "user": filler,
            "messages": [{"role": "user", "content": "hi"}],
        },
    )
    assert reply.status == 200, reply.read()[:500]


def test_errors_stay_json(site):
    port, behind = site
    connection = connect(port, 30)
    for body, status in ((b"{", 400), ({"model": "none", "messages": []}, 404)):
        reply = post(connection, behind, body)
        assert reply.status == status
        assert set(json.loads(reply.read())["error"]) == {"message", "type", "param", "code"}


def test_wrong_keys_are_counted_by_the_clients_of_nginx(site):
    port, _ = site

    def wrong(address):
        connection = connect(port, source=address)
        made_up = {"authorization": "Bearer gw_wrong", "x-forwarded-for": "198.51.100.1"}
        connection.request("GET", "/v1/models", headers=made_up)
        with contextlib.closing(connection):
            return connection.getresponse().status

    assert [wrong("127.0.0.2") for _ in range(4)] == [401, 401, 401, 429]
    assert wrong("127.0.0.3") == 401


def test_a_client_that_leaves_nginx_leaves_the_gateway_too(site):
    port, behind = site
    connection = connect(port, 30)
    reply = post(connection, behind, {
        "model": "m", "stream": True, "max_tokens": 1000,
        "messages": [{"role": "user", "content": "[[sim:itl=50ms]] slowly"}],
    })  # fmt: skip
    reply.readline()
    reply.close()
    connection.close()
    wait_until(
        lambda: 'gateway_inflight_requests{backend="b1",pool="m"} 0.0' in behind.metrics(),
        30,
        "the request ends",
    )


def test_keep_alive_costs_not_one_502_in_5000_posts(site):
    """Five clients rest at the same times, so connections of both hops are idle up to their limits."""
    port, behind = site
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    together = threading.Barrier(5)

    def statuses():
        with contextlib.closing(connect(port, 30)) as connection:
            for rest_s in (0.0, 3.0, 5.0, 3.5):
                together.wait(120)
                time.sleep(rest_s)
                for _ in range(250):
                    reply = post(connection, behind, body)
                    reply.read()
                    yield reply.status

    with concurrent.futures.ThreadPoolExecutor(together.parties) as threads:
        told = list(threads.map(lambda _: collections.Counter(statuses()), range(together.parties)))
    assert sum(told, collections.Counter()) == {200: 5000}


def error_of(reply):
    body = json.loads(reply.read())
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return reply.status, body["error"]["code"]


def test_what_nginx_itself_refuses_is_json(site):
    port, behind = site
    with contextlib.closing(connect(port)) as connection:
        connection.putrequest("POST", "/v1/chat/completions")
        connection.putheader("content-length", str(65 * 1024 * 1024))
        connection.endheaders()
        reply = connection.getresponse()
        assert reply.getheader("content-type") == "application/json"
        assert error_of(reply) == (413, "request_too_large")
    with contextlib.closing(connect(port)) as connection:
        connection.request("GET", "/v1/models", headers={"x-long": "x" * 9000})
        assert error_of(connection.getresponse()) == (400, "invalid_http")
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as plain:
        plain.request("GET", "/v1/models")
        assert error_of(plain.getresponse()) == (400, "tls_needed")


def test_it_speaks_http_2(site):
    port, _ = site
    curl = need("curl", "curl")
    if "HTTP2" not in subprocess.run([curl, "-V"], capture_output=True, text=True).stdout:
        pytest.skip("this curl does not speak HTTP/2")
    url = f"https://127.0.0.1:{port}/readyz"
    words = ["-sk", "--http2", "--noproxy", "*", "-o", "/dev/null", "-w", "%{http_version}", url]
    told = subprocess.run([curl, *words], capture_output=True, text=True, timeout=60)
    assert told.stdout == "2"


def test_a_gateway_that_is_gone_and_an_address_that_may_not_are_json(tmp_path):
    nginx = need("nginx", "nginx")
    port = free_port()
    conf = as_shipped(tmp_path, port, f"127.0.0.1:{free_port()}")
    assert "#allow 10.0.0.0/8;" in conf
    conf = conf.replace("#allow 10.0.0.0/8;", "allow 127.0.0.1;").replace("#deny all;", "deny all;")
    with serving(nginx, tmp_path, conf):
        wait_until(lambda: knocks(port) is not None, 120, "nginx answers")
        assert knocks(port) == (502, "gateway_unreachable")
        assert knocks(port, source="127.0.0.2") == (403, "ip_not_authorized")


def knocks(port, source="127.0.0.1"):
    with contextlib.suppress(OSError), contextlib.closing(connect(port, source=source)) as each:
        each.request("GET", "/v1/models")
        return error_of(each.getresponse())
    return None


def test_its_ports_are_not_those_of_the_gateway_or_of_vllm():
    listens = {int(port) for port in re.findall(r"listen (?:\S*:)?(\d+)", SHIPPED.read_text())}
    assert listens == {443}


def doctor(behind, port, site_conf, *more):
    """What `vllm-gateway doctor` finds: its exit code, and each verdict that is not ok by what it is about."""
    model = ["--model", "m", "--key", behind.key]
    words = ["-c", behind.config, "--through", f"https://127.0.0.1:{port}", "--insecure"]
    command = [GATEWAY, "doctor", *words, *model, "--nginx", site_conf, "--json", *more]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    told = json.loads(ran.stdout)
    found = {each["about"]: each for each in told if each["verdict"] == "wrong"}
    return ran.returncode, found, {each["about"] for each in told if each["verdict"] == "ok"}


@pytest.fixture
def slow_model(tmp_path):
    """A gateway over a model that writes as fast as a real one: 64 tokens take about a second."""
    command = [GATEWAY, "sim", "--port", str(port := free_port()), "--model", "m"]
    with (
        running(command, log=tmp_path / "sim.log"),
        gateway(
            tmp_path,
            f"pools: {{m: {{backends: [http://127.0.0.1:{port}]}}}}",
            "trusted_proxies: [127.0.0.1]",
        ) as behind,
    ):
        yield behind


def test_the_doctor_finds_nothing_wrong_behind_the_shipped_file(tmp_path, slow_model):
    nginx, port = need("nginx", "nginx"), free_port()
    with serving(nginx, tmp_path, as_shipped(tmp_path, port, slow_model.url[7:])):
        wait_until(lambda: answers(port), 120, "nginx answers")
        code, wrong, fine = doctor(slow_model, port, tmp_path / "site.conf", "--silent-for", "3s")
        assert (code, wrong) == (0, {})
        assert fine >= {"reach", "tls", "body_size", "streaming", "silence", "nginx", "advisories"}
        assert "clock" in fine


def test_the_doctor_finds_what_a_careless_file_does_to_clients(tmp_path, slow_model):
    nginx, port = need("nginx", "nginx"), free_port()
    conf = as_shipped(tmp_path, port, slow_model.url[7:])
    for there, here in (
        ("gzip off;", "gzip on; gzip_types *; gzip_proxied any; gzip_min_length 0;"),
        ("proxy_buffering off;", "proxy_ignore_headers X-Accel-Buffering;"),
        ("client_max_body_size 64m;", "client_max_body_size 8m;"),
        ("proxy_read_timeout 3600s;", "proxy_read_timeout 2s;"),
        ("proxy_send_timeout 60s;", "proxy_send_timeout 5s;"),
    ):
        assert there in conf
        conf = conf.replace(there, here)
    with serving(nginx, tmp_path, conf):
        wait_until(lambda: answers(port), 120, "nginx answers")
        code, wrong, _ = doctor(slow_model, port, tmp_path / "site.conf", "--silent-for", "4s")
        assert code == 8
        assert set(wrong) == {"streaming", "gzip", "buffering", "x_accel_buffering", "body_size", "read_timeout", "send_timeout", "silence"}  # fmt: skip
        assert "with status 504; the gateway takes up to 1h" in wrong["silence"]["told"]
        assert wrong["streaming"]["change"]
        assert wrong["read_timeout"]["where"].endswith(
            f"site.conf:{1 + conf[: conf.index('proxy_read_timeout')].count(chr(10))}"
        )
