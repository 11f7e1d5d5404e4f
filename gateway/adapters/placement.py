"""Plan which adapters to load and unload, from what is wanted and what each backend has. Pure.

In this order, with at most one change at a time on each backend:

    not wanted     unload what this gateway loaded and nobody wants there any more. Where a backend has more than
                   it can keep, unload the adapters with the least demand. Reload from a new path, one copy
                   after the other; a copy in use finishes its requests first. If a reload fails, the other
                   copies stay until one backend has the adapter from the new path
    pinned         by an operator or in the settings: load at once
    waited for     requests wait and no backend has it: load at once, on a backend that has caught up after
                   its last load, in place of the adapter with the least demand. If all are in use, that
                   one gets no new requests, and goes when its last one ends. Where nothing may be loaded while
                   adapters are in use, none gets new requests until their last one has ended
    replicas: N    load until N backends have it, in place of any adapter without such a number
    auto           on every backend if all adapters fit there, otherwise in proportion to demand

An adapter without demand stays until its room is needed. A copy replaces another only if its demand per
copy is more than twice as high. So noise moves nothing, and a move is not undone. An adapter that was
loaded a moment ago, or by somebody else, is never unloaded to make room.

A backend in reserve gets what the others cannot take, and every adapter if all fit everywhere. A copy there
does not count as one of the wanted copies. It goes once the other backends have enough, unless it is pinned.
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
    copies: int | None = None  # how many are wanted; None: auto
    pins: frozenset[str] = NOBODY  # ids of backends
    demand: float = 0.0
    waits_since: float | None = None  # no backend has it, and requests wait for it since then
    fresh: bool = False  # it was loaded a moment ago, so it stays
    waits: bool = False  # a server may have died as it loaded it, so no other loads it now
    weight: float = 1.0  # its size, in any unit


@dataclass(frozen=True, slots=True)
class Place:
    """A backend that serves, as placement sees it."""

    id: str
    room: int | None = None  # most adapters that it can keep; None: not known
    held: frozenset[str] = NOBODY  # adapters that are loaded
    stale: frozenset[str] = NOBODY  # of `held`, loaded from another path than the wanted one
    ours: frozenset[str] = NOBODY  # of `held`, loaded by this gateway
    in_use: frozenset[str] = NOBODY  # adapters with requests in flight there
    out: frozenset[str] = NOBODY  # adapters that an operator keeps away, whoever loaded them
    failed: frozenset[str] = NOBODY  # the last load or unload of these failed there
    stuck: frozenset[str] = NOBODY  # the server did not unload these a moment ago
    changing: frozenset[str] = NOBODY  # being loaded or unloaded now
    held_up: frozenset[str] = NOBODY  # of `changing`, a load that waits for requests to end
    # Why each of these cannot be loaded now.
    barred: Mapping[str, str] = field(default_factory=dict)
    closed: bool = False  # nothing may be loaded now
    alone: bool = False  # nothing may be loaded there while an adapter is in use
    reserve: bool = False  # it gets no requests while others serve
    rested: bool = True  # loads that are not urgent may begin
    caught_up: bool = True  # loads that requests wait for may begin
    load_s: float = 0.0  # expected seconds until its present requests are done

    @property
    def shut(self) -> bool:
        """Whether nothing may be loaded now, but for what waits until the adapters there are unused."""
        return self.closed or (self.alone and bool(self.in_use))

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
        reserve = [each for each in places if each.reserve]
        # Without any other, those in reserve get all requests.
        self.reserve = reserve if len(reserve) < len(places) else []
        self.reserve_ids = frozenset(each.id for each in self.reserve)
        self.front = [each for each in places if each.id not in self.reserve_ids]
        self.copies = dict.fromkeys(self.wanted, 0)
        self.in_front = dict.fromkeys(self.wanted, 0)  # copies without those in reserve
        for each in places:
            for name in (each.held | each.changing - each.held_up) & self.wanted.keys():
                self._count(name, each, 1)
        # Adapters whose new path failed on one backend and is on none: their copies from the old path stay.
        self.doubtful = frozenset().union(*(each.failed - each.held for each in places))
        self.doubtful -= frozenset().union(*(each.held - each.stale for each in places))
        self.takes = {
            each.id: each.free or bool(each.changing or self._movable(each)) for each in places
        }
        self.held_up = frozenset().union(*(each.held_up for each in places))
        # An adapter that no backend has yet is tried on one first: its load may end that server.
        self.coming = {name for each in places for name in each.changing - each.held}
        self.coming -= self.held_up  # it may be loaded elsewhere at once
        self.coming -= frozenset().union(*(each.held - each.stale for each in places))
        self.moved: dict[str, Move] = {}
        # The adapter with the least demand at a place, and that demand, by place and whether it may be in use. Every
        # adapter that is not there asks for it, so it is cached until the next move.
        self.coldest: dict[tuple[str, bool], tuple[float, str] | None] = {}

    def moves(self) -> list[Move]:
        for place in self.places:
            self._clear(place)
        for each in self.wanted.values():
            for place in self.places:
                if place.id in each.pins and self._lacking(each, place):
                    self._move(each, [place], at_once=True)
        self._load_awaited()
        auto = [each for each in self.wanted.values() if each.copies is None]
        auto.sort(key=lambda each: (self.in_front[each.name] > 0, -self._gain(each, self.in_front)))
        for each in [*(each for each in self.wanted.values() if each.copies is not None), *auto]:
            in_front, in_reserve = self._targets(each)
            if self.in_front[each.name] + self._coming(each) < in_front:
                self._move(each, self.front, at_once=False)
            elif self.copies[each.name] - self.in_front[each.name] < in_reserve:
                self._move(each, self.reserve, at_once=False)
        return [*self.moved.values()]

    def _load_awaited(self) -> None:
        """Load what requests wait for, in the order in which they came."""
        waits = [each for each in self.wanted.values() if each.waits_since is not None]
        for drains in (False, True):
            for each in sorted(waits, key=lambda each: each.waits_since or 0.0):
                if self.copies[each.name] == 0 and not (drains and each.name in self.held_up):
                    places = [place for place in self._asked(each) if place.caught_up]
                    self._move(each, places, at_once=True, drains=drains)

    def _clear(self, place: Place) -> None:
        """Plan one unload or reload: of what is not wanted there, has a new path, or is more than it can keep."""
        if place.changing or place.shut:
            return
        idle = (place.held & place.ours) - place.in_use
        # Stale ones may be in use, and finish their requests first: else a busy adapter would never be reloaded.
        stale = (
            (place.stale & place.ours & self.wanted.keys()) - place.barred.keys() - self.doubtful
        )
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
        counted = self._counted(place)[each.name]
        return most is not None and counted > most and place.id not in each.pins

    def _spare(self, each: Wanted, place: Place) -> bool:
        """Whether a copy there does not count as a wanted one: the backend is in reserve, and it is not pinned."""
        return place.id in self.reserve_ids and place.id not in each.pins

    def _count(self, name: str, place: Place, more: int) -> None:
        self.copies[name] += more
        if not self._spare(self.wanted[name], place):
            self.in_front[name] += more

    def _counted(self, place: Place) -> dict[str, int]:
        """Return the copies that count at a place: in reserve all of them, elsewhere those in front."""
        return self.copies if place.id in self.reserve_ids else self.in_front

    def _asked(self, each: Wanted) -> Sequence[Place]:
        """Return the backends of which one should load what requests wait for."""
        front = any(
            self.takes[place.id] and not place.shut and each.name not in place.barred
            for place in self.front
        )
        return self.front if front or not self.reserve else self.reserve

    def _coming(self, each: Wanted) -> int:
        """Return how many pinned copies will come once the present change at their place has ended."""
        count = 0
        for place in self.places:
            if place.id in each.pins and self._lacking(each, place):
                move = self.moved.get(place.id)
                waits = bool(place.changing) if move is None else move.load != each.name
                count += waits and self.takes[place.id] and each.name not in place.barred
        return count

    def _targets(self, each: Wanted) -> tuple[int, int]:
        """Return how many copies are wanted in front, and how many more in reserve."""
        able = [
            place
            for place in self.places
            if each.name in place.held or (self.takes[place.id] and each.name not in place.barred)
        ]
        in_front = len(able)
        if self.reserve:
            in_front -= sum(self._spare(each, place) for place in able)
        if each.copies is not None:
            count = each.copies
        elif self.all_fit:
            count = len(able)
        else:
            share = each.demand / self.demand if each.demand > _NOISE else 0.0
            count = max(1, math.ceil(_HEADROOM * share * len(self.front)))
        first = min(count, in_front)
        return first, min(count - first, len(able) - in_front)

    def _gain(self, each: Wanted, copies: Mapping[str, int]) -> float:
        return each.demand / (copies[each.name] + 1)

    def _lacking(self, each: Wanted, place: Place) -> bool:
        return each.name not in place.held and each.name not in place.changing

    def _move(
        self, each: Wanted, places: Sequence[Place], *, at_once: bool, drains: bool = False
    ) -> None:
        """Load an adapter on the best of some backends, if any can take it now.

        It replaces an adapter without requests in flight. With `drains` these end first: of the adapter that it
        replaces, or of all where none may be loaded beside them.
        """
        found = []
        for place in () if each.waits or each.name in self.coming else places:
            shut = place.closed if drains else place.shut
            taken = place.changing or place.id in self.moved
            if shut or taken or not self._lacking(each, place) or each.name in place.barred:
                continue
            if not at_once and not self._calm(place):
                continue
            goes = None if place.free else self._goes(each, place, at_once=at_once, drains=drains)
            if not place.free and goes is None:
                continue
            weight = sum(self.wanted[name].weight for name in place.held if name in self.wanted)
            key = goes is not None, round(place.load_s, 1), weight, len(place.held), place.id
            found.append((key, place, goes))
        if found:
            _, chosen, goes = min(found, key=lambda each: each[0])
            move = self.moved[chosen.id] = Move(chosen.id, goes, each.name)
            self.coldest.clear()
            if not self.copies[each.name]:
                self.coming.add(each.name)
            self._count(each.name, chosen, 1)
            if move.unload in self.copies:
                self._count(move.unload, chosen, -1)

    def _calm(self, place: Place) -> bool:
        """Whether a load that is not urgent may begin there: it is idle, or no backend is changing."""
        others = self.changing or self.moved
        return place.rested and (place.load_s == 0 or not others)

    def _goes(self, each: Wanted, place: Place, *, at_once: bool, drains: bool) -> str | None:
        """Return the adapter that another one may replace at a place; None: each has too much demand."""
        if place.room is not None and len(place.held) > place.room:
            return None
        key = place.id, drains
        if key not in self.coldest:
            loss = self._loss(place, NOBODY if drains else place.in_use)
            self.coldest[key] = min(((lost, name) for name, lost in loss.items()), default=None)
        if (found := self.coldest[key]) is None:
            return None
        lost, coldest = found
        gain = self._gain(each, self._counted(place))
        if at_once or each.copies is not None or gain > _WORTH * lost + _NOISE:
            return coldest
        return None

    def _loss(self, place: Place, in_use: frozenset[str]) -> dict[str, float]:
        """Return the adapters that may be unloaded now to make room, with their demand per copy."""
        copies = self._counted(place)
        return {
            name: 0.0 if known is None else known.demand / copies[name]
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
        possible = self.takes[place.id]
        for name in self.wanted:
            if name in place.changing or name in place.held:
                continue
            if name in place.barred:
                found[name] = Exclusion.ADAPTER_FAILED
            elif possible and self.copies[name] == 0:
                found[name] = Exclusion.ADAPTER_DUE
        return found
