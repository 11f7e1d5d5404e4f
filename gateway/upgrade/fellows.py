"""This worker among the others: it meets their parent, answers what it is asked, and ends in its turn."""

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
    """Have the parent of the workers know this one."""
    if process.group is None:
        return []
    answering = group.create_task(_in_group(process, process.group), name="workers")
    await process.group.meet()
    return [answering]


async def _in_group(process: Process, group: Group) -> None:
    """Answer the other workers. Without the parent nobody starts this one again, so it ends."""

    async def upgrade() -> str:
        try:
            await process.upgrades.ask()
        except UpgradeFailed as error:
            return str(error)
        return ""

    async def reload() -> None:
        process.hangup.set()

    group.answers |= {"upgrade": upgrade, "reload": reload}
    await group.run()
    log.error("the parent process has gone; this worker ends", extra={"event": "parent_gone"})
    process.supervisor.in_charge = False  # what was launched runs on
    process.stopping.set()


async def all_stop(process: Process) -> bool:
    """Return whether nobody accepts connections from the listener once this process does not."""
    if process.group is None:
        return True
    try:
        return await process.group.all_stop()
    except Unanswered:
        return False


async def let_others_end(process: Process) -> None:
    """Wait until no other worker needs the servers that this one stops when it ends."""
    group = process.group
    if group is None or not process.leads or process.succeeded.is_set():
        return
    with contextlib.suppress(Unanswered, TimeoutError):
        async with asyncio.timeout(process.config.shutdown.grace + _OTHERS_S):
            await group.others_ended()
