"""Every metric the gateway exports, in one table; the exporter, the reference and tests read it.

Names: prefix `gateway_`, base units, `_total` on counters, `_info` on constants. Labels come from
closed or configured sets only, never from what a client wrote; `observe.metrics` holds the caps.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum
from typing import Final

from gateway.core.types import Endpoint, Outcome, Phase, ShedReason, UsageSource
from gateway.observe.buckets import (
    INTER_TOKEN_BUCKETS,
    LAG_BUCKETS,
    OVERHEAD_BUCKETS,
    REQUEST_BUCKETS,
    TTFT_BUCKETS,
)

UNKNOWN: Final = "_unknown"  # a name that was not resolved
OTHER: Final = "_other"  # a name beyond the cap on names


class Kind(Enum):
    """Prometheus metric types in use."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Instrument:
    """One metric. `buckets` are upper bounds, `+Inf` not among them."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _counter(name: str, help_: str, *labels: str) -> Instrument:
    return Instrument(name, Kind.COUNTER, help_, labels)


def _gauge(name: str, help_: str, *labels: str) -> Instrument:
    return Instrument(name, Kind.GAUGE, help_, labels)


def _histogram(name: str, buckets: tuple[float, ...], help_: str, *labels: str) -> Instrument:
    return Instrument(name, Kind.HISTOGRAM, help_, labels, buckets)


REQUESTS: Final = _counter(
    "gateway_requests_total",
    "Finished requests, by outcome and by the HTTP status sent to the client.",
    "pool", "model", "endpoint", "outcome", "code",
)  # fmt: skip
REQUEST_DURATION: Final = _histogram(
    "gateway_request_duration_seconds",
    REQUEST_BUCKETS,
    "Time from a request's head to the last byte of its reply, for requests sent to a backend.",
    "pool", "model",
)  # fmt: skip
TTFT: Final = _histogram(
    "gateway_ttft_seconds",
    TTFT_BUCKETS,
    "Time from a request's head to the first byte of its stream, as the client sees it.",
    "pool", "model",
)  # fmt: skip
INTER_TOKEN: Final = _histogram(
    "gateway_inter_token_seconds",
    INTER_TOKEN_BUCKETS,
    "Mean time between tokens of a complete stream, one observation per request.",
    "pool", "model",
)  # fmt: skip
OVERHEAD: Final = _histogram(
    "gateway_overhead_seconds",
    OVERHEAD_BUCKETS,
    "The gateway's own time from receiving a request's body to sending it on, without queueing.",
    "endpoint",
)
SHED: Final = _counter(
    "gateway_shed_total", "Requests refused for capacity, by reason.", "pool", "reason"
)
FALLBACKS: Final = _counter(
    "gateway_fallbacks_total",
    "Requests for a pool that another one took; cause is no_backend, overload or context.",
    "pool", "to", "cause",
)  # fmt: skip
SHADOWS: Final = _counter(
    "gateway_shadow_requests_total",
    "Copies of requests to another pool, whose replies nobody gets; outcome is ok, rejected (4xx), failed or"
    " dropped (for load). They are in no other metric of requests.",
    "pool", "to", "outcome",
)  # fmt: skip
SHADOW_TTFT: Final = _histogram(
    "gateway_shadow_ttft_seconds",
    TTFT_BUCKETS,
    "Time from sending a copy to the first byte of its reply.",
    "pool", "to",
)  # fmt: skip
QUEUED: Final = _gauge(
    "gateway_queue_requests", "Requests waiting here for room on a backend.", "pool"
)
QUEUED_TOKENS: Final = _gauge(
    "gateway_queue_tokens",
    "Tokens that the waiting requests are expected to need, prompts plus outputs.",
    "pool",
)
QUEUE_WAIT: Final = _histogram(
    "gateway_queue_wait_seconds",
    TTFT_BUCKETS,
    "Time in the queue, for requests that had to wait, whatever their outcome.",
    "pool",
)
LIMIT: Final = _gauge(
    "gateway_backend_limit",
    "The adaptive concurrency limit of a backend; absent with admission off.",
    "pool", "backend",
)  # fmt: skip
LIMIT_CUTS: Final = _counter(
    "gateway_backend_limit_cuts_total",
    "Times the concurrency limit was lowered; sign is waiting, preempted, refused, late or slow.",
    "pool", "backend", "sign",
)  # fmt: skip
RESTARTS: Final = _counter(
    "gateway_backend_restarts_total",
    "Restarts of a backend by this gateway, by cause.",
    "pool", "backend", "cause",
)  # fmt: skip
RESTARTS_HELD: Final = _gauge(
    "gateway_restarts_held",
    "1 while an operator holds automatic restarts of a pool, else 0.",
    "pool",
)
SUPERVISION: Final = _counter(
    "gateway_supervision_events_total",
    "Supervision events, by kind: started, start_failed, exited, remedy, suspended, ...",
    "pool", "backend", "kind",
)  # fmt: skip
TOKENS: Final = _counter(
    "gateway_tokens_total",
    "Tokens of finished requests; kind is prompt, completion, cached (part of prompt, where replies tell) or "
    "expected (to be cached where they were sent).",
    "pool", "model", "kind",
)  # fmt: skip
USAGE_SOURCE: Final = _counter(
    "gateway_usage_source_total", "Requests, by the source of their token counts.", "source"
)
ATTEMPTS: Final = _counter(
    "gateway_upstream_attempts_total",
    "Times a request was sent to a backend; what exceeds the number of requests are retries.",
    "pool",
)
RESUMED: Final = _counter(
    "gateway_streams_resumed_total",
    "Times another backend went on with a stream whose own one had failed.",
    "pool",
)
UPSTREAM_FAILURES: Final = _counter(
    "gateway_upstream_failures_total",
    "Attempts that failed because of the backend, including those that a retry repaired.",
    "pool", "backend", "reason",
)  # fmt: skip
FAILED_KEYS: Final = _counter(
    "gateway_failed_keys_total",
    "Requests without a valid key or admin token; listener is public or admin, result is told (401)"
    " or limited (429).",
    "listener",
    "result",
)
CLIENT_RETRIES: Final = _counter(
    "gateway_client_retries_total",
    "Requests that are retries, according to the client's SDK.",
    "pool",
)
CLIENT_DISCONNECTS: Final = _counter(
    "gateway_client_disconnects_total",
    "Clients that disconnected early; stage is before_send, before_first_byte or streaming.",
    "pool", "stage",
)  # fmt: skip
ACCESS_LOG_DROPPED: Final = _counter(
    "gateway_access_log_dropped_total",
    "Log lines lost because standard output blocked or failed.",
)
IN_FLIGHT: Final = _gauge(
    "gateway_inflight_requests",
    "Requests of this gateway in flight on a backend.",
    "pool",
    "backend",
)
BACKEND_PHASE: Final = _gauge(
    "gateway_backend_phase",
    "1 for the phase a backend is in, 0 for the others.",
    "pool", "backend", "phase",
)  # fmt: skip
KV_USAGE: Final = _gauge(
    "gateway_backend_kv_usage_ratio",
    "KV cache usage (0 to 1) reported by the backend; absent while out of date.",
    "pool", "backend",
)  # fmt: skip
EVENTS_KNOWN: Final = _gauge(
    "gateway_kv_events_known",
    "1 while a backend's KV events tell what its prefix cache holds, 0 while that is guessed.",
    "pool", "backend",
)  # fmt: skip
EVENTS_LOSSES: Final = _counter(
    "gateway_kv_events_losses_total",
    "Times that what KV events told of a backend was forgotten: messages were missed, or it started anew.",
    "pool", "backend",
)  # fmt: skip
EVENTS_GARBLED: Final = _counter(
    "gateway_kv_events_garbled_total",
    "Messages of a backend that are no KV events, or of kinds that are not known.",
    "pool", "backend",
)  # fmt: skip
RUNNING: Final = _gauge(
    "gateway_backend_running",
    "Requests running in the backend, of all its clients; absent while out of date.",
    "pool", "backend",
)  # fmt: skip
WAITING: Final = _gauge(
    "gateway_backend_waiting",
    "Requests waiting in the backend, of all its clients; absent while out of date.",
    "pool", "backend",
)  # fmt: skip
SCRAPE_AGE: Final = _gauge(
    "gateway_backend_scrape_age_seconds",
    "Age of the backend's load figures; +Inf while there are none.",
    "pool", "backend",
)  # fmt: skip
TRANSITIONS: Final = _counter(
    "gateway_backend_transitions_total",
    "Phase changes of a backend, by the new phase and the reason.",
    "pool", "backend", "to", "reason",
)  # fmt: skip
UNKNOWN_FIELDS: Final = _counter(
    "gateway_unknown_fields_total",
    "Fields of request bodies that neither vLLM nor a public API knows; vLLM ignores them.",
    "pool", "endpoint",
)  # fmt: skip
OPEN_CONNECTIONS: Final = _gauge(
    "gateway_open_connections", "Open connections; side is client or backend.", "side"
)
CONNECTIONS_SHED: Final = _counter(
    "gateway_connections_shed_total",
    "Client connections closed or refused to stay within `limits.connections`, by reason.",
    "reason",
)
BODY_BYTES: Final = _gauge(
    "gateway_request_body_bytes",
    "Bytes that request bodies hold of `limits.bodies`; those below 64 KiB do not count.",
)
BODY_BYTES_LIMIT: Final = _gauge(
    "gateway_request_body_limit_bytes", "Most bytes that request bodies may hold together."
)
LOOP_LAG: Final = _histogram(
    "gateway_event_loop_lag_seconds", LAG_BUCKETS, "How late the event loop runs its timers."
)
CONFIG_INFO: Final = _gauge(
    "gateway_config_info", "Always 1; the label is the hash of the configuration in force.", "hash"
)
CONFIG_RELOADED: Final = _gauge(
    "gateway_config_last_reload_success_timestamp_seconds",
    "When the configuration in force was loaded, in seconds since the epoch.",
)
CONFIG_RELOADS: Final = _counter(
    "gateway_config_reloads_total",
    "Reloads; result is success or failure (the old configuration stays in force).",
    "result",
)
BUILD_INFO: Final = _gauge(
    "gateway_build_info",
    "Always 1; the labels are the versions of the gateway and of Python.",
    "version",
    "python",
)

INSTRUMENTS: Final[tuple[Instrument, ...]] = tuple(
    value for value in tuple(globals().values()) if isinstance(value, Instrument)
)

# What prometheus_client's ProcessCollector adds on Linux; not ours, but part of the answer.
PROCESS_METRICS: Final = (
    "process_virtual_memory_bytes",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
    "process_cpu_seconds_total",
    "process_open_fds",
    "process_max_fds",
)

_CLOSED_LABELS: Final = {
    "endpoint": [each.value for each in Endpoint],
    "outcome": [each.value for each in Outcome],
    "phase": [each.value for each in Phase],
    "reason` of `gateway_shed_total": [each.value for each in ShedReason],
    "reason` of `gateway_connections_shed_total": [
        "lingering (it was refused already)",
        "slow_head",
        "idle",
        "refused (new, while all others were at work)",
        "address (new, of an address that has `limits.connections_per_address`)",
    ],
    "source": [each.value for each in UsageSource],
}


def reference() -> str:
    """Return the reference of all metrics as Markdown (the text of deploy/METRICS.md)."""
    lines = [
        "# Metrics",
        "",
        "`GET /metrics` on the admin listener. Generated from `gateway/observe/instruments.py` by",
        "`python -m gateway.observe.instruments > deploy/METRICS.md`; a test keeps both the same.",
        "",
        "| metric | type | labels | meaning |",
        "| --- | --- | --- | --- |",
    ]
    for each in INSTRUMENTS:
        labels = ", ".join(f"`{label}`" for label in each.labels) or "none"
        lines.append(f"| `{each.name}` | {each.kind.value} | {labels} | {each.help} |")
    lines += ["", "## Labels", ""]
    lines += [
        "- `pool` and `backend` are names of the configuration; `model` is a pool's name, an",
        f"  alias or an adapter. `{UNKNOWN}` stands for requests refused before their model was",
        f"  known (`endpoint`: before their path and method were), `{OTHER}` for names beyond the",
        "  cap on names.",
    ]
    lines += [
        f"- `{label}` is one of {', '.join(f'`{value}`' for value in values)}."
        for label, values in _CLOSED_LABELS.items()
    ]
    lines += ["", "## Buckets", ""]
    for each in INSTRUMENTS:
        if each.buckets:
            bounds = " ".join(f"{bound:g}" for bound in each.buckets)
            lines.append(f"- `{each.name}`: {bounds}")
    lines += ["", "## The process", "", "From prometheus_client, on Linux:", ""]
    lines += [f"- `{name}`" for name in PROCESS_METRICS]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(reference())
