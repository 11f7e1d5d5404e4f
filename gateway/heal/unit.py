"""`Unit`: one supervised backend. It alone writes its state, in one task, once for each look.

A unit compares what is wanted with what is seen, again at each look: so what is due stays due,
whatever failed meanwhile. The steps are in the order of a restart, from the first sign on:

    _serve      evidence: Suspect               _doubt    two test requests failed: that is proof
    begin       the policy permits a restart    _drain    planned: what it carries finishes
    _replace    claim, stop, start              _start    until it answers, ends, or hangs
    _prove      a token, adapters, warm-up      then it serves

`_drain` and `_replace` are in `heal.restartable`. What ended is Failed, and examined before anything is done about it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Final

from gateway.config.units import format_duration
from gateway.core.aio import guarded
from gateway.core.events import EventKind
from gateway.core.types import Phase
from gateway.heal.autopsy import NOT_EXAMINED, Finding
from gateway.heal.decisions import Cause, Sign
from gateway.heal.restartable import Restartable
from gateway.heal.sight import after_look, doubt
from gateway.heal.statefile import digest
from gateway.heal.states import (
    FAILED_TESTS,
    Absent,
    Draining,
    Failed,
    Proving,
    Replacing,
    Serving,
    Starting,
    Suspect,
    Suspended,
)
from gateway.pools.unanswered import in_words

_POLL_S: Final = 0.1
_TEST_EVERY_S: Final = 30.0  # of one that is suspended and lives
_FOUND_S: Final = 5.0  # one that was found running answers by then, or it is starting


class Unit(Restartable):
    """One supervised backend, and what it does in each state. See the module."""

    @property
    def way(self) -> str:
        """A digest of how its server is started and restarted; a setting that a later version adds changes nothing."""
        launch, restart = self.config.launch, self.config.restart
        started = None if launch is None else launch.started_with
        others = None if restart is None else restart.model_dump(mode="json", exclude_defaults=True)
        return digest((started, others))

    async def _turn(self) -> None:
        if not isinstance(self.state, Draining | Replacing):
            await self._look()
        match self.state:  # where it is Absent, the policy says when it is started
            case Serving() as state:
                await self._serve(state)
            case Suspect() as state:
                await self._doubt(state)
            case Draining() as state:
                await self._drain(state)
            case Replacing() as state:
                await self._replace(state)
            case Starting() as state:
                await self._start(state)
            case Proving() as state:
                await self._prove(state)
            case Failed() as state:
                await self._examine(state)
            case Suspended() as state:
                await self._try_suspended(state)

    async def _look(self) -> None:
        """See what runs, go over to the state that follows from it, and tell what no step tells.

        A look that takes long goes on beside the steps, which use what is known until it is over.
        """
        most, every_s = self.pool.supervision.max_memory, self._timing.every_s
        seen, before = await self.observed.see(most, every_s), self.state
        if seen is None:
            return
        after = after_look(before, seen, self._now(), launches=self.launcher.launches)
        if isinstance(after, Starting) and not isinstance(before, Starting):
            self.observed.watch = self._new_watch(self._now())
        if isinstance(before, Starting) and before.ours and before.incarnation is None:
            self.launched = after.incarnation  # its launcher could not tell yet
        if after is not before:
            self._to(self._expected(after))
        lived = isinstance(before, Proving | Serving | Suspect)
        if lived and isinstance(after, Starting):
            how = after.pending or "another process runs in its place, which we did not start"
            self._tell(EventKind.EXITED, "replaced", how)
        elif lived and isinstance(after, Absent):
            self._tell(EventKind.EXITED, "absent", seen.detail or "nothing of it runs any more")

    # --- it serves, until there is evidence -------------------------------------------------------

    async def _serve(self, state: Serving) -> None:
        """Suspect what its probes or its progress have against it; test it when nothing moves for long."""
        if self.backend.phase is Phase.READY:
            self.adapters = self._shared.held.see(self.backend, self.config)
        found = doubt(self.backend)
        if found is not None:
            now, of, why = self._now(), state.incarnation, found.reason
            self._to(Suspect(now, of, sign=found.sign, proof_at=now + found.proof_s, why_down=why))
        elif still_s := self.observed.still_s(self.pool.supervision.canary):
            failed = await self.observed.test()
            if failed and self.state is state:
                sign = Sign(Cause.FROZEN, f"no progress for {still_s:.0f} s")
                self._to(Suspect(self._now(), state.incarnation, sign=sign))
                self._fail_test(failed)

    # --- it is suspect, until it gives a token, or two test requests in a row fail ----------------

    async def _doubt(self, state: Suspect) -> None:
        """Test it again: at once after a sign of life, which resets the count. A token ends the suspicion."""
        if self.revives:
            self._to(state := replace(state, failures=0))
        elif self._now() < state.test_at:
            return
        failed = await self.observed.test()
        if failed is None or self.state is not state:
            return
        now = self._now()
        if failed:
            self._fail_test(failed)
        elif not state.proved:
            self._to(Proving(now, state.incarnation))
        elif self.backend.health.up:
            self._to(Serving(now, state.incarnation))
        else:
            self._to(replace(state, failures=0, test_at=now + self._timing.every_s))

    def _fail_test(self, failed: str) -> None:
        assert isinstance(self.state, Suspect)
        times = self._now(), self._timing.last_words_s, self._timing.every_s
        up = self.backend.health.up
        self._to(self.state.after_failure(failed, *times, alone=self.alone, answers=up))

    # --- it starts, and proves itself -------------------------------------------------------------

    async def _start(self, state: Starting) -> None:
        """Wait until it answers; one that hangs is examined. Pending, it waits for its service manager."""
        now, health = self._now(), self.backend.health
        watch = self.observed.watch = self.observed.watch or self._new_watch(now)
        if state.pending:
            watch.put_off(now)
        elif health.up and state.incarnation is not None:
            self._answers(state)
            return
        elif (hung := watch.hung(now)) is not None:
            told = await self._examine_hang(watch.stage.name.lower(), hung)
            sign = Sign(Cause.START_HUNG, hung)
            of, owed, now = state.incarnation, state.incarnation is None, self._now()
            self._to(Failed(now, of, sign=sign, lives=not owed, told=told, owed=owed))
            return
        owes = state.owes or now - state.since >= _FOUND_S
        told, ready_at = watch.told(now), watch.ready_at(now)
        if state.pending:
            told = f"pending for {format_duration(round(now - state.pending_at))}: {state.pending}"
        self._to(replace(state, told=told, owes=owes, fresh=False, ready_at=ready_at))
        until = now + self._timing.every_s
        is_known = not state.pending and state.incarnation is not None  # else only a look leads on
        while not (is_known and health.up) and self._now() < until:
            await asyncio.sleep(min(_POLL_S, self._timing.every_s))
            health = self.backend.health

    def _answers(self, state: Starting) -> None:
        """One that we started owes a token; one that was found running, and answers, serves."""
        now, of, ready_at = self._now(), state.incarnation, state.ready_at
        if state.owes:
            self._to(Proving(now, of, before=state.before, ours=state.ours, ready_at=ready_at))
        else:
            self._tell(EventKind.STARTED, "found", "it was found running, and serves")
            self._to(Serving(now, of))

    async def _prove(self, state: Proving) -> None:
        """Ask for one token, twice, for the first may find a cold engine; then prepare it, and it serves."""
        for _ in range(FAILED_TESTS):
            if not (failed := await self.observed.test(self._timing.first_token_s)):
                break
        if failed is None:
            return
        if failed:
            told = in_words(failed)
            why = f"/health responds, but its engine did not compute one token ({told})"
            await self._unproven(state, why)
            return
        if why := await self._prepare.load_adapters(self.pool, self.adapters, self._say):
            await self._unproven(state, why)
            return
        await self._prepare.warm_up()
        now, watch, overrides = self._now(), self.observed.watch, self._shared.overrides
        began_at = self.observed.since or state.since
        if (gone := overrides.served(self.id, self.config.launch)) is not None:
            what = f"it serves without {gone.told()}, so that was dropped"
            self._tell(EventKind.REMEDY, "dropped", what)
        if watch is not None and state.ours:
            self._shared.usual.learn(self.id, self.config, self._changes(), watch.ended(now))
        self.observed.worked_at = now
        self._tell(EventKind.STARTED, "started", f"serves {now - began_at:.0f} s after its start")
        self._to(Serving(now, state.incarnation))

    def _say(self, told: str) -> None:
        if isinstance(self.state, Proving):
            self._to(replace(self.state, told=told))

    async def _unproven(self, state: Proving, why: str) -> None:
        """Suspect what answers and gives no token, unless it ends now: then its end tells more."""
        until = self._now() + self._timing.last_words_s
        while self._now() < until:
            await self._look()
            if not isinstance(self.state, Proving):
                return
            await asyncio.sleep(min(_POLL_S, self._timing.every_s))
        await self._examine_hang("proving", why)
        sign = Sign(Cause.START_HUNG, why)
        suspect = Suspect(self._now(), state.incarnation, sign=sign, out=True, proved=False)
        self._to(replace(suspect, failures=FAILED_TESTS, why_down="start_failed"))

    # --- it failed --------------------------------------------------------------------------------

    async def _examine(self, state: Failed) -> None:
        """Find out why it ended, and apply what policy allows. One that hung, and goes on after all, is left alone."""
        seen, starting = self.observed.seen, state.sign.cause is Cause.START_FAILED
        if state.examined or seen is None:
            now, watch = self._now(), self.observed.watch
            if state.lives and self.backend.health.up:
                self._to(Proving(now, state.incarnation))
            elif state.lives and watch is not None and watch.hung(now) is None:
                self._to(Starting(now, state.incarnation, ours=self.ours))
            return
        autopsy = self._shared.autopsy
        found = await self._beside(autopsy.of_end(self.id, self.launcher, seen, starting=starting))
        self.diagnosis = found.diagnosis
        cured = starting and autopsy.remedy(self.id, self.pool, self.config, found)
        hopeless = starting and found.hopeless and not cured
        examined = replace(state, examined=True, told=found.told, hopeless=hopeless)
        self._to(replace(examined, ready_at=None) if hopeless else examined)

    async def _examine_hang(self, stage: str, why: str) -> str:
        """Find out why a start hangs whose process lives, and apply what policy allows; return it for people."""
        autopsy = self._shared.autopsy
        found = await self._beside(autopsy.of_hang(self.id, self.launcher, stage, why))
        self.diagnosis = found.diagnosis
        autopsy.remedy(self.id, self.pool, self.config, found)
        return found.told

    async def _beside(self, examined: Coroutine[None, None, Finding]) -> Finding:
        """Wait for an autopsy, which goes on and tells its event also when an order ends the wait."""
        assert self._group is not None
        name = f"autopsy of {self.id}"
        task = self._group.create_task(guarded(examined, name=name), name=name)
        await asyncio.wait([task])
        return task.result() or NOT_EXAMINED

    # --- it is suspended --------------------------------------------------------------------------

    async def _try_suspended(self, state: Suspended) -> None:
        now = self._now()
        if not state.lives or not self.backend.health.up or now < state.test_at:
            return
        failed, now = await self.observed.test(), self._now()
        if self.state is state:
            waits = replace(state, test_at=now + _TEST_EVERY_S)
            self._to(Proving(now, state.incarnation) if failed == "" else waits)
