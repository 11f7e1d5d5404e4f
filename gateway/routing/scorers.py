"""How good backends are for a request: each scorer gives every one 0 (worst) to 1 (best)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from gateway.pools.table import Backend


class Scorer(Protocol):
    """One aspect of fitness; a pure function of the backends' state and the time."""

    def __call__(self, backends: Sequence[Backend], now: float) -> list[float]:
        """Return 0..1 for each, larger is better."""


def least_work(backends: Sequence[Backend], now: float) -> list[float]:
    """Prefer the backend that ends its requests soonest: how many they are, and how slow it is.

    They are scraped ones plus our own since that scrape; the pace is measured against its peers'.
    """
    return [1.0 / ((1.0 + backend.load(now)) * backend.slowness) for backend in backends]


def free_kv_cache(backends: Sequence[Backend], now: float) -> list[float]:
    """Prefer the backend with the emptier KV cache; unknown or stale counts as half full."""
    return [
        0.5 if (usage := backend.kv_usage_ratio(now)) is None else 1.0 - usage
        for backend in backends
    ]


# Load decides; the KV cache only parts backends whose load is about equal.
DEFAULT_SCORERS: Final[tuple[tuple[Scorer, float], ...]] = (
    (least_work, 1.0),
    (free_kv_cache, 0.1),
)
