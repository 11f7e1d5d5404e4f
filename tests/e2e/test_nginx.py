"""Real nginx with the shipped configuration in front of the gateway."""

import contextlib
import http.client
import json
import os
import pathlib
import time

import pytest

from tests.e2e.support import GATEWAY, free_port, gateway, get, need, running, wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
]
SHIPPED = pathlib.Path(__file__).parents[2] / "deploy/nginx/gateway.conf"


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
        shipped = SHIPPED.read_text()
        assert "server 127.0.0.1:8080;" in shipped
        assert "listen 8000;" in shipped
        site_conf = shipped.replace("server 127.0.0.1:8080;", f"server {behind.url[7:]};")
        site_conf = site_conf.replace("listen 8000;", f"listen 127.0.0.1:{port};")
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
            wait_until(
                lambda: get(f"http://127.0.0.1:{port}/readyz")[0] == 200, 120, "nginx answers"
            )
            yield port, behind


def post(connection, behind, body, path="/v1/chat/completions"):
    connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body),
                       {"content-type": "application/json", "authorization": f"Bearer {behind.key}"})  # fmt: skip
    return connection.getresponse()


def test_a_stream_arrives_chunk_by_chunk(site):
    port, behind = site
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
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
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
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
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    for body, status in ((b"{", 400), ({"model": "none", "messages": []}, 404)):
        reply = post(connection, behind, body)
        assert reply.status == status
        assert set(json.loads(reply.read())["error"]) == {"message", "type", "param", "code"}


def test_wrong_keys_are_counted_by_the_clients_of_nginx(site):
    port, _ = site

    def wrong(address):
        connection = http.client.HTTPConnection(
            "127.0.0.1", port, timeout=30, source_address=(address, 0)
        )
        made_up = {"authorization": "Bearer gw_wrong", "x-forwarded-for": "198.51.100.1"}
        connection.request("GET", "/v1/models", headers=made_up)
        with contextlib.closing(connection):
            return connection.getresponse().status

    assert [wrong("127.0.0.2") for _ in range(4)] == [401, 401, 401, 429]
    assert wrong("127.0.0.3") == 401


def test_a_client_that_leaves_nginx_leaves_the_gateway_too(site):
    port, behind = site
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
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
    port, behind = site
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    statuses: dict[int, int] = {}
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    for number in range(5000):
        reply = post(connection, behind, body)
        reply.read()
        statuses[reply.status] = statuses.get(reply.status, 0) + 1
        if number in (1000, 2000, 3000):
            time.sleep((3.0, 5.0, 3.5)[number // 1000 - 1])  # around the idle limits of both hops
    assert statuses == {200: 5000}
