"""Adapters of several gateways or workers: one gateway plans for the requests of all, the others follow it.

Each tells which adapters its requests use and wait for. The holder of a lease plans for the sum, and tells what each
backend has and lacks. Of the workers of one gateway only the first may hold it: operators' orders arrive there.

While the store does not answer, the gateway that planned last goes on, and the others go by the model lists of the
backends. Once its lease has ended another gateway may plan, so it unloads nothing that others may use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from gateway.adapters.elsewhere import Elsewhere, PoolTold
from gateway.adapters.keeper import PoolAdapters
from gateway.core.aio import Clock, periodic
from gateway.store.seat import Seat
from gateway.store.shared import Board, SharedStore, StoreUnavailable, read_told

_BEAT_S: Final = 0.25
_KEPT_S: Final = 2.0  # an older message does not count: its gateway died, or cannot reach the store
_FORMAT: Final = msgspec.json.Decoder(dict[str, PoolTold])


@dataclass(slots=True)
class Together:
    """One task of a process; `id` names its life."""

    store: SharedStore
    clock: Clock
    id: str
    may_lead: bool = True
    others: bool = False  # there certainly are others: the other workers
    _seat: Seat = field(init=False)
    _leads: bool | None = None  # None: not known yet
    _others: list[dict[str, PoolTold]] = field(default_factory=list)  # their last messages
    _heard_at: float = -math.inf

    def __post_init__(self) -> None:
        self._seat = Seat("adapters", self.id, self.store, self.clock)

    async def run(self, pools: Mapping[str, PoolAdapters]) -> None:
        """Tell and hear until cancelled."""

        async def turn() -> None:
            await self.turn(pools)

        await periodic(turn, every_s=_BEAT_S, name="adapters of all gateways")

    async def turn(self, pools: Mapping[str, PoolAdapters]) -> None:
        """Exchange messages with the other gateways, and decide whether this one leads."""
        found: Mapping[str, tuple[str, float]] | None = None
        try:
            if self.may_lead:
                await self._seat.keep()
            self._leads = self._seat.ours
            text = msgspec.json.encode({name: each.tell() for name, each in pools.items()}).decode()
            found = await self.store.beat(self.id, text, _KEPT_S, Board.ADAPTERS)
        except StoreUnavailable:
            self._leads = self.may_lead and self._leads is not False
        if found is not None:
            others = [text for each, (text, _) in found.items() if each != self.id]
            self._others = [read_told(_FORMAT, text, {}) for text in others]
            self._heard_at = self.clock.now()
        elif not self._seat.ours and self.clock.now() - self._heard_at > _KEPT_S:
            self._others = []
        stale = found is None and self._leads and not self._seat.ours
        for name, keeper in pools.items():
            keeper.leads = self._leads
            messages = [each[name] for each in self._others if name in each]
            keeper.hear(Elsewhere(messages, stale=stale, others=self.others))
