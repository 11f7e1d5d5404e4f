"""The rules of the policy, in their order: for one backend that calls for a restart, one decision.

`gateway.heal.policy` has the table, and says why it is so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gateway.core.types import Phase
from gateway.heal.decisions import Cause, Decision, Restart, Sign, Suspend, Wait, Why
from gateway.heal.members import ALL_GPUS, Case, Member, Starts, View
from gateway.heal.states import Failed

IDLE_S: Final = 300.0  # nobody comes to the last one that serves: nothing is lost

_HELD: Final = frozenset({Phase.CORDONED, Phase.DRAINING})


@dataclass(frozen=True, slots=True)
class Question:
    """What a rule is asked about: a backend that calls for a restart, in its pool, now."""

    case: Case
    view: View
    blind_until: float
    starts: Starts

    @property
    def member(self) -> Member:
        """The backend."""
        return self.case.member

    @property
    def cause(self) -> Cause:
        """What calls for its restart."""
        assert self.case.sign is not None
        return self.case.sign.cause

    @property
    def now(self) -> float:
        """The moment."""
        return self.view.circumstances.now

    @property
    def lives(self) -> bool:
        """Whether something of it runs."""
        return not self.member.ended

    @property
    def due_at(self) -> float:
        """When backoff allows its restart."""
        return self.case.record.due_at(self.view.policy, self.now)

    @property
    def held_until(self) -> float:
        """Until when its restarts are on hold."""
        holds = self.view.circumstances.holds
        scopes = (None, self.member.pool, self.case.id)
        return max(holds.get(scope, -math.inf) for scope in scopes)

    @property
    def opens_in_min(self) -> int:
        """In how many minutes scheduled restarts may begin."""
        return self.view.policy.opens_in(self.view.circumstances.minute)

    def busy(self) -> bool:
        """Whether it is full, which is no time for a planned restart."""
        planned = self.cause.planned and self.cause is not Cause.SLOW
        return self.lives and planned and self.member.saturated

    def restarted(self) -> bool:
        """Whether it survived its restart, or another replica sees to it."""
        tried = self.case.record.orders_for(self.member.incarnation)
        return self.lives and tried.times > 0 and not tried.again

    def used_up(self) -> str:
        """Return what did not help, so that no further restart will; empty while one may."""
        policy, record = self.view.policy, self.case.record
        restarts = record.restarts_since(self.now - policy.within_s)
        if self.cause is Cause.SCHEDULED:
            return ""
        if restarts >= policy.max_restarts:
            return f"{policy.max_restarts} restarts within {policy.within_s:.0f} s did not help"
        state = self.member.state
        if isinstance(state, Failed) and state.hopeless and record.in_a_row:
            return "it was started once more, and a restart cannot help"
        return ""

    def last(self) -> bool:
        """Whether it alone serves its pool, and may have work."""
        others = any(each.member.serving and each.id != self.case.id for each in self.view.cases)
        idle_since = self.case.record.idle_since
        idle = idle_since is not None and self.now - idle_since >= IDLE_S
        return self.member.serving and not others and not idle

    def gpu(self) -> bool:
        """Whether another start uses its GPUs."""
        return self.starts.in_the_way(self.member) is not None


# In this order; None stands for Suspend.
_RULES: Final[tuple[tuple[Why | None, Callable[[Question], object]], ...]] = (
    (Why.UNSEEN, lambda q: not q.member.visible),
    (Why.HELD, lambda q: q.member.held or q.member.phase in _HELD),
    (Why.BUSY, Question.busy),
    (Why.SUSPENDED, lambda q: q.member.suspended),
    (Why.MANUAL, lambda q: not q.view.policy.automatic),
    (Why.ON_HOLD, lambda q: q.now < q.held_until),
    (Why.FOLLOWER, lambda q: not q.view.leads),
    (Why.ORDERED, Question.restarted),
    (Why.SUSPECTED, lambda q: q.lives and q.now < q.blind_until),
    (Why.WINDOW, lambda q: q.cause is Cause.SCHEDULED and q.opens_in_min > 0),
    (None, Question.used_up),
    (Why.BACKOFF, lambda q: q.now < q.due_at),
    (Why.TURN, lambda q: q.lives and q.view.turn_taken),
    (Why.BUDGET, lambda q: q.member.serving and q.view.out >= q.view.allowed_out),
    (Why.LAST, Question.last),
    (Why.GPU, Question.gpu),
)
_OF_AN_ORDER: Final = _RULES[-1:]


def judged(question: Question) -> Decision | None:
    """Return what is decided about a backend; None where nothing calls for a decision."""
    case, member = question.case, question.member
    if member.ordered is not None:
        question = replace(question, case=replace(case, sign=member.ordered))
        return _first(question, member.ordered, _OF_AN_ORDER)
    if case.sign is None or member.under_way or member.state is None:
        return None
    return _first(question, case.sign, _RULES)


def _first(
    question: Question,
    sign: Sign,
    rules: Sequence[tuple[Why | None, Callable[[Question], object]]],
) -> Decision:
    case = question.case
    for why, applies in rules:
        if applies(question):
            if why is None:
                return Suspend(case.id, sign.cause, f"{question.used_up()}: {sign.evidence}")
            waits_for = _start(question) if why is Why.GPU else ""
            until = _until(why, question)
            return Wait(case.id, why, until, sign.cause, sign.evidence, waits_for)
    incarnation = case.member.incarnation
    attempt = case.record.orders_for(incarnation).times + 1
    return Restart(case.id, sign.cause, sign.evidence, incarnation, sign.cause.planned, attempt)


def _start(question: Question) -> str:
    found = question.starts.in_the_way(question.member)
    assert found is not None
    gpu, backend_id = found
    return f"until {backend_id} has started" + ("" if gpu == ALL_GPUS else f" on GPU {gpu}")


def _until(why: Why, question: Question) -> float | None:
    match why:
        case Why.ON_HOLD:
            return None if question.held_until == math.inf else question.held_until
        case Why.SUSPECTED:
            return question.blind_until
        case Why.WINDOW:
            return question.now + 60.0 * question.opens_in_min
        case Why.BACKOFF:
            return question.due_at
        case _:
            return None
