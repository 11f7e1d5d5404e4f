"""`Healing`: what one process of a gateway does to backends, and leaves to another one in an upgrade."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from gateway.heal.following import Following
from gateway.process import Process


class Healing:
    """What only one gateway may do to its backends at a time: supervise them, and place adapters.

    What it does is written to the state folder, which it holds the lock of meanwhile. A worker that does not
    lead does as the leading one says instead.
    """

    def __init__(self, process: Process, group: asyncio.TaskGroup) -> None:
        self._process = process
        self._group = group
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Begin, or go on after a pause."""
        process = self._process
        works: dict[str, Coroutine[Any, Any, None]] = {"adapters": process.adapters.run()}
        if process.leads:
            works |= {"supervisor": process.supervisor.run(), "gpus": process.gpus.run()}
            works["state folder"] = process.disk.lock.hold()
        else:
            following = Following(
                process.table, process.store, process.supervisor.names, process.replicas
            )
            works["following"] = following.run()
        self._tasks = [self._group.create_task(work, name=name) for name, work in works.items()]

    def follow(self, telling: Coroutine[Any, Any, None]) -> None:
        """Go on after a pause behind the process that took over: go by what it places, and decide and write nothing.

        `telling` tells it what it has to know meanwhile.
        """
        adapters = self._process.adapters
        adapters.hand_over()
        works = {"adapters": adapters.run(), "heir": telling}
        self._tasks = [self._group.create_task(work, name=name) for name, work in works.items()]

    async def pause(self) -> None:
        """Leave everything as it is, what is under way too."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
