"""What one process counts as used of each limit: everything if it runs alone, else its part."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from gateway.core.limits import Amounts, Counted, Counts, Period
from gateway.limiting.rules import MINUTE_S, NOTHING, day_of, month_of, most_here

CALENDAR: Final = frozenset({Period.DAY, Period.MONTH})


@dataclass(frozen=True, slots=True)
class Moment:
    """One moment, by the clock of minutes and by the calendar."""

    now: float
    day: int
    month: int

    @classmethod
    def of(cls, now: float, wall: float) -> Moment:
        """Return the moment of two clocks."""
        day = day_of(wall)
        return cls(now, day, month_of(day))

    def stamp(self, period: Period) -> float:
        """Return the stamp of a level that is noted now: a time, a day or a month."""
        if period is Period.MINUTE:
            return self.now
        return self.day if period is Period.DAY else self.month


class Level(NamedTuple):
    """What is used of one amount as of `stamp`, under the limit `most`."""

    stamp: float
    used: float
    most: float


_EMPTY: Final = Level(0.0, 0.0, 0.0)
_MOST_RAISED: Final = 100_000
_MOST_REPLICAS: Final = 60  # that share a limit: the part of each empties so much more slowly

_Place = tuple[str, int, Period]  # the name of a store, and which amount over which time


def _counts(level: Level, period: Period, at: Moment) -> bool:
    """Whether a level still counts: its minute is not empty, or its day or month not over."""
    if period is not Period.MINUTE:
        return level.stamp >= at.stamp(period)
    return at.now - level.stamp < level.used / level.most * MINUTE_S * _MOST_REPLICAS


@dataclass(slots=True)
class Levels:
    """The levels of each store, by amount and period, and its leases of running requests."""

    amounts: OrderedDict[_Place, Level] = field(default_factory=OrderedDict)
    raised: set[_Place] = field(default_factory=set)  # days and months with what was spent before
    # By store and lease: until when it counts. The oldest come first.
    running: dict[str, dict[str, float]] = field(default_factory=dict)

    def used(self, plan: Counts, at: Moment, replicas: int = 1) -> tuple[float, ...]:
        """Return what is used of each rule; a clock that goes back empties nothing.

        A minute empties at the pace of the limit, or of its part where several `replicas` share it. When a limit is
        lowered, what is used becomes at most a whole minute of the new one.
        """
        stores = plan.stores
        return tuple([self._level(stores[rule.store], rule, at, replicas) for rule in plan.rules])

    def _level(self, store: str, rule: Counted, at: Moment, replicas: int) -> float:
        period = rule.period
        if period is Period.RUNNING:
            return len(self.running.get(store, ()))
        place = store, rule.amount, period
        stamp, used, before = self.amounts.get(place, _EMPTY)
        if stamp > at.stamp(period):  # the clock was ahead then: it counts for the present time
            stamp = at.stamp(period)
            self.amounts[place] = Level(stamp, used, before)
        if period is Period.MINUTE:
            most = most_here(rule, replicas)
            if rule.most < before:
                used = min(used, most)
            return max(0.0, used - (at.now - stamp) / MINUTE_S * most)
        return used if stamp == at.stamp(period) else 0.0

    def recall(self, plan: Counts, at: Moment, spent: Callable[[int], float]) -> None:
        """Raise days and months to what is known to be `spent` of them: new ones, and each that is not in `raised`."""
        for number, rule in enumerate(plan.rules):
            if rule.period in CALENDAR:
                store = plan.stores[rule.store]
                place = store, rule.amount, rule.period
                if place not in self.raised or place not in self.amounts:
                    used = max(spent(number), self._level(store, rule, at, 1))
                    self._note(place, Level(at.stamp(rule.period), used, rule.most), at)
                    if len(self.raised) >= _MOST_RAISED:
                        self.raised.clear()  # to raise them again does no harm
                    self.raised.add(place)

    def put(self, plan: Counts, used: Sequence[float], at: Moment) -> None:
        """Note what is used of each rule, except rules of running requests."""
        for rule, level in zip(plan.rules, used, strict=True):
            if rule.period is not Period.RUNNING:
                place = plan.stores[rule.store], rule.amount, rule.period
                self._note(place, Level(at.stamp(rule.period), level, rule.most), at)

    def go_on(
        self, told: Sequence[tuple[Counts, Sequence[float], Moment]], at: Moment, replicas: int
    ) -> None:
        """Go on from this replica's part of what Redis told, the newest last.

        Redis does not know what was used of minutes here while it was away: at least that counts.
        """
        before = [(plan, self.used(plan, at, replicas)) for plan, _, _ in told if self.amounts]
        for plan, used, then in told:
            self.put(plan, [each / replicas for each in used], then)
        for plan, here in before:
            if any(here):
                parts = self.used(plan, at, replicas)
                minutes = [rule.period is Period.MINUTE for rule in plan.rules]
                each = zip(minutes, parts, here, strict=True)
                self.put(
                    plan, [max(part, own) if minute else part for minute, part, own in each], at
                )

    def _note(self, place: _Place, level: Level, at: Moment) -> None:
        """Note a level. A new one first removes up to two old ones that do not count any more, so memory is bounded."""
        if place not in self.amounts:
            for _ in range(min(2, len(self.amounts))):
                looked_at, each = self.amounts.popitem(last=False)
                if _counts(each, looked_at[2], at):
                    self.amounts[looked_at] = each
        self.amounts[place] = level

    def charge(
        self, plan: Counts, more: Amounts, at: Moment, taken_on: int, replicas: int = 1
    ) -> None:
        """Add what is used more, or give back what is used less; not to this day what was taken on another one.

        A minute goes on under the limit by which it was noted last, which may be newer than the plan.
        """
        if more == NOTHING:
            return
        plan, levels = self._as_noted(plan), []
        for rule, level in zip(plan.rules, self.used(plan, at, replicas), strict=True):
            each = more[rule.amount]
            past = each < 0 and (
                (rule.period is Period.DAY and taken_on != at.day)
                or (rule.period is Period.MONTH and month_of(taken_on) != at.month)
            )
            levels.append(level if past else max(0.0, level + each))
        self.put(plan, levels, at)

    def _as_noted(self, plan: Counts) -> Counts:
        """Return a plan with the limits by which its levels were noted last: a reload may have changed them since."""
        rules = []
        for rule in plan.rules:
            place = plan.stores[rule.store], rule.amount, rule.period
            most = self.amounts.get(place, _EMPTY).most
            rules.append(rule if most in (0.0, rule.most) else replace(rule, most=most))
        return replace(plan, rules=tuple(rules)) if rules != [*plan.rules] else plan

    def begin(self, plan: Counts, lease: str, until: float = math.inf) -> None:
        """Count a request as running, until it ends or its lease does."""
        for place in plan.running:
            self.renew(plan.stores[place], lease, until)

    def renew(self, store: str, lease: str, until: float) -> None:
        """Extend a lease in a store."""
        leases = self.running.setdefault(store, {})
        leases.pop(lease, None)  # so that the dictionary's order is that of time
        leases[lease] = until

    def give_up(self, plan: Counts, now: float) -> None:
        """Remove the leases that nobody has renewed in time."""
        for place in plan.running:
            leases = self.running.get(plan.stores[place], {})
            while leases and leases[lease := next(iter(leases))] <= now:
                del leases[lease]

    def end(self, plan: Counts, lease: str) -> None:
        """Count a request as ended."""
        for place in plan.running:
            store = plan.stores[place]
            leases = self.running.get(store)
            if leases is not None:
                leases.pop(lease, None)
                if not leases:
                    del self.running[store]
