"""The supervisor: looks at every supervised backend, asks the policy, and has its decisions done.

    each second:  look (launcher, log) -> examine what ended -> facts -> remedy.decide -> act
                                            |                                        |
                                      diagnosis -> cure -> overrides          restart, suspend, wait

One task for each restart and each start that is watched; everything it knows of a backend is in its
`Charge`. Decisions are pure (`control.remedy`); what is done step by step is in `control.bringup`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Final

from gateway.config.models import Config
from gateway.config.supervision import LaunchConfig, RestartConfig
from gateway.core.aio import Clock, guarded, periodic
from gateway.core.events import Event, EventKind, Events
from gateway.core.types import Phase, RequestRecord
from gateway.heal.autopsy import Autopsy, explained
from gateway.heal.backoff import Policy, policy_of, replaced
from gateway.heal.bringup import Bringup
from gateway.heal.charge import Charge, Timing, facts_of
from gateway.heal.deathwatch import DeathWatch
from gateway.heal.fleet import LOOKED_FOR, Fleet, Maker, launcher_of
from gateway.heal.gputurns import GpuTurns
from gateway.heal.healing import Decision, Facts, Moment, Restart, Suspend, Wait
from gateway.heal.leases import Leases
from gateway.heal.lookout import Lookout, runs
from gateway.heal.marks import Mark, Marks
from gateway.heal.overrides import Overrides
from gateway.heal.remedy import History, clear, decide, operated, settled, suspended, withdrawn
from gateway.heal.usual import UsualTimes
from gateway.launch.launcher import Incarnation
from gateway.launch.process import ProcessLauncher
from gateway.pools.health import Order, Tending
from gateway.pools.store import SharedStore, StoreUnavailable
from gateway.pools.table import Backend, PoolTable

log = logging.getLogger("gateway.supervisor")

_LOOKS_S: Final = 1.0  # that a turn waits for the launchers' answers


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
        self.events = Events()
        self.marks = Marks(store)
        self.overrides = Overrides(config.state)
        self.history = History()
        self._config = config
        self._timing = timing
        gpus = GpuTurns()
        self.fleet = Fleet(table, clock, self.events, gpus, make_launcher)
        usual = UsualTimes(config.state)
        autopsy = Autopsy(table, clock, self.overrides, self.events)
        self._bringup = Bringup(
            table, clock, self.overrides, usual, self.events, gpus, autopsy, timing
        )
        self._lookout = Lookout(table, clock, autopsy, timing)
        self._deathwatch = DeathWatch(table, self._lookout, timing)
        self._deathwatched: dict[str, Incarnation | None] = {}
        self._group: asyncio.TaskGroup | None = None
        self._closed = False
        self._leases = Leases(store, clock)
        self._looks: dict[str, asyncio.Task[None]] = {}
        self._canaries: dict[str, asyncio.Task[None]] = {}
        self.fleet.apply(config)

    @property
    def charges(self) -> Mapping[str, Charge]:
        """The backends under supervision, by their ids."""
        return self.fleet.charges

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

        Where another way to start a server is configured, what is known of the old one's failures
        is forgotten: a suspension, and what remedies changed.
        """
        before = {each.id: _ways(each) for each in self.charges.values()}
        self._config = config
        self.fleet.apply(config)
        for charge in self.charges.values():
            if before.get(charge.id, _ways(charge)) != _ways(charge):
                self.clear(charge.id)
                self.history = replaced(self.history, charge.id)
        self._drop_overrides()

    def _drop_overrides(self) -> None:
        for backend_id, gone in self.overrides.follow(self._config).items():
            told = f"{gone.told()} was removed together with the `launch` settings that needed it"
            event = Event(self.clock.wall(), EventKind.REMEDY, backend_id, "dropped", told)
            self.events.tell(event)

    def ended(self, settled: Sequence[RequestRecord]) -> None:
        """Take in requests that ended, as `observe.ledger` posts them."""
        self._lookout.ended(self.charges, settled)

    # --- the turn -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Supervise until cancelled.

        Cancel: restarts under way are left where they are, and nothing is stopped; see `close`.
        """
        self._drop_overrides()  # the configuration may have changed while no gateway ran
        async with asyncio.TaskGroup() as group:
            self._group = group
            turn = partial(self.turn, group)
            await periodic(turn, every_s=self._timing.every_s, name="supervisor", jitter_ratio=0.0)

    async def turn(self, group: asyncio.TaskGroup) -> None:
        """Look at everything once, and begin what is to be done."""
        await self._look(group)
        now = self.clock.now()
        for charge in self.charges.values():
            self._lookout.judge(charge, self._peers(charge), now)
            self._watch(charge, group, now)
        moment = await self._moment()
        self._agree()
        # No await from here on: what an operator orders meanwhile must not be lost.
        facts = [self._facts(backend, moment.now) for backend in self.table]
        self.history, decisions = decide(facts, self.history, self._policies(), moment)
        decided: Mapping[str, Decision] = {each.backend_id: each for each in decisions}
        for charge in self.charges.values():
            self._act(charge, decided.get(charge.id), group)
        await self.marks.tell()

    def _facts(self, backend: Backend, now: float) -> Facts:
        return facts_of(backend, now, self.charges.get(backend.id))

    def _policies(self) -> dict[str, Policy]:
        return {name: policy_of(pool.supervision) for name, pool in self._config.pools.items()}

    async def _moment(self) -> Moment:
        local = time.localtime(self.clock.wall())
        leads = await self._leases.keep({each.backend.pool for each in self.charges.values()})
        minute = local.tm_hour * 60 + local.tm_min
        return Moment(self.clock.now(), leads, minute, self._leases.holds)

    def _watch(self, charge: Charge, group: asyncio.TaskGroup, now: float) -> None:
        """Begin to watch a start that nobody here ordered; ask an idle engine for a token."""
        seen = charge.seen
        looked = seen is not None or charge.trouble  # the first look may stop a server, which lasts
        if charge.backend.health.tended is LOOKED_FOR and looked and not (seen and seen.running):
            self.table.tend(charge.id, None)
        if charge.busy or seen is None or not seen.running or charge.starting:
            return
        if charge.restarting:
            return  # it waits for the server that had its name
        if seen.incarnation is None or seen.incarnation != charge.verified:
            if charge.verified is None or seen.incarnation is not None:
                charge.starting = True
                bring_up = self._bringup.bring_up(charge, seen.incarnation)
                charge.work = _begin(group, bring_up, f"start of {charge.id}")
            return
        if charge.backend.phase is Phase.READY:
            charge.adapters = charge.known_adapters()
        if self._deathwatched.get(charge.id) != seen.incarnation:
            self._deathwatched[charge.id] = seen.incarnation
            if isinstance(charge.launcher, ProcessLauncher):
                keep = self._deathwatch.keep(charge, charge.launcher)
                _begin(group, keep, f"deathwatch {charge.id}")
        asked = self._canaries.get(charge.id)
        if (asked is None or asked.done()) and self._lookout.canary_due(charge, now):
            prove = self._lookout.prove(charge)
            self._canaries[charge.id] = _begin(group, prove, f"canary {charge.id}")

    async def _look(self, group: asyncio.TaskGroup) -> None:
        """Look at all; a launcher that does not answer in time delays no other's turn."""
        begun: list[asyncio.Task[None]] = []
        for charge in self.charges.values():
            last = self._looks.get(charge.id)
            if last is None or last.done():
                look = self._lookout.look(charge)
                self._looks[charge.id] = task = _begin(group, look, f"look {charge.id}")
                begun.append(task)
        if begun:
            await asyncio.wait(begun, timeout=_LOOKS_S)

    def _peers(self, charge: Charge) -> list[Charge]:
        pool = charge.backend.pool
        return [
            each
            for each in self.charges.values()
            if each is not charge and each.backend.pool == pool
        ]

    def _agree(self) -> None:
        """Do as other replicas say: leave alone what they suspended, drain what is drained there."""
        here = {(Mark.SUSPENDED, each.id) for each in self.charges.values() if each.suspended}
        for backend in self.table:
            if backend.health.held is Phase.DRAINING:
                here.add((Mark.DRAINED, backend.id))
        ids = {Mark.SUSPENDED: self.charges.keys(), Mark.DRAINED: self.table.ids()}
        for mark, backend_id, on in self.marks.changes(self._leases.holds, here, ids):
            kind, word = EventKind.OPERATOR, "drain" if on else "undrain"
            if mark is Mark.DRAINED:
                self.table.order(backend_id, Order.DRAIN if on else Order.RESUME)
            elif on:
                kind, word = EventKind.SUSPENDED, "suspended"
                self._suspended_elsewhere(self.charges[backend_id])
            else:
                self._clear(backend_id)
            told = f"{word}: ordered by another replica; see its events"
            self.events.tell(Event(self.clock.wall(), kind, backend_id, word, told))

    def _suspended_elsewhere(self, charge: Charge) -> None:
        self.history = suspended(self.history, charge.id)
        charge.suspended = True
        told = ": ".join(filter(None, ("suspended by another replica", explained(charge))))
        self._tend_down(charge, "suspended", told)

    # --- acting -------------------------------------------------------------------------------------

    def _act(self, charge: Charge, decision: Decision | None, group: asyncio.TaskGroup) -> None:
        match decision:
            case Restart():
                self.begin(charge, decision, group)
            case Suspend(cause=cause, evidence=evidence):
                charge.decision, charge.suspended = decision, True
                self.marks.say(Mark.SUSPENDED, charge.id, on=True)
                told = ": ".join(filter(None, (evidence, explained(charge))))
                self._tend_down(charge, "suspended", f"suspended, {told}")
                self._tell(charge, EventKind.SUSPENDED, cause.value, told)
            case Wait() | None:
                charge.decision = decision

    def restart(self, backend_id: str, why: str = "") -> None:
        """Begin a restart that an operator ordered; it clears a suspension, and needs no lease.

        Raises:
            KeyError: the backend is not supervised.
        """
        charge = self.charges[backend_id]
        incarnation = charge.seen.incarnation if charge.seen is not None else None
        now = self.clock.now()
        who = f"an operator: {why}" if why else "an operator"
        self.marks.say(Mark.SUSPENDED, backend_id, on=False)
        self.history, order = operated(self.history, backend_id, incarnation, now, who)
        assert self._group is not None, "orders come once it runs"
        self.begin(charge, order, self._group)

    def clear(self, backend_id: str) -> None:
        """Forget the failures of a backend, so that it is no longer suspended, in no replica."""
        self.marks.say(Mark.SUSPENDED, backend_id, on=False)
        self._clear(backend_id)

    def _clear(self, backend_id: str) -> None:
        self.history = clear(self.history, backend_id)
        charge = self.charges.get(backend_id)
        if charge is not None and charge.suspended:
            charge.suspended, charge.decision = False, None
            if charge.seen is not None and charge.seen.running and not charge.busy:
                charge.starting, charge.verified = False, None  # it is tried, and serves if it can

    def begin(self, charge: Charge, order: Restart, group: asyncio.TaskGroup) -> None:
        """Begin a restart that was decided on."""
        charge.suspended, charge.decision = False, None
        again = charge.ran and order.incarnation is not None
        kind, charge.ran = EventKind.RESTART if again else EventKind.LAUNCH, True
        self._tell(charge, kind, order.cause.value, order.evidence)
        before = charge.work
        if before is not None:
            before.cancel()
        charge.restarting = True
        work = self._claimed_restart(charge, order, before)
        charge.work = _begin(group, work, f"restart {charge.id}")

    async def _claimed_restart(
        self, charge: Charge, order: Restart, before: asyncio.Task[None] | None
    ) -> None:
        """Restart, unless another replica did: at most once for each incarnation.

        `before` is what was being done with it, and is cancelled: it writes to the charge until it ends.
        """
        if before is not None:
            await asyncio.wait([before])
        charge.restarting = True
        try:
            claimed = await self.store.claim_restart(charge.id, order.incarnation, order.attempt)
        except StoreUnavailable:
            charge.restarting, charge.trouble = False, "the shared store does not respond"
            self.history = withdrawn(self.history, order)
            return
        if not (claimed and await self._bringup.restart(charge, order)):
            charge.restarting = False
            self.history = settled(self.history, charge.id)

    def _tend_down(self, charge: Charge, reason: str, detail: str) -> None:
        left = runs(charge)
        if left is not None:
            keeps = f"Its server still runs ({left}) and keeps its port and memory"
            detail = f"{detail.rstrip('.')}. {keeps}; `vllm-gateway restart` stops it"
        self.table.tend(charge.id, Tending(Phase.DOWN, reason, detail))

    def _tell(self, charge: Charge, kind: EventKind, label: str, detail: str) -> None:
        self.events.tell(Event(self.clock.wall(), kind, charge.id, label, detail))

    # --- the end ------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Stop, once, what was launched with `on_exit: stop`; the rest runs on. Call it after `run`."""
        if self._closed:
            return
        self._closed = True
        await self.fleet.close()
        await self._leases.release()


def _ways(charge: Charge) -> tuple[LaunchConfig | None, RestartConfig | None]:
    return charge.config.launch, charge.config.restart


def _begin(
    group: asyncio.TaskGroup, work: Coroutine[Any, Any, object], name: str
) -> asyncio.Task[None]:
    return group.create_task(guarded(work, name=name), name=name)
