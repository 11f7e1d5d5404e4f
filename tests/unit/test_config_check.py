"""What is wrong or doubtful with settings taken together."""

from __future__ import annotations

import pathlib

import pytest

from gateway.config.findings import Severity
from gateway.config.load import check_text

POOL = "pools: {m: {backends: [http://h:1]}}\n"


def findings(text):
    return check_text(text, file="gw.yaml", folder=pathlib.Path("/"), env={}).findings


def codes(text, severity=Severity.ERROR):
    return [each.code for each in findings(text) if each.severity is severity]


def warnings(text):
    return codes(text, Severity.WARNING)


@pytest.mark.parametrize("where", ["0.0.0.0:9090", "10.0.0.1:9090", "'[::]:9090'", "gw.lan:9090"])
def test_an_admin_listener_open_to_others_needs_a_token(where):
    assert codes(POOL + f"admin: {{listen: {where}}}") == ["open-admin"]
    assert codes(POOL + f"admin: {{listen: {where}, token: {'x' * 16}}}") == []
    assert codes(POOL + f"admin: {{listen: {where}, token: {'x' * 15}}}") == ["weak-token"]


@pytest.mark.parametrize("where", ["127.0.0.1:9091", "localhost:9091", "unix:/run/gw.sock"])
def test_a_local_admin_listener_needs_none(where):
    assert findings(POOL + f"admin: {{listen: {where}}}") == ()


def test_an_empty_token_is_no_token():
    assert codes(POOL + "admin: {listen: 0.0.0.0:9090, token: '${T:-}'}") == ["open-admin"]


def test_authentication_off_for_others_is_a_loud_warning():
    assert warnings(POOL + "keys: none") == []
    found = findings(POOL + "keys: none\nlisten: 0.0.0.0:8080")
    assert [each.code for each in found] == ["auth-off"]
    assert "AUTHENTICATION IS OFF" in found[0].message
    assert found[0].severity is Severity.WARNING


def test_authentication_off_for_every_web_page_is_a_loud_warning_too():
    assert warnings(POOL + "cors: {origins: ['*']}") == []
    assert warnings(POOL + "keys: none\ncors: {origins: ['https://app.example']}") == []
    assert warnings(POOL + "keys: none\ncors: {origins: ['*']}") == ["open-to-pages"]


@pytest.mark.parametrize(
    ("public", "admin", "clash"),
    [
        ("127.0.0.1:80", "127.0.0.1:80", True),
        ("0.0.0.0:80", "127.0.0.1:80", True),
        ("localhost:80", "127.0.0.1:80", True),
        ("'[::]:80'", "127.0.0.1:80", True),  # IPv4 arrives there too
        ("0.0.0.0:80", "'[::1]:80'", False),  # and no IPv6 here
        ("127.0.0.1:80", "127.0.0.2:80", False),
        ("127.0.0.1:0", "127.0.0.1:0", False),
        ("unix:/a", "unix:/a", True),
        ("unix:/a", "unix:/b", False),
        ("unix:/a", "127.0.0.1:80", False),
    ],
)
def test_the_two_listeners_must_not_share_an_address(public, admin, clash):
    text = POOL + f"listen: {public}\nadmin: {{listen: {admin}}}"
    assert codes(text) == (["address-clash"] if clash else [])


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("listen: 127.0.0.1:9090", ("listen",)),  # the default of the other
        ("admin: {listen: 127.0.0.1:8080}", ("admin", "listen")),
        ("listen: 127.0.0.1:80\nadmin: {listen: 127.0.0.1:80}", ("admin", "listen")),
    ],
)
def test_an_address_of_both_listeners_is_told_where_it_is_written(text, path):
    (finding,) = findings(POOL + text)
    assert finding.path == path
    assert finding.place.line > 1
    assert "`admin: {listen: 127.0.0.1:9091}`" in finding.hint


@pytest.mark.parametrize(
    ("listens", "backend", "clash"),
    [
        ("127.0.0.1:7777", "http://127.0.0.1:7777", True),
        ("127.0.0.1:7777", "http://localhost:7777", True),
        ("localhost:7777", "http://127.0.0.1:7777", True),
        ("gw.lan:80", "http://gw.lan", True),
        ("0.0.0.0:7777", "http://127.0.0.1:7777", True),
        ("'[::]:7777'", "'http://[::1]:7777'", True),
        ("unix:/run/a", "'unix:/run/a'", True),
        ("0.0.0.0:7777", "http://10.0.0.11:7777", False),  # it may be another machine
        ("0.0.0.0:7777", "'http://[::1]:7777'", False),
        ("127.0.0.1:7777", "http://127.0.0.2:7777", False),
        ("127.0.0.1:7777", "http://127.0.0.1:8001", False),
        ("unix:/run/a", "'unix:/run/b'", False),
        ("unix:/run/a", "http://127.0.0.1:8001", False),
    ],
)
def test_a_backend_must_not_be_the_gateway_itself(listens, backend, clash):
    pools = f"pools: {{m: {{backends: [http://h:1, {backend}]}}}}\n"
    for listener in (f"listen: {listens}", f"admin: {{listen: {listens}, token: {'x' * 16}}}"):
        found = [each for each in findings(pools + listener) if each.severity is Severity.ERROR]
        where = [("address-clash", ("pools", "m", "backends", 1))] if clash else []
        assert [(each.code, each.path) for each in found] == where


@pytest.mark.parametrize(
    "pools",
    [
        "{a: {aliases: [b], backends: [http://h:1]}, b: {backends: [http://h:2]}}",
        "{a: {aliases: [x], backends: [http://h:1]}, b: {aliases: [x], backends: [http://h:2]}}",
        "{a: {aliases: [x, x], backends: [http://h:1]}}",
        "{a: {aliases: [a], backends: [http://h:1]}}",
        "{a: {adapters: [b], backends: [http://h:1]}, b: {backends: [http://h:2]}}",
        "{a: {aliases: [x], adapters: [x], backends: [http://h:1]}}",
    ],
)
def test_a_name_leads_to_one_pool(pools):
    assert codes(f"pools: {pools}") == ["duplicate-name"]


def test_backend_names_and_urls_are_unique_in_a_pool():
    text = "pools: {m: {backends: [{name: b2, url: http://h:1}, http://h:2, http://h:1]}}"
    found = findings(text)
    assert [each.code for each in found] == ["duplicate-backend", "duplicate-backend"]
    assert "backends 1 and 2 of this pool are both named `b2`" in found[0].message
    assert "http://h:1 is already listed as b2" in found[1].message


def test_pools_may_share_backend_names_but_a_shared_server_is_doubtful():
    text = "pools: {a: {backends: [http://h:1]}, b: {backends: [http://h:1]}}"
    assert codes(text) == []
    assert warnings(text) == ["shared-backend"]


def test_work_must_resume_below_where_it_stops():
    text = "pools: {m: {backends: [http://h:1], kv: {stop_admitting: 0.5, resume: 0.5}}}"
    assert codes(text) == ["kv-order"]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("timeouts: {upstream_keep_alive: 5s}", "stale-connections"),
        ("timeouts: {first_byte: 2h}", "deadline-order"),
    ],
)
def test_a_doubtful_setting_is_a_warning(text, code):
    assert codes(POOL + text) == []
    assert warnings(POOL + text) == [code]


def test_a_wait_that_outlives_the_clients_is_a_warning():
    text = "pools: {m: {backends: [http://h:1], queue: {max_wait: 15m}}}"
    assert warnings(text) == ["long-wait"]


def test_a_prefix_cache_of_each_tenant_without_tenants_is_a_warning():
    pool = "pools: {m: {backends: [http://h:1], prefix_cache: per_tenant}}\n"
    assert warnings(pool) == []
    found = findings(pool + "keys: none")
    assert [each.code for each in found] == ["no-tenants"]
    assert found[0].severity is Severity.WARNING
    assert found[0].path == ("pools", "m", "prefix_cache")


def test_metrics_that_are_always_stale_are_an_error():
    assert codes(POOL + "health: {scrape_interval: 10s}") == ["deadline-order"]


def test_a_wrong_value_is_not_also_judged_by_the_default_in_its_place():
    text = "pools: {m: {backends: [http://h:1], kv: {stop_admitting: 0.5, resume: x}}}"
    assert codes(text) == ["wrong-type"]


def test_an_unknown_key_does_not_hide_what_is_wrong_beside_it():
    text = "admin: {listen: 0.0.0.0:9090, tokn: x}\n" + POOL
    assert codes(text) == ["open-admin", "unknown-key"]


@pytest.mark.parametrize("owner", ["tiers: {gold: ", "tenants: {acme: "])
@pytest.mark.parametrize("limits", ["{budget_per_day: 5}", "{models: {m: {budget_per_month: 5}}}"])
def test_a_budget_without_prices_refuses_nothing(owner, limits):
    text = POOL + owner + f"{{limits: {limits}}}}}\n"
    assert warnings(text) == ["no-prices"]
    assert warnings(text + "prices: {models: {'*': {output: 2}}}") == []
    assert warnings(POOL + owner + "{limits: {tokens_per_day: 5}}}") == []


def test_a_stop_that_leaves_no_time_to_running_requests_is_a_warning():
    assert warnings(POOL + "shutdown: {announce: 1m, grace: 1m}") == ["deadline-order"]
    assert warnings(POOL + "shutdown: {announce: 1m, grace: 2m}") == []
    assert warnings(POOL + "shutdown: {grace: 0s}") == []


def test_a_collector_with_the_path_of_its_traces_is_a_warning():
    for end, found in (
        ("/v1/traces", ["doubled-path"]),
        ("/v1/traces/", ["doubled-path"]),
        ("", []),
    ):
        assert warnings(POOL + f"traces: {{endpoint: 'http://user:hunter2@c:4318{end}'}}") == found
