"""Whether a request fits its limits, and the words and headers about them. Pure.

A limit per minute is a bucket of one minute's worth that empties continuously: `used` falls by limit / 60 a
second, and a request fits while used + what it costs is at most the limit. So of N minutes nobody gets more
than N + 1 minutes' worth. A limit per day or month counts from the beginning of that, in UTC. If too much was taken
it is given back; if too little, it is charged later, over the limit if need be. A request that does not fit one of
its rules takes nothing from any. A request that a minute in `shadow` would refuse is let through and takes nothing
from that minute: so a limit that is tried out refuses as many as it would in force.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

from gateway.core.limits import (
    RULES,
    Amounts,
    Counted,
    Counts,
    Judged,
    Limit,
    OnOutage,
    Period,
    Plan,
    Rule,
    Scope,
)

NOTHING: Final = Amounts()
MINUTE_S: Final = 60.0
DAY_S: Final = 86_400.0
ROUNDING: Final = 1e-6
_ENDS_SOON_S: Final = 1.0  # nobody knows when a running request ends
_AGREE_SOON_S: Final = 30.0  # nor when replicas agree again
MONEY: Final = RULES[Rule.BUDGET_DAY][1]  # the amount that budgets count

_TENANTS: Final = (Scope.TENANT, Scope.TENANT_MODEL)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Which limit a request does not fit, with the numbers; `fits_in_s` None: it never fits.

    `most` is the limit, or this replica's part of it.
    """

    limit: Limit
    most: float
    used: float
    requested: float
    fits_in_s: float | None


def day_of(wall: float) -> int:
    """Return the day, in UTC, since the epoch."""
    return int(wall // DAY_S)


@lru_cache(maxsize=64)
def month_of(day: int) -> int:
    """Return the month that a day belongs to, counted from the year 0."""
    at = datetime.fromtimestamp(day * DAY_S, UTC)
    return at.year * 12 + at.month - 1


@lru_cache(maxsize=8)
def _month_ends(month: int) -> float:
    year, place = divmod(month + 1, 12)
    return datetime(year, place + 1, 1, tzinfo=UTC).timestamp()


def resets_in_s(period: Period, wall: float) -> float:
    """Return the seconds until a day or month ends."""
    day = day_of(wall)
    ends = (day + 1) * DAY_S if period is Period.DAY else _month_ends(month_of(day))
    return ends - wall


def still_counted(plan: Plan, day: int, today: int) -> str:
    """Return the rules of a plan, as scripts read them, whose present day or month includes an earlier `day`."""
    if day == today:
        return plan.calendar
    return plan.months if month_of(day) == month_of(today) else ""


def most_here(rule: Counted, replicas: int) -> float:
    """Return one replica's part of a limit: at least one of what is counted, so that nobody is shut out."""
    if replicas <= 1:
        return rule.most
    return rule.most / replicas if rule.amount == MONEY else max(1.0, rule.most // replicas)


def over(plan: Counts, costs: Amounts, used: Sequence[float], replicas: int = 1) -> list[int]:
    """Return the places of the rules that a request does not fit, those in shadow too."""
    return [
        place
        for place, (rule, level) in enumerate(zip(plan.rules, used, strict=True))
        if level + costs[rule.amount] > most_here(rule, replicas) + ROUNDING
    ]


def passed_by(plan: Counts, places: Sequence[int]) -> frozenset[int]:
    """Return, of the rules that a request does not fit, those from which it takes nothing if it is let through."""
    return frozenset(each for each in places if plan.rules[each].period is Period.MINUTE)


def used_with(
    plan: Counts, costs: Amounts, used: Sequence[float], places: Sequence[int]
) -> tuple[float, ...]:
    """Return what is used once a request is let through that does not fit the rules at `places`."""
    passed = passed_by(plan, places)
    return tuple(
        [
            level if place in passed else level + costs[rule.amount]
            for place, (level, rule) in enumerate(zip(used, plan.rules, strict=True))
        ]
    )


def refusal(  # noqa: PLR0913 - what a judgement rests on
    plan: Plan, costs: Amounts, used: Sequence[float], places: Sequence[int], wall: float,
    replicas: int = 1, *, away: bool = False,
) -> Refusal | None:  # fmt: skip
    """Return, of the rules that a request does not fit, the one that refuses it for the longest; None: none does.

    `away`: replicas cannot agree, and rules with `on_outage: open` refuse nothing.
    """
    found: list[Refusal] = []
    for place in places:
        rule, level = plan.rules[place], used[place]
        if rule.shadow or (away and rule.limit.on_outage is OnOutage.OPEN):
            continue
        most, cost = most_here(rule, replicas), costs[rule.amount]
        found.append(Refusal(rule.limit, most, level, cost, _fits_in_s(rule, most, level, cost, wall)))  # fmt: skip
    return max(
        found,
        key=lambda each: float("inf") if each.fits_in_s is None else each.fits_in_s,
        default=None,
    )


def _fits_in_s(rule: Judged, most: float, used: float, cost: float, wall: float) -> float | None:
    if cost > rule.most + ROUNDING:
        return None
    if cost > most + ROUNDING:  # it fits the limit, and not this replica's part of it
        return _AGREE_SOON_S
    if rule.period is Period.RUNNING:
        return _ENDS_SOON_S
    if rule.period is Period.MINUTE:
        return (used + cost - most) / most * MINUTE_S
    return resets_in_s(rule.period, wall)


# --- words and headers ----------------------------------------------------------------------------


def header_lines(plan: Plan, used: Sequence[float], wall: float, share_of: int = 1) -> bytes:
    """Return `x-ratelimit-*` in OpenAI's form: the tightest limit of each label, what remains, when it is whole again.

    Where `share_of` replicas each have their part, what remains is of that part, which empties at its own pace.
    """
    lines, rules = b"", plan.rules
    for label, places in plan.shown:
        place = places[0]
        if len(places) > 1:
            place = min(places, key=lambda each: most_here(rules[each], share_of) - used[each])
        rule, level = rules[place], used[place]
        most = most_here(rule, share_of)
        if rule.period is Period.MINUTE:
            whole_s = level / most * MINUTE_S
        else:
            whole_s = resets_in_s(rule.period, wall) if level else 0.0
        remains = max(0.0, most - level)
        lines += (
            b"x-ratelimit-limit-%b: %d\r\nx-ratelimit-remaining-%b: %d\r\nx-ratelimit-reset-%b: %b\r\n"
            % (label, rule.most, label, remains, label, duration(whole_s).encode())
        )
    return lines


def told(found: Refusal, *, share_of: int = 1, currency: str = "") -> str:
    """Return a refusal for people; `share_of`: how many replicas have a part each while they cannot agree."""
    limit = found.limit
    runs = limit.rule.value.startswith("concurrent")
    money = currency if limit.rule.value.startswith("budget") else None
    used, requested = amount_told(found.used, money), amount_told(found.requested, money)
    numbers = f"{used} {'running' if runs else 'used'}, {requested} requested"
    share = f" (its part of {share_of} replicas, which cannot agree now)" if share_of > 1 else ""
    if found.fits_in_s is None:
        cure = "It can never fit: send a smaller request, or ask the operator for a higher limit."
    elif runs:
        cure = "Retry when one of them has ended."
    elif found.requested > found.most + ROUNDING:
        cure = "It fits when they agree again."
    else:
        cure = f"It fits in {duration(found.fits_in_s)}."
    return (
        f"{whose(limit)} has reached its limit {limit.rule.value}: {amount_told(found.most, money)}{share};"
        f" {numbers}. {cure}"
    )


def whose(limit: Limit) -> str:
    """Return whose limit it is, for people."""
    what = "The tenant" if limit.scope in _TENANTS else "The API key"
    of = f", for models `{limit.models}`," if limit.models else ""
    return f"{what} `{limit.owner}`{of}"


def amount_told(amount: float, currency: str | None) -> str:
    """Return a count, rounded up, or, where there is a currency, money."""
    if currency is None:
        return f"{math.ceil(amount - ROUNDING):,}"
    return (
        f"{amount:,.4g} {currency}".rstrip() if amount < 1 else f"{amount:,.2f} {currency}".rstrip()
    )


def duration(seconds: float) -> str:
    """Write a time as OpenAI does: 20ms, 7s, 1m30s, 11h0m5s."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"
