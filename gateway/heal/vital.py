"""The processes that a launched server cannot serve without, watched while it serves.

vLLM is several processes. When its engine or a worker is killed, the API process may take seconds to
notice. What ends as a whole is seen by its launcher too, and how it ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.core.aio import guarded
from gateway.launch import proc
from gateway.launch.launcher import Incarnation, Launcher, LaunchError
from gateway.launch.process import ProcessLauncher

Lost = Callable[[Incarnation | None, str], None]  # of whom, and what became of which process


class VitalProcesses:
    """See the module. `lost` is told in the moment in which one of them ends."""

    def __init__(self, backend_id: str, lost: Lost) -> None:
        self._backend_id, self._lost = backend_id, lost
        self._task: asyncio.Task[None] | None = None

    def watch(self, group: asyncio.TaskGroup, launcher: Launcher, of: Incarnation | None) -> None:
        """Watch those that it has now: the last time that it served, it had others."""
        self.end()
        if isinstance(launcher, ProcessLauncher):
            name = f"processes of {self._backend_id}"
            watching = guarded(self._first_end(launcher, of), name=name)
            self._task = group.create_task(watching, name=name)

    def end(self) -> None:
        """Watch no more."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _first_end(self, launcher: ProcessLauncher, of: Incarnation | None) -> None:
        try:
            ended = await proc.first_end(await launcher.vital())
        except (LaunchError, OSError):
            return  # no record, or no handles: its probes have to notice
        if ended is not None:
            self._lost(of, f"its process {ended}")
