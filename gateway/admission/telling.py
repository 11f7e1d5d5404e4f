"""What replicas have under way at each backend, told to each other (decision 038).

Metrics are up to a second old, and gateways that go by them alone all send to the backend that was idle then.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from gateway.core.aio import Clock, periodic
from gateway.pools.elsewhere import UnderWay, since, together
from gateway.pools.table import Backend, PoolTable
from gateway.store.shared import Board, SharedStore, StoreUnavailable, read_told

_CALM_S: Final = 0.25
_LATELY_S: Final = 2.0
_BUSY_S: Final = 0.02  # while anybody waits: room that is free is taken by all who know of it
_KEPT_S: Final = 2.0  # what is older says nothing: its gateway died, or cannot reach the store


class Told(msgspec.Struct, frozen=True):
    """What a gateway tells. What another version does not tell has its default."""

    waits: bool = False  # requests wait for room there
    backends: dict[str, UnderWay] = {}  # by their `heal.names`


_FORMAT: Final = msgspec.json.Decoder(Told)


@dataclass(slots=True)
class Telling:
    """One task of a gateway; `id` names its life."""

    store: SharedStore
    clock: Clock
    table: PoolTable
    id: str
    waits: Callable[[], bool]  # whether requests wait for room here
    name_of: Callable[[Backend], str]  # what all gateways call a backend
    rng: random.Random = field(default_factory=random.Random)  # spreads when gateways tell
    _before: dict[str, Told] = field(default_factory=dict)  # by gateway
    _short_until: float = -math.inf  # somebody waited for room lately

    async def run(self) -> None:
        """Tell and hear until cancelled; then nothing is known of the others."""
        try:
            await periodic(self.turn, every_s=self.pace_s, name="what is under way", rng=self.rng)
        finally:
            self.table.hear({}, 1)

    def pace_s(self) -> float:
        """Return after how long to tell again."""
        if not self._before:
            return _CALM_S
        return _BUSY_S if self._short_until > self.clock.now() else _CALM_S

    async def turn(self) -> None:
        """Tell what is under way here, and hear of the others. Without the store nothing is known of them."""
        waits = self.waits()
        under_way = {self.name_of(each): each.room.under_way(each.in_flight) for each in self.table}
        own = Told(waits, under_way)
        try:
            found = await self.store.beat(
                self.id, msgspec.json.encode(own).decode(), _KEPT_S, Board.UNDER_WAY
            )
        except StoreUnavailable:
            found = {}
        before, self._before = self._before, {}
        for each, (text, _) in found.items():
            if each != self.id:
                self._before[each] = read_told(_FORMAT, text, Told())
        if waits or any(each.waits for each in self._before.values()):
            self._short_until = self.clock.now() + _LATELY_S
        if not before and not self._before:
            return
        heard: dict[str, list[UnderWay]] = {}
        for each, told in self._before.items():
            earlier = before[each].backends if each in before else {}
            for name, of in told.backends.items():
                heard.setdefault(name, []).append(since(earlier.get(name), of))
        elsewhere = {
            each.id: together(every)
            for each in self.table
            if (every := heard.get(self.name_of(each))) is not None
        }
        self.table.hear(elsewhere, len(self._before) + 1)
