"""What `doctor` finds in nginx's settings, versions and flags, each with the line to change."""

import asyncio
import contextlib
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cli.doctor.advisories import mending, open_in
from gateway.cli.doctor.cached import judged
from gateway.cli.doctor.nginxfile import parse, seconds, size
from gateway.cli.doctor.nginxrules import nginx_findings
from gateway.cli.doctor.servers import flag_findings, metrics_findings, server_findings
from gateway.config.models import Config
from gateway.sim.server import SimConfig, SimServer

SHIPPED = (pathlib.Path(__file__).parents[2] / "deploy/nginx/gateway.conf").read_text()


def config(**more):
    backend = {"name": "b1", "url": "http://127.0.0.1:8001"}
    settings = {"version": 1, "trusted_proxies": ["127.0.0.1"]}
    return Config.model_validate(settings | {"pools": {"m": {"backends": [backend]}}} | more)


def found(text, settings=None):
    findings = nginx_findings(parse(text, "site.conf"), settings or config())
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
        ("keepalive_timeout 60s;", "keepalive_timeout 90s;", "keep_alive"),
        ("proxy_next_upstream off;", "proxy_next_upstream error non_idempotent;", "replay"),
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
    (finding,) = found(SHIPPED.replace("server 127.0.0.1:8080;", "server 127.0.0.1:9999;"))
    assert finding.about == "proxy_pass"


def test_trusted_proxies_are_wanted_where_nginx_names_the_client():
    (finding,) = found(SHIPPED, config(trusted_proxies=[]))
    assert finding.change == "trusted_proxies: [127.0.0.1]"


def test_what_nginx_prints_is_read_file_by_file():
    printed = "# configuration file /etc/nginx/nginx.conf:\nhttp {\n  include x;\n}\n# configuration file /etc/nginx/x:\n\na b;\n"
    root = parse(printed, "nginx -T")
    assert [each.where for each in root.inside] == ["/etc/nginx/nginx.conf:1", "/etc/nginx/x:2"]


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
        assert "its metrics count 496" in findings[0].told
        assert findings[0].change == "start it with --enable-prompt-tokens-details"


@pytest.mark.parametrize("reply", [b'{"usage": {"prompt_tokens": 512}}', b"garbage", b"[]"])
def test_where_nothing_is_cached_there_is_nothing_to_tell(reply):
    assert [*judged("m/b1", reply, 7.0, 7.0)] == []
