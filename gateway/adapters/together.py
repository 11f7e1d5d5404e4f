"""Adapters of several gateways: one places them for the requests of all, the others do as it tells.

Each tells which adapters its requests use and wait for. Who holds a lease plans for the sum, and tells what each
backend has and lacks. While the store does not answer, who placed them last goes on, and the others go by what
backends show.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from gateway.adapters.elsewhere import Elsewhere, PoolTold
from gateway.adapters.keeper import PoolAdapters
from gateway.core.aio import Clock, periodic
from gateway.store.seat import Seat
from gateway.store.shared import Board, SharedStore, StoreUnavailable

_BEAT_S: Final = 0.25
_KEPT_S: Final = 2.0  # what is older says nothing: its gateway died, or cannot reach the store
_FORMAT: Final = msgspec.json.Decoder(dict[str, PoolTold])


@dataclass(slots=True)
class Together:
    """One task of a gateway; `id` names its life."""

    store: SharedStore
    clock: Clock
    id: str
    _seat: Seat = field(init=False)
    _leads: bool | None = None  # None: nobody has told yet

    def __post_init__(self) -> None:
        self._seat = Seat("adapters", self.id, self.store, self.clock)

    async def run(self, pools: Mapping[str, PoolAdapters]) -> None:
        """Tell and hear until cancelled."""

        async def turn() -> None:
            await self.turn(pools)

        await periodic(turn, every_s=_BEAT_S, name="adapters of all gateways")

    async def turn(self, pools: Mapping[str, PoolAdapters]) -> None:
        """Tell of the adapters here, and hear of the others."""
        found: Mapping[str, tuple[str, float]] = {}
        try:
            await self._seat.keep()
            self._leads = self._seat.ours
            text = msgspec.json.encode({name: each.tell() for name, each in pools.items()}).decode()
            found = await self.store.beat(self.id, text, _KEPT_S, Board.ADAPTERS)
        except StoreUnavailable:
            self._leads = self._leads is not False
        others = [_told(text) for each, (text, _) in found.items() if each != self.id]
        for name, keeper in pools.items():
            keeper.leads = self._leads
            keeper.hear(Elsewhere([each[name] for each in others if name in each]))


def _told(text: str) -> Mapping[str, PoolTold]:
    try:
        return _FORMAT.decode(text)
    except (msgspec.DecodeError, ValueError):  # of another version
        return {}
