"""How a key stands: each of its limits with what is used of it now, for the holder of the key."""

from __future__ import annotations

from typing import TypedDict

from gateway.core.limits import Period, Plan, Taken
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
    if isinstance(found, Taken):
        limiter.settle(found, NOTHING)
    used = None if isinstance(found, Closed) else found.used
    rows = []
    for place, rule in enumerate(plan.rules):
        level = None if used is None else used[place]
        most = rule.most if isinstance(found, Closed) else most_here(rule, found.share_of)
        rows.append(
            Standing(
                scope=rule.limit.scope.value,
                rule=rule.limit.rule.value,
                models=rule.limit.models or None,
                limit=rule.most,
                used=level,
                remaining=None if level is None else max(0.0, most - level),
                resets_in_s=None
                if level is None or isinstance(found, Closed)
                else _resets_in_s(rule.period, level, most, found.wall),
                shadow=rule.shadow,
            )
        )
    return rows


def _resets_in_s(period: Period, used: float, most: float, wall: float) -> float | None:
    if period is Period.RUNNING:
        return None
    seconds = used / most * MINUTE_S if period is Period.MINUTE else resets_in_s(period, wall)
    return round(seconds, 3) if used else 0.0
