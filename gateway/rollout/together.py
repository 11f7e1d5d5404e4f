"""Canaries of several gateways: each tells what it saw, one judges the sum, and all take its verdict over.

Who judges holds a lease in the shared store. Of workers without Redis it is the one that leads. What a gateway tells
are sums since the trial began, so what a lost beat had is in the next one. Without the store there is no verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from gateway.core.aio import Clock, periodic
from gateway.rollout.rollouts import Rollouts, TrialTold
from gateway.store.seat import Seat
from gateway.store.shared import Board, SharedStore, StoreUnavailable

_BEAT_S: Final = 1.0
_KEPT_S: Final = 3600.0  # what a gateway saw stays true when it is gone
_FORMAT: Final = msgspec.json.Decoder(dict[str, TrialTold])


@dataclass(slots=True)
class Together:
    """One task of a gateway; `id` names its life. `elects`: whether it may be the one that judges, by a lease."""

    rollouts: Rollouts
    store: SharedStore
    clock: Clock
    id: str
    elects: bool
    _seat: Seat = field(init=False)
    _tells: bool = False  # others may hear of a canary here, so its end is told too

    def __post_init__(self) -> None:
        self._seat = Seat("canaries", self.id, self.store, self.clock)

    async def run(self) -> None:
        """Tell and hear until cancelled."""
        await periodic(self.turn, every_s=_BEAT_S, name="canaries of all gateways")

    async def turn(self) -> None:
        """Tell what was seen here, and hear of the others."""
        told = self.rollouts.tell()
        if not told and not self._tells:
            return
        try:
            if self.elects:
                await self._seat.keep()
            text = msgspec.json.encode(told).decode() if told else ""
            found = await self.store.beat(self.id, text, _KEPT_S, Board.CANARIES)
            self._tells = bool(told)
        except StoreUnavailable:
            found = None
        if self.elects:
            self.rollouts.judges = self._seat.ours
        if found is not None:
            others = [
                (_told(text), age_s) for each, (text, age_s) in found.items() if each != self.id
            ]
            self.rollouts.hear(others)


def _told(text: str) -> Mapping[str, TrialTold]:
    try:
        return _FORMAT.decode(text)
    except (msgspec.DecodeError, ValueError):  # of another version
        return {}
