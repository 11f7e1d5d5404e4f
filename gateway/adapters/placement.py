"""Plan which adapters to load and unload, from what is wanted and what each backend has. Pure.

In this order, with at most one change at a time on each backend:

    not wanted     unload what this gateway loaded and nobody wants there any more, and the adapters with the
                   least demand where a backend has more than it can keep; reload from a new path, one
                   copy after the other, also where it is in use: then its requests end first
    pinned         by an operator or in the settings: load at once
    waited for     requests wait and no backend has it: load at once, on a backend that has caught up after
                   its last load, in place of the adapter with the least demand. If all are in use, that
                   one gets no new requests, and goes when its last one ends
    replicas: N    load until N backends have it, in place of any adapter without such a number
    auto           on every backend if all adapters fit there, otherwise in proportion to demand

An adapter without demand stays until its room is needed. A copy replaces another only if its demand per
copy is more than twice as high. So noise moves nothing, and a move is not undone. An adapter that was
loaded a moment ago, or by somebody else, is never unloaded to make room.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from gateway.core.exclusion import Exclusion

# Copies in proportion to demand, times this. With exactly as many, the copies of a hot adapter would have
# to share its requests perfectly.
_HEADROOM: Final = 1.5
_WORTH: Final = 2.0  # a copy replaces one with less than half its demand
_NOISE: Final = 0.05  # requests in flight on average over the last minute; less is no demand

NOBODY: Final[frozenset[str]] = frozenset()


@dataclass(frozen=True, slots=True)
class Wanted:
    """One adapter that can be loaded. `demand` is the average of requests in flight."""

    name: str
    copies: int | None = None  # None: auto
    pins: frozenset[str] = NOBODY  # ids of backends
    demand: float = 0.0
    waits_since: float | None = (
        None  # no backend has it, and requests have waited for it since then
    )
    fresh: bool = False  # it was loaded a moment ago, so it stays
    weight: float = 1.0  # its size, in any unit


@dataclass(frozen=True, slots=True)
class Place:
    """A backend that serves, as placement sees it."""

    id: str
    room: int | None = None  # most adapters that it can keep; None: not known
    held: frozenset[str] = NOBODY  # adapters that are loaded
    stale: frozenset[str] = NOBODY  # of those, loaded from another path than the one that is wanted
    ours: frozenset[str] = NOBODY  # of those, loaded by this gateway
    in_use: frozenset[str] = NOBODY  # adapters with requests in flight there
    out: frozenset[str] = NOBODY  # adapters that an operator keeps away, whoever loaded them
    stuck: frozenset[str] = NOBODY  # the server did not unload these a moment ago
    changing: frozenset[str] = NOBODY  # being loaded or unloaded now
    barred: Mapping[str, str] = field(
        default_factory=dict
    )  # why each of these cannot be loaded now
    closed: bool = False  # nothing may be loaded now
    rested: bool = True  # loads that are not urgent may begin
    caught_up: bool = True  # loads that requests wait for may begin
    load_s: float = 0.0  # expected seconds until its present requests are done

    @property
    def free(self) -> bool:
        """Whether one more fits."""
        if self.room is None:
            return True
        return len(self.held | self.changing if self.changing else self.held) < self.room


@dataclass(frozen=True, slots=True)
class Move:
    """One change of one backend: unload once no request uses it, then load."""

    place: str
    unload: str | None = None
    load: str | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one backend that is under way."""

    move: Move
    began_at: float
    late_at: float = math.inf  # from then on requests no longer wait for its load


def plan(wanted: Sequence[Wanted], places: Sequence[Place]) -> list[Move]:
    """Return the moves to begin now; at most one per backend."""
    return _Plan(wanted, places).moves()


def lacks(wanted: Sequence[Wanted], places: Sequence[Place]) -> dict[str, dict[str, Exclusion]]:
    """Return by backend which adapters are not available there, with the reason if it is not just absence."""
    known = _Plan(wanted, places)
    return {each.id: known.lacks(each) for each in places}


def fit_everywhere(wanted: Sequence[Wanted], places: Sequence[Place]) -> bool:
    """Whether each backend has room for all wanted adapters beside those it has anyway."""
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
        self.copies = dict.fromkeys(self.wanted, 0)
        for each in places:
            for name in (each.held | each.changing) & self.wanted.keys():
                self.copies[name] += 1
        self.moved: dict[str, Move] = {}
        # The adapter with the least demand there, and that demand, by place and whether it may be in use. It is
        # asked for by every adapter that is not there, so it is kept until the next move.
        self.coldest: dict[tuple[str, bool], tuple[float, str] | None] = {}

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
                    places = [place for place in self.places if place.caught_up]
                    self._move(each, places, at_once=True, drains=drains)
        auto = [each for each in self.wanted.values() if each.copies is None]
        auto.sort(key=lambda each: (self.copies[each.name] > 0, -self._gain(each)))
        for each in [*(each for each in self.wanted.values() if each.copies is not None), *auto]:
            if self.copies[each.name] < self._target(each):
                self._move(each, self.places, at_once=False)
        return [*self.moved.values()]

    def _clear(self, place: Place) -> None:
        """Unload what is not wanted there, or more than it can keep; reload what has a new path."""
        if place.changing or place.closed:
            return
        idle = (place.held & place.ours) - place.in_use
        # These finish their requests first: one that is always in use would never be reloaded.
        stale = (place.stale & place.ours & self.wanted.keys()) - place.barred.keys()
        out = place.held & place.out
        for name in sorted((idle | stale | out) - self.changing - place.stuck):
            each = self.wanted.get(name)
            if name in stale | out or each is None or self._surplus(each, place):
                load = name if name in stale - out else None
                self.moved[place.id] = Move(place.id, name, load)
                self.changing |= {name}  # one copy at a time
                return
        loss = self._loss(place, place.in_use)
        if place.room is not None and len(place.held) > place.room and loss:
            name = min(loss, key=lambda name: (loss[name], name))
            self.moved[place.id] = Move(place.id, name)
            self.changing |= {name}

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
        """Load an adapter on the best of some backends, if any can take it now.

        It replaces an adapter without requests in flight, or with `drains` one that finishes them first.
        """
        found = []
        for place in places:
            shut = place.changing or place.closed or place.id in self.moved
            if shut or not self._lacking(each, place) or each.name in place.barred:
                continue
            if not at_once and not self._calm(place):
                continue
            goes = None if place.free else self._goes(each, place, at_once=at_once, drains=drains)
            if not place.free and goes is None:
                continue
            weight = sum(self.wanted[name].weight for name in place.held if name in self.wanted)
            key = goes is not None, round(place.load_s, 1), weight, len(place.held), place.id
            found.append((key, Move(place.id, goes, each.name)))
        if found:
            move = min(found, key=lambda pair: pair[0])[1]
            self.moved[move.place] = move
            self.coldest.clear()
            self.copies[each.name] += 1
            if move.unload in self.copies:
                self.copies[move.unload] -= 1

    def _calm(self, place: Place) -> bool:
        """Whether a load that is not urgent may begin: it is idle, or no other backend is changing."""
        others = self.changing or self.moved
        return place.rested and (place.load_s == 0 or not others)

    def _goes(self, each: Wanted, place: Place, *, at_once: bool, drains: bool) -> str | None:
        """Return the adapter to unload in place of another; None: none has so little demand."""
        if place.room is not None and len(place.held) > place.room:
            return None
        key = place.id, drains
        if key not in self.coldest:
            loss = self._loss(place, NOBODY if drains else place.in_use)
            self.coldest[key] = min(((lost, name) for name, lost in loss.items()), default=None)
        if (found := self.coldest[key]) is None:
            return None
        lost, coldest = found
        if at_once or each.copies is not None or self._gain(each) > _WORTH * lost + _NOISE:
            return coldest
        return None

    def _loss(self, place: Place, in_use: frozenset[str]) -> dict[str, float]:
        """Return the adapters that may be unloaded now to make room, with their demand per copy."""
        return {
            name: 0.0 if known is None else known.demand / self.copies[name]
            for name, known in self._movable(place).items()
            if name not in in_use | place.stuck and (known is None or not known.fresh)
        }

    def _movable(self, place: Place) -> dict[str, Wanted | None]:
        """Return the adapters that may be unloaded to make room for another."""
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
