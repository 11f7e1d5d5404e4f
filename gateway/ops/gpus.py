"""What operators are told of the GPUs of launched backends. Pure.

vLLM takes its share of a GPU's memory at its start (92 %, unless it is told otherwise) and keeps it, so how much
is in use says nothing by itself. What runs out of memory is the rest: graphs, other processes, peaks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from typing_extensions import TypedDict

from gateway.core.gpu import GpuLoad
from gateway.ops.problems import Problem

_MOST_OF_REST: Final = 0.85
_GIB: Final = 1 << 30


class GpuOverview(TypedDict):
    """One GPU that a launched backend may use, as it was within the last minute or two."""

    index: int  # as nvidia-smi counts
    memory_used_bytes: int  # by all processes
    memory_bytes: int
    memory_planned_ratio: float  # that launched backends take by their settings
    memory_rest_used_ratio: float  # the part in use of what these leave free
    busy_ratio: float | None  # of the last moment, in which it computed anything; null: not told


def gpus_told(gpus: Sequence[GpuLoad]) -> list[GpuOverview]:
    """Return a backend's GPUs as they are told."""
    return [
        GpuOverview(
            index=each.index,
            memory_used_bytes=each.used_bytes,
            memory_bytes=each.total_bytes,
            memory_planned_ratio=round(each.planned_ratio, 3),
            memory_rest_used_ratio=round(max(each.rest_used_ratio, 0.0), 3),
            busy_ratio=each.busy_ratio,
        )
        for each in gpus
    ]


def gpu_problems(backend_id: str, gpus: Sequence[GpuOverview]) -> Iterator[Problem]:
    """Yield that a GPU has little memory left, beside what vLLM takes: the fullest of the backend's."""
    worst = max(gpus, key=lambda each: each["memory_rest_used_ratio"], default=None)
    if worst is None or worst["memory_rest_used_ratio"] < _MOST_OF_REST:
        return
    used, size, planned = (
        worst["memory_used_bytes"],
        worst["memory_bytes"],
        worst["memory_planned_ratio"],
    )
    yield Problem(
        kind="gpu_memory",
        severity="note",
        subject=f"backend {backend_id}",
        what=f"GPU {worst['index']} of backend {backend_id} has {(size - used) / _GIB:.1f} of"
        f" {size / _GIB:.1f} GiB of memory left",
        cause=f"{worst['memory_rest_used_ratio']:.0%} of what the servers launched here leave free is in use:"
        f" their settings take {planned:.0%} of it. At the next peak vLLM may run out of memory.",
        remedy="See with `nvidia-smi` who uses it; lower `gpu-memory-utilization` in `launch.args`.",
        weight=worst["memory_rest_used_ratio"],
    )
