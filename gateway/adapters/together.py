"""Adapters of several gateways or workers: one gateway plans for the requests of all, the others follow it.

Each tells which adapters its requests use and wait for. The holder of a lease plans for the sum, and tells what each
backend has and lacks. Of the workers of one gateway only the first may hold it: operators' orders arrive there.

A process that an upgrade replaces gives its lease back, and follows like any other until its requests have ended.

A pool with servers of this machine (`heal.names`) is none of another one's: each machine has a lease for its own.

Gateways do not reload at the same moment: what one tells of a server that has, or had, another name here is not
taken for what was loaded on the one that has the name. Addresses are told as digests.

While the store does not answer, the gateway that planned last goes on, and the others go by the model lists of the
backends. Once its lease has ended another gateway may plan, so it unloads nothing that others may use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from gateway.adapters.elsewhere import Elsewhere, PoolTold
from gateway.adapters.keeper import PoolAdapters
from gateway.adapters.memory import Memory
from gateway.core.aio import Clock, periodic
from gateway.store.seat import Seat
from gateway.store.shared import Board, SharedStore, StoreUnavailable, read_told

_BEAT_S: Final = 0.25
_KEPT_S: Final = 2.0  # an older message does not count: its gateway died, or cannot reach the store
_FORMAT: Final = msgspec.json.Decoder(dict[str, PoolTold])


@dataclass(slots=True)
class Together:
    """One task of a process; `id` names its life. `scope_of` says whose a pool is, see `heal.names.Names.scope`."""

    store: SharedStore
    clock: Clock
    id: str
    may_lead: bool = True
    others: bool = False  # there certainly are others: the other workers
    scope_of: Callable[[str], str] = field(default=lambda pool: "")
    _seats: dict[str, Seat] = field(default_factory=dict)  # by scope
    _leads: dict[str, bool] = field(default_factory=dict)  # by scope; missing: not known yet
    _others: list[dict[str, PoolTold]] = field(default_factory=list)  # their last messages
    _heard_at: float = -math.inf

    async def run(self, pools: Mapping[str, PoolAdapters]) -> None:
        """Tell and hear until cancelled."""

        async def turn() -> None:
            await self.turn(pools)

        await periodic(turn, every_s=_BEAT_S, name="adapters of all gateways")

    async def turn(self, pools: Mapping[str, PoolAdapters]) -> None:
        """Exchange messages with the other gateways, and decide whether this one leads."""
        scopes = {name: self.scope_of(name) for name in pools}
        seats = {scope: self._seat(scope) for scope in scopes.values()}
        found: Mapping[str, tuple[str, float]] | None = None
        try:
            for scope, seat in seats.items():
                await (seat.keep() if self.may_lead else seat.leave())
                self._leads[scope] = seat.ours
            told = {name + scopes.get(name, ""): _told(each) for name, each in pools.items()}
            text = msgspec.json.encode(told).decode()
            found = await self.store.beat(self.id, text, _KEPT_S, Board.ADAPTERS)
        except StoreUnavailable:
            for scope in seats:
                self._leads[scope] = self.may_lead and self._leads.get(scope) is not False
        if found is not None:
            others = [text for each, (text, _) in found.items() if each != self.id]
            self._others = [read_told(_FORMAT, text, {}) for text in others]
            self._heard_at = self.clock.now()
        heard_lately = self.clock.now() - self._heard_at <= _KEPT_S
        for name in scopes.keys() & pools.keys():  # a reload may have changed them meanwhile
            scope, keeper = scopes[name], pools[name]
            keeper.leads = self._leads[scope]
            stale = found is None and keeper.leads and not seats[scope].ours
            heard = self._others if heard_lately or seats[scope].ours else ()
            told_here = [each[name + scope] for each in heard if name + scope in each]
            messages = [_of_same_servers(each, keeper.known.memory) for each in told_here]
            keeper.hear(Elsewhere(messages, stale=stale, others=self.others))

    def _seat(self, scope: str) -> Seat:
        known = self._seats.get(scope)
        if known is None:
            known = self._seats[scope] = Seat(f"adapters{scope}", self.id, self.store, self.clock)
        return known


def _told(keeper: PoolAdapters) -> PoolTold:
    told, memory = keeper.tell(), keeper.known.memory
    return msgspec.structs.replace(
        told, addresses={each: memory.address(each) for each in told.loaded}
    )


def _of_same_servers(told: PoolTold, memory: Memory) -> PoolTold:
    """Leave out what was loaded on another server of a name: one of two gateways has reloaded already."""
    others = {each for each, address in told.addresses.items() if memory.is_another(each, address)}
    if not others:
        return told
    loaded = {each: names for each, names in told.loaded.items() if each not in others}
    begun = {each: names for each, names in told.begun.items() if each not in others}
    return msgspec.structs.replace(told, loaded=loaded, begun=begun)
