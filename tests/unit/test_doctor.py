"""What `doctor` finds in nginx's settings, versions and flags, each with the line to change."""

import asyncio
import contextlib
import email.utils
import http.server
import json
import pathlib
import re
import socketserver
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from gateway.cli.console import Exit, VerbError
from gateway.cli.doctor.advisories import mending, open_in
from gateway.cli.doctor.cached import judged
from gateway.cli.doctor.clocks import of_date
from gateway.cli.doctor.machine import files_finding
from gateway.cli.doctor.nginxfile import parse, seconds, size
from gateway.cli.doctor.nginxrules import nginx_findings
from gateway.cli.doctor.onredis import keeps, redis_findings
from gateway.cli.doctor.replies import Asked, pace, waited
from gateway.cli.doctor.running import own_server, running_findings
from gateway.cli.doctor.servers import flag_findings, metrics_findings, server_findings
from gateway.cli.doctor.site import Site
from gateway.cli.doctor.through import through_findings
from gateway.cli.main import app
from gateway.config.models import Config
from gateway.sim.server import SimConfig, SimServer
from gateway.store.scripts import BUDGET_S
from tests.ports import free_port

SHIPPED = (pathlib.Path(__file__).parents[2] / "deploy/nginx/gateway.conf").read_text()


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("api.example", "begins with http:// or https://"),
        ("https://api.example:80800", "not a URL: Port out of range"),
        ("https://[::1", "not a URL: Invalid IPv6 URL"),
        ("https://:443", "names no host"),
    ],
)
def test_what_is_no_url_is_a_usage_error(tmp_path, url, told):
    file = tmp_path / "gateway.yaml"
    file.write_text("pools: {m: {backends: [http://127.0.0.1:1]}}\n")
    error = CliRunner().invoke(app, ["doctor", "-c", str(file), "--through", url]).exception
    assert isinstance(error, VerbError)
    assert (told in str(error), error.code) == (True, Exit.USAGE)


def config(**more):
    backend = {"name": "b1", "url": "http://127.0.0.1:8001"}
    settings = {"version": 1, "trusted_proxies": ["127.0.0.1"]}
    return Config.model_validate(settings | {"pools": {"m": {"backends": [backend]}}} | more)


def found(text, settings=None):
    findings = nginx_findings(parse(text, "site.conf"), settings or config(), file="gw.yaml")
    return [each for each in findings if each.verdict != "ok"]


def line_of(text, needle):
    return next(n for n, line in enumerate(text.splitlines(), 1) if needle in line)


def test_the_shipped_file_has_nothing_wrong():
    assert found(SHIPPED) == []


@pytest.mark.parametrize(
    ("there", "here", "about"),
    [
        ("proxy_buffering off;", "proxy_buffering on; proxy_ignore_headers X-Accel-Buffering;", "buffering"),
        ("gzip off;", "gzip on; gzip_types text/event-stream;", "gzip"),
        ("proxy_http_version 1.1;", "proxy_http_version 1.0;", "http_version"),
        ("client_max_body_size 64m;", "client_max_body_size 8m;", "body_size"),
        ("proxy_read_timeout 3600s;", "proxy_read_timeout 60s;", "read_timeout"),
        ("proxy_send_timeout 60s;", "proxy_send_timeout 10s;", "send_timeout"),
        ("keepalive_timeout 60s;", "keepalive_timeout 90s;", "keep_alive"),
        ("proxy_next_upstream error timeout;", "proxy_next_upstream error non_idempotent;", "replay"),
        ("proxy_ignore_client_abort off;", "proxy_ignore_client_abort on;", "client_abort"),
        ("proxy_intercept_errors off;", "proxy_intercept_errors on;", "errors"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_found_with_its_line(there, here, about):
    wrong = SHIPPED.replace(there, here)
    finding = next(each for each in found(wrong) if each.about == about)
    assert finding.verdict == "wrong"
    assert finding.where == f"site.conf:{line_of(wrong, here)}"
    assert finding.change


@pytest.mark.parametrize(
    ("gone", "about"),
    [
        ("proxy_read_timeout 3600s;", "read_timeout"),
        ("client_max_body_size 64m;", "body_size"),
        ("proxy_http_version 1.1;", "http_version"),
        ("proxy_set_header X-Forwarded-For $remote_addr;", "client_address"),
        ('proxy_set_header Connection "";', "keep_alive"),
    ],
)
def test_what_is_missing_is_found_as_nginx_has_a_default_for_it(gone, about):
    assert about in [each.about for each in found(SHIPPED.replace(gone, ""))]


@pytest.mark.parametrize(
    ("there", "here", "about", "change"),
    [
        ("proxy_connect_timeout 5s;", "proxy_connect_timeout 30s;", "connect_timeout", "proxy_connect_timeout 5s;"),
        ("proxy_connect_timeout 5s;", "", "connect_timeout", "proxy_connect_timeout 5s;"),
        ("    keepalive 64;", "", "keep_alive", "keepalive 64; in an `upstream` block, which proxy_pass names"),
    ],
)  # fmt: skip
def test_what_works_and_could_be_better_is_a_note(there, here, about, change):
    (finding,) = found(SHIPPED.replace(there, here))
    assert (finding.verdict, finding.about, finding.change) == ("note", about, change)


def test_an_nginx_with_fewer_connections_than_the_gateway_is_told():
    def told(of_each, workers):
        return found(f"{workers} events {{ worker_connections {of_each}; }} http {{ {SHIPPED} }}")

    (finding,) = told(768, "worker_processes 4;")
    assert finding.about == "connections"
    assert "at most 1,536 clients at a time; the gateway takes 10,000" in finding.told
    assert finding.change == "worker_connections 5000; and worker_rlimit_nofile 10000;"
    assert told(5000, "worker_processes 4;") == []
    assert told(768, "worker_processes auto;") == []  # how many cores it has is not known


def test_a_line_that_holds_for_several_places_is_told_once():
    location = SHIPPED[SHIPPED.index("    location / {") : SHIPPED.index("    # What nginx itself")]
    both = location + location.replace("location / {", "location /v1/ {")
    wrong = SHIPPED.replace(location, both).replace("client_max_body_size 64m;", "client_max_body_size 8m;")  # fmt: skip
    assert [each.about for each in found(wrong)] == ["body_size"]


def test_a_setting_of_a_block_around_counts():
    wrong = (
        "http { proxy_read_timeout 1h; server { proxy_read_timeout 30s; "
        + SHIPPED[SHIPPED.index("location /") : SHIPPED.index("# What nginx itself")]
        .replace("proxy_read_timeout 3600s;", "")
        .replace("vllm_gateway;", "127.0.0.1:8080;")
        + "}}"
    )
    finding = next(each for each in found(wrong) if each.about == "read_timeout")
    assert "30s" in finding.told


def test_a_proxy_that_leads_elsewhere_is_told():
    (finding,) = found(SHIPPED.replace("server 127.0.0.1:8080 ", "server 127.0.0.1:9999 "))
    assert finding.about == "proxy_pass"


@pytest.mark.parametrize(
    "written", ["unix:/run/gw.sock", "unix:/run/gw.sock:", "unix:/run/gw.sock:/v1/"]
)
def test_a_proxy_that_leads_to_a_unix_socket_is_found(written):
    site = SHIPPED.replace("proxy_pass http://vllm_gateway;", f"proxy_pass http://{written};")
    assert [each.about for each in found(site, config(listen="unix:/run/gw.sock"))] == [
        "keep_alive"
    ]


@contextlib.contextmanager
def proxy(post, path=None, under="", far_s=0.0):
    """A proxy that answers to GET under a path, and to POST as told; on the UNIX socket at a path, if one is named.

    It answers to /livez after `far_s`.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            time.sleep(far_s if self.path.endswith("/livez") else 0.0)
            self.send_response(200 if self.path == f"{under}/livez" else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_POST(self):
            size = int(self.headers["Content-Length"])
            if size < 2**20:  # larger ones are announced, and not sent
                self.rfile.read(size)  # to close before it has come would break it off
            status = post(self)
            if status:
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()
            self.close_connection = True

        def log_message(self, *_):
            pass

    if path is None:
        made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    else:
        made = socketserver.ThreadingUnixStreamServer(str(path), Handler)
    with made as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            where = "localhost" if path else f"127.0.0.1:{server.server_address[1]}"
            yield Site(f"http://{where}", socket=str(path or ""))
        finally:
            server.shutdown()
            thread.join()


def test_a_proxy_that_breaks_off_ends_one_look_and_not_all():
    with proxy(lambda _: None) as site:
        findings = list(through_findings(site, config(), Asked(), site))
    told = {each.about: each.verdict for each in findings}
    assert (told["body_size"], told["streaming"]) == ("skipped", "skipped")


def test_a_gateway_below_a_path_of_a_site_is_asked_there():
    asked = []
    with proxy(lambda each: asked.append(each.path) or 200, under="/llm") as site, proxy(lambda _: 200) as own:  # fmt: skip
        below = Site(f"{site.url}/llm")
        told = {
            each.about: each
            for each in through_findings(below, config(), Asked("gw_1_x", "m"), own)
        }
    assert told["reach"].verdict == "ok"
    assert {each.partition("/v1/")[0] for each in asked} == {"/llm"}
    assert told["streaming"].told == "The stream was too short to tell"


def test_nobody_at_the_other_end_is_told_without_a_number_of_the_system():
    site = Site(f"http://127.0.0.1:{free_port()}")
    (finding,) = through_findings(site, config(), Asked(), site)
    assert finding.told == f"{site.url} does not lead to a gateway: Connection refused"


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_the_base_url_of_an_sdk_will_do(tmp_path, end):
    file = tmp_path / "gateway.yaml"
    file.write_text("version: 1\npools: {m: {backends: [http://127.0.0.1:1]}}\n")
    with proxy(lambda _: 200) as site:
        words = ["doctor", "-c", str(file), "--through", f"{site.url}{end}", "--json"]
        ran = CliRunner().invoke(app, words)
    told = {each["about"]: each["told"] for each in json.loads(ran.stdout)}
    assert told["reach"] == f"{site.url} leads to a gateway"


def test_a_gateway_that_listens_on_a_unix_socket_is_asked_there(tmp_path):
    asked = []
    socket, file = tmp_path / "gw.sock", tmp_path / "gateway.yaml"
    file.write_text(
        f"version: 1\nlisten: unix:{socket}\npools: {{m: {{backends: [http://127.0.0.1:1]}}}}\n"
    )
    with proxy(lambda _: 200) as site, proxy(lambda each: asked.append(each.path) or 200, socket):
        words = ["doctor", "-c", str(file), "--through", site.url, "--key", "gw_1_x", "--json"]
        ran = CliRunner().invoke(app, words)
    told = {each["about"]: each["told"] for each in json.loads(ran.stdout)}
    assert asked == ["/v1/chat/completions"]
    assert told["streaming"] == "The stream was too short to tell"


def test_a_body_that_only_audio_may_have_is_announced_as_audio():
    limits = {"max_body": "1MiB", "max_audio_body": f"{33 * 2**20 + 1}B"}
    with proxy(lambda asked: 401 if "audio" in asked.path else 413) as site:
        findings = list(through_findings(site, config(limits=limits), Asked(), site))
    assert "wrong" not in [each.verdict for each in findings]


def test_a_body_limit_is_told_large_enough():
    limits = {"max_body": f"{33 * 2**20 + 1}B"}
    with proxy(lambda _: 413) as site:
        findings = list(through_findings(site, config(limits=limits), Asked(), site))
    (wrong,) = [each for each in findings if each.verdict == "wrong"]
    assert wrong.change == "client_max_body_size 34m;"


def test_a_proxy_that_is_far_away_is_given_the_time_to_refuse():
    def refuse(_):
        time.sleep(2.0)  # beyond the 1.5 s that one nearby has
        return 413

    with proxy(refuse, far_s=2.0) as site:  # four times that to refuse in
        findings = list(through_findings(site, config(), Asked(), site))
    assert ("body_size", "wrong") in [(each.about, each.verdict) for each in findings]


def test_trusted_proxies_are_wanted_where_nginx_names_the_client():
    (finding,) = found(SHIPPED, config(trusted_proxies=[]))
    assert finding.where == "gw.yaml"
    assert finding.change == "trusted_proxies: [127.0.0.1]"


def test_what_nginx_prints_is_read_file_by_file():
    printed = "# configuration file /etc/nginx/nginx.conf:\nhttp {\n  include x;\n}\n# configuration file /etc/nginx/x:\n\na b;\n"
    (http,) = parse(printed, "nginx -T").inside
    assert [each.where for each in (http, *http.inside)] == [
        "/etc/nginx/nginx.conf:1",
        "/etc/nginx/x:2",
    ]


def printed(http, site, headers=""):
    """Return what `nginx -T` prints of a site in a file of its own, as distributions have it."""
    return (
        "# configuration file /etc/nginx/nginx.conf:\nhttp {\n" + http + "\n"
        "include /etc/nginx/conf.d/*.conf;\n}\n"
        "# configuration file /etc/nginx/conf.d/gateway.conf:\n" + site + "\n"
        "# configuration file /etc/nginx/proxy_params:\n" + headers + "\n"
    )


def test_what_nginx_conf_sets_for_all_sites_holds_in_their_files():
    site = SHIPPED.replace("client_max_body_size 64m;", "").replace("proxy_read_timeout 3600s;", "")
    assert found(printed("client_max_body_size 64m; proxy_read_timeout 1h;", site)) == []
    (wrong,) = found(printed("client_max_body_size 8m; proxy_read_timeout 1h;", site))
    assert (wrong.about, wrong.where) == ("body_size", "/etc/nginx/nginx.conf:2")


def test_what_a_location_includes_holds_there():
    headers = 'proxy_set_header Connection ""; proxy_set_header X-Forwarded-For $remote_addr;'
    gone = ("proxy_set_header Connection", "proxy_set_header X-Forwarded-For")
    site = "\n".join(line for line in SHIPPED.splitlines() if not line.strip().startswith(gone))
    site = site.replace("proxy_pass ", "include proxy_params; proxy_pass ")
    assert found(printed("", site, headers)) == []


def diagnosed(folder, *words, settings="r.yaml"):
    """Return what the verb finds of nginx, for a gateway that no backend answers."""
    file = folder / settings
    file.write_text("version: 1\npools: {m: {backends: [http://127.0.0.1:1]}}\n")
    ran = CliRunner().invoke(app, ["doctor", "-c", str(file), *map(str, words), "-o", "json"])
    return file, {each["about"]: each for each in json.loads(ran.stdout)}


def test_what_a_file_includes_is_looked_at_too(tmp_path):
    main, site = tmp_path / "nginx.conf", tmp_path / "conf.d" / "gateway.conf"
    site.parent.mkdir()
    wrong = SHIPPED.replace("proxy_read_timeout 3600s;", "proxy_read_timeout 60s;")
    wrong = wrong.replace("proxy_intercept_errors off;", "include 'more';")
    site.write_text(wrong)
    main.write_text("include nginx.conf; http {\n  include conf.d/*.conf;\n  include none/*;\n}\n")
    (tmp_path / "more").write_text("proxy_intercept_errors on;")
    settings, found = diagnosed(tmp_path, "--nginx", main)
    assert "proxy_pass" not in found
    assert found["read_timeout"]["where"] == f"{site}:{line_of(wrong, 'proxy_read_timeout')}"
    assert found["errors"]["where"] == f"{tmp_path}/more:1"
    assert found["client_address"]["where"] == str(settings)


def test_what_a_file_includes_and_cannot_be_read_is_a_note(tmp_path):
    main = tmp_path / "nginx.conf"
    main.write_text("http { include sites/gateway.conf; }")
    _, found = diagnosed(tmp_path, "--nginx", main)
    assert found["nginx"]["verdict"] == "note"
    assert (
        found["nginx"]["told"] == f"{tmp_path}/sites/gateway.conf cannot be read: No such file or directory;"
        " what it sets is not known"
    )  # fmt: skip
    assert found["proxy_pass"]["verdict"] == "note"
    # What nginx printed elsewhere has it all.
    main.write_text(printed("", SHIPPED, "include gone;"))
    _, found = diagnosed(tmp_path, "--nginx", main)
    assert not {"nginx", "proxy_pass"} & {*found}


def test_an_nginx_of_this_machine_that_serves_others_is_a_note(tmp_path, monkeypatch):
    program = tmp_path / "nginx"
    program.write_text("#!/bin/sh\necho 'events {}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    _, found = diagnosed(tmp_path)
    assert found["proxy_pass"]["verdict"] == "note"
    main = tmp_path / "nginx.conf"
    main.write_text("events {}")  # one that is named is to lead to the gateway
    _, found = diagnosed(tmp_path, "--nginx", main)
    assert found["proxy_pass"]["verdict"] == "wrong"


def test_a_file_that_includes_itself_is_read_once():
    root = parse(
        "# configuration file /a:\ninclude b;\n# configuration file /b:\ninclude b; c;", "nginx -T"
    )
    assert [each.name for each in root.inside] == ["include", "c"]


@given(st.text(alphabet="{};'\"\\ab# \n$", max_size=60))
def test_any_text_is_read_or_refused(text):
    with contextlib.suppress(ValueError):
        root = parse(text, "f")
        assert all(each.parent is root for each in root.inside)


def test_times_and_sizes_as_nginx_writes_them():
    assert (seconds("1h30m"), seconds("75"), seconds("500ms"), seconds("x")) == (
        5400,
        75,
        0.5,
        None,
    )
    assert (size("64m"), size("1k"), size("7"), size("1x")) == (64 << 20, 1024, 7, None)


def test_versions_have_the_advisories_that_are_open_in_them():
    assert "CVE-2025-48956" in " ".join(open_in("0.10.1"))
    assert "CVE-2025-48956" not in " ".join(open_in("0.10.1.1"))
    assert "CVE-2025-9141" not in " ".join(open_in("0.9.2"))  # its tool parser came later
    assert "CVE-2026-44223" in " ".join(open_in("v0.18.0"))
    assert "CVE-2026-44223" not in " ".join(open_in("0.17.1"))
    assert open_in("0.32.0") == []
    assert open_in("unknown") == []
    assert mending("0.9.0.dev3") == "0.31.0"
    assert mending("0.32.0") == ""


def test_flags_that_work_against_the_gateway_are_found():
    launched = {"name": "b1", "launch": {"command": ["vllm", "serve", "m"], "port": 8001}}

    def flags(**launch):
        backend = {**launched, "launch": launched["launch"] | launch}
        (pool,) = config(pools={"m": {"backends": [backend]}}).pools.values()
        return [each.about for each in flag_findings("m/b1", pool.backends[0])]

    assert flags() == ["prompt_tokens_details"]
    assert flags(args={"enable-prompt-tokens-details": True}) == []
    with_flag = ["vllm", "serve", "m", "--disable_log_stats", "--enable-prompt-tokens-details"]
    assert flags(command=with_flag) == ["log_stats"]
    assert [each.about for each in metrics_findings("m/b1", b"python_info 1\n")] == ["log_stats"]
    assert [*metrics_findings("m/b1", b"vllm:num_requests_running 0\n")] == []


@pytest.mark.parametrize(
    ("settings", "verdict"),
    [
        ({}, "note"),
        ({"prompt_tokens_details": True}, "ok"),
        ({"max_model_len": 256}, None),  # its window is shorter than what is asked
    ],
)
def test_a_server_that_does_not_tell_what_was_cached_is_found_by_its_replies(settings, verdict):
    async def story():
        async with SimServer(SimConfig(model="m", **settings)) as sim:
            backend = {"name": "b1", "url": sim.url}
            settled = config(pools={"m": {"backends": [backend]}})
            findings = await asyncio.to_thread(server_findings, settled)
            assert len(sim.received("/v1/completions")) in (0, 2)
            return [each for each in findings if each.about == "prompt_tokens_details"]

    findings = asyncio.run(story())
    assert [each.verdict for each in findings] == ([] if verdict is None else [verdict])
    if verdict == "note":
        assert "its metrics say 496, its reply says nothing" in findings[0].told
        assert findings[0].change == "start it with --enable-prompt-tokens-details"


@pytest.mark.parametrize("reply", [b'{"usage": {"prompt_tokens": 512}}', b"garbage", b"[]"])
def test_where_nothing_is_cached_there_is_nothing_to_tell(reply):
    assert [*judged("m/b1", reply, 7.0, 7.0)] == []


def test_lua_has_quotes_and_braces_of_its_own():
    lua = """access_by_lua_block {
        -- don't stop here }
        local t = { a = "}", b = '{', c = [[ it's } ]], d = [==[ ]] } ]==], e = t[1] - 2 }
        --[[ nor here }
        ]] if t then t = { {} } end
    }"""
    root = parse(f"http {{ {lua}\n proxy_buffering off; }}", "f")
    (http,) = root.inside
    assert [(each.name, each.where) for each in http.inside] == [
        ("access_by_lua_block", "f:1"),
        ("proxy_buffering", "f:7"),
    ]
    with pytest.raises(ValueError, match="f:2: it is not closed"):
        parse("http {\nset_by_lua_block $a { return { x }", "f")


def test_a_quote_within_a_word_is_a_part_of_it():
    root = parse("""location ~ ^/it's/x { a "b c"; if ($x ~ 'd e') { f ${g}'h; } }""", "f")
    (location,) = root.inside
    assert location.words == ["~", "^/it's/x"]
    assert [each.words for each in location.inside] == [['"b c"'], ["($x", "~", "'d e')"]]
    assert location.inside[1].inside[0].words == ["${g}'h"]


# --- the gateway that runs, and clocks ----------------------------------------------------------------


@contextlib.contextmanager
def admin(page, token=None):
    """An admin listener whose metrics are a page; it wants a token, if one is named."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path, self.headers["Authorization"]))
            allowed = token is None or self.headers["Authorization"] == f"Bearer {token}"
            self.send_response(200 if allowed else 401)
            self.end_headers()
            self.wfile.write(page if allowed else b"{}")

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            thread.join()


def test_the_limit_of_open_files_is_that_of_the_running_gateway():
    with admin(b"process_open_fds 30.0\nprocess_max_fds 1024.0\n") as (address, _):
        few = [*running_findings(config(admin={"listen": address}), "", "")]
    with admin(b"process_max_fds 65536.0\n") as (address, _):
        enough = [*running_findings(config(admin={"listen": address}), "", "")]
    assert [(each.verdict, each.told, each.change) for each in few] == [
        (
            "note",
            "The running gateway may open 1,024 files, enough for 454 of 10,000 clients (`limits.connections`)",
            "LimitNOFILE=65536 in vllm-gateway.service, or ulimit -Hn",
        )
    ]
    assert [(each.verdict, each.told) for each in enough] == [
        ("ok", "The running gateway may open 65,536 files, enough for 10,000 clients")
    ]


def test_fewer_files_do_where_fewer_clients_are_let_in():
    few = config(limits={"connections": 400})
    assert files_finding(few, 1024, "It").verdict == "ok"
    many = config(limits={"connections": 50_000})
    assert "LimitNOFILE=100116 " in files_finding(many, 65_536, "It").change


def test_the_token_of_the_file_is_sent_to_the_listener_of_the_file_and_nowhere_else():
    with admin(b"process_max_fds 65536.0\n", token="t" * 32) as (address, asked):
        own = config(admin={"listen": address, "token": "t" * 32})
        assert [each.verdict for each in running_findings(own, "", "")] == ["ok"]
        refused = [*running_findings(own, f"http://{address}", "")]
    assert [each[1] for each in asked] == ["Bearer " + "t" * 32, None]
    assert "requires its admin token" in refused[0].told


def test_where_no_gateway_runs_the_limit_of_this_shell_is_told():
    nobody = config(admin={"listen": "127.0.0.1:1"})
    skipped, shell = running_findings(nobody, "", "")
    assert (skipped.verdict, skipped.about) == ("skipped", "running")
    assert shell.told.startswith("A gateway started from this shell may open ")


@pytest.mark.parametrize(
    ("listen", "server"),
    [("0.0.0.0:9", "http://127.0.0.1:9"), ("[::]:9", "http://[::1]:9"), ("unix:/run/a", "unix:/run/a")],
)  # fmt: skip
def test_the_admin_listener_is_asked_where_this_machine_has_it(listen, server):
    assert own_server(config(admin={"listen": listen, "token": "t" * 32})) == server


def test_clocks_that_are_apart_are_told_with_the_seconds():
    def told(apart_s):
        date = email.utils.formatdate(time.time() - apart_s, usegmt=True)
        return [*of_date(date, "m/b1", "note", "logs do not fit together")]

    (near,), (far,) = told(1), told(60)
    assert (near.verdict, far.verdict) == ("ok", "note")
    assert re.search("of m/b1 are (60|61) s apart: logs do not fit together", far.told)
    assert [*of_date("", "m/b1", "note", "")] == [*of_date("yesterday", "m/b1", "note", "")] == []


def test_the_clock_of_a_backend_is_read_from_its_replies():
    async def story():
        async with SimServer(SimConfig(model="m")) as sim:
            backend = {"name": "b1", "url": sim.url}
            settled = config(pools={"m": {"backends": [backend]}})
            return await asyncio.to_thread(server_findings, settled)

    (clock,) = [each for each in asyncio.run(story()) if each.about == "clock"]
    assert clock.told == "The clocks of this machine and of m/b1 go together"


def test_a_backend_that_does_not_answer_is_told_in_words():
    backend = {"name": "b1", "url": f"http://127.0.0.1:{free_port()}"}
    (finding,) = server_findings(config(pools={"m": {"backends": [backend]}}))
    assert finding.told == "m/b1 does not answer: connection refused"


def test_a_redis_that_does_not_answer_leaves_its_clock_unknown():
    (finding,) = asyncio.run(redis_findings("redis://:secret@127.0.0.1:1/0"))
    assert (finding.verdict, finding.about) == ("skipped", "clock")
    assert "the connection was refused" in finding.told
    assert "secret" not in finding.told


def test_a_redis_that_is_far_away_tells_its_clock():
    """Requests would not wait so long for it, and this does."""

    ended = asyncio.Event()

    async def far_away(reader, writer):
        while data := await reader.read(65536):
            if b"EVAL" in data:
                await asyncio.sleep(2 * BUDGET_S)
                now = b"%d" % time.time()
                writer.write(b"*2\r\n$%d\r\n%b\r\n$1\r\n0\r\n" % (len(now), now))
            else:  # several of a client that connects may come in one read
                writer.write(b"+OK\r\n" * (data.count(b"SETINFO") + data.count(b"PING")))
        writer.close()
        await writer.wait_closed()
        ended.set()

    async def story():
        async with await asyncio.start_server(far_away, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            findings = await redis_findings(f"redis://127.0.0.1:{port}/0")
            await ended.wait()
            return findings

    (clock,) = asyncio.run(story())
    assert clock.told == "The clocks of this machine and of Redis go together"


@pytest.mark.parametrize(
    ("memory", "verdict"),
    [
        ("maxmemory:0\r\nmaxmemory_policy:allkeys-lru\r\n", "ok"),  # it is never full
        ("maxmemory:104857600\r\nmaxmemory_policy:noeviction\r\n", "ok"),
        ("# Memory\r\nmaxmemory:104857600\r\nmaxmemory_policy:volatile-lru\r\n", "wrong"),
    ],
)
def test_a_redis_that_drops_keys_by_itself_is_wrong(memory, verdict):
    (finding,) = keeps(memory)
    assert (finding.about, finding.verdict) == ("redis", verdict)
    assert verdict == "ok" or finding.change == "maxmemory-policy noeviction, in redis.conf"


def test_of_a_redis_that_does_not_tell_its_memory_nothing_is_said():
    assert [*keeps("")] == []


# --- whole replies ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("direct", "outer", "tokens_per_s"),
    [(1.0, 1.0, 64), (1.6, 1.0, 64), (1.0, 1.6, 64), (1.0, 0.1, 64)],
    ids=["alike", "the first stalled", "the second stalled", "held back by the proxy"],
)
def test_how_long_a_whole_reply_takes_is_told_by_the_faster_stream(direct, outer, tokens_per_s):
    assert pace(direct, outer) == tokens_per_s


def error(code):
    return json.dumps({"error": {"code": code, "message": "why"}}).encode()


@pytest.mark.parametrize(
    ("took", "status", "told", "verdict"),
    [
        (90.5, 200, b"{}", "ok"),
        (40.0, 200, b"{}", "skipped"),  # the model stopped
        (60.0, 504, b"<html>", "wrong"),
        (60.0, 0, b"", "wrong"),
        (60.0, 502, error("gateway_unreachable"), "wrong"),  # as deploy/nginx/gateway.conf writes it
        (3.0, 400, error("context_length_exceeded"), "skipped"),
        (3.0, 503, error("server_is_overloaded"), "skipped"),
    ],
)  # fmt: skip
def test_what_ends_a_long_reply_is_told_apart(took, status, told, verdict):
    finding = waited(took, 90.0, status, told, "1h")
    assert (finding.verdict, finding.about) == (verdict, "silence")
    assert verdict == "ok" or finding.change
