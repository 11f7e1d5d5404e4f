"""The supervisor: asks the policy about all units, and has them begin what it permits.

    each second:  leases -> what replicas and operators want -> judges -> policy.decide -> begin, suspend, wait

What is done with one backend is in its `heal.unit`; decisions are pure (`heal.policy`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial

from gateway.config.models import Config
from gateway.core.aio import Clock, periodic
from gateway.core.errors import BackendDown
from gateway.core.events import EventKind, Events
from gateway.core.types import Outcome, Phase, RequestRecord
from gateway.heal.autopsy import Autopsy, explained
from gateway.heal.decisions import Cause, Decision, Restart, Setback, Sign, Suspend, Wait, Why
from gateway.heal.elsewhere import leave_alone
from gateway.heal.fleet import Fleet, Maker, launcher_of
from gateway.heal.held import HeldAdapters
from gateway.heal.intent import Intent, Mark
from gateway.heal.leases import Leases
from gateway.heal.members import Circumstances, Member, gpus_of
from gateway.heal.names import Names
from gateway.heal.observed import Timing
from gateway.heal.overrides import Overrides
from gateway.heal.policy import decide
from gateway.heal.record import History
from gateway.heal.shared import Shared
from gateway.heal.states import Suspended
from gateway.heal.unit import Unit
from gateway.heal.usual import UsualTimes
from gateway.launch.launcher import Incarnation
from gateway.launch.proc import Process
from gateway.pools.health import Order
from gateway.pools.table import Backend, PoolTable
from gateway.store.shared import SharedStore, StoreUnavailable

_FAILED = frozenset({Outcome.BACKEND_ERROR, Outcome.BACKEND_TIMEOUT, Outcome.STREAM_BROKEN})
_COUNTED = _FAILED | {Outcome.OK}


class Supervisor:
    """Supervision of all backends that have `launch` or `restart`. One event loop."""

    def __init__(
        self,
        table: PoolTable,
        clock: Clock,
        store: SharedStore,
        config: Config,
        *,
        make_launcher: Maker = launcher_of,
        timing: Timing = Timing(),  # noqa: B008 - frozen
    ) -> None:
        self.table = table
        self.clock = clock
        self.store = store
        self.events, self.names = Events(), Names()
        self.intent = Intent(store, clock, config.state, self.named)
        self.overrides = Overrides(config.state)
        self.history = History()
        self._config = config
        self._timing = timing
        autopsy = Autopsy(table, clock, self.overrides, self.events)
        shared = Shared(
            *(table, clock, store, self.events, self.overrides),
            *(UsualTimes(config.state), HeldAdapters(config.state), autopsy, timing, self.names),
            came_to=self._came_to,
            on_hold=lambda pool: self.held()[pool] or self.intent.holds_now(pool),
        )
        self.fleet = Fleet(shared, make_launcher)
        self._leases = Leases(store, clock)
        self.leads: frozenset[str] = frozenset()  # pools that this replica may act on
        self.drained_elsewhere: Callable[[], AbstractSet[str]] = frozenset  # names
        self._closed = False
        self.in_charge = True  # of what runs: it is ours to stop
        self._restored = False  # the store has the holds of the last gateway
        self.fleet.apply(config)
        self._follow_intent()

    @property
    def units(self) -> Mapping[str, Unit]:
        """The backends under supervision, by their ids."""
        return self.fleet.units

    @property
    def holds(self) -> Mapping[str | None, float]:
        """Until when operators hold automatic restarts, of a pool or (None) of all; `inf`: for good."""
        now, pools = self.clock.now(), self._config.pools
        every = self._leases.holds.items()  # those of marks, too
        return {of: until for of, until in every if until > now and (of is None or of in pools)}

    def held(self) -> Mapping[str, bool]:
        """Return of each pool whether an operator holds its automatic restarts."""
        holds = self.holds
        return {pool: None in holds or pool in holds for pool in self._config.pools}

    def apply(self, config: Config) -> None:
        """Take over a configuration, after the pool table has.

        Where another way to start a server is configured, who is in charge forgets the failures of the old
        one: its suspension, and what remedies changed. A backend that is gone has no failures either.
        """
        before = {each.id: (each, each.way) for each in self.units.values()}
        lasts = {"state": self._config.state}  # its servers are known by it
        self._config = config.model_copy(update=lasts)
        self.fleet.apply(self._config)
        if not self.in_charge:
            return
        for unit in self.units.values():
            known, way = before.pop(unit.id, (unit, unit.way))
            if way != unit.way:
                self.clear(unit.id)
            if known is not unit:
                self.history = self.history.anew(unit.id)
        for gone in before:
            self.history = self.history.clear(gone).anew(gone)
        self._follow_intent()
        self._drop_former()

    def _follow_intent(self) -> None:
        """Take out what operators drained, here or before this gateway began."""
        for backend in self.table:
            if self.intent.has(Mark.DRAINED, backend.id) and backend.health.held is None:
                self.table.order(backend.id, Order.DRAIN)
        for unit in self.units.values():
            unit.suspended = self.intent.has(Mark.SUSPENDED, unit.id)

    def _drop_former(self) -> None:
        for unit in self.units.values():
            if unit.suspended and self.intent.way(unit.id) not in ("", unit.way):
                self.clear(unit.id)
        self.fleet.shared.held.follow(self._config)
        for backend_id, gone in self.overrides.follow(self._config).items():
            told = f"{gone.told()} was removed together with the `launch` settings that needed it"
            self.events.note(self.clock, EventKind.REMEDY, backend_id, "dropped", told)

    def ended(self, settled: Sequence[RequestRecord]) -> None:
        """Count requests that came to an end on a backend, as `observe.ledger` posts them."""
        units = self.units
        for record in settled if units else ():
            unit = units.get(record.backend_id or "")
            known = record.error_code == BackendDown.default_code  # of that its unit is told
            if unit is not None and record.outcome in _COUNTED and not known:
                unit.observed.ended(record, failed=record.outcome in _FAILED)

    def stand_by(self, unproven: Mapping[str, Incarnation] | None = None) -> None:
        """Let another gateway supervise as yet, which hands its backends over as they are. Then `run`."""
        self.in_charge = False
        self.fleet.stand_by(unproven)

    # --- the turn -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Supervise until cancelled.

        Cancel: restarts under way are left where they are, and nothing is stopped; see `close`. It may
        be run again, and goes on from there.
        """
        self.in_charge = True
        self.fleet.take_charge(self._config.state)
        self._drop_former()  # the configuration may have changed while no gateway ran
        try:
            async with asyncio.TaskGroup() as group:
                turn, every_s = partial(self.turn, group), self._timing.every_s
                await periodic(turn, every_s=every_s, name="supervisor", jitter_ratio=0.0)
        finally:
            for unit in self.units.values():
                unit.rest()

    async def turn(self, group: asyncio.TaskGroup) -> None:
        """Ask the policy once about all that is seen, and begin what it permits."""
        for unit in self.units.values():
            unit.live(group)
        circumstances = await self._circumstances()
        # No await from here on: what an operator orders meanwhile must not be lost.
        self._agree()
        leave_alone(self.table, self.names, self.drained_elsewhere())
        for unit in self.units.values():
            unit.judge(self._peers(unit))
        members = [self._member(backend, circumstances.now) for backend in self.table]
        policies = {name: pool.supervision for name, pool in self._config.pools.items()}
        self.history, decisions = decide(members, self.history, policies, circumstances)
        decided: Mapping[str, Decision] = {each.backend_id: each for each in decisions}
        for unit in self.units.values():
            self._act(unit, decided.get(unit.id))
        await self.intent.tell()

    async def _circumstances(self) -> Circumstances:
        self.leads = leads = await self._lead()
        local = time.localtime(self.clock.wall())
        minute = local.tm_hour * 60 + local.tm_min
        answers = not self.store.trouble
        return Circumstances(self.clock.now(), leads, minute, self._leases.holds, answers)

    async def _lead(self) -> frozenset[str]:
        """Return the pools that this replica may act on: none before the store has the file's holds."""
        supervised: dict[str, list[Backend]] = {}
        for unit in self.units.values():
            supervised.setdefault(unit.backend.pool, []).append(unit.backend)
        pools = {name: self.names.lease(name, every) for name, every in supervised.items()}
        leads = await self._leases.keep(pools)
        if self._restored:
            return leads
        if not self._leases.answered:
            return frozenset()
        try:
            await self.intent.restore(self._leases.holds)
        except StoreUnavailable:
            return frozenset()
        self._restored = True
        return await self._leases.keep(pools)

    def named(self, backend_id: str) -> str:
        """Return what all gateways call a backend."""
        backend = self.table.get(backend_id)
        return backend_id if backend is None else self.names.of(backend)

    def _member(self, backend: Backend, now: float) -> Member:
        unit, health = self.units.get(backend.id), backend.health
        sample = None if backend.stale(now) else backend.sample
        at_work = backend.in_flight or (sample and (sample.running or sample.waiting))
        member = Member(
            backend_id=backend.id,
            pool=backend.pool,
            phase=backend.phase,
            since=backend.health.since,
            held=health.held is not None,
            asleep=health.asleep,
            saturated=backend.saturated(now),
            idle=not at_work,
            drained_elsewhere=self.names.of(backend) in self.drained_elsewhere(),
        )
        if unit is None:
            down = backend.phase is Phase.DOWN and not health.asleep
            return replace(member, bad_at=backend.health.since if down else None)
        observed = unit.observed
        return replace(
            member,
            state=unit.state,
            sign=unit.calls_for(),
            ordered=unit.ordered if now >= unit.order_at and not observed.untold else None,
            visible=observed.seen is not None,
            ours=unit.ours,
            suspended=unit.suspended,
            age_s=None if observed.since is None else now - observed.since,
            bad_at=unit.bad_at,
            gpus=gpus_of(unit.config.launch, unit.pool.remedies),
        )

    def _peers(self, unit: Unit) -> list[Unit]:
        pool = unit.backend.pool
        return [
            each for each in self.units.values() if each is not unit and each.backend.pool == pool
        ]

    def _agree(self) -> None:
        """Do as other replicas say: leave alone what they suspended, drain what is drained there."""
        ids = {Mark.SUSPENDED: self.units.keys(), Mark.DRAINED: self.table.ids()}
        for mark, backend_id, on in self.intent.changes(self._leases.holds, ids):
            kind, word = EventKind.OPERATOR, "drain" if on else "undrain"
            if mark is Mark.DRAINED:
                self.table.order(backend_id, Order.DRAIN if on else Order.RESUME)
            elif on:
                kind, word = EventKind.SUSPENDED, "suspended"
                self.units[backend_id].suspended = True
            else:
                self._clear(backend_id)
            told = f"{word}: ordered by another replica; see its events"
            self.events.note(self.clock, kind, backend_id, word, told)

    def moved(self, streams: Mapping[str, int]) -> None:
        """Say how many streams left which backends, as these are drained."""
        for backend_id, count in streams.items():
            told = f"{count} stream{'' if count == 1 else 's'} went on elsewhere, as it is drained"
            self.events.note(self.clock, EventKind.MOVED, backend_id, "drain", told)

    # --- acting -------------------------------------------------------------------------------------

    def _act(self, unit: Unit, decision: Decision | None) -> None:
        unit.waits(decision if isinstance(decision, Wait | Suspend) else None)
        match decision:
            case Restart():
                unit.begin(decision)
            case Suspend(cause=cause, evidence=evidence):
                told = ": ".join(filter(None, (evidence, explained(unit.diagnosis))))
                self.intent.say(Mark.SUSPENDED, unit.id, on=True, why=told, way=unit.way)
                self._suspend(unit, decision, told)
                self.events.note(self.clock, EventKind.SUSPENDED, unit.id, cause.value, told)
            case Wait(why=Why.SUSPENDED):
                self._suspend(unit, decision, self.intent.why(Mark.SUSPENDED, unit.id))

    def _suspend(self, unit: Unit, decision: Suspend | Wait, told: str) -> None:
        if not isinstance(unit.state, Suspended):
            unit.suspend(Sign(decision.cause, decision.evidence), f"suspended, {told}")

    def restart(self, backend_id: str, why: str = "") -> None:
        """Have a restart due that an operator ordered; it clears a suspension, and needs no lease.

        Raises:
            KeyError: the backend is not supervised.
        """
        unit = self.units[backend_id]
        self.intent.say(Mark.SUSPENDED, backend_id, on=False)
        told = f"ordered by an operator: {why}" if why else "ordered by an operator"
        unit.order(Sign(Cause.OPERATOR, told))

    def clear(self, backend_id: str) -> None:
        """Forget the failures of a backend, so that it is no longer suspended, in no replica."""
        self.intent.say(Mark.SUSPENDED, backend_id, on=False)
        self._clear(backend_id)

    def put_back(self, backend_id: str) -> None:
        """Put a backend back into service: clear it, and trust it whatever speaks against it."""
        self.clear(backend_id)
        if (unit := self.units.get(backend_id)) is not None:
            unit.trust()

    def _clear(self, backend_id: str) -> None:
        self.history = self.history.clear(backend_id)
        if (unit := self.units.get(backend_id)) is not None:
            unit.clear()

    def _came_to(self, setback: Setback, order: Restart) -> None:
        self.history = self.history.came_to(setback, order)

    # --- the end ------------------------------------------------------------------------------------

    async def hand_over(self, heir: Process) -> None:
        """Leave all that runs to another gateway, which supervises from now on. Call it after `run`."""
        self.in_charge, self.fleet.follows = False, True
        await self.fleet.hand_over(heir)
        await self._leases.release()

    async def close(self) -> None:
        """Stop once what has `on_exit: stop`, unless another gateway is in charge. Call it after `run`."""
        if self._closed:
            return
        self._closed = True
        if self.in_charge and self._restored:
            await self.intent.close()
        await self.fleet.close(stop=self.in_charge)
        await self._leases.release()
