"""How good a backend is for a request: each scorer gives 0 (worst) to 1 (best)."""

from __future__ import annotations

from typing import Final, Protocol

from gateway.pools.table import Backend


class Scorer(Protocol):
    """One aspect of a backend's fitness; a pure function of the backend's state and the time."""

    def __call__(self, backend: Backend, now: float) -> float:
        """Return 0..1, larger is better."""


def fewest_requests(backend: Backend, now: float) -> float:
    """Prefer the backend with the fewest requests: scraped ones plus our own since that scrape."""
    return 1.0 / (1.0 + backend.load(now))


def free_kv_cache(backend: Backend, now: float) -> float:
    """Prefer the backend with the emptier KV cache; unknown or stale counts as half full."""
    sample = backend.sample
    if sample is None or sample.kv_usage_ratio is None or backend.stale(now):
        return 0.5
    return 1.0 - sample.kv_usage_ratio


# Load decides; the KV cache only parts backends whose load is about equal.
DEFAULT_SCORERS: Final[tuple[tuple[Scorer, float], ...]] = (
    (fewest_requests, 1.0),
    (free_kv_cache, 0.1),
)
