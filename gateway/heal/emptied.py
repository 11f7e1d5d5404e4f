"""When a backend carries no more requests: ours, and those of the other workers that share it."""

from __future__ import annotations

import asyncio
from typing import Final

from gateway.core.aio import Clock
from gateway.pools.table import Backend, PoolTable

_POLL_S: Final = 0.1


async def emptied(backend: Backend, table: PoolTable, clock: Clock, patience_s: float) -> None:
    """Wait until a backend carries no request, here or elsewhere, `patience_s` at most."""
    began = now = clock.now()
    carried = table.carried_elsewhere
    while now < began + patience_s and (
        backend.in_flight or carried(carried_as(table, backend), began)
    ):
        await asyncio.sleep(_POLL_S)
        now = clock.now()


def carried_as(table: PoolTable, backend: Backend) -> str:
    """Return how workers name what they carry of a backend: by its id.

    If another server has that by now, the address is added.
    """
    present = table.get(backend.id)
    moved = present is not None and present.url != backend.url
    return f"{backend.id} {backend.url}" if moved else backend.id
