"""The fleet: which backends are under supervision, as the configuration says, and their end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from gateway.config.models import BackendConfig, Config, PoolConfig
from gateway.config.supervision import OnExit
from gateway.core.aio import Clock, start
from gateway.core.events import Event, EventKind, Events
from gateway.core.types import Phase
from gateway.heal.charge import Charge, emptied
from gateway.heal.gputurns import GpuTurns
from gateway.heal.healing import Cause, Sign
from gateway.launch.launcher import Launcher, LaunchError
from gateway.launch.make import make
from gateway.pools.health import Tending
from gateway.pools.table import Backend, PoolTable
from gateway.watch.fetch import Pages

# Until the first look has told what runs: a server that outlived its gateway may be about to be
# stopped, and probes would put it into service meanwhile.
LOOKED_FOR: Final = Tending(Phase.STARTING, "restart", "looking for its process")

Maker = Callable[[Backend, Config], Launcher | None]


def launcher_of(backend: Backend, config: Config) -> Launcher | None:
    """Make the launcher that the configuration asks for; None for a backend that has none."""
    return make(_settings(backend, config)[1], backend.pool, config.state)


@dataclass(slots=True)
class Fleet:
    """The charges, by the ids of their backends. A charge that goes is stopped, if it was launched."""

    table: PoolTable
    clock: Clock
    events: Events
    gpus: GpuTurns
    make: Maker
    charges: dict[str, Charge] = field(default_factory=dict)
    leaving: dict[asyncio.Task[None], Charge] = field(default_factory=dict)

    def apply(self, config: Config) -> None:
        """Take over a configuration: charges that stay keep all their state, those that go are stopped.

        Call it after the pool table has taken the configuration over.
        """
        before, self.charges = self.charges, {}
        for backend in self.table:
            known = before.get(backend.id)
            if known is not None and self._keep(known, backend, config):
                self.charges[backend.id] = before.pop(backend.id)
            elif (charge := self._new(backend, config)) is not None:
                self.charges[backend.id] = charge
        for gone in before.values():
            self._let_go(gone, self.charges.get(gone.id))

    def _new(self, backend: Backend, config: Config) -> Charge | None:
        pool, settings = _settings(backend, config)
        launcher = self.make(backend, config)
        if launcher is None:
            return None
        if settings.launch is not None:
            self.gpus.know(settings.launch.gpus)
            if backend.health.tended is None:
                self.table.tend(backend.id, LOOKED_FOR)
        return Charge(backend, pool, settings, launcher, Pages(backend))

    def _keep(self, charge: Charge, backend: Backend, config: Config) -> bool:
        """Have a charge follow what is configured now; False when it is another server by now."""
        pool, settings = _settings(backend, config)
        same = charge.backend is backend and charge.config.restart == settings.restart
        if not same or (charge.config.launch is None) is not (settings.launch is None):
            return False
        if settings.launch != charge.config.launch:
            launcher = self.make(backend, config)
            assert launcher is not None  # it has `launch`
            charge.launcher = launcher
            if _server(settings) != _server(charge.config):
                why = "its `launch` settings changed"
                charge.signs[Cause.OPERATOR] = Sign(Cause.OPERATOR, why)
        charge.pool, charge.config = pool, settings
        return True

    def _let_go(self, charge: Charge, heir: Charge | None) -> None:
        """Stop what is no longer configured so, once its requests have ended.

        `heir` is the charge that has its name now. The same command line runs on under it; where
        another one is configured the heir waits until the old server is gone.
        """
        charge.gone = True
        if charge.work is not None:
            charge.work.cancel()
        if charge.backend.health.tended is not LOOKED_FOR:  # that is its heir's
            self.table.tend(charge.id, None)
        before = charge.config.launch
        stops = before is not None and (heir is None or heir.config.launch != before)
        if heir is not None and stops:
            heir.restarting = True
        leaving = self._stop_gone(charge, heir) if stops else _closed(charge)
        task = start(leaving, name=f"let go {charge.id}")
        self.leaving[task] = charge
        task.add_done_callback(self.leaving.pop)

    async def _stop_gone(self, charge: Charge, heir: Charge | None) -> None:
        try:
            await emptied(charge.backend, self.clock, charge.pool.supervision.drain)
            await self._stop(charge)
            await _closed(charge)
        finally:
            if heir is not None:
                heir.restarting = heir.ran = False

    async def close(self) -> None:
        """Stop what was launched with `on_exit: stop`; let go of all."""
        going = dict(self.leaving)
        for task in going:
            task.cancel()
        if going:
            await asyncio.wait(going)
        every = [*self.charges.values(), *going.values()]
        async with asyncio.TaskGroup() as group:
            for charge in every:
                launch = charge.config.launch
                if launch is not None and launch.on_exit is OnExit.STOP:
                    group.create_task(self._stop(charge), name=f"stop {charge.id}")
        for charge in every:
            await _closed(charge)

    async def _stop(self, charge: Charge) -> None:
        with contextlib.suppress(LaunchError):
            seen = await charge.launcher.look()
            if seen.incarnation is not None:
                grace_s = charge.pool.supervision.stop_grace
                await charge.launcher.stop(seen.incarnation, grace_s=grace_s)
                if seen.running:
                    at = self.clock.wall()
                    self.events.tell(Event(at, EventKind.STOPPED, charge.id, "stopped", "stopped"))


async def _closed(charge: Charge) -> None:
    charge.pages.close()
    await charge.launcher.close()


def _server(config: BackendConfig) -> dict[str, object]:
    """Return what a running server was started with; the rest of `launch` is about its end."""
    assert config.launch is not None
    return config.launch.model_dump(exclude={"on_exit", "orphan"})


def _settings(backend: Backend, config: Config) -> tuple[PoolConfig, BackendConfig]:
    pool = config.pools[backend.pool]
    return pool, next(each for each in pool.backends if each.name == backend.name)
