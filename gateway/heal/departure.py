"""The end of a unit that is no longer configured so: its server finishes what it carries, and is stopped.

Until then that server keeps its address and its GPUs, so what is new and needs them waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Final

from gateway.config.models import BackendConfig, PoolConfig
from gateway.core.aio import start
from gateway.core.events import EventKind
from gateway.core.types import Phase
from gateway.heal.emptied import emptied
from gateway.heal.members import gpus_of, overlap
from gateway.heal.shared import Shared
from gateway.heal.unit import Unit
from gateway.launch.launcher import LaunchError, Superseded
from gateway.pools.facts import Tending

LEAVES: Final = Tending(
    Phase.DRAINING,
    "draining",
    "the server that was launched here finishes its requests, then it is stopped",
)


class Departure:
    """The end of one unit, in a task of its own. A server that is not to be stopped runs on."""

    def __init__(
        self, unit: Unit, shared: Shared, *, stops: bool, earlier: Iterable[Departure]
    ) -> None:
        self.unit = unit
        self.stops = stops
        self._shared = shared
        self._begun = False
        before = [each.task for each in earlier if each.unit.id == unit.id]
        self.task: asyncio.Task[None] = start(self._run(before), name=f"let go {unit.id}")

    async def _run(self, before: Iterable[asyncio.Task[None]]) -> None:
        """Stop and close it, after what had its name before: both may be about one server."""
        for each in before:
            await asyncio.wait([each])
        if self.stops:
            shared, unit = self._shared, self.unit
            until = shared.clock.now() + unit.pool.supervision.drain
            for carrier in unit.carriers:
                await emptied(carrier, shared.table, shared.clock, until - shared.clock.now())
        if self.stops:  # still: nobody took it back
            self._begun = True
            await stop_server(self.unit, self._shared)
        await closed(self.unit)

    def take_back(self, config: BackendConfig) -> bool:
        """Let the server run on, if it is the one that is configured again and is not being stopped yet."""
        if not self.stops or self._begun or not same_server(self.unit.config, config):
            return False
        self.stops = False
        return True

    def in_the_way_of(self, backend_id: str, pool: PoolConfig, config: BackendConfig) -> bool:
        """Whether a backend has to wait: the server has its name, its address, or a GPU that it needs."""
        mine, ours = self.unit.config, gpus_of(config.launch, pool.remedies)
        same_place = self.unit.id == backend_id or mine.url == config.url
        return self.stops and (same_place or overlap(gpus_of(mine.launch, ()), ours))


def same_server(one: BackendConfig, other: BackendConfig) -> bool:
    """Whether two backends of one name launch the same server."""
    if one.launch is None or other.launch is None:
        return one.launch is other.launch
    return one.launch.started_with == other.launch.started_with


async def stop_server(unit: Unit, shared: Shared) -> None:
    """Stop its server; not one that another gateway is in charge of, or has started in its place since."""
    tell = partial(shared.events.note, shared.clock)
    try:
        seen, known = await unit.launcher.look(), unit.observed.incarnation
        if seen.incarnation is not None and known in (None, seen.incarnation) and not seen.others:
            grace_s = unit.pool.supervision.stop_grace
            await unit.launcher.stop(seen.incarnation, grace_s=grace_s)
            if seen.running:
                tell(EventKind.STOPPED, unit.id, "stopped", "stopped")
    except Superseded:
        pass  # another gateway's
    except LaunchError as error:
        told = (
            f"its server could not be stopped, and may run on with its port and GPU memory: {error}"
        )
        tell(EventKind.LEFT_BEHIND, unit.id, "not_stopped", told)


async def closed(unit: Unit) -> None:
    """Close its connections."""
    unit.pages.close()
    await unit.launcher.close()
