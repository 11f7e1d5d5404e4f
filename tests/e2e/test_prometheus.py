"""Real Prometheus: the rules load, each alert fires on series that it is for and not on others, and a scrape works."""

import json
import pathlib
import re
import subprocess
import urllib.parse

import pytest

from gateway.observe.grafana import ROWS
from gateway.observe.instruments import INSTRUMENTS
from gateway.observe.problemalerts import PROBLEMS, STATES
from gateway.observe.rules import ALERTS
from tests.e2e.support import GATEWAY, gateway, get, need, running, wait_until
from tests.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SHIPPED = pathlib.Path(__file__).parents[2] / "deploy/prometheus"
BACKEND = 'instance="g:9090",pool="m",backend="b1"'
POOL = 'instance="g:9090",pool="m"'
OK = f'gateway_requests_total{{{POOL},outcome="ok"}}'

# For each alert: series that fire it, and series that do not. Values are promtool's: `0+6x20` begins with 0 and
# grows by 6 each 5 s, 20 times. What fires is asked after the last value.
CASES = {
    "GatewayUnreachable": (
        {'up{job="vllm-gateway",instance="g:9090"}': "0x400"},
        {'up{job="vllm-gateway",instance="g:9090"}': "1x400", 'up{job="other"}': "0x400"},
    ),
    "PoolDown": (
        {
            f'gateway_backend_phase{{{BACKEND},phase="ready"}}': "0x400",
            f'gateway_backend_phase{{{BACKEND},phase="degraded"}}': "0x400",
            f'gateway_backend_phase{{{BACKEND},phase="down"}}': "1x400",
            f"gateway_queue_requests{{{POOL}}}": "3x400",
            # Discovery found nobody for this one.
            'gateway_queue_requests{instance="g:9090",pool="empty"}': "3x400",
        },
        {
            f'gateway_backend_phase{{{BACKEND},phase="ready"}}': "0x400",
            f'gateway_backend_phase{{{POOL},backend="b2",phase="degraded"}}': "1x400",
            f"gateway_queue_requests{{{POOL}}}": "0x400",
        },
    ),
    "RequestsFail": (
        {OK: "0+9x400", f'gateway_requests_total{{{POOL},outcome="backend_error"}}': "0+1x400"},
        # One in 50 fails, and of a pool that has hardly any requests each.
        {
            OK: "0+50x400",
            f'gateway_requests_total{{{POOL},outcome="backend_error"}}': "0+1x400",
            'gateway_requests_total{pool="idle",outcome="backend_error"}': "0x398 1 1 1",
        },
    ),
    "GatewayBug": (
        {f'gateway_requests_total{{{POOL},outcome="bug"}}': "_x380 1x30"},  # the first one
        {f'gateway_requests_total{{{POOL},outcome="bug"}}': "1x400"},  # long ago
    ),
    "RequestsShed": (
        {OK: "0+9x400", f'gateway_requests_total{{{POOL},outcome="shed"}}': "0+1x400"},
        {OK: "0+50x400", f'gateway_requests_total{{{POOL},outcome="shed"}}': "0+1x400"},
    ),
    "QueueDoesNotEmpty": (
        {f"gateway_queue_requests{{{POOL}}}": "3x400"},
        {
            f"gateway_queue_requests{{{POOL}}}": "3x390 0 3x9",
            'gateway_queue_requests{instance="new",pool="m"}': "_x390 3x9",
        },
    ),
    "FirstTokenLate": (
        {
            f'gateway_ttft_seconds_bucket{{{POOL},le="10"}}': "0+9x400",
            f'gateway_ttft_seconds_bucket{{{POOL},le="20"}}': "0+10x400",
            f'gateway_ttft_seconds_bucket{{{POOL},le="+Inf"}}': "0+10x400",
            f"gateway_ttft_seconds_count{{{POOL}}}": "0+10x400",
        },
        {
            f'gateway_ttft_seconds_bucket{{{POOL},le="1"}}': "0+10x400",
            f'gateway_ttft_seconds_bucket{{{POOL},le="+Inf"}}': "0+10x400",
            f"gateway_ttft_seconds_count{{{POOL}}}": "0+10x400",
            # Two long prompts at night, a few minutes apart.
            'gateway_ttft_seconds_bucket{pool="idle",le="10"}': "5x400",
            'gateway_ttft_seconds_bucket{pool="idle",le="20"}': "5x330 6x35 7x34",
            'gateway_ttft_seconds_bucket{pool="idle",le="+Inf"}': "5x330 6x35 7x34",
            'gateway_ttft_seconds_count{pool="idle"}': "5x330 6x35 7x34",
        },
    ),
    "KvCacheFull": (
        {
            f"gateway_backend_kv_usage_ratio{{{BACKEND}}}": "0.5x390 0.99x9",
            f"gateway_queue_requests{{{POOL}}}": "0x390 3x9",
        },
        {
            f"gateway_backend_kv_usage_ratio{{{BACKEND}}}": "0.99x400",
            f"gateway_queue_requests{{{POOL}}}": "0x400",
        },
    ),
    "CanaryWorse": (
        {f'gateway_canary_verdict{{{POOL},verdict="worse"}}': "0x390 1x10"},
        {f'gateway_canary_verdict{{{POOL},verdict="fine"}}': "1x400"},
    ),
    "RestartsHeld": (
        {f"gateway_restarts_held{{{POOL}}}": "1x3000"},
        {f"gateway_restarts_held{{{POOL}}}": "1x400"},
    ),
    "EventLoopLate": (
        {
            'gateway_event_loop_lag_seconds_bucket{instance="g:9090",le="0.1"}': "0+1x400",
            'gateway_event_loop_lag_seconds_bucket{instance="g:9090",le="1"}': "0+10x400",
            'gateway_event_loop_lag_seconds_bucket{instance="g:9090",le="+Inf"}': "0+10x400",
        },
        {
            'gateway_event_loop_lag_seconds_bucket{instance="g:9090",le="0.1"}': "0+10x400",
            'gateway_event_loop_lag_seconds_bucket{instance="g:9090",le="+Inf"}': "0+10x400",
        },
    ),
    "FileDescriptorsLow": (
        {
            'process_open_fds{instance="g:9090"}': "90x400",
            'process_max_fds{instance="g:9090"}': "100x400",
            'gateway_build_info{instance="g:9090"}': "1x400",
        },
        # A process that is no gateway.
        {'process_open_fds{instance="x"}': "90x400", 'process_max_fds{instance="x"}': "100x400"},
    ),
    "BodiesFull": (
        {
            'gateway_request_body_bytes{instance="g:9090"}': "95x400",
            'gateway_request_body_limit_bytes{instance="g:9090"}': "100x400",
        },
        {
            'gateway_request_body_bytes{instance="g:9090"}': "0x400",
            'gateway_request_body_limit_bytes{instance="g:9090"}': "100x400",
        },
    ),
    "ConnectionsRefused": (
        {'gateway_connections_shed_total{instance="g:9090",reason="refused"}': "0+1x400"},
        {'gateway_connections_shed_total{instance="g:9090",reason="idle"}': "0+1x400"},
    ),
    "LogLinesLost": (
        {'gateway_access_log_dropped_total{instance="g:9090"}': "0x350 5x50"},
        {'gateway_access_log_dropped_total{instance="g:9090"}': "5x400"},
    ),
    "ConfigurationsDiffer": (
        {'gateway_config_info{shared="a"}': "1x400", 'gateway_config_info{shared="b"}': "1x400"},
        {
            # Each listens at an address of its own.
            'gateway_config_info{hash="c",shared="a",instance="1"}': "1x400",
            'gateway_config_info{hash="d",shared="a",instance="2"}': "1x400",
            'gateway_config_info{hash="e",instance="3"}': "1x400",  # before there was this label
            'gateway_config_info{shared="b",instance="4",job="staging"}': "1x400",
        },
    ),
    "WrongKeys": (
        {'gateway_failed_keys_total{listener="public",result="told"}': "0+10x400"},
        {'gateway_failed_keys_total{listener="public",result="told"}': "0+1x400"},
    ),
}


def judged(alert):
    """The same for an alert on a state or a problem: each that it names fires it, once there is one."""
    metric, label, words = re.search(r'(gateway_\w+)\{(\w+)=~?"([^"]*)"', alert.expr).groups()
    told = ',severity="degraded",subject="backend m/b1"' if metric == "gateway_problem" else ""
    steps = {"30m": 400, "5m": 80}.get(alert.lasts, 30)
    named = {
        f'{metric}{{{POOL},backend="b{place}",{label}="{word}"{told}}}': f"1x{steps}"
        for place, word in enumerate(words.split("|"))
    }
    return named, {f'{metric}{{{BACKEND},{label}="something_else"{told}}}': f"1x{steps}"}


# A start that waits for its service manager before.
CHANGING = {
    "BackendStartsLong": {
        f'gateway_backend_state{{{BACKEND},state="pending"}}': "1x200 stale",
        f'gateway_backend_state{{{BACKEND},state="starting"}}': "_x200 1x200",
    },
}
JUDGED = {each.name: judged(each) for each in (*STATES, *PROBLEMS)}
CASES |= JUDGED
# How many fire, where that is not one.
FIRING = {name: len(fires) for name, (fires, _) in JUDGED.items()} | {
    "ConfigurationsDiffer": 2,
    "PoolDown": 2,
}
# Series beside those of `CASES` that fire an alert, and how many.
ALSO_FIRES = (
    # No gateway is scraped by that name: the scrape has another one, or no address was found for the Service.
    ("GatewayUnreachable", {'up{job="other",instance="g:9090"}': "1x400"}, 1),
)


def length(values):
    return 5 * max(sum(int(part.split("x")[1]) for part in text.split() if "x" in part) for text in values)  # fmt: skip


def asked(alert, series, firing):
    """One test for promtool: how many alerts of this name fire at the end of the series."""
    at_s = length(series.values())
    return {
        "interval": "5s",
        "input_series": [{"series": name, "values": text} for name, text in series.items()],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)',
                "eval_time": f"{at_s}s",
                "exp_samples": [{"labels": "{}", "value": firing}],
            }
        ],
    }


def test_each_alert_has_series_that_fire_it_and_series_that_do_not():
    assert set(CASES) == {each.name for each in ALERTS}


def test_the_rules_and_the_sample_of_a_scrape_are_valid():
    promtool = need("promtool", "promtool (Debian's package prometheus)")
    for words in (
        ["check", "rules", SHIPPED / "alerts.yaml"],
        ["check", "config", SHIPPED / "prometheus.yaml"],
    ):
        ran = subprocess.run([promtool, *words], capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0, ran.stdout + ran.stderr


def test_alerts_fire_on_what_they_are_for_and_not_on_what_is_in_order(tmp_path):
    promtool = need("promtool", "promtool (Debian's package prometheus)")
    tests = [
        asked(name, series, firing)
        for name, (fires, quiet) in CASES.items()
        for series, firing in ((fires, FIRING.get(name, 1)), (quiet, 0))
    ]
    tests += [asked(name, series, 1) for name, series in CHANGING.items()]
    tests += [asked(*each) for each in ALSO_FIRES]
    # JSON is YAML.
    (tmp_path / "alerts.test.yaml").write_text(
        json.dumps(
            {
                "rule_files": [str(SHIPPED / "alerts.yaml")],
                "evaluation_interval": "5s",
                "tests": tests,
            }
        )
    )
    ran = subprocess.run(
        [promtool, "test", "rules", tmp_path / "alerts.test.yaml"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


# What a panel shows of series that two gateways tell of the same backends, and one of a tenant.
PANELS = {
    "Backends ready": (
        {
            f'gateway_backend_phase{{instance="{each}",pool="m",backend="{backend}",phase="ready"}}': "1x60"
            for each in ("g1:9090", "g2:9090")
            for backend in ("b1", "b2")
        },
        2,
    ),
    "Backends down": (
        {
            'gateway_backend_phase{instance="g1:9090",pool="m",backend="b1",phase="down"}': "1x60",
            'gateway_backend_phase{instance="g2:9090",pool="m",backend="b1",phase="down"}': "0x60",
        },
        1,
    ),
    # Per 5 s: 100 of a prompt, 80 of these cached, and 20 written.
    "Tokens by tenant": (
        {
            'gateway_tenant_tokens_total{instance="g1:9090",tenant="a",kind="input"}': "0+100x60",
            'gateway_tenant_tokens_total{instance="g1:9090",tenant="a",kind="cached"}': "0+80x60",
            'gateway_tenant_tokens_total{instance="g1:9090",tenant="a",kind="output"}': "0+20x60",
        },
        24,
    ),
}


def test_panels_count_nothing_twice(tmp_path):
    promtool = need("promtool", "promtool (Debian's package prometheus)")
    panels = {each.title: each for row in ROWS.values() for each in row}
    tests = []
    for title, (series, value) in PANELS.items():
        (query,) = panels[title].queries
        expr = re.sub(r"\$(?:instance|pool)", ".*", query.expr).replace("$__rate_interval", "1m")
        wanted = {"expr": f"sum({expr})", "eval_time": "5m", "exp_samples": [{"labels": "{}", "value": value}]}  # fmt: skip
        given = [{"series": name, "values": text} for name, text in series.items()]
        tests.append({"interval": "5s", "input_series": given, "promql_expr_test": [wanted]})
    (tmp_path / "panels.test.yaml").write_text(json.dumps({"tests": tests}))
    words = [promtool, "test", "rules", tmp_path / "panels.test.yaml"]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def asks(port, path, **query):
    url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
    status, body = get(url, timeout=60)
    return json.loads(body)["data"] if status == 200 else None


def test_prometheus_scrapes_the_gateway_and_an_alert_fires(tmp_path):
    prometheus = need("prometheus", "prometheus (Debian's package prometheus)")
    port = free_port()
    with (
        running([GATEWAY, "sim", "--port", str(sim := free_port()), "--model", "m"], log=tmp_path / "sim.log"),
        gateway(tmp_path, f"pools: {{m: {{backends: [http://127.0.0.1:{sim}]}}, gone: {{backends: [http://127.0.0.1:9]}}}}") as site,
    ):  # fmt: skip
        settings = (SHIPPED / "prometheus.yaml").read_text()
        settings = settings.replace("127.0.0.1:9090", site.admin_url.removeprefix("http://"))
        (tmp_path / "prometheus.yaml").write_text(settings)
        (tmp_path / "alerts.yaml").write_text((SHIPPED / "alerts.yaml").read_text())
        command = [
            prometheus,
            f"--config.file={tmp_path / 'prometheus.yaml'}",
            f"--storage.tsdb.path={tmp_path / 'series'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with running(command, log=tmp_path / "prometheus.log"):

            def firing():
                told = asks(port, "alerts") or {"alerts": []}
                return {
                    (each["labels"]["alertname"], each["labels"].get("pool"))
                    for each in told["alerts"]
                    if each["state"] == "firing"
                }

            wait_until(lambda: ("PoolDown", "gone") in firing(), 120, "the alert fires")
            assert ("PoolDown", "m") not in firing()
            (url,) = {
                each["annotations"]["runbook_url"]
                for each in asks(port, "alerts")["alerts"]
                if each["labels"]["alertname"] == "PoolDown"
            }
            status, page = get(url, timeout=60)
            assert (status, b"<h1>PoolDown</h1>" in page) == (200, True)
            names = set(asks(port, "label/__name__/values"))
            # Gauges and counters without labels are there from the first scrape; others once they have a value.
            assert {
                each.name for each in INSTRUMENTS if not each.labels and not each.buckets
            } <= names
            rules = [rule for group in asks(port, "rules")["groups"] for rule in group["rules"]]
            assert {each["name"] for each in rules} == {each.name for each in ALERTS}
            assert {each["health"] for each in rules} == {"ok"}
