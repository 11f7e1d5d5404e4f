"""What operators are told of the GPUs of launched backends. Pure.

vLLM takes its share of a GPU's memory at its start (92 %, unless it is told otherwise) and keeps it, so how much
is in use says nothing by itself. What runs out of memory is the rest: graphs, other processes, peaks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from typing_extensions import TypedDict

from gateway.core.gpu import GpuLoad
from gateway.ops.moment import rounded
from gateway.ops.problems import Problem

_MOST_OF_REST: Final = 0.85
_GIB: Final = 1 << 30


class GpuOverview(TypedDict):
    """One GPU that a launched backend may use, as it was within the last minute or two."""

    index: int  # as nvidia-smi counts
    part: int | None  # of a GPU in parts (MIG), as nvidia-smi counts; null: it is whole
    memory_used_bytes: int  # by all processes
    memory_bytes: int
    # What launched backends take by their settings; null: these do not say.
    memory_planned_ratio: float | None
    # The part in use of what these leave free; null: not known.
    memory_rest_used_ratio: float | None
    busy_ratio: float | None  # of the last moment, in which it computed anything; null: not told


def gpus_told(gpus: Sequence[GpuLoad]) -> list[GpuOverview]:
    """Return a backend's GPUs as they are told."""
    return [
        GpuOverview(
            index=each.index,
            part=each.part,
            memory_used_bytes=each.used_bytes,
            memory_bytes=each.total_bytes,
            memory_planned_ratio=rounded(each.planned_ratio),
            memory_rest_used_ratio=rounded(each.rest_used_ratio),
            busy_ratio=each.busy_ratio,
        )
        for each in gpus
    ]


def gpu_problems(backend_id: str, gpus: Sequence[GpuOverview]) -> Iterator[Problem]:
    """Yield that a GPU has little memory left, beside what vLLM takes: the fullest of the backend's."""
    rests = [
        each["memory_rest_used_ratio"] or 0.0 for each in gpus
    ]  # what is not known counts as free
    rest = max(rests, default=0.0)
    if rest < _MOST_OF_REST:
        return
    worst = gpus[rests.index(rest)]
    used, size = worst["memory_used_bytes"], worst["memory_bytes"]
    yield Problem(
        kind="gpu_memory",
        severity="note",
        subject=f"backend {backend_id}",
        what=f"{_name(worst)} of backend {backend_id} has {(size - used) / _GIB:.1f} of {size / _GIB:.1f} GiB"
        " of memory left",
        cause=f"{rest:.0%} of what the servers launched here leave free is in use: their settings take"
        f" {worst['memory_planned_ratio'] or 0.0:.0%} of it. At the next peak vLLM may run out of memory.",
        remedy="See with `nvidia-smi` who uses it; lower `gpu-memory-utilization` in `launch.args`.",
        weight=rest,
    )


def _name(gpu: GpuOverview) -> str:
    part = "" if gpu["part"] is None else f", MIG part {gpu['part']}"
    return f"GPU {gpu['index']}{part}"
