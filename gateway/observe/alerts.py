"""Alerts on metrics: what Prometheus asks, and what the runbook says. Pure.

`observe.rules` makes deploy/prometheus/alerts.yaml and deploy/RUNBOOKS.md from these and from
`observe.problemalerts`. Tests hold each name and label against the metrics that exist, and each rule against
series that fire it and series that do not.

An alert waits (`lasts`) no longer than it needs to be sure. Ratios ask for a few requests, so that one
failure at night wakes nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from gateway.core.types import Outcome, Phase
from gateway.observe.recent import ERRORS

Severity = Literal[
    "critical",  # clients are not served: wake somebody
    "warning",  # they are, but worse, or not for long: look at it today
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert. `summary` may use Prometheus' templates; the three texts below it are the runbook's."""

    name: str
    expr: str
    lasts: str = "0s"  # how long it must hold before it fires
    severity: Severity = "warning"
    summary: str
    means: str
    look: str
    act: str


_SERVING: Final = f"{Phase.READY.value}|{Phase.DEGRADED.value}"
_FAILED: Final = "|".join(sorted(ERRORS))
_POOL: Final = "pool {{ $labels.pool }}"
BACKEND: Final = "{{ $labels.pool }}/{{ $labels.backend }}"
_BUGS: Final = f'gateway_requests_total{{outcome="{Outcome.BUG.value}"}}'
_ALL: Final = 'sum by (instance, pool) (rate(gateway_requests_total{pool!="_unknown"}[5m]))'


def _share(of: str) -> str:
    """Return the share of a pool's requests that match; nothing below one request in 10 s."""
    matching = (
        f'sum by (instance, pool) (rate(gateway_requests_total{{pool!="_unknown",{of}}}[5m]))'
    )
    return f"{matching} / ({_ALL} > 0.1)"


SERVICE: Final = (
    Alert(
        name="GatewayUnreachable",
        # A scrape whose job has another name, or that finds no address, has no `up` that could be 0.
        expr='up{job="vllm-gateway"} == 0 or absent(up{job="vllm-gateway"})',
        lasts="30s",
        severity="critical",
        summary="Prometheus cannot scrape {{ with $labels.instance }}the gateway at {{ . }}{{ else }}any gateway{{ end }}",
        means="The gateway does not run, its admin listener cannot be reached, or it refuses the scrape's token."
        " Any gateway: no scrape has the job `vllm-gateway`, or its targets have no address.",
        look="`systemctl status vllm-gateway`, `journalctl -u vllm-gateway -n 50`; exit code 3 means that the"
        " settings cannot be used. `curl -i http://ADMIN/metrics` tells a 401 from no answer.",
        act="Settings: `vllm-gateway check FILE` names every mistake. Token: give Prometheus a key of kind `metrics`.",
    ),
    Alert(
        name="PoolDown",
        # A pool without backends has no phases, but always the length of its queue.
        expr=f'(sum by (instance, pool) (gateway_backend_phase{{phase=~"{_SERVING}"}})'
        " or sum by (instance, pool) (gateway_queue_requests) * 0) == 0",
        lasts="15s",
        severity="critical",
        summary=f"No backend of {_POOL} serves",
        means="Every request for this pool is refused (503), unless another pool stands in (`fallback`).",
        look="`vllm-gateway status` names each backend's state with its cause; `vllm-gateway events` what was tried.",
        act="`vllm-gateway logs POOL/NAME | vllm-gateway diagnose -` for servers that the gateway launched. For others"
        " start vLLM where it runs. A suspended backend needs `vllm-gateway undrain POOL/NAME` once it is repaired.",
    ),
    Alert(
        name="RequestsFail",
        expr=f'{_share(f"""outcome=~"{_FAILED}" """.strip())} > 0.05',
        lasts="1m",
        severity="critical",
        summary=f"{{{{ $value | humanizePercentage }}}} of the requests of {_POOL} fail",
        means="Backends answer with errors, fall silent, end their streams early, or take longer than `timeouts.total`."
        " Refusals for capacity do not count.",
        look="`vllm-gateway explain --last-error`; `gateway_upstream_failures_total` by backend and reason says which"
        " one fails, and how.",
        act="`vllm-gateway drain POOL/NAME` takes a single bad backend out. If all fail, what they share is at fault:"
        " the model, the flags, or the last change.",
    ),
    Alert(
        name="GatewayBug",
        # A series begins with its first request, which counts as no increase.
        expr=f"sum by (instance, pool) ((increase({_BUGS}[5m]) > 0) or ({_BUGS} unless {_BUGS} offset 5m)) > 0",
        summary=f"The gateway itself failed on requests for {_POOL}",
        means="A request met an error in the gateway's own code (500 `server_error`). Others go on.",
        look="Its log has the traceback beside the request's id.",
        act="`vllm-gateway bundle` packs what a bug report needs.",
    ),
)

CAPACITY: Final = (
    Alert(
        name="KvCacheFull",
        expr="gateway_backend_kv_usage_ratio > 0.95 and on (instance, pool) gateway_queue_requests > 0",
        summary=f"The KV cache of {BACKEND} is {{{{ $value | humanizePercentage }}}} full, and requests wait",
        means="The engine has all the work that it can hold. New requests wait here; if others use this server too,"
        " it may preempt.",
        look="`RUNNING`, `WAITING` and `IN FLIGHT` of `vllm-gateway status`: is the work all of this gateway's?",
        act="Add a backend, raise `--gpu-memory-utilization`, use `--kv-cache-dtype fp8`, or lower `max_context`."
        " `vllm-gateway plan` says what fits.",
    ),
    Alert(
        name="RequestsShed",
        expr=f'{_share(f"""outcome="{Outcome.SHED.value}" """.strip())} > 0.05',
        lasts="2m",
        summary=f"{{{{ $value | humanizePercentage }}}} of the requests of {_POOL} are refused for capacity",
        means="More work arrives than the backends can do in time. Clients get 429 or 503 with a time to retry.",
        look="`gateway_shed_total` by reason; `vllm-gateway explain ID` of one of them names the setting.",
        act="Add a backend, lower `limits` of the tenant that sends most (`vllm-gateway usage --by tenant`), or give the"
        " pool a `fallback`.",
    ),
    Alert(
        name="QueueDoesNotEmpty",
        expr="min_over_time(gateway_queue_requests[5m]) > 0 and gateway_queue_requests offset 5m > 0",
        summary=f"Requests have waited for {_POOL} for 5 minutes without a break",
        means="No backend has room. The queue is bounded and fair, but first tokens come late.",
        look="`vllm-gateway status`: is it the KV cache or the limit of each backend that is full?",
        act="As for RequestsShed. If `LIMIT` is far below what vLLM runs elsewhere, see `gateway_backend_limit_cuts_total`.",
    ),
    Alert(
        name="FirstTokenLate",
        # Of fewer than 20 first tokens, none is one in 20.
        expr="histogram_quantile(0.95, sum by (instance, pool, le) (rate(gateway_ttft_seconds_bucket[5m]))) > 10"
        " and on (instance, pool) sum by (instance, pool) (increase(gateway_ttft_seconds_count[5m])) >= 20",
        lasts="5m",
        summary=f"One in 20 first tokens of {_POOL} takes longer than {{{{ $value | humanizeDuration }}}}",
        means="Clients wait long for the beginning of their replies: in the queue here, or while the engine reads prompts.",
        look="`gateway_queue_wait_seconds` tells the part of the queue. If it is small, prompts are long or not cached:"
        " the kinds `cached` and `prompt` of `gateway_tokens_total`.",
        act="More backends help the queue; `prefix` routing and equal beginnings of prompts help the reading.",
    ),
)

OPERATORS: Final = (
    Alert(
        name="CanaryWorse",
        expr='gateway_canary_verdict{verdict="worse"} == 1',
        summary=f"The canary of {_POOL} is certainly worse than the others",
        means="Its errors or its speed differ from the other revision by more than chance explains.",
        look="`vllm-gateway status` has the comparison.",
        act="Take it back: give the backends of its revision `weight: 0` and reload. With `canary: {automatic: true}` the"
        " gateway takes the next one back by itself.",
    ),
    Alert(
        name="RestartsHeld",
        expr="gateway_restarts_held == 1",
        lasts="4h",
        summary=f"Automatic restarts of {_POOL} have been on hold for four hours",
        means="An operator ran `hold`, and nobody lifted it. What fails stays so.",
        look="`vllm-gateway audit` says who, and why.",
        act="`vllm-gateway hold --lift`, with `--pool POOL` where only this pool is on hold: `status` has the command.",
    ),
)

PROCESS: Final = (
    Alert(
        name="EventLoopLate",
        expr="histogram_quantile(0.99, sum by (instance, le)"
        " (rate(gateway_event_loop_lag_seconds_bucket[5m]))) > 0.1",
        lasts="5m",
        summary="The event loop of {{ $labels.instance }} is late by more than {{ $value | humanizeDuration }}",
        means="The process has more to do than one core can, or is not given a core.",
        look="`rate(process_cpu_seconds_total[1m])` near 1 means that it is busy; far below, that others take its core.",
        act="`workers: N`, or several gateways.",
    ),
    Alert(
        name="FileDescriptorsLow",
        expr="process_open_fds / process_max_fds > 0.8 and on (instance) gateway_build_info",
        lasts="2m",
        summary="{{ $labels.instance }} uses {{ $value | humanizePercentage }} of its file descriptors",
        means="At the limit, idle clients are closed for new ones, and then new ones are refused.",
        look="`gateway_open_connections` by side; `gateway_connections_shed_total`.",
        act="Raise `LimitNOFILE` of the unit (`ulimit -Hn`), or add a gateway.",
    ),
    Alert(
        name="BodiesFull",
        expr="gateway_request_body_bytes / gateway_request_body_limit_bytes > 0.9",
        lasts="1m",
        summary="Request bodies hold {{ $value | humanizePercentage }} of the memory for them",
        means="Large requests (images, audio, long prompts) wait for memory, and are then refused.",
        look="`vllm-gateway usage --by key` tells who sends most.",
        act="Raise `limits.bodies` if there is memory; else have clients send URLs in place of images.",
    ),
    Alert(
        name="ConnectionsRefused",
        expr='sum by (instance, reason) (rate(gateway_connections_shed_total{reason=~"refused|address"}[5m])) > 0',
        lasts="1m",
        summary="New clients are refused ({{ $labels.reason }})",
        means="`refused`: as many clients as `limits.connections` have requests in progress. `address`: one address"
        " has as many as `limits.connections_per_address`.",
        look="`ss -tn state established '( sport = :PORT )'` by address.",
        act="Behind a proxy set `trusted_proxies`; raise the limit; or block the address.",
    ),
    Alert(
        name="LogLinesLost",
        expr="increase(gateway_access_log_dropped_total[10m]) > 0",
        summary="{{ $labels.instance }} has lost log lines",
        means="Standard output blocked or failed: its disk is full, or its reader is too slow. Requests do not wait for it.",
        look="`df -h`; `journalctl --disk-usage`.",
        act="Free the disk, or find out why the reader is slow. `log: {access: false}` leaves out the lines of requests.",
    ),
    Alert(
        name="ConfigurationsDiffer",
        expr="gateway_config_info and on (job)"
        ' count by (job) (count by (job, shared) (gateway_config_info{shared!=""})) > 1',
        lasts="10m",
        summary="{{ $labels.instance }} and other gateways have different configurations",
        means="A change reached some gateways and not the others, so clients get different answers.",
        look="The label `shared` of `gateway_config_info`: gateways with the same value have the same settings, apart from"
        " those of their own (`listen`, `admin`, `redis`, `keys`, `log`, `state`).",
        act="Give all the same file and reload them.",
    ),
)

CLIENTS: Final = (
    Alert(
        name="WrongKeys",
        expr="sum by (instance, listener) (rate(gateway_failed_keys_total[5m])) > 1",
        lasts="5m",
        summary="Wrong keys arrive at the {{ $labels.listener }} listener, {{ $value | humanize }} a second",
        means="A client goes on with a revoked key, or somebody guesses. Answers to one address are limited.",
        look="`client` of the log's lines: `request` with `outcome` `unauthenticated` at the public listener,"
        " `admin_refused` at the admin one.",
        act="Tell the client's owner, or block the address in front of the gateway.",
    ),
)
