"""What a backend's /metrics page says of its load and its steps.

Metrics are found by anchored searches for the few names needed: a general parser takes 32 ms of the
event loop for a page of 232 KiB, this takes less than 1 ms. Old and new names are both known.
Source: vLLM 0.32 `v1/metrics/loggers.py`; renames since 0.9: `gpu_cache_usage_perc`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Final

from gateway.core.types import LoadSample

MAX_METRICS_BYTES: Final = 4 * 1024 * 1024

_NAMES: Final = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "gpu_cache_usage_perc",
    "generation_tokens_total",
    "prompt_tokens_total",
    "iteration_tokens_total_count",
    "num_preemptions_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "gpu_prefix_cache_hits_total",
    "estimated_flops_per_gpu_total",
    "engine_sleep_state",
    "cache_config_info",
    "lora_requests_info",
)
# name, labels, value; label values may hold escaped quotes and braces
_SAMPLE: Final = re.compile(
    rb"^vllm:("
    + "|".join(_NAMES).encode()
    + rb')(?:\{((?:[^"}\n]|"(?:[^"\\\n]|\\.)*")*)\})?[ \t]+(\S+)',
    re.MULTILINE,
)
_MOST: Final = 1e30  # what is more is a mistake, as is what is negative; sums of these stay finite
_LOADS: Final = frozenset({"num_requests_running", "num_requests_waiting"})
_ENGINE: Final = re.compile(rb'(?:^|,)engine="(\d{1,3})"')
_LABEL: Final = re.compile(rb'(\w+)="((?:[^"\\]|\\.)*)"')
_PROGRESS: Final = (
    "generation_tokens_total",
    "prompt_tokens_total",
    "iteration_tokens_total_count",
)
# What a step moves even if it makes no token: a partial prefill counts in none of the above. The usage of the
# cache is compared by itself. The time of the adapters' gauge, which every step sets, is added to these.
# Source: vLLM 0.32 v1/metrics/loggers.py, PrometheusStatLogger.record.
_STEPS: Final = (
    "prefix_cache_queries_total",
    "num_preemptions_total",
    "estimated_flops_per_gpu_total",  # only with --enable-mfu-metrics
)


def parse_metrics(body: bytes, now: float) -> LoadSample | None:
    """Read a metrics page: engines summed, the fullest KV cache; None when it tells no load.

    Unreadable lines are passed over. The KV capacity is the engine's own figure in tokens where it
    gives one: blocks times block size is wrong for hybrid and sliding-window models.
    """
    if len(body) > MAX_METRICS_BYTES:
        return None
    sums: dict[str, float] = {}
    kv_usage: float | None = None
    caches: list[bytes] = []
    asleep = False
    engines: dict[int, int] = {}
    adapters, adapters_at = b"", -math.inf
    for name, labels, value in _samples(body):
        match name:
            case "kv_cache_usage_perc" | "gpu_cache_usage_perc":
                kv_usage = max(kv_usage or 0.0, min(value, 1.0))
            case "engine_sleep_state":
                asleep = asleep or (value > 0 and b'sleep_state="awake"' not in labels)
            case "cache_config_info":
                caches.append(labels)
            case "lora_requests_info":
                # Every combination ever seen stays; its value is when it was last true.
                if value > adapters_at:
                    adapters, adapters_at = labels, value
            case _:
                sums[name] = sums.get(name, 0.0) + value
                if name in _LOADS and (engine := _ENGINE.search(labels)) is not None:
                    rank = int(engine[1])
                    engines[rank] = engines.get(rank, 0) + int(value)
    if "num_requests_running" not in sums:
        return None
    return LoadSample(
        at=now,
        running=int(sums["num_requests_running"]),
        waiting=int(sums.get("num_requests_waiting", 0)),
        kv_usage_ratio=kv_usage,
        kv_capacity_tokens=_capacity(caches),
        progress=sum(sums.get(name, 0.0) for name in _PROGRESS),
        preemptions=sums.get("num_preemptions_total", 0.0),
        asleep=asleep,
        running_adapters=_names(_labels(adapters).get(b"running_lora_adapters", b"")),
        steps=sum(sums.get(name, 0.0) for name in _STEPS) + max(adapters_at, 0.0),
        generation_tokens=sums.get("generation_tokens_total", 0.0),
        engines=_by_rank(engines),
        prefix_hits=sums.get("prefix_cache_hits_total", sums.get("gpu_prefix_cache_hits_total")),
    )


def _by_rank(engines: dict[int, int]) -> tuple[int, ...]:
    """Return the requests of several engines that are the whole server; empty for others."""
    whole = len(engines) > 1 and engines.keys() == set(range(len(engines)))
    return tuple(engines[rank] for rank in range(len(engines))) if whole else ()


def _samples(body: bytes) -> Iterator[tuple[str, bytes, float]]:
    for name, labels, text in _SAMPLE.findall(body):
        try:
            value = float(text)
        except ValueError:
            continue
        if abs(value) <= _MOST:
            yield name.decode(), labels, max(value, 0.0)


def _labels(labels: bytes) -> dict[bytes, bytes]:
    return dict(_LABEL.findall(labels))


def _capacity(caches: list[bytes]) -> int | None:
    """Return how many tokens the largest cache holds: 0 for a model that uses none, None if unknown.

    Each engine has a cache. `kv_cache_size_tokens` is of one, but `num_gpu_blocks` is the sum over all.
    A block of each engine is never used, and an encoder has no other.
    """
    found: list[int] = []
    for labels in caches:
        values = _labels(labels)
        tokens = _count(values.get(b"kv_cache_size_tokens"))
        blocks, size = _count(values.get(b"num_gpu_blocks")), _count(values.get(b"block_size"))
        if tokens is None and blocks is not None and size is not None:
            tokens = blocks // len(caches) * size if blocks > len(caches) else 0
        if tokens is not None:
            found.append(tokens)
    return max(found, default=None)


def _count(text: bytes | None) -> int | None:
    return int(text) if text is not None and text.isdigit() and len(text) <= 15 else None


def _names(text: bytes) -> tuple[str, ...]:
    names = (name.strip() for name in text.decode(errors="replace").split(","))
    return tuple(sorted(name for name in names if name))
