"""The choice among eligible backends: the best total score, ties broken at random."""

from __future__ import annotations

import random
from collections.abc import Sequence

from gateway.pools.table import Backend
from gateway.routing.scorers import DEFAULT_SCORERS, Scorer


def score(
    backend: Backend, now: float, scorers: Sequence[tuple[Scorer, float]] = DEFAULT_SCORERS
) -> float:
    """Return the weighted sum of all scorers for one backend."""
    return sum(weight * scorer(backend, now) for scorer, weight in scorers)


def pick(
    backends: Sequence[Backend],
    now: float,
    rng: random.Random,
    scorers: Sequence[tuple[Scorer, float]] = DEFAULT_SCORERS,
) -> Backend:
    """Return one of `backends` (not empty): the best, and among equals any with the same chance."""
    if len(backends) == 1:
        return backends[0]
    scores = [score(backend, now, scorers) for backend in backends]
    best = max(scores)
    return rng.choice(
        [backend for backend, value in zip(backends, scores, strict=True) if value == best]
    )
