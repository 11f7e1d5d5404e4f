"""The reference of all metrics as Markdown: `python -m gateway.observe.reference > deploy/METRICS.md`."""

from __future__ import annotations

import sys
from typing import Final

from gateway.core.endings import Ending
from gateway.core.types import Endpoint, Outcome, Phase, ShedReason, UsageSource
from gateway.observe.instruments import INSTRUMENTS, OTHER, UNKNOWN

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
    "reason` of `gateway_upstream_failures_total": [
        each.value for each in Ending if each not in (Ending.FULL, Ending.MOVED, Ending.REFUSED)
    ],
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
        "`python -m gateway.observe.reference > deploy/METRICS.md`; a test keeps both the same.",
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
        "  cap on names. What was counted of a backend is dropped an hour after the backend has left.",
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
    lines += [
        "",
        "## The process",
        "",
        "From prometheus_client, on Linux. With `workers` they are those of worker 1:",
        "",
    ]
    lines += [f"- `{name}`" for name in PROCESS_METRICS]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(reference())
