"""Which adapters go where: what is wanted and what each backend holds in, moves out. Pure.

In this order, one change at a time on each backend:

    not wanted     what this gateway loaded and nobody wants there any more goes, or another path comes
    pinned         by an operator or in the settings: at once
    waited for     no backend has it and requests wait: at once; it may push out the coldest, and
                   where all are in use, the coldest takes no new requests until it has gone
    replicas: N    until N backends have it; it may push out any that has no such number
    auto           on every backend where all adapters fit, else by share of demand

What nobody asks for stays until its room is needed. A copy replaces another only if it is worth twice
as much, in demand for each copy: so noise moves nothing, and what was moved does not move back. Nothing
is taken away that was loaded a moment ago, or that somebody else loaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from gateway.core.exclusion import Exclusion

# Copies for each backend's worth of demand. With exactly as many, the copies of a hot adapter would
# have to share its requests perfectly.
_HEADROOM: Final = 1.5
_WORTH: Final = 2.0  # times the demand of what goes
_NOISE: Final = 0.05  # requests at a time, over the last minute: less is no demand

NOBODY: Final[frozenset[str]] = frozenset()


@dataclass(frozen=True, slots=True)
class Wanted:
    """One adapter that can be loaded. `demand` is in requests at a time, `weight` in any unit."""

    name: str
    copies: int | None = None  # None: auto
    pins: frozenset[str] = NOBODY  # ids of backends
    demand: float = 0.0
    waits_since: float | None = None  # no backend has it, and since then requests wait for it
    fresh: bool = False  # it was loaded a moment ago, and what was spent on that is to pay
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Place:
    """A backend that serves, as placement sees it."""

    id: str
    room: int | None = None  # most adapters that it keeps; None: not known
    held: frozenset[str] = NOBODY
    stale: frozenset[str] = NOBODY  # of them, from another path than the one that is wanted
    ours: frozenset[str] = NOBODY  # of them, loaded by this gateway
    riding: frozenset[str] = NOBODY  # adapters with requests in flight there
    out: frozenset[str] = NOBODY  # what an operator does not want there, whoever loaded it
    changing: frozenset[str] = NOBODY  # loaded or unloaded right now
    barred: Mapping[str, str] = field(default_factory=dict)  # why it cannot load each of these now
    closed: bool = False  # nothing may be loaded now
    rested: bool = True  # takes what is not urgent
    load_s: float = 0.0  # expected seconds until all that is there is done

    @property
    def free(self) -> bool:
        """Whether one more fits."""
        return self.room is None or len(self.held | self.changing) < self.room


@dataclass(frozen=True, slots=True)
class Move:
    """One change of one backend: something goes, once it has no request in flight, then something comes."""

    place: str
    unload: str | None = None
    load: str | None = None


def plan(wanted: Sequence[Wanted], places: Sequence[Place]) -> list[Move]:
    """Return what to do now; at most one move for each backend."""
    return _Plan(wanted, places).moves()


def lacks(wanted: Sequence[Wanted], places: Sequence[Place]) -> dict[str, dict[str, Exclusion]]:
    """Return by backend which adapters a request cannot have there, and why, if more than not being there."""
    known = _Plan(wanted, places)
    return {each.id: known.lacks(each) for each in places}


def fit_everywhere(wanted: Sequence[Wanted], places: Sequence[Place]) -> bool:
    """Whether each backend keeps all that is wanted beside what it holds anyway."""
    names = {each.name for each in wanted}
    return all(place.room is None or len(names | place.held) <= place.room for place in places)


class _Plan:
    """One look at one pool."""

    def __init__(self, wanted: Sequence[Wanted], places: Sequence[Place]) -> None:
        self.wanted = {each.name: each for each in wanted}
        self.places = places
        self.all_fit = fit_everywhere(wanted, places)
        self.demand = sum(each.demand for each in wanted)
        self.changing = frozenset().union(*(each.changing for each in places))
        self.copies = {
            name: sum(name in each.held or name in each.changing for each in places)
            for name in self.wanted
        }
        self.moved: dict[str, Move] = {}

    def moves(self) -> list[Move]:
        for place in self.places:
            self._clear(place)
        for each in self.wanted.values():
            for place in self.places:
                if place.id in each.pins and self._lacking(each, place):
                    self._move(each, [place], at_once=True)
        waits = [each for each in self.wanted.values() if each.waits_since is not None]
        for drains in (False, True):
            for each in sorted(waits, key=lambda each: each.waits_since or 0.0):
                if self.copies[each.name] == 0:
                    self._move(each, self.places, at_once=True, drains=drains)
        auto = [each for each in self.wanted.values() if each.copies is None]
        auto.sort(key=lambda each: (self.copies[each.name] > 0, -self._gain(each)))
        for each in [*(each for each in self.wanted.values() if each.copies is not None), *auto]:
            if self.copies[each.name] < self._target(each):
                self._move(each, self.places, at_once=False)
        return [*self.moved.values()]

    def _clear(self, place: Place) -> None:
        """Unload what is not wanted there; what has another path now is loaded from it."""
        if place.changing or place.closed:
            return
        mine = (place.held & place.ours) - place.riding
        for name in sorted((mine | place.held & place.out) - self.changing):
            each, out = self.wanted.get(name), name in place.out
            stale = name in place.stale and each is not None and name not in place.barred
            if stale or out or each is None or self._surplus(each, place):
                self.moved[place.id] = Move(place.id, name, name if stale and not out else None)
                self.changing |= {name}  # one copy at a time
                return

    def _surplus(self, each: Wanted, place: Place) -> bool:
        most = None if each.copies is None else max(each.copies, len(each.pins))
        return most is not None and self.copies[each.name] > most and place.id not in each.pins

    def _target(self, each: Wanted) -> int:
        able = [
            place
            for place in self.places
            if each.name in place.held or each.name not in place.barred
        ]
        if each.copies is not None:
            return min(each.copies, len(able))
        if self.all_fit:
            return len(able)
        share = each.demand / self.demand if each.demand > _NOISE else 0.0
        return min(max(1, math.ceil(_HEADROOM * share * len(self.places))), len(able))

    def _gain(self, each: Wanted) -> float:
        return each.demand / (self.copies[each.name] + 1)

    def _lacking(self, each: Wanted, place: Place) -> bool:
        return each.name not in place.held and each.name not in place.changing

    def _move(
        self, each: Wanted, places: Sequence[Place], *, at_once: bool, drains: bool = False
    ) -> None:
        """Load an adapter on the best of some backends, if it may be loaded on any now.

        What goes for it has no requests in flight, unless it `drains`.
        """
        found = []
        for place in places:
            shut = place.changing or place.closed or place.id in self.moved
            if shut or not self._lacking(each, place) or each.name in place.barred:
                continue
            if not at_once and not self._calm(place):
                continue
            riding = NOBODY if drains else place.riding
            goes = None if place.free else self._coldest(each, place, riding, at_once=at_once)
            if not place.free and goes is None:
                continue
            weight = sum(self.wanted[name].weight for name in place.held if name in self.wanted)
            key = goes is not None, round(place.load_s, 1), weight, len(place.held), place.id
            found.append((key, Move(place.id, goes, each.name)))
        if found:
            move = min(found, key=lambda pair: pair[0])[1]
            self.moved[move.place] = move
            self.copies[each.name] += 1
            if move.unload in self.copies:
                self.copies[move.unload] -= 1

    def _calm(self, place: Place) -> bool:
        """Whether it takes what is not urgent: it has nothing to do, or no other backend is at it."""
        others = self.changing or self.moved
        return place.rested and (place.load_s == 0 or not others)

    def _coldest(
        self, each: Wanted, place: Place, riding: frozenset[str], *, at_once: bool
    ) -> str | None:
        """Return what goes for an adapter; None: nothing there is worth so much less."""
        if place.room is not None and len(place.held) > place.room:
            return None
        loss = {
            name: 0.0 if known is None else known.demand / self.copies[name]
            for name, known in self._movable(place).items()
            if name not in riding and (known is None or not known.fresh)
        }
        coldest = min(loss, key=lambda name: (loss[name], name), default=None)
        if coldest is None or at_once or each.copies is not None:
            return coldest
        return coldest if self._gain(each) > _WORTH * loss[coldest] + _NOISE else None

    def _movable(self, place: Place) -> dict[str, Wanted | None]:
        """Return what may ever be taken from a backend for another adapter."""
        found = {name: self.wanted.get(name) for name in (place.held & place.ours) - self.changing}
        return {
            name: each
            for name, each in found.items()
            if each is None or (each.copies is None and place.id not in each.pins)
        }

    def lacks(self, place: Place) -> dict[str, Exclusion]:
        found = dict.fromkeys(place.changing, Exclusion.ADAPTER_LOADING)
        possible = place.free or bool(place.changing or self._movable(place))
        for name in self.wanted:
            if name in place.changing or name in place.held:
                continue
            if name in place.barred:
                found[name] = Exclusion.ADAPTER_FAILED
            elif possible and self.copies[name] == 0:
                found[name] = Exclusion.ADAPTER_DUE
        return found
