"""Every metric the gateway exports, in one table; the exporter, the reference and tests read it.

Names: prefix `gateway_`, base units, `_total` on counters, `_info` on constants. Labels come from
closed or configured sets only, never from what a client wrote; `observe.metrics` holds the caps.
"""

from __future__ import annotations

from typing import Final

from gateway.observe.buckets import (
    INTER_TOKEN_BUCKETS,
    LAG_BUCKETS,
    OVERHEAD_BUCKETS,
    REQUEST_BUCKETS,
    TTFT_BUCKETS,
)
from gateway.observe.instrument import Instrument, counter, gauge, histogram

UNKNOWN: Final = "_unknown"  # a name that was not resolved
OTHER: Final = "_other"  # a name beyond the cap on names

REQUESTS: Final = counter(
    "gateway_requests_total",
    "Finished requests, by outcome and HTTP status. Of a reply that broke off after its head (200), code is the status"
    " of the error; of a client that left before its end, 499.",
    "pool", "model", "endpoint", "outcome", "code",
)  # fmt: skip
REQUEST_DURATION: Final = histogram(
    "gateway_request_duration_seconds",
    REQUEST_BUCKETS,
    "Time from a request's head to the last byte of its reply, for requests sent to a backend.",
    "pool", "model",
)  # fmt: skip
TTFT: Final = histogram(
    "gateway_ttft_seconds",
    TTFT_BUCKETS,
    "Time from a request's head to the first byte of its stream, as the client sees it.",
    "pool", "model",
)  # fmt: skip
BACKEND_TTFT: Final = histogram(
    "gateway_backend_ttft_seconds",
    TTFT_BUCKETS,
    "Time from sending a request to a backend to the first byte of its stream.",
    "pool", "backend",
)  # fmt: skip
INTER_TOKEN: Final = histogram(
    "gateway_inter_token_seconds",
    INTER_TOKEN_BUCKETS,
    "Mean time between tokens of a complete stream, one observation per request.",
    "pool", "model",
)  # fmt: skip
OVERHEAD: Final = histogram(
    "gateway_overhead_seconds",
    OVERHEAD_BUCKETS,
    "The gateway's own time from receiving a request's body to sending it on, without queueing.",
    "endpoint",
)
SHED: Final = counter(
    "gateway_shed_total", "Requests refused for capacity, by reason.", "pool", "reason"
)
FALLBACKS: Final = counter(
    "gateway_fallbacks_total",
    "Requests for a pool that another one took; cause is no_backend, overload or context.",
    "pool", "to", "cause",
)  # fmt: skip
SHADOWS: Final = counter(
    "gateway_shadow_requests_total",
    "Copies of requests to another pool, whose replies nobody gets; outcome is ok, rejected (4xx), failed or"
    " dropped (for load). They are in no other metric of requests.",
    "pool", "to", "outcome",
)  # fmt: skip
SHADOW_TTFT: Final = histogram(
    "gateway_shadow_ttft_seconds",
    TTFT_BUCKETS,
    "Time from sending a copy to the first byte of its reply.",
    "pool", "to",
)  # fmt: skip
QUEUED: Final = gauge(
    "gateway_queue_requests", "Requests waiting here for room on a backend.", "pool"
)
QUEUED_TOKENS: Final = gauge(
    "gateway_queue_tokens",
    "Tokens that the waiting requests are expected to need, prompts plus outputs.",
    "pool",
)
QUEUE_WAIT: Final = histogram(
    "gateway_queue_wait_seconds",
    TTFT_BUCKETS,
    "Each time that a request was in the queue of a pool, whatever became of it, and whichever pool answered it.",
    "pool",
)
LIMIT: Final = gauge(
    "gateway_backend_limit",
    "The adaptive concurrency limit of a backend; absent with admission off.",
    "pool", "backend",
)  # fmt: skip
LIMIT_CUTS: Final = counter(
    "gateway_backend_limit_cuts_total",
    "Times the concurrency limit was lowered; sign is waiting, preempted, refused, late or slow.",
    "pool", "backend", "sign",
)  # fmt: skip
RESTARTS: Final = counter(
    "gateway_backend_restarts_total",
    "Restarts of a backend by this gateway, by cause.",
    "pool", "backend", "cause",
)  # fmt: skip
RESTARTS_HELD: Final = gauge(
    "gateway_restarts_held",
    "1 while an operator holds automatic restarts of a pool, else 0.",
    "pool",
)
CANARY: Final = gauge(
    "gateway_canary_verdict",
    "1 for the verdict on a pool's canary, 0 for the others: open (not known yet), worse or fine (no worse).",
    "pool", "verdict",
)  # fmt: skip
CANARY_REQUESTS: Final = counter(
    "gateway_canary_requests_total",
    "Requests that the verdict on a pool's canary counts; side is canary or others.",
    "pool", "side",
)  # fmt: skip
ADAPTER_CHANGES: Final = counter(
    "gateway_adapter_changes_total",
    "LoRA adapters that the gateway loaded or unloaded; result is loaded, evicted (another was loaded in its place), "
    "unloaded or failed.",
    "pool", "result",
)  # fmt: skip
ADAPTER_LOAD_SECONDS: Final = counter(
    "gateway_adapter_load_seconds_total", "Seconds that these loads took.", "pool"
)
SUPERVISION: Final = counter(
    "gateway_supervision_events_total",
    "Supervision events, by kind: started, start_failed, exited, remedy, suspended, ...",
    "pool", "backend", "kind",
)  # fmt: skip
TOKENS: Final = counter(
    "gateway_tokens_total",
    "Tokens of finished requests; kind is prompt, completion, cached (part of prompt, where replies tell) or "
    "expected (to be cached where they were sent).",
    "pool", "model", "kind",
)  # fmt: skip
TENANT_TOKENS: Final = counter(
    "gateway_tenant_tokens_total",
    "Tokens of finished requests by tenant; kind is input, cached (part of input) or output. The first 1,000 "
    "tenants have series of their own.",
    "tenant", "kind",
)  # fmt: skip
LIMIT_REFUSALS: Final = counter(
    "gateway_limit_refusals_total",
    "Requests that did not fit a limit, by scope and rule; shadow is true where it refused nothing.",
    "scope", "rule", "shadow",
)  # fmt: skip
USAGE_SOURCE: Final = counter(
    "gateway_usage_source_total", "Requests, by the source of their token counts.", "source"
)
ATTEMPTS: Final = counter(
    "gateway_upstream_attempts_total",
    "Times a request was sent to a backend; what exceeds the number of requests are retries.",
    "pool",
)
RETRIES: Final = counter(
    "gateway_retries_total",
    "What followed attempts that were surely not executed, or are over; next is elsewhere, fresh_connection, again (the"
    " same backend, as it asked) or over_budget (the client was told the error).",
    "pool", "next",
)  # fmt: skip
QUARANTINED: Final = counter(
    "gateway_quarantined_total",
    "Requests that were refused because they were being worked on as two backends died.",
    "pool",
)
RESUMED: Final = counter(
    "gateway_streams_resumed_total",
    "Times another backend went on with a stream: cause is failure (of its own one) or drain.",
    "pool", "cause",
)  # fmt: skip
UPSTREAM_FAILURES: Final = counter(
    "gateway_upstream_failures_total",
    "Attempts that failed at a backend, including those that a retry repaired.",
    "pool", "backend", "reason",
)  # fmt: skip
FAILED_KEYS: Final = counter(
    "gateway_failed_keys_total",
    "Requests without a valid key or admin token; listener is public or admin, result is told (401)"
    " or limited (429).",
    "listener",
    "result",
)
CLIENT_RETRIES: Final = counter(
    "gateway_client_retries_total",
    "Requests that are retries, according to the client's SDK.",
    "pool",
)
CLIENT_DISCONNECTS: Final = counter(
    "gateway_client_disconnects_total",
    "Clients that disconnected early; stage is before_send, before_first_byte or streaming.",
    "pool", "stage",
)  # fmt: skip
ACCESS_LOG_DROPPED: Final = counter(
    "gateway_access_log_dropped_total",
    "Log lines lost because standard output blocked or failed.",
)
IN_FLIGHT: Final = gauge(
    "gateway_inflight_requests",
    "Requests of this gateway in flight on a backend.",
    "pool",
    "backend",
)
BACKEND_PHASE: Final = gauge(
    "gateway_backend_phase",
    "1 for the phase a backend is in, 0 for the others.",
    "pool", "backend", "phase",
)  # fmt: skip
BACKEND_STATE: Final = gauge(
    "gateway_backend_state",
    "1 for the state that `vllm-gateway status` tells of a backend, such as frozen; absent for the others.",
    "pool", "backend", "state",
)  # fmt: skip
PROBLEM: Final = gauge(
    "gateway_problem",
    "1 for each problem that `vllm-gateway status` lists; subject is what it concerns, such as `pool m`.",
    "kind", "severity", "subject",
)  # fmt: skip
EJECTED: Final = gauge(
    "gateway_backend_ejected",
    "1 while a backend gets no new requests, or one at a time, because those before it failed.",
    "pool", "backend",
)  # fmt: skip
KV_USAGE: Final = gauge(
    "gateway_backend_kv_usage_ratio",
    "KV cache usage (0 to 1) reported by the backend; absent while out of date.",
    "pool", "backend",
)  # fmt: skip
GPU_MEMORY_USED: Final = gauge(
    "gateway_gpu_memory_used_bytes",
    "Memory in use of a GPU that a launched backend may use, by all processes; absent where nobody can tell."
    " The gpu 1:0 is the first part (MIG) of GPU 1.",
    "pool", "backend", "gpu",
)  # fmt: skip
GPU_MEMORY: Final = gauge(
    "gateway_gpu_memory_bytes", "Memory that such a GPU has.", "pool", "backend", "gpu"
)
GPU_BUSY: Final = gauge(
    "gateway_gpu_utilization_ratio",
    "Part of the last moment in which such a GPU computed anything, asked each minute.",
    "pool", "backend", "gpu",
)  # fmt: skip
PREFIX_HASHES: Final = gauge(
    "gateway_prefix_index_hashes",
    "Hashes of prompts that are kept to know what a backend's prefix cache holds; about 75 bytes each.",
    "pool", "backend",
)  # fmt: skip
PREFIX_SHARED: Final = counter(
    "gateway_prefix_shared_hashes_total",
    "Hashes of prompts that gateways and workers tell each other; result is told, heard (of all others) or dropped "
    "(learned here and not told). A hash takes 11 bytes.",
    "result",
)
EVENTS_KNOWN: Final = gauge(
    "gateway_kv_events_known",
    "1 while a backend's KV events tell what its prefix cache holds, 0 while that is guessed.",
    "pool", "backend",
)  # fmt: skip
EVENTS_LOSSES: Final = counter(
    "gateway_kv_events_losses_total",
    "Times that what KV events told of a backend was forgotten: messages were missed, or it started anew.",
    "pool", "backend",
)  # fmt: skip
EVENTS_GARBLED: Final = counter(
    "gateway_kv_events_garbled_total",
    "Messages of a backend that are no KV events, or of kinds that are not known.",
    "pool", "backend",
)  # fmt: skip
RUNNING: Final = gauge(
    "gateway_backend_running",
    "Requests running in the backend, of all its clients; absent while out of date.",
    "pool", "backend",
)  # fmt: skip
WAITING: Final = gauge(
    "gateway_backend_waiting",
    "Requests waiting in the backend, of all its clients; absent while out of date.",
    "pool", "backend",
)  # fmt: skip
SCRAPE_AGE: Final = gauge(
    "gateway_backend_scrape_age_seconds",
    "Age of the backend's load figures; +Inf while there are none.",
    "pool", "backend",
)  # fmt: skip
TRANSITIONS: Final = counter(
    "gateway_backend_transitions_total",
    "Phase changes of a backend, by the new phase and the reason.",
    "pool", "backend", "to", "reason",
)  # fmt: skip
UNKNOWN_FIELDS: Final = counter(
    "gateway_unknown_fields_total",
    "Fields of request bodies that neither vLLM nor a public API knows; vLLM ignores them.",
    "pool", "endpoint",
)  # fmt: skip
OPEN_CONNECTIONS: Final = gauge(
    "gateway_open_connections", "Open connections; side is client or backend.", "side"
)
CONNECTIONS_SHED: Final = counter(
    "gateway_connections_shed_total",
    "Client connections closed or refused to stay within `limits.connections`, by reason.",
    "reason",
)
BODY_BYTES: Final = gauge(
    "gateway_request_body_bytes",
    "Bytes that request bodies hold of `limits.bodies`; those below 64 KiB do not count.",
)
BODY_BYTES_LIMIT: Final = gauge(
    "gateway_request_body_limit_bytes", "Most bytes that request bodies may hold together."
)
KEPT_BODY_BYTES: Final = gauge(
    "gateway_kept_body_bytes",
    "Bytes of large bodies that are kept so that another backend can go on with their streams; at most 64 MiB for"
    " each worker.",
)
LOOP_LAG: Final = histogram(
    "gateway_event_loop_lag_seconds", LAG_BUCKETS, "How late the event loop runs its timers."
)
CONFIG_INFO: Final = gauge(
    "gateway_config_info",
    "Always 1; hash is that of the configuration in force, shared that of the settings which all gateways should have"
    " alike (all but listen, admin, redis, keys, log and state).",
    "hash", "shared",
)  # fmt: skip
CONFIG_RELOADED: Final = gauge(
    "gateway_config_last_reload_success_timestamp_seconds",
    "When the configuration in force was loaded, in seconds since the epoch.",
)
CONFIG_RELOADS: Final = counter(
    "gateway_config_reloads_total",
    "Reloads; result is success or failure (the old configuration stays in force).",
    "result",
)
BUILD_INFO: Final = gauge(
    "gateway_build_info",
    "Always 1; the labels are the versions of the gateway and of Python.",
    "version",
    "python",
)

INSTRUMENTS: Final[tuple[Instrument, ...]] = tuple(
    value for value in tuple(globals().values()) if isinstance(value, Instrument)
)
