"""Which pools this replica may restart: it holds their lease, with time enough left to act."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping

from gateway.core.aio import Clock
from gateway.store.shared import RENEW_S, Lease, SharedStore, StoreUnavailable


class Leases:
    """The leases of pools that this process holds or tries to get. One a pool, renewed in time.

    A store that does not answer fails closed: no lease, no restarts; what it said last of holds stays.
    A hold that is missing there, though nobody lifted it, was lost with the store, and is told to it anew.
    """

    def __init__(self, store: SharedStore, clock: Clock) -> None:
        self.holds: Mapping[str | None, float] = {}
        self.answered = False  # the store has told its holds
        self._store = store
        self._clock = clock
        self._holder = secrets.token_hex(8)  # names this process's life
        self._held: dict[str, tuple[Lease, float]] = {}

    async def keep(self, pools: Mapping[str, str]) -> frozenset[str]:
        """Take, or renew where it is time, the lease of each pool; returns the pools that it may act on.

        Args:
            pools: the name of the lease of each.
        """
        try:
            self.holds = await self._told_anew(await self._store.holds())
            self.answered = True
            for name in {*pools.values()}:
                await self._keep(name)
        except StoreUnavailable:
            pass  # what is held expires by itself
        now = self._clock.now()
        may = {name for name, (lease, _) in self._held.items() if lease.may_act(now)}
        return frozenset(pool for pool, name in pools.items() if name in may)

    async def release(self) -> None:
        """Give all back, so that another replica need not wait for them to expire."""
        held, self._held = self._held, {}
        try:
            for lease, _ in held.values():
                await self._store.release(lease)
        except StoreUnavailable:
            pass

    async def _told_anew(self, found: Mapping[str | None, float]) -> Mapping[str | None, float]:
        now = self._clock.now()
        before = self.holds.items()
        lost = {of: until for of, until in before if until > now and of not in found}
        for scope, until in lost.items():
            await self._store.hold(scope, None if until == math.inf else until - now)
        return {**found, **lost}

    async def _keep(self, name: str) -> None:
        held, now = self._held.get(name), self._clock.now()
        if held is None:
            lease = await self._store.acquire(name, self._holder)
        elif now - held[1] >= RENEW_S:
            lease = await self._store.renew(held[0])
        else:
            return
        if lease is None:
            self._held.pop(name, None)
        else:
            self._held[name] = (lease, now)
