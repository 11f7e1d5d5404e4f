"""The Grafana dashboard: `python -m gateway.observe.grafana > deploy/grafana/vllm-gateway.json`. Pure.

A panel is one row of a table: its title, its unit, and what it asks Prometheus for. Tests hold each metric and
each label against those that exist, so no panel shows "No data" after a rename.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from gateway.observe.recent import ERRORS

_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH: Final = 24  # of Grafana's grid
_HEIGHT: Final = 8
_RATE: Final = "[$__rate_interval]"
_POOL: Final = 'instance=~"$instance",pool=~"$pool"'
_ALL: Final = 'instance=~"$instance"'


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression; `legend` names its lines by their labels."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `unit` is one of Grafana's; `help_` says how to read it."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    help_: str = ""
    kind: Literal["timeseries", "state-timeline", "stat"] = "timeseries"
    width: int = 8
    stacked: bool = False
    most: float | None = None  # of the axis


def rate(metric: str, by: str, *matchers: str) -> str:
    """Return the rate of a counter by some labels, for the pools that are chosen."""
    return f"sum by ({by}) (rate({metric}{{{','.join((_POOL, *matchers))}}}{_RATE}))"


def quantile(metric: str, at: float, by: tuple[str, ...] = ("pool",)) -> Query:
    """Return a quantile of a histogram by some labels."""
    inner = f"sum by ({', '.join((*by, 'le'))}) (rate({metric}_bucket{{{_POOL}}}{_RATE}))"
    names = "/".join(f"{{{{{name}}}}}" for name in by)
    return Query(f"histogram_quantile({at}, {inner})", f"{names} p{at * 100:.0f}")


def gauge(metric: str, *matchers: str) -> str:
    """Return a gauge of the backends that are chosen."""
    return f"{metric}{{{','.join((_POOL, *matchers))}}}"


def _phase(phase: str) -> Query:
    """Return how many backends are in a phase; each of several gateways counts all of them."""
    inner = gauge("gateway_backend_phase", f'phase="{phase}"')
    return Query(f"sum(max by (pool, backend) ({inner}))", "")


_BACKEND: Final = "{{pool}}/{{backend}}"
ROWS: Final[dict[str, tuple[Panel, ...]]] = {
    "Now": (
        Panel("Backends ready", "none", (_phase("ready"),), kind="stat", width=4),
        Panel("Backends down", "none", (_phase("down"),), kind="stat", width=4),
        Panel("In flight", "none", (Query(f"sum({gauge('gateway_inflight_requests')})", ""),), kind="stat", width=4),
        Panel("Waiting", "none", (Query(f"sum({gauge('gateway_queue_requests')})", ""),), kind="stat", width=4),
        Panel("Requests", "reqps", (Query(f"sum(rate(gateway_requests_total{{{_POOL}}}{_RATE}))", ""),),
              kind="stat", width=4),
        Panel("Tokens written", "none",
              (Query(f'sum(rate(gateway_tokens_total{{{_POOL},kind="completion"}}{_RATE}))', ""),),
              "Tokens a second, of finished requests.", "stat", 4),
    ),
    "Problems": (
        Panel("Problems", "none", (Query(f'gateway_problem{{{_ALL}}} == 1', "{{subject}}: {{kind}}"),),
              "What `vllm-gateway status` lists.", "state-timeline", 12),
        Panel("States of backends", "none", (Query(f"{gauge('gateway_backend_state')} == 1", "{{pool}}/{{backend}} {{state}}"),),
              "Each line is a backend in a state, while it is in it.", "state-timeline", 12),
    ),
    "Requests": (
        Panel("Requests by outcome", "reqps",
              (Query(rate("gateway_requests_total", "outcome"), "{{outcome}}"),), stacked=True),
        Panel("Errors by pool", "reqps",
              (Query(rate("gateway_requests_total", "pool, outcome",
                          f'outcome=~"{"|".join(sorted(ERRORS))}"'), "{{pool}} {{outcome}}"),)),
        Panel("Refused for capacity", "reqps", (Query(rate("gateway_shed_total", "pool, reason"), "{{pool}} {{reason}}"),)),
        Panel("First token", "s", (quantile("gateway_ttft_seconds", 0.5), quantile("gateway_ttft_seconds", 0.95)),
              "From a request's head to the first byte of its stream, as the client sees it."),
        Panel("Time between tokens", "s",
              (quantile("gateway_inter_token_seconds", 0.5), quantile("gateway_inter_token_seconds", 0.95)),
              "The mean of each complete stream."),
        Panel("Whole requests", "s",
              (quantile("gateway_request_duration_seconds", 0.5), quantile("gateway_request_duration_seconds", 0.95))),
        Panel("Tokens a second", "none", (Query(rate("gateway_tokens_total", "pool, kind"), "{{pool}} {{kind}}"),),
              "`cached` is a part of `prompt`; `expected` is what was expected to be cached."),
        Panel("Streams that another backend went on with", "reqps",
              (Query(rate("gateway_streams_resumed_total", "pool, cause"), "{{pool}} {{cause}}"),)),
        Panel("Clients that left", "reqps",
              (Query(rate("gateway_client_disconnects_total", "stage"), "{{stage}}"),)),
    ),
    "Queue": (
        Panel("Requests waiting here", "none", (Query(gauge("gateway_queue_requests"), "{{pool}}"),)),
        Panel("Tokens waiting here", "none", (Query(gauge("gateway_queue_tokens"), "{{pool}}"),)),
        Panel("Time in the queue", "s",
              (quantile("gateway_queue_wait_seconds", 0.5), quantile("gateway_queue_wait_seconds", 0.95)),
              "Of requests that had to wait."),
    ),
    "Backends": (
        Panel("KV cache", "percentunit", (Query(gauge("gateway_backend_kv_usage_ratio"), _BACKEND),), most=1),
        Panel("Memory of GPUs", "percentunit",
              (Query(f"{gauge('gateway_gpu_memory_used_bytes')} / {gauge('gateway_gpu_memory_bytes')}",
                     f"{_BACKEND} GPU {{{{gpu}}}}"),),
              "Of launched backends. vLLM takes its share at its start and keeps it.", most=1),
        Panel("Utilization of GPUs", "percentunit",
              (Query(gauge("gateway_gpu_utilization_ratio"), f"{_BACKEND} GPU {{{{gpu}}}}"),), most=1),
        Panel("In flight, of this gateway", "none", (
            Query(gauge("gateway_inflight_requests"), _BACKEND),
            Query(gauge("gateway_backend_limit"), f"{_BACKEND} limit"),
        )),
        Panel("Running and waiting, of all clients", "none", (
            Query(gauge("gateway_backend_running"), f"{_BACKEND} running"),
            Query(gauge("gateway_backend_waiting"), f"{_BACKEND} waiting"),
        )),
        Panel("First token by backend", "s",
              (quantile("gateway_backend_ttft_seconds", 0.95, ("pool", "backend")),),
              "From sending a request there to the first byte of its stream."),
        Panel("Failed attempts", "reqps",
              (Query(rate("gateway_upstream_failures_total", "pool, backend, reason"), f"{_BACKEND} {{{{reason}}}}"),)),
        Panel("Limit lowered", "reqps",
              (Query(rate("gateway_backend_limit_cuts_total", "pool, backend, sign"), f"{_BACKEND} {{{{sign}}}}"),)),
        Panel("Restarts", "none",
              (Query(f"sum by (pool, backend, cause) (increase({gauge('gateway_backend_restarts_total')}{_RATE}))",
                     f"{_BACKEND} {{{{cause}}}}"),)),
    ),
    "Tenants": (
        Panel("Tokens by tenant", "none",
              (Query(f'topk(10, sum by (tenant) (rate(gateway_tenant_tokens_total{{{_ALL},kind!="cached"}}{_RATE})))',
                     "{{tenant}}"),),
              "Tokens a second, of prompts (cached ones too) and written; the ten that use most."),
        Panel("Over a limit", "reqps",
              (Query(f'sum by (scope, rule) (rate(gateway_limit_refusals_total{{{_ALL},shadow="false"}}{_RATE}))',
                     "{{scope}} {{rule}}"),)),
        Panel("Wrong keys", "reqps",
              (Query(f"sum by (listener, result) (rate(gateway_failed_keys_total{{{_ALL}}}{_RATE}))",
                     "{{listener}} {{result}}"),)),
    ),
    "The gateway": (
        Panel("CPU", "percentunit",
              (Query(f'rate(process_cpu_seconds_total{{{_ALL},job="vllm-gateway"}}{_RATE})', "{{instance}}"),),
              "Of one core; a process uses one."),
        Panel("Memory", "bytes",
              (Query(f'process_resident_memory_bytes{{{_ALL},job="vllm-gateway"}}', "{{instance}}"),
               Query(f"gateway_request_body_bytes{{{_ALL}}}", "{{instance}} request bodies"))),
        Panel("Event loop late", "s",
              (Query(f"histogram_quantile(0.99, sum by (instance, le)"
                     f" (rate(gateway_event_loop_lag_seconds_bucket{{{_ALL}}}{_RATE})))", "{{instance}} p99"),)),
        Panel("Own time before sending on", "s",
              (Query(f"histogram_quantile(0.99, sum by (endpoint, le)"
                     f" (rate(gateway_overhead_seconds_bucket{{{_ALL}}}{_RATE})))", "{{endpoint}} p99"),)),
        Panel("Open connections", "none",
              (Query(f"sum by (side) (gateway_open_connections{{{_ALL}}})", "{{side}}"),)),
        Panel("File descriptors", "percentunit",
              (Query(f'process_open_fds{{{_ALL},job="vllm-gateway"}} / process_max_fds', "{{instance}}"),), most=1),
    ),
}  # fmt: skip


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    return {
        "uid": "vllm-gateway",
        "title": "vllm-gateway",
        "description": "Made from gateway/observe/grafana.py by `make references`.",
        "tags": ["vllm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "graphTooltip": 1,  # one cross-hair for all panels
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
                _choice("instance", "label_values(gateway_build_info, instance)", "Gateway"),
                _choice("pool", "label_values(gateway_queue_requests, pool)", "Pool"),
            ]
        },
        "annotations": {"list": []},
        "links": [],
        "panels": list(_panels()),
    }  # fmt: skip


def text() -> str:
    """Return the file that Grafana imports (deploy/grafana/vllm-gateway.json)."""
    return json.dumps(dashboard(), indent=1) + "\n"


def _choice(name: str, query: str, label: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "label": label,
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,  # when the range changes
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _panels() -> Iterator[dict[str, Any]]:
    number, y = 0, 0
    for title, panels in ROWS.items():
        number += 1
        place = {"x": 0, "y": y, "w": _WIDTH, "h": 1}
        yield {"id": number, "type": "row", "title": title, "gridPos": place,
               "collapsed": False, "panels": []}  # fmt: skip
        x, y = 0, y + 1
        height = 0
        for each in panels:
            if x + each.width > _WIDTH:
                x, y = 0, y + height
            number += 1
            height = 4 if each.kind == "stat" else _HEIGHT
            yield _panel(number, each, {"x": x, "y": y, "w": each.width, "h": height})
            x += each.width
        y += height


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    custom: dict[str, Any] = {"fillOpacity": 10, "showPoints": "never"}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.kind == "timeseries":
        defaults["custom"] = custom
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help_,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _OPTIONS[panel.kind],
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": _SOURCE, "expr": query.expr, "legendFormat": query.legend}
            for place, query in enumerate(panel.queries)
        ],
    }  # fmt: skip


_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "timeseries": {
        "legend": {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "area",
        "justifyMode": "auto",
        "orientation": "auto",
        "textMode": "auto",
    },
    "state-timeline": {
        "showValue": "never",
        "rowHeight": 0.8,
        "mergeValues": True,
        "legend": {"showLegend": False, "displayMode": "list", "placement": "bottom", "calcs": []},
        "tooltip": {"mode": "single", "sort": "none"},
    },
}


if __name__ == "__main__":
    sys.stdout.write(text())
