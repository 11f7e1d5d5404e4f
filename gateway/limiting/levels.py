"""What one process knows to be used of each limit: all there is where it runs alone, else its part."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from gateway.core.limits import Amounts, Counted, Counts, Period
from gateway.limiting.rules import MINUTE_S, NOTHING, day_of, month_of, most_here

CALENDAR: Final = frozenset({Period.DAY, Period.MONTH})


@dataclass(frozen=True, slots=True)
class Moment:
    """Now, as limits count it."""

    now: float
    day: int
    month: int

    @classmethod
    def of(cls, now: float, wall: float) -> Moment:
        """Return the moment of two clocks."""
        day = day_of(wall)
        return cls(now, day, month_of(day))

    def stamp(self, period: Period) -> float:
        """Return what a level of a period is valid for."""
        if period is Period.MINUTE:
            return self.now
        return self.day if period is Period.DAY else self.month


class Level(NamedTuple):
    """What is used of one amount. It is valid for `stamp`, and was taken under the limit `most`."""

    stamp: float
    used: float
    most: float


_EMPTY: Final = Level(0.0, 0.0, 0.0)
_REPLICAS_MOST: Final = 60  # that share a limit; the share of each empties as much more slowly

_Place = tuple[str, int, Period]  # the name of a store, and which amount over which time


def _counts(level: Level, period: Period, at: Moment) -> bool:
    """Whether something is left of a level."""
    if period is not Period.MINUTE:
        return level.stamp >= at.stamp(period)
    return at.now - level.stamp < level.used / level.most * MINUTE_S * _REPLICAS_MOST


@dataclass(slots=True)
class Levels:
    """By the names of stores: levels by amount and period, and leases of what runs."""

    amounts: OrderedDict[_Place, Level] = field(default_factory=OrderedDict)
    running: dict[str, dict[str, float]] = field(default_factory=dict)  # until when, oldest first

    def used(self, plan: Counts, at: Moment, replicas: int = 1) -> tuple[float, ...]:
        """Return what is used of each rule; a clock that goes back empties nothing.

        A minute empties at the pace of the limit; of several `replicas` each has its part of that, too. Under
        a limit that was lowered no more is used than a whole minute of it.
        """
        stores = plan.stores
        return tuple([self._level(stores[rule.store], rule, at, replicas) for rule in plan.rules])

    def _level(self, store: str, rule: Counted, at: Moment, replicas: int) -> float:
        period = rule.period
        if period is Period.RUNNING:
            return len(self.running.get(store, ()))
        stamp, used, before = self.amounts.get((store, rule.amount, period), _EMPTY)
        if period is Period.MINUTE:
            most = most_here(rule, replicas)
            if rule.most < before:
                used = min(used, most)
            return max(0.0, used - max(0.0, at.now - stamp) / MINUTE_S * most)
        return used if stamp >= at.stamp(period) else 0.0

    def recall(self, plan: Counts, at: Moment, spent: Callable[[int], float]) -> None:
        """Begin the days and months of a plan, of which nothing is known yet, with what was used of them before."""
        for number, rule in enumerate(plan.rules):
            if rule.period in CALENDAR:
                place = plan.stores[rule.store], rule.amount, rule.period
                if place not in self.amounts:
                    self._note(place, Level(at.stamp(rule.period), spent(number), rule.most), at)

    def put(self, plan: Counts, used: Sequence[float], at: Moment) -> None:
        """Note what is used of each rule but of those that count what runs."""
        for rule, level in zip(plan.rules, used, strict=True):
            if rule.period is not Period.RUNNING:
                place = plan.stores[rule.store], rule.amount, rule.period
                self._note(place, Level(at.stamp(rule.period), level, rule.most), at)

    def _note(self, place: _Place, level: Level, at: Moment) -> None:
        """Note a level; a new one makes up for two others, if they count no more."""
        if place not in self.amounts:
            for _ in range(min(2, len(self.amounts))):
                looked_at, each = self.amounts.popitem(last=False)
                if _counts(each, looked_at[2], at):
                    self.amounts[looked_at] = each
        self.amounts[place] = level

    def charge(
        self, plan: Counts, more: Amounts, at: Moment, taken_on: int, replicas: int = 1
    ) -> None:
        """Count what is used more, or, as far as there is, less; what was taken on another day stays with that."""
        if more == NOTHING:
            return
        levels = []
        for rule, level in zip(plan.rules, self.used(plan, at, replicas), strict=True):
            each = more[rule.amount]
            past = each < 0 and (
                (rule.period is Period.DAY and taken_on != at.day)
                or (rule.period is Period.MONTH and month_of(taken_on) != at.month)
            )
            levels.append(level if past else max(0.0, level + each))
        self.put(plan, levels, at)

    def begin(self, plan: Counts, lease: str, until: float = math.inf) -> None:
        """Count a request among what runs, until it ends or is given up."""
        for place in plan.running:
            self.renew(plan.stores[place], lease, until)

    def renew(self, store: str, lease: str, until: float) -> None:
        """Count what runs in a store for longer."""
        leases = self.running.setdefault(store, {})
        leases.pop(lease, None)  # so that the dictionary's order is that of time
        leases[lease] = until

    def give_up(self, plan: Counts, now: float) -> None:
        """Count no more what nobody has renewed."""
        for place in plan.running:
            leases = self.running.get(plan.stores[place], {})
            while leases and leases[lease := next(iter(leases))] <= now:
                del leases[lease]

    def end(self, plan: Counts, lease: str) -> None:
        """Count a request no more."""
        for place in plan.running:
            store = plan.stores[place]
            leases = self.running.get(store)
            if leases is not None:
                leases.pop(lease, None)
                if not leases:
                    del self.running[store]
