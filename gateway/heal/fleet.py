"""The fleet: which backends are under supervision, as the configuration says, and their end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gateway.config.models import BackendConfig, Config, PoolConfig
from gateway.config.supervision import OnExit
from gateway.core.events import EventKind
from gateway.heal.departure import LEAVES, Departure, closed, same_server, stop_server
from gateway.heal.due import take_over
from gateway.heal.shared import Shared
from gateway.heal.states import Absent, Draining, Replacing
from gateway.heal.unit import Unit
from gateway.launch.launcher import Incarnation, Launcher
from gateway.launch.leftbehind import left_behind
from gateway.launch.make import make
from gateway.launch.proc import Process
from gateway.launch.process import ProcessLauncher
from gateway.launch.record import file_name
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
    leaving: dict[asyncio.Task[None], Departure] = field(default_factory=dict)

    def apply(self, config: Config) -> None:
        """Take over a configuration: units that stay keep all their state, those that go are stopped.

        Call it after the pool table has taken the configuration over.
        """
        before, self.units, kept = self.units, {}, {}
        for backend in self.shared.table:
            known = before.get(backend.id)
            if known is not None and self._keep(known, backend, config):
                kept[backend.id] = before.pop(backend.id)
        for former in before.values():
            self._let_go(former, config)
        for backend in self.shared.table:
            if (unit := kept.get(backend.id)) is None:
                unit = self._new(backend, config, before.get(backend.id))
            elif unit.outdated:
                unit.after = self._in_the_way_of(backend, unit.pool, unit.config)
            if unit is not None:
                self.units[backend.id] = unit
        self._show_leaving(before)

    def take_charge(self, state: Path) -> None:
        """Supervise from now on. Tell of launched servers that nobody stops, by the state folder."""
        self.follows = False
        every = (*self.units.values(), *(each.unit for each in self.leaving.values()))
        launched = (each.backend for each in every if each.config.launch is not None)
        cared_for = {file_name(each.pool, each.name) for each in launched}
        for backend_id, told in left_behind(state / "run", cared_for):
            events, clock = self.shared.events, self.shared.clock
            events.note(clock, EventKind.LEFT_BEHIND, backend_id, "left_behind", told)

    def stand_by(self, unproven: Mapping[str, Incarnation] | None = None) -> None:
        """Let another gateway or worker supervise: until the first look here, probes decide of all but `unproven`."""
        self.follows = True
        for unit in self.units.values():
            unit.found((unproven or {}).get(unit.id))

    def _new(self, backend: Backend, config: Config, former: Unit | None) -> Unit | None:
        """Make a unit that waits for what is in its way; None for a backend without supervision.

        `former` had its name until now. The server that runs may be the one that is configured.
        """
        pool, settings = _settings(backend, config)
        launcher = self.make(backend, config)
        if launcher is None:
            return None
        leaving = [each for each in self.leaving.values() if each.unit.id == backend.id]
        back = [each.unit for each in leaving if each.take_back(settings)]
        after: tuple[asyncio.Task[None], ...] = ()
        served = True
        stays = former is not None and same_server(former.config, settings)
        if former is not None and stays:
            after, served = former.after, not _has_none(former)
        elif not back:
            after, served = self._in_the_way_of(backend, pool, settings), False
        until = ", ".join(self.leaving[each].unit.id for each in after if each in self.leaving)
        told = f"waiting to start until the server of {until} has ended" if until else ""
        served = served or self.follows
        state = Absent(self.shared.clock.now(), None, looked=False, served=served, told=told)
        unit = Unit(backend, pool, settings, launcher, self.shared, state)
        unit.after = after
        for each in [*back, former] if former is not None and stays else back:
            take_over(unit, each)
        return unit

    def _in_the_way_of(
        self, backend: Backend, pool: PoolConfig, settings: BackendConfig
    ) -> tuple[asyncio.Task[None], ...]:
        leaving = self.leaving.items()
        return tuple(
            task for task, each in leaving if each.in_the_way_of(backend.id, pool, settings)
        )

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
        unit.pool, unit.config = pool, settings
        if unit.observed.watch is not None:
            unit.observed.watch.patience = pool.supervision.patience
        return True

    def _let_go(self, unit: Unit, config: Config) -> None:
        """Stop what is no longer configured so, once its requests have ended.

        Where the same server stays configured under its name, it runs on.
        """
        unit.end()
        backend = self.shared.table.get(unit.id)
        stops = unit.config.launch is not None and not _has_none(unit) and not self.follows
        if backend is not None and same_server(unit.config, _settings(backend, config)[1]):
            stops = False
        departure = Departure(unit, self.shared, stops=stops, earlier=self.leaving.values())
        self.leaving[departure.task] = departure
        departure.task.add_done_callback(self._gone)

    def _show_leaving(self, gone: Iterable[str]) -> None:
        """Keep new requests from servers that are to be stopped, where their addresses are still configured.

        Elsewhere probes decide about backends that were supervised until now (`gone`) and are not any more. What is
        launched at such an address from now on waits for its server's end, and says so.
        """
        table, units = self.shared.table, self.units
        for backend_id in gone:
            if backend_id not in units:
                table.tend(backend_id, None)
        for departure in self.leaving.values():
            for backend in self._at_address_of(departure):
                unit = units.get(backend.id)
                if unit is None or unit.config.launch is None:
                    table.tend(backend.id, LEAVES)

    def _gone(self, task: asyncio.Task[None]) -> None:
        """Forget a departure; from now on probes decide about an address that nobody supervises."""
        departure = self.leaving.pop(task)
        for backend in self._at_address_of(departure):
            if backend.id not in self.units:
                self.shared.table.tend(backend.id, None)

    def _at_address_of(self, departure: Departure) -> list[Backend]:
        """Return the backends at the address of a server that is to be stopped; none if it runs on."""
        url = departure.unit.config.url
        return [each for each in self.shared.table if departure.stops and each.url == url]

    def going(self) -> list[Backend]:
        """Return the backends whose servers are about to be stopped: they are restarted, or leave the configuration."""
        table, units = self.shared.table, self.units.values()
        restarted = [each.backend for each in units if isinstance(each.state, Draining | Replacing)]
        leaving = [each.unit.backend for each in self.leaving.values() if each.stops]
        return [*restarted, *(each for each in leaving if table.get(each.id) in (each, None))]

    async def hand_over(self, heir: Process) -> None:
        """Put another gateway in charge of all that runs; nothing of it is stopped here any more."""
        every, self.units = self.units, {}
        for unit in every.values():
            unit.end()
            self.shared.table.tend(unit.id, None)  # here its probes decide from now on
            if isinstance(unit.launcher, ProcessLauncher):
                unit.launcher.hand_over(heir)
            await closed(unit)

    async def close(self, *, stop: bool = True) -> None:
        """Stop what was launched with `on_exit: stop`, if that is for us to do; let go of all.

        Servers that were leaving are stopped here, whoever is in charge of the rest.
        """
        leaving = dict(self.leaving)
        for task in leaving:
            task.cancel()
        if leaving:
            await asyncio.wait(leaving)
        going = [each.unit for each in leaving.values() if each.stops]
        every = [*self.units.values(), *(each.unit for each in leaving.values())]
        for unit in every:
            unit.end()
        async with asyncio.TaskGroup() as group:
            ends = [
                unit
                for unit in (self.units.values() if stop else ())
                if unit.config.launch is not None and unit.config.launch.on_exit is OnExit.STOP
            ]
            for unit in (*ends, *going):  # no next gateway has those that are leaving
                group.create_task(stop_server(unit, self.shared), name=f"stop {unit.id}")
        for unit in every:
            await closed(unit)


def _has_none(unit: Unit) -> bool:
    """Whether a unit has no server yet: before its first look it waits for the ends of others."""
    state = unit.state
    new = isinstance(state, Absent) and not (state.looked or state.served)
    return new and not all(each.done() for each in unit.after)


def _settings(backend: Backend, config: Config) -> tuple[PoolConfig, BackendConfig]:
    pool = config.pools[backend.pool]
    return pool, next(each for each in pool.backends if each.name == backend.name)
