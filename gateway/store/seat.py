"""A seat that one gateway has at a time, by a lease in the shared store."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.core.aio import Clock
from gateway.store.shared import Lease, SharedStore


@dataclass(slots=True)
class Seat:
    """`holder` names this process's life."""

    name: str
    holder: str
    store: SharedStore
    clock: Clock
    _lease: Lease | None = None

    @property
    def ours(self) -> bool:
        """Whether this gateway has it, with time enough left to act."""
        return self._lease is not None and self._lease.may_act(self.clock.now())

    async def keep(self) -> None:
        """Take it if it is free; keep it if it is ours. Call it each second or so.

        Raises:
            StoreUnavailable: what is ours expires by itself.
        """
        if self._lease is not None:
            self._lease = await self.store.renew(self._lease)
        if self._lease is None:
            self._lease = await self.store.acquire(self.name, self.holder)

    async def leave(self) -> None:
        """Give it up for good, if it is ours, so that another one has it at once.

        Raises:
            StoreUnavailable: it expires by itself.
        """
        lease, self._lease = self._lease, None
        if lease is not None:
            await self.store.release(lease)
