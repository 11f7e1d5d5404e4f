"""The choice among eligible backends: the best total score, ties broken at random."""

from __future__ import annotations

import random
from collections.abc import Sequence

from gateway.pools.table import Backend
from gateway.routing.scorers import DEFAULT_SCORERS, Scorer


def scores(
    backends: Sequence[Backend],
    now: float,
    scorers: Sequence[tuple[Scorer, float]] = DEFAULT_SCORERS,
) -> list[float]:
    """Return the weighted sum of all scorers for each backend."""
    totals = [0.0] * len(backends)
    for scorer, weight in scorers:
        given = scorer(backends, now)
        totals = [total + weight * value for total, value in zip(totals, given, strict=True)]
    return totals


def pick(
    backends: Sequence[Backend],
    now: float,
    rng: random.Random,
    scorers: Sequence[tuple[Scorer, float]] = DEFAULT_SCORERS,
) -> Backend:
    """Return one of `backends` (not empty): the best, and among equals any with the same chance."""
    if len(backends) == 1:
        return backends[0]
    totals = scores(backends, now, scorers)
    best = max(totals)
    if totals.count(best) == 1:
        return backends[totals.index(best)]
    return rng.choice([each for each, total in zip(backends, totals, strict=True) if total == best])
