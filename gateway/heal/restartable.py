"""`Restartable`: how a supervised backend is drained, stopped and started anew.

    _drain      what it carries finishes        _replace  claim, stop, start

An order that cannot be carried out leaves it as it was.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from gateway.core.events import EventKind
from gateway.heal.decisions import Cause, Setback, Sign, setback_of
from gateway.heal.emptied import emptied
from gateway.heal.states import Draining, Failed, Replacing, Serving, Starting, Suspect, lives
from gateway.heal.supervised import Supervised
from gateway.launch.launcher import LaunchError, Obstacle, Runs, Superseded
from gateway.observe.redact import redact
from gateway.store.shared import StoreUnavailable
from gateway.vllmlog.diagnosis import Kind

_CLAIMED: Final = "another gateway began this restart, or this one in an earlier life"


class Restartable(Supervised):
    """One supervised backend, and how it is restarted. See the module."""

    async def _drain(self, state: Draining) -> None:
        for each in self.carriers:
            patience_s = state.until - self._now()
            await emptied(each, self._shared.table, self._shared.clock, patience_s)
        automatic = self.carried_out is None
        if automatic and (why := await self._called_off()):
            self._tell(EventKind.OPERATOR, "called_off", f"its restart was called off: {why}")
            self._give_up(state, Setback.GIVEN_UP, stays_ordered=False)
        else:
            self._to(self._replacing(state.order, state.before))

    async def _called_off(self) -> str:
        """Return what an operator did meanwhile that keeps others from restarting it; empty: nothing."""
        self.observed.look_no_more()  # what it will see may be of before the drain
        seen = await self.observed.see(self.pool.supervision.max_memory)
        if seen is not None and seen.state is Runs.ABSENT and not self.launcher.launches:
            return seen.detail or "nothing of it runs any more"
        if self.backend.health.held is not None:
            return "an operator drained it"
        return "an operator holds restarts" if self._shared.on_hold(self.backend.pool) else ""

    async def _replace(self, state: Replacing) -> None:
        """Claim the restart; have the launcher stop what runs, and start anew."""
        order, of, shared = state.order, state.order.incarnation, self._shared
        claim = shared.names.of(self.backend), of, order.attempt
        try:
            claimed = state.claimed or await shared.store.claim_restart(*claim)
        except StoreUnavailable as error:
            self.observed.trouble = f"the shared store does not answer: {error}"
            self._give_up(state, Setback.GIVEN_UP, stays_ordered=True)
            return
        if not claimed:
            self._tell(EventKind.LAUNCH_FAILED, order.cause.value, _CLAIMED)
            self._give_up(state, Setback.ANOTHERS, stays_ordered=True)
            return
        self._to(replace(state, claimed=True))
        served_s = 0.0
        if isinstance(state.before, Serving):  # its last model list is whole, and of what goes
            self.adapters = shared.held.see(self.backend, self.config)
            served_s = self._now() - state.before.since
        self.diagnosis, self.observed.trouble = None, ""  # of the server that goes
        self.observed.look_no_more()  # what it will see is of the server that goes, too
        begun = shared.overrides.starting(self.id, self.config.launch, served_s)
        grace_s, launch = self.pool.supervision.stop_grace, self.config.launch
        try:
            made = await self.launcher.restart(of, grace_s=grace_s, changes=begun.changes)
        except LaunchError as error:
            await self._not_launched(state, error)
            return
        self.launched = made
        shared.overrides.began(self.id, begun)
        self.signs, self.runs_with = {}, launch  # its settings may have changed meanwhile
        self.observed.begins(made)
        self.observed.watch = watch = self._new_watch(now := self._now())
        self._to(Starting(now, made, before=of, ours=True, told=watch.told(now), fresh=True))

    async def _not_launched(self, state: Replacing, error: LaunchError) -> None:
        """Tell what the launcher could not do, without secrets. A server that lives stays; the restart stays due."""
        label = Kind.PORT if error.obstacle is Obstacle.PORT else state.order.cause
        self._tell(EventKind.LAUNCH_FAILED, label.value, said := redact(str(error)))
        setback, seen = setback_of(error), await self.observed.see(self.pool.supervision.max_memory)
        hopeless = error.obstacle is Obstacle.CANNOT_HELP
        another = isinstance(error, Superseded)
        if not another:  # it is no trouble of the one that runs now
            self.observed.trouble = said
        if another or (lives(state.before) if seen is None else not seen.gone):
            done = hopeless or (another and state.order.incarnation is not None)
            self._give_up(state, setback, stays_ordered=not done)
            return
        self._shared.came_to(setback, state.order)
        why = f"it could not be started: {said}"
        ended = state.incarnation if seen is None else seen.incarnation
        if not hopeless:
            self._stays_ordered(state.order.attempt, elsewhere=False)
        failed = Failed(self._now(), ended, sign=Sign(Cause.START_FAILED, why), told=why, owed=True)
        self._to(replace(failed, hopeless=hopeless))

    def _give_up(
        self, state: Draining | Replacing, setback: Setback, *, stays_ordered: bool
    ) -> None:
        """Be again what it was; evidence has to be found anew."""
        if stays_ordered:
            self._stays_ordered(state.order.attempt, elsewhere=setback is Setback.ANOTHERS)
        self._shared.came_to(setback, state.order)
        before = state.before
        self._to(replace(before, failures=0) if isinstance(before, Suspect) else before)
