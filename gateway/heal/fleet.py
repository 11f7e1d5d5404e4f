"""The fleet: which backends are under supervision, as the configuration says, and their end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.config.models import BackendConfig, Config, PoolConfig
from gateway.config.supervision import OnExit
from gateway.core.aio import start
from gateway.core.events import EventKind
from gateway.heal.decisions import CHANGED, Cause
from gateway.heal.emptied import emptied
from gateway.heal.supervised import Shared
from gateway.heal.unit import Unit
from gateway.launch.launcher import Launcher, LaunchError
from gateway.launch.make import make
from gateway.launch.proc import Process
from gateway.launch.process import ProcessLauncher
from gateway.pools.table import Backend

Maker = Callable[[Backend, Config], Launcher | None]


def launcher_of(backend: Backend, config: Config) -> Launcher | None:
    """Make the launcher that the configuration asks for; None for a backend that has none."""
    return make(_settings(backend, config)[1], backend.pool, config.state)


@dataclass(slots=True)
class Fleet:
    """The units, by the ids of their backends. What goes is stopped, if it was launched."""

    shared: Shared
    make: Maker
    follows: bool = False  # another gateway or worker supervises
    units: dict[str, Unit] = field(default_factory=dict)
    leaving: dict[asyncio.Task[None], Unit | None] = field(
        default_factory=dict
    )  # None: not stopped

    def apply(self, config: Config) -> None:
        """Take over a configuration: units that stay keep all their state, those that go are stopped.

        Call it after the pool table has taken the configuration over.
        """
        before, self.units = self.units, {}
        for backend in self.shared.table:
            known = before.get(backend.id)
            if known is not None and self._keep(known, backend, config):
                self.units[backend.id] = before.pop(backend.id)
            elif (unit := self._new(backend, config)) is not None:
                self.units[backend.id] = unit
        for gone in before.values():
            self._let_go(gone, self.units.get(gone.id))

    def stand_by(self) -> None:
        """Let another gateway or worker supervise: until the first look here, probes alone decide."""
        self.follows = True
        for unit in self.units.values():
            unit.found_in_service()

    def _new(self, backend: Backend, config: Config) -> Unit | None:
        pool, settings = _settings(backend, config)
        launcher = self.make(backend, config)
        if launcher is None:
            return None
        return Unit(backend, pool, settings, launcher, self.shared, served=self.follows)

    def _keep(self, unit: Unit, backend: Backend, config: Config) -> bool:
        """Have a unit follow what is configured now; False when it is another server by now."""
        pool, settings = _settings(backend, config)
        same = unit.backend is backend and unit.config.restart == settings.restart
        if not same or (unit.config.launch is None) is not (settings.launch is None):
            return False
        if settings.launch != unit.config.launch:
            launcher = self.make(backend, config)
            assert launcher is not None  # it has `launch`
            unit.launcher = unit.observed.launcher = launcher
            if _server(settings) != _server(unit.config):
                unit.signs[Cause.OPERATOR] = CHANGED
        unit.pool, unit.config = pool, settings
        if unit.observed.watch is not None:
            unit.observed.watch.patience = pool.supervision.patience
        return True

    def _let_go(self, unit: Unit, heir: Unit | None) -> None:
        """Stop what is no longer configured so, once its requests have ended.

        `heir` is the unit that has its name now. The same command line runs on under it; where
        another one is configured the heir waits until the old server is gone, and an order that it
        gets meanwhile waits with it.
        """
        unit.end()
        if heir is None:
            self.shared.table.tend(unit.id, None)
        before = unit.config.launch
        changed = heir is None or heir.config.launch != before
        stops = before is not None and changed and not self.follows
        task = start(self._leave(unit, stops=stops), name=f"let go {unit.id}")
        self.leaving[task] = unit if stops else None
        task.add_done_callback(self.leaving.pop)
        if heir is not None and (stops or unit.after is not None):
            heir.after = task

    async def _leave(self, unit: Unit, *, stops: bool) -> None:
        """Stop and close it, after the server that had its name before: what runs may be that one."""
        if unit.after is not None:
            await asyncio.wait([unit.after])
        if stops:
            shared = self.shared
            await emptied(unit.backend, shared.table, shared.clock, unit.pool.supervision.drain)
            await self._stop(unit)
        await _closed(unit)

    async def hand_over(self, heir: Process) -> None:
        """Put another gateway in charge of all that runs; nothing of it is stopped here any more."""
        every, self.units = self.units, {}
        for unit in every.values():
            unit.end()
            self.shared.table.tend(unit.id, None)  # here its probes decide from now on
            if isinstance(unit.launcher, ProcessLauncher):
                unit.launcher.hand_over(heir)
            await _closed(unit)

    async def close(self, *, stop: bool = True) -> None:
        """Stop what was launched with `on_exit: stop`, if that is for us to do; let go of all.

        What was to go is ours to stop, whoever is in charge of the rest.
        """
        leaving = dict(self.leaving)
        going = [unit for unit in leaving.values() if unit is not None]
        for task, unit in leaving.items():
            if unit is not None:
                task.cancel()
        if leaving:
            await asyncio.wait(leaving)
        every = [*self.units.values(), *going]
        for unit in every:
            unit.end()
        async with asyncio.TaskGroup() as group:
            for unit in every if stop else going:
                launch = unit.config.launch
                if launch is not None and launch.on_exit is OnExit.STOP:
                    group.create_task(self._stop(unit), name=f"stop {unit.id}")
        for unit in every:
            await _closed(unit)

    async def _stop(self, unit: Unit) -> None:
        """Stop its server; not another one that a gateway has started in its place since."""
        with contextlib.suppress(LaunchError):
            seen, known = await unit.launcher.look(), unit.observed.incarnation
            if seen.incarnation is not None and known in (None, seen.incarnation):
                grace_s = unit.pool.supervision.stop_grace
                await unit.launcher.stop(seen.incarnation, grace_s=grace_s)
                if seen.running:
                    events, clock = self.shared.events, self.shared.clock
                    events.note(clock, EventKind.STOPPED, unit.id, "stopped", "stopped")


async def _closed(unit: Unit) -> None:
    unit.pages.close()
    await unit.launcher.close()


def _server(config: BackendConfig) -> dict[str, object]:
    assert config.launch is not None
    return config.launch.started_with


def _settings(backend: Backend, config: Config) -> tuple[PoolConfig, BackendConfig]:
    pool = config.pools[backend.pool]
    return pool, next(each for each in pool.backends if each.name == backend.name)
