"""Which pools this replica may restart: it holds their lease, with time enough left to act."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping

from gateway.core.aio import Clock
from gateway.pools.store import RENEW_S, Lease, SharedStore, StoreUnavailable


class Leases:
    """The leases of pools that this process holds or tries to get. One a pool, renewed in time.

    A store that does not answer fails closed: no lease, no restarts; what it said last of holds stays.
    """

    def __init__(self, store: SharedStore, clock: Clock) -> None:
        self.holds: Mapping[str | None, float] = {}
        self._store = store
        self._clock = clock
        self._holder = secrets.token_hex(8)  # names this process's life
        self._held: dict[str, tuple[Lease, float]] = {}

    async def keep(self, pools: Iterable[str]) -> frozenset[str]:
        """Take, or renew where it is time, the lease of each pool; returns those that allow to act."""
        try:
            self.holds = await self._store.holds()
            for pool in pools:
                await self._keep(pool)
        except StoreUnavailable:
            pass  # what is held expires by itself
        now = self._clock.now()
        return frozenset(pool for pool, (lease, _) in self._held.items() if lease.may_act(now))

    async def release(self) -> None:
        """Give all back, so that another replica need not wait for them to expire."""
        held, self._held = self._held, {}
        try:
            for lease, _ in held.values():
                await self._store.release(lease)
        except StoreUnavailable:
            pass

    async def _keep(self, pool: str) -> None:
        held, now = self._held.get(pool), self._clock.now()
        name = f"restarts/{pool}"
        if held is None:
            lease = await self._store.acquire(name, self._holder)
        elif now - held[1] >= RENEW_S:
            lease = await self._store.renew(held[0])
        else:
            return
        if lease is None:
            self._held.pop(pool, None)
        else:
            self._held[pool] = (lease, now)
