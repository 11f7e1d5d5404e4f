"""`Supervised`: one backend's state, its one task, and what others order or hold against it.

What it does by itself in each state, step by step, is in `heal.unit`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from gateway.config.models import BackendConfig, PoolConfig
from gateway.core.aio import periodic
from gateway.core.events import EventKind
from gateway.core.types import SERVING
from gateway.heal.decisions import CHANGED, Cause, Restart, Sign, Suspend, Wait
from gateway.heal.elsewhere import left_alone
from gateway.heal.observed import Observed
from gateway.heal.preparation import Preparation
from gateway.heal.shared import Shared
from gateway.heal.startup import StartWatch
from gateway.heal.states import (
    FAILED_TESTS,
    Absent,
    Draining,
    Failed,
    Proving,
    Replacing,
    Serving,
    Starting,
    State,
    Suspect,
    Suspended,
    calls_for,
    checked,
    in_service,
    lives,
    restarting,
    tending,
    under_way,
)
from gateway.heal.vital import VitalProcesses
from gateway.launch.launcher import Changes, Incarnation, Launcher
from gateway.pools.table import Backend
from gateway.vllmlog.diagnosis import Diagnosis
from gateway.watch.fetch import Pages


class Supervised:
    """One supervised backend. Others read its attributes.

    They write `suspended`, as the operators' intent says, and what a reload changes (`heal.fleet`).
    """

    def __init__(
        self,
        backend: Backend,
        pool: PoolConfig,
        config: BackendConfig,
        launcher: Launcher,
        shared: Shared,
        state: Absent,  # as it is before the first look
    ) -> None:
        self.backend, self.pool, self.config, self.launcher = backend, pool, config, launcher
        self.carriers = [backend]  # of its requests: those before a reload, too
        self.pages = Pages(backend)
        self.state: State = state
        self.observed = Observed(backend, self.pages, launcher, shared.clock, shared.timing)
        self.signs: dict[Cause, Sign] = {}  # what the judges have against one that serves
        self.runs_with = config.launch  # what it was started with, as far as is known
        self.diagnosis: Diagnosis | None = None  # of its end or hang, until it starts again
        self.adapters = shared.held.of(backend.id, config)  # name to path, while it served
        self.bad_at: float | None = None  # when it last ceased to serve, by itself
        self.launched: Incarnation | None = None  # the one that we launched last
        self.ordered: Sign | None = None  # an operator's restart that has not begun
        self.carried_out: Sign | None = None  # the one that was begun last
        self.order_at = 0.0  # not before: it could not be carried out just now
        self.order_elsewhere = False  # another gateway may carry it out until then
        self.suspended = False  # an operator has to clear it before it is restarted again
        self.decision: Wait | Suspend | None = None  # why nothing is done about what ails it
        self.after: tuple[asyncio.Task[None], ...] = ()  # the ends of servers in its way
        self.tasks: list[asyncio.Task[None]] = []
        self._shared, self._timing = shared, shared.timing
        self._prepare = Preparation(backend, self.pages, shared.table, shared.clock, shared.events)
        self._vital = VitalProcesses(self.id, self._lost)
        self._group: asyncio.TaskGroup | None = None
        self._to(self.state)

    @property
    def id(self) -> str:
        """The backend's id, `pool/name`."""
        return self.backend.id

    @property
    def under_way(self) -> bool:
        """Whether a restart or a start of it goes on, or is ordered."""
        return self.ordered is not None or under_way(self.state)

    @property
    def ours(self) -> bool:
        """Whether we launched what runs, or ran last."""
        state = self.state
        if isinstance(state, Starting) and state.ours:
            return True
        return self.launched is not None and self.launched == state.incarnation

    @property
    def alone(self) -> bool:
        """Whether no other backend of its pool serves."""
        every = self._shared.table.backends(self.backend.pool)
        return not any(each.phase in SERVING for each in every if each is not self.backend)

    @property
    def revives(self) -> bool:
        """Whether it is suspect, and gave a sign of life since: it is tested again before anything else."""
        state, up = self.state, self.backend.health.up
        return isinstance(state, Suspect) and state.revives(self.observed.moved_at, answers=up)

    @property
    def outdated(self) -> bool:
        """Whether it runs with other `launch` settings than those that are configured."""
        had, has = self.runs_with, self.config.launch
        changed = had is not None and has is not None and had.started_with != has.started_with
        return changed or self.observed.outdated

    def calls_for(self) -> Sign | None:
        """Return what calls for a restart of it now."""
        signs = {CHANGED.cause: CHANGED, **self.signs} if self.outdated else self.signs
        return None if self.revives else calls_for(self.state, signs, self._now())

    # --- its life ---------------------------------------------------------------------------------

    def live(self, group: asyncio.TaskGroup) -> None:
        """Begin to look, if it has not begun; what it does belongs to the group."""
        if self._group is None:
            self._group = group
            self._go_on()
            if isinstance(self.state, Serving):
                self._watch_processes(self.state.incarnation)

    def found(self, unproven: Incarnation | None) -> None:
        """Take it from another gateway as it is: until the first look its probes decide, if it is proven."""
        served = unproven is None
        self._to(Absent(self._now(), None, looked=False, served=served, unproven=unproven))

    def rest(self) -> None:
        """Do nothing more: the group it lived in has ended. `live` goes on from the state as it is."""
        self.observed.look_no_more()
        self._group = None

    def _go_on(self) -> None:
        """Go on from the state as it is now; what was being done ends first."""
        assert self._group is not None, "orders come once it lives"
        before, self.tasks = self.tasks, []
        for task in before:
            task.cancel()  # now: it must not take a step in the new state
        self.tasks.append(self._group.create_task(self._live(before), name=f"unit {self.id}"))

    def end(self) -> None:
        """Be no longer configured: nothing is looked at or done any more."""
        self.observed.look_no_more()
        self._vital.end()
        for task in self.tasks:
            task.cancel()

    async def _live(self, before: Sequence[asyncio.Task[None]]) -> None:
        while left := [each for each in (*before, *self.after) if not each.done()]:
            await asyncio.wait(left)
        await periodic(self._turn, every_s=self._pause_s, name=f"unit {self.id}", jitter_ratio=0.0)

    async def _turn(self) -> None:
        """Take the step that the state calls for."""
        raise NotImplementedError

    def _pause_s(self) -> float:
        """Return the time to the next turn: none before steps that wait by themselves."""
        waits = isinstance(self.state, Starting | Proving | Draining | Replacing)
        due = isinstance(self.state, Failed) and not self.state.examined
        return 0.0 if waits or due else self._timing.every_s

    # --- its state --------------------------------------------------------------------------------

    def _to(self, state: State) -> None:
        """Go over to a state: the only place that writes it."""
        before, self.state = self.state, checked(self.state, state)
        if self.order_elsewhere and state.incarnation != before.incarnation:
            self.ordered, self.order_elsewhere = None, False  # it did
        if isinstance(before, Serving) and isinstance(state, Suspect | Failed):
            self.bad_at = self._now()
            if self.backend.models:  # the last list of the server that goes
                self.adapters = self._shared.held.see(self.backend, self.config)
        if isinstance(state, Starting | Serving):
            self.diagnosis = None
        if isinstance(state, Serving):
            self.observed.watch = None
            if not isinstance(before, Replacing):  # else it could not be restarted
                self.observed.trouble = ""
            self._watch_processes(state.incarnation)
        self._tell_suspicion(before, state)
        shown = tending(state, launched=self.config.launch is not None) or left_alone(self.backend)
        if shown != self.backend.health.tended:
            self._shared.table.tend(self.id, shown)

    def _tell_suspicion(self, before: State, state: State) -> None:
        match before, state:
            case Suspect(), Suspect() if before.failures < FAILED_TESTS <= state.failures:
                self._tell(EventKind.SUSPECT, "proved", state.evidence)
            case Suspect(), Serving():
                self._tell(EventKind.SUSPECT, "cleared", "nothing speaks against it now")
            case ((Proving() | Serving()), Suspect(sign=sign)):
                self._tell(EventKind.SUSPECT, sign.cause.value, sign.evidence)

    def _watch_processes(self, of: Incarnation | None) -> None:
        if self._group is not None:
            self._vital.watch(self._group, self.launcher, of)

    def _lost(self, of: Incarnation | None, how: str) -> None:
        """Take it out in the moment in which a process ends that it cannot do without.

        One that lives on, and gives a token, serves again.
        """
        now, state = self._now(), self.state
        if isinstance(state, Serving) and state.incarnation == of:
            sign = Sign(Cause.ENGINE_DEAD, how)
            test_at = now + self._timing.last_words_s  # most end as a whole, and say why
            self._to(Suspect(now, of, sign=sign, out=True, test_at=test_at, why_down="exited"))

    # --- what others hold against it, or order ---------------------------------------------------

    def judge(self, peers: Sequence[Supervised]) -> None:
        """Have the judges say whether it is slow, fails or grows, beside its pool's other units."""
        theirs = [each.observed.judges for each in peers]
        slow_ratio = self.pool.supervision.slow_ratio
        ejection = self.backend.health.ejection
        found = self.observed.judges.found(theirs, slow_ratio, self._now(), ejection)
        if Cause.ERRORS in found and Cause.ERRORS not in self.signs:
            self.bad_at = self._now()
        self.signs = found

    def begin(self, order: Restart) -> None:
        """Begin a restart that the policy permits; one that goes on is begun anew."""
        now, before = self._now(), self.state
        if isinstance(before, Draining | Replacing):
            before = before.before
        self.carried_out, self.ordered, self.decision = self.ordered, None, None
        nothing_ran = isinstance(before, Absent) or order.incarnation is None
        kind = EventKind.LAUNCH if nothing_ran else EventKind.RESTART
        self._tell(kind, order.cause.value, order.evidence)
        if order.planned and in_service(self.state):
            until = now + self.pool.supervision.drain
            told = f"finishing its requests, then {restarting(order)}"
            draining = Draining(now, before.incarnation, order=order, before=before, until=until)
            self._to(replace(draining, told=told))
        else:
            self._to(self._replacing(order, before))
        self._go_on()

    def _replacing(self, order: Restart, before: State) -> Replacing:
        soon = self._soon()
        return Replacing(self._now(), before.incarnation, order=order, before=before, ready_at=soon)

    def _expected(self, after: State) -> State:
        """Say when one that served and ended will serve again: it is started at once, as a rule."""
        may = self.pool.supervision.automatic and not self.suspended
        match after:
            case Failed(sign=Sign(cause=Cause.EXITED)) if may:
                return replace(after, ready_at=self._soon())
            case _:
                return after

    def _soon(self) -> float | None:
        """Return when it serves, if it is started now; None: unknown."""
        now = self._now()
        return self._new_watch(now).ready_at(now)

    def order(self, sign: Sign) -> None:
        """Have an operator's restart due at once; it clears a suspension."""
        self.ordered, self.order_at, self.suspended = sign, 0.0, False
        self.order_elsewhere = False
        self.observed.forget_restarts()

    def waits(self, decision: Wait | Suspend | None) -> None:
        """Take note of why nothing is done about it, and of when it will serve if time alone ends that."""
        if self.decision is not None and decision is None and isinstance(self.state, Serving):
            self.observed.trouble = ""  # nothing calls for a restart any more, or one begins
        self.decision, state, ready_at = decision, self.state, None
        if not isinstance(state, Failed) or not state.examined:
            return
        if isinstance(decision, Wait) and decision.until is not None and not state.hopeless:
            ready_at = self._new_watch(decision.until).ready_at(decision.until)
        if ready_at != state.ready_at:
            self._to(replace(state, ready_at=ready_at))

    def _stays_ordered(self, attempt: int, *, elsewhere: bool) -> None:
        """Have an operator's order due again after a pause: it could not be carried out just now.

        `elsewhere`: another gateway claimed it. That one gets the time to stop the server, too; once another
        incarnation is seen, it has carried the order out.
        """
        if self.ordered is None and self.carried_out is not None:
            config, doublings = self.pool.supervision, min(attempt - 1, 64)
            pause_s = min(config.backoff * 2.0**doublings, config.max_backoff)
            pause_s += config.stop_grace if elsewhere else 0.0
            self.ordered, self.order_at = self.carried_out, self._now() + pause_s
            self.order_elsewhere = elsewhere

    def suspend(self, sign: Sign, told: str) -> None:
        """Leave it alone until an operator clears it; one that serves, or starts, serves all the same."""
        self.suspended = True
        if isinstance(self.state, Serving | Starting | Proving):
            return
        now, lived = self._now(), lives(self.state)
        suspended = Suspended(now, self.state.incarnation, sign=sign, lives=lived, told=told)
        self._to(suspended)

    def clear(self) -> None:
        """An operator says that the cause is gone: it is tried, or started anew, with other settings too."""
        self.suspended, self.observed.trouble = False, ""
        self.observed.forget_restarts()
        state, now = self.state, self._now()
        if isinstance(state, Suspended):
            self.decision, anew = None, self.outdated or not state.lives
            sign = Sign(state.sign.cause, "an operator ended its suspension")
            failed = Failed(now, state.incarnation, sign=sign, told=state.told)
            self._to(
                replace(failed, lives=state.lives) if anew else Starting(now, state.incarnation)
            )
            self.observed.watch = None if anew else self._new_watch(now)

    def trust(self) -> None:
        """An operator puts it back into service, whatever speaks against it."""
        if isinstance(self.state, Suspect):
            self.observed.worked_at = self._now()
            self._to(Serving(self._now(), self.state.incarnation))

    # --- small things -----------------------------------------------------------------------------

    def _now(self) -> float:
        return self._shared.clock.now()

    def _tell(self, kind: EventKind, label: str, detail: str) -> None:
        self._shared.events.note(self._shared.clock, kind, self.id, label, detail)

    def _new_watch(self, began_at: float) -> StartWatch:
        patience, launches = self.pool.supervision.patience, self.launcher.launches
        usual_s = self._shared.usual.of(self.id, self.config, self._changes())
        return StartWatch(patience, began_at, launches, usual_s)

    def _changes(self) -> Changes:
        return self._shared.overrides.of(self.id, self.config.launch).changes
