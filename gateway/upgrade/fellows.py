"""One worker among others: meet their parent, answer the others' calls, and end in the right order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

from gateway.core.channel import Unanswered
from gateway.ops.upgrading import UpgradeFailed
from gateway.process import Process
from gateway.store.group import Group

log = logging.getLogger("gateway.app")

_OTHERS_S: Final = 5.0  # beyond `shutdown.grace`, for the other workers to end


async def meet_parent(process: Process, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
    """Connect to the parent of the workers, if there is one; return the task that answers calls."""
    if process.group is None:
        return []
    answering = group.create_task(_in_group(process, process.group), name="workers")
    await process.group.meet()
    return [answering]


async def _in_group(process: Process, group: Group) -> None:
    """Answer the calls of other workers. Without the parent nobody would restart this worker, so it ends."""

    async def upgrade() -> str:
        try:
            await process.upgrades.ask()
        except UpgradeFailed as error:
            return str(error)
        return ""

    group.answers["upgrade"] = upgrade
    await group.run()
    log.error("the parent process has gone; this worker ends", extra={"event": "parent_gone"})
    process.supervisor.in_charge = False  # launched servers run on
    process.stopping.set()


async def all_stop(process: Process) -> bool:
    """Return whether all workers stop, so that nobody else accepts connections from the listener."""
    if process.group is None:
        return True
    try:
        return await process.group.all_stop()
    except Unanswered:
        return False


async def let_others_end(process: Process) -> None:
    """Wait until the other workers have ended: they need the servers that this one stops at its end.

    Where they go on, as this worker alone was told to stop, its servers run on for the next worker 1.
    """
    group = process.group
    if group is None or not process.leads or process.succeeded.is_set():
        return
    with contextlib.suppress(Unanswered, TimeoutError):
        if not await group.all_stop():
            process.supervisor.in_charge = False
            return
        async with asyncio.timeout(process.config.shutdown.grace + _OTHERS_S):
            await group.others_ended()
