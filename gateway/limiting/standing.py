"""How a key stands: each of its limits with what is used of it now, for the holder of the key."""

from __future__ import annotations

from typing import TypedDict

from gateway.core.limits import Judged, Period, Plan, Taken
from gateway.limiting.limiter import Closed, Limiter
from gateway.limiting.rules import MINUTE_S, NOTHING, most_here, resets_in_s


class Standing(TypedDict):
    """One limit. `used` null: replicas cannot agree on it now."""

    scope: str  # core.limits.Scope
    rule: str  # core.limits.Rule
    models: str | None  # a glob, where it counts these alone
    limit: float
    used: float | None
    remaining: float | None
    resets_in_s: float | None  # until nothing is used; null where nobody can tell
    shadow: bool  # it refuses nothing


async def standing(limiter: Limiter, plan: Plan) -> list[Standing]:
    """Return how a key stands with each of its limits; this uses nothing up.

    Cancel: as in `Limiter.take`.
    """
    found = await limiter.take(plan, NOTHING)
    if isinstance(found, Closed):
        return [_row(rule, rule.most, None, 0.0) for rule in plan.rules]
    if isinstance(found, Taken):
        limiter.settle(found, NOTHING)
    return [
        _row(rule, most_here(rule, found.share_of), used, found.wall)
        for rule, used in zip(plan.rules, found.used, strict=True)
    ]


def _row(rule: Judged, most: float, used: float | None, wall: float) -> Standing:
    """Return how a key stands with one limit, of which this replica gives out `most`."""
    limit = rule.limit
    return Standing(
        scope=limit.scope.value,
        rule=limit.rule.value,
        models=limit.models or None,
        limit=rule.most,
        used=used,
        remaining=None if used is None else max(0.0, most - used),
        resets_in_s=None if used is None else _resets_in_s(rule.period, used, most, wall),
        shadow=rule.shadow,
    )


def _resets_in_s(period: Period, used: float, most: float, wall: float) -> float | None:
    if period is Period.RUNNING:
        return None
    seconds = used / most * MINUTE_S if period is Period.MINUTE else resets_in_s(period, wall)
    return round(seconds, 3) if used else 0.0
