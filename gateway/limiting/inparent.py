"""Count in the parent what the workers of one gateway use of each limit: it does what the scripts do on Redis.

The parent lives as long as the gateway. The running requests of a worker that dies count for at most one lease.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from gateway.core.aio import Clock
from gateway.core.limits import Amounts, Counted, Counts, Period
from gateway.limiting import scripts
from gateway.limiting.levels import Levels, Moment
from gateway.limiting.rules import month_of, over, used_with

_AMOUNTS: Final = len(Amounts._fields)
_HEAD: Final = 2 + _AMOUNTS  # words before the rules
_DONE: Final = "1"


class SharedLevels:
    """Answers as the scripts of `limiting.scripts` do. One owner, one event loop; nothing waits."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._levels = Levels()
        self._acts = {
            scripts.TAKE.sha: self._take,
            scripts.SETTLE.sha: self._settle,
            scripts.RENEW.sha: self._renew,
            scripts.RECALL.sha: self._recall,
        }

    def run(self, sha: str, stores: Sequence[str], args: Sequence[str | int]) -> str:
        """Do what a script does, and return its reply; empty for a script of another version."""
        act = self._acts.get(sha)
        at = Moment.of(self._clock.now(), self._clock.wall())
        return "" if act is None else act(tuple(stores), [str(each) for each in args], at)

    def _take(self, stores: tuple[str, ...], args: list[str], at: Moment) -> str:
        lease, for_ms, costs, counts = _read(stores, args[0])
        self._levels.give_up(counts, at.now)
        used = self._levels.used(counts, at)
        places = over(counts, costs, used)
        fits = all(counts.rules[place].shadow for place in places)
        if fits:
            used = used_with(counts, costs, used, places)
            self._levels.put(counts, used, at)
            if costs.requests:
                self._levels.begin(counts, lease, at.now + float(for_ms) / 1000)
        levels = [f"{'!' if place in places else ''}{each:.9f}" for place, each in enumerate(used)]
        return f"{int(fits)} {at.day} {' '.join(levels)}"

    def _settle(self, stores: tuple[str, ...], args: list[str], at: Moment) -> str:
        lease, taken_on, more, counts = _read(stores, args[0])
        self._levels.end(counts, lease)
        self._levels.charge(counts, more, at, int(taken_on))
        return _DONE

    def _renew(self, stores: tuple[str, ...], args: list[str], at: Moment) -> str:
        for lease in args[1:]:
            self._levels.renew(stores[0], lease, at.now + float(args[0]) / 1000)
        return _DONE

    def _recall(self, stores: tuple[str, ...], args: list[str], at: Moment) -> str:
        day, *spent = args[1].split()
        then = Moment(at.now, int(day), month_of(int(day)))
        counts = _counts(stores, args[0])
        levels = [
            max(level, float(known)) if then.stamp(rule.period) == at.stamp(rule.period) else level
            for rule, level, known in zip(
                counts.rules, self._levels.used(counts, at), spent, strict=True
            )
        ]
        self._levels.put(counts, levels, at)
        return _DONE


def _read(stores: tuple[str, ...], words: str) -> tuple[str, str, Amounts, Counts]:
    first, second, *rest = words.split(" ", _HEAD)
    return first, second, Amounts(*map(float, rest[:_AMOUNTS])), _counts(stores, rest[_AMOUNTS])


@lru_cache(maxsize=4096)
def _counts(stores: tuple[str, ...], rules: str) -> Counts:
    words = rules.split()
    counted = tuple(
        Counted(
            store=int(store) - 1,
            period=Period(kind[1]),
            amount=int(kind[0]),
            most=float(most),
            shadow=refuses == "0",
        )
        for store, kind, most, refuses in zip(*[iter(words)] * 4, strict=True)
    )
    running = tuple(each.store for each in counted if each.period is Period.RUNNING)
    return Counts(counted, stores, running)
