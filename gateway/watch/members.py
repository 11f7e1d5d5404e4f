"""Run one task for each wanted backend of the pool table, across reloads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from gateway.pools.table import Backend, PoolTable


async def for_each_member(
    table: PoolTable,
    work: Callable[[Backend], Coroutine[Any, Any, None]],
    *,
    name: str,
    wanted: Callable[[Backend], bool] = lambda backend: True,
    leaving: bool = False,
) -> None:
    """Run work for each wanted backend until cancelled; when one leaves, or is not wanted any more, its task ends.

    Cancel: all tasks end.
    """
    changed = asyncio.Event()
    changed.set()
    at_work: dict[Backend, asyncio.Task[None]] = {}
    table.on_members.append(changed.set)
    try:
        async with asyncio.TaskGroup() as group:
            while True:
                await changed.wait()
                changed.clear()
                members = {backend for backend in table if wanted(backend)}
                if leaving:
                    members |= {*table.leaving()} & at_work.keys()
                for gone in at_work.keys() - members:
                    at_work.pop(gone).cancel()
                for new in members - at_work.keys():
                    at_work[new] = group.create_task(work(new), name=f"{name} {new.id}")
    finally:
        table.on_members.remove(changed.set)
