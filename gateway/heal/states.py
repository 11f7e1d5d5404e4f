"""The state of a supervised backend: one of nine frozen values, and the table of their transitions.

    state       meaning                                           leaves it by
    Absent      nothing runs, and nothing has ended               runs: Starting. permitted: Replacing
    Starting    it runs, or its service manager makes it          answers: Proving. ended or hung: Failed
    Proving     it answers: one token, adapters, warm-up          done: Serving. no token: Suspect
    Serving     in rotation, if its probes agree                  evidence: Suspect. planned: Draining
    Suspect     it lives and may not work; canaries go on         a token: Serving. proof: Replacing
    Draining    before a planned restart: its requests finish     over: Replacing. called off: as before
    Replacing   its launcher stops what runs, and starts anew     launched: Starting. failed: as before
    Failed      it ended, or its start hangs                      permitted: Replacing. answers: Proving
    Suspended   not restarted until an operator clears it         gives a token: Proving. cleared: Failed

Wherever its process ends it is Failed; another incarnation that shows is Starting, and so is a hung
start whose log speaks again; what its service manager took away is Absent. A start of ours
whose settings changed is Replacing, as soon as that is permitted; what was found running comes up first.
`LATER` is the whole table. An operator's drain is an intent beside the state (`heal.intent`), never a transition.

What the pool table shows of a backend (`Tending`) is a projection of its state: `tending`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from gateway.core.types import Phase
from gateway.heal.decisions import GRAVITY, Cause, Restart, Sign
from gateway.launch.launcher import Incarnation
from gateway.pools.facts import Tending
from gateway.pools.unanswered import in_words

FAILED_TESTS: Final = 2  # in a row, that prove that an engine does not work
LONGEST_PAUSE: Final = 30  # looks between two tests of one that stays suspect


@dataclass(frozen=True, slots=True)
class _State:
    """What every state has: since when it lasts, and of which incarnation."""

    since: float
    incarnation: Incarnation | None  # None: nothing is known to run, or only a look will tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent(_State):
    """Nothing of it runs. `due`: it is for us to start it, as soon as that is allowed."""

    looked: bool = True  # False: nobody has looked yet
    served: bool = False  # and the gateway before this one hands it over as it is
    due: bool = False
    told: str = ""  # what it waits for before the first look
    unproven: Incarnation | None = None  # the gateway before this one had no token of it yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Starting(_State):
    """A process runs and does not answer yet, or its service manager is at work on it."""

    before: Incarnation | None = None  # what it replaces; it may be seen for a while yet
    ours: bool = False  # we launched it
    owes: bool = True  # a token, before it serves; one that was found running does not
    pending: str = ""  # what its service manager does with it meanwhile, and
    pending_at: float = 0.0  # since when it is at work on it
    told: str = ""  # where its start is
    ready_at: float | None = None  # when it is expected to serve; None: unknown
    fresh: bool = False  # it has just begun: what is known is of the process before


@dataclass(frozen=True, slots=True, kw_only=True)
class Proving(_State):
    """It answers, and has to compute one token, load its adapters and warm up before it serves."""

    before: Incarnation | None = None  # what ran before its start
    ours: bool = False
    told: str = ""  # what it does now
    ready_at: float | None = None  # when it is expected to serve; None: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving(_State):
    """It is in rotation, if its probes agree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect(_State):
    """It lives, and there is evidence that it does not work. A test request decides.

    Before one failed (two, where no other serves), `out` is False: its probes say whether it is in rotation.
    """

    sign: Sign
    failed: str = ""  # how the last test request did, in a short word
    failures: int = 0  # test requests that failed in a row, with no sign of life between them
    out: bool = False
    proved: bool = True  # its start came to a good end
    test_at: float = 0.0  # the next test request
    proof_at: float = 0.0  # before that, test requests that fail are no proof
    failed_at: float = math.inf  # when the last test request failed, and
    answers: bool = True  # whether /health was answered then
    why_down: str = "frozen"  # short closed word, once that is certain

    @property
    def evidence(self) -> str:
        """Return what is against it, with what its test requests say."""
        if not self.failures:
            return self.sign.evidence
        tests = f"{self.failures} test requests in a row" if self.failures > 1 else "a test request"
        return f"{self.sign.evidence}, and {tests} failed ({in_words(self.failed)})"

    @property
    def reason(self) -> str:
        """Return the short word of why it is out; before that is certain no request is ended for it."""
        return self.why_down if self.failures != 1 else "suspect"

    def proven(self, now: float) -> bool:
        """Whether enough test requests failed in a row, since all progress had stopped."""
        return self.failures >= FAILED_TESTS and now >= self.proof_at

    def revives(self, moved_at: float, *, answers: bool) -> bool:
        """Whether it gave a sign of life since the last test request failed, so that the next one decides.

        One that answered that with an error is not silent: that its engine moves is nothing new.
        """
        moves = self.failed == "timeout" and moved_at > self.failed_at
        return moves or (answers and not self.answers)

    def after_failure(
        self,
        failed: str,
        now: float,
        last_words_s: float,
        pause_s: float,
        *,
        alone: bool = False,
        answers: bool = True,
    ) -> Suspect:
        """Return the state after a test request that failed; the next ones come later each time.

        `answers` says whether its probes pass. One that answers an error knows that its engine died, and
        gets time to end by itself. One that serves its pool `alone` stays in rotation until there is
        proof: requests have nowhere else to go.
        """
        failures, proof_at = self.failures + 1, self.proof_at
        if failed != "timeout":
            proof_at = max(proof_at, self.since + last_words_s)
        pauses = 0 if failures < FAILED_TESTS else min(2**failures, LONGEST_PAUSE)
        return replace(
            self,
            failures=failures,
            failed=failed,
            failed_at=now,
            answers=answers,
            out=self.out or not alone or failures >= FAILED_TESTS,
            test_at=now + pauses * pause_s,
            proof_at=proof_at,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Draining(_State):
    """What it carries finishes before it is restarted, up to `until`."""

    order: Restart
    until: float
    before: State
    told: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacing(_State):
    """Its launcher stops what runs and starts anew; `before` is what it was."""

    order: Restart
    before: State
    claimed: bool = False  # in the shared store: it is for us to go on with it
    ready_at: float | None = None  # when it is expected to serve; None: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(_State):
    """It ended, could not be started, or hangs in its start (`lives`)."""

    sign: Sign
    lives: bool = False
    examined: bool = True  # why is known, as far as it can be; nothing is done before
    told: str = ""  # why, and what helps
    hopeless: bool = False  # a restart changes nothing about it
    owed: bool = False  # we stopped it and could not start it: that nothing runs is our doing
    ready_at: float | None = None  # when it is expected to serve, restarted as soon as it may be


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspended(_State):
    """It is not restarted until an operator clears it."""

    sign: Sign
    lives: bool = False
    told: str = ""
    test_at: float = 0.0  # of one that lives: the next test request


State = Absent | Starting | Proving | Serving | Suspect | Draining | Replacing | Failed | Suspended

_ANYWHERE: Final = frozenset({Absent, Starting, Replacing})
LATER: Final[Mapping[type[State], frozenset[type[State]]]] = {
    Absent: _ANYWHERE | {Failed, Suspended},
    Starting: _ANYWHERE | {Proving, Serving, Draining, Failed},
    Proving: _ANYWHERE | {Proving, Serving, Suspect, Failed},
    Serving: _ANYWHERE | {Serving, Suspect, Draining, Failed},
    Suspect: _ANYWHERE | {Suspect, Serving, Proving, Draining, Failed, Suspended},
    Draining: frozenset({Replacing, Starting, Serving, Suspect}),
    Replacing: _ANYWHERE | {Proving, Serving, Suspect, Failed, Suspended},
    Failed: _ANYWHERE | {Failed, Proving, Suspended},
    Suspended: _ANYWHERE | {Suspended, Failed, Proving},
}


def under_way(state: State | None) -> bool:
    """Whether a restart of it goes on, or its start; one that was found running may serve already."""
    if isinstance(state, Starting):
        return state.owes
    return isinstance(state, Draining | Replacing | Proving)


def begins(state: State) -> bool:
    """Whether nothing of it ran before, as far as is known: it is looked for, or its first start goes on."""
    match state:
        case Replacing(order=order):
            return order.incarnation is None
        case Starting(before=before) | Proving(before=before):
            return before is None
        case _:
            return isinstance(state, Absent)


def in_service(state: State | None) -> bool:
    """Whether it takes requests, if its probes agree."""
    found = isinstance(state, Starting) and not state.owes
    return found or isinstance(state, Serving | Suspect)


def checked(before: State, after: State) -> State:
    """Return the state after a transition.

    Raises:
        AssertionError: the table does not have it, which is a bug.
    """
    if type(after) not in LATER[type(before)]:
        raise AssertionError(f"{type(before).__name__} -> {type(after).__name__} is not allowed")
    return after


def tending(state: State, *, launched: bool) -> Tending | None:  # noqa: C901 - one case a state
    """Return what the pool table shows; None where its probes decide. `launched`: we start it."""
    match state:
        case Absent(looked=False, served=True):
            return None
        case Absent(looked=looked, told=told):
            told = told or ("waiting to be started" if looked else "looking for its process")
            shown = launched or state.unproven is not None
            return Tending(Phase.STARTING, "restart", told) if shown else None
        case Starting(owes=owes, told=told, pending=pending):
            at, reason = state.ready_at, "pending" if pending else "restart"
            return (
                Tending(Phase.STARTING, reason, told or pending, state.fresh, at) if owes else None
            )
        case Proving(told=told):
            return Tending(Phase.STARTING, "restart", told, ready_at=state.ready_at)
        case Serving():
            return None
        case Suspect(out=out, proved=proved):
            phase = Phase.DOWN if proved else Phase.STARTING
            return Tending(phase, state.reason, state.evidence) if out else None
        case Draining(told=told):
            return Tending(Phase.DRAINING, "restart", told)
        case Replacing(order=order, ready_at=ready_at):
            return Tending(Phase.STARTING, "restart", restarting(order), ready_at=ready_at)
        case Failed(sign=sign, told=told, hopeless=hopeless, ready_at=ready_at):
            exited = sign.cause is Cause.EXITED
            phase = Phase.DOWN if hopeless or exited else Phase.STARTING
            reason = "exited" if exited else "start_failed"
            return Tending(phase, reason, told, ready_at=ready_at)
        case Suspended(told=told, lives=lives, incarnation=left):
            if lives:
                keeps = f"Its server still runs ({left}) and keeps its port and memory"
                told = f"{told.rstrip('.')}. {keeps}; `vllm-gateway restart` stops it"
            return Tending(Phase.DOWN, "suspended", told)


def lives(state: State) -> bool:
    """Whether a process of it runs, as far as is known."""
    match state:
        case Failed(lives=lived) | Suspended(lives=lived):
            return lived
        case Draining(before=before) | Replacing(before=before):
            return lives(before)
        case _:
            return not isinstance(state, Absent)


def unproven(state: State) -> bool:
    """Whether what runs has to give a token before it serves: its start has not come to its good end."""
    match state:
        case Starting(owes=owes):
            return owes
        case Suspect(proved=proved):
            return not proved
        case Failed(lives=lived) | Suspended(lives=lived):
            return lived
        case Replacing(before=before):
            return unproven(before)
        case _:
            return isinstance(state, Proving)


def restarting(order: Restart) -> str:
    """Return why it is restarted, for people."""
    return f"restarting: {order.cause.value.replace('_', ' ')}, {order.evidence}"


def calls_for(state: State, judged: Mapping[Cause, Sign], now: float) -> Sign | None:
    """Return what calls for a restart in this state; `judged` is what was found of one that serves."""
    match state:
        case Absent(due=True):
            return Sign(Cause.EXITED, "it has no running process")
        case Failed(sign=sign, examined=True) | Suspended(sign=sign):
            return sign
        case Suspect() if state.proven(now):
            return Sign(state.sign.cause, state.evidence)
        case Serving():
            return min(judged.values(), key=lambda sign: GRAVITY[sign.cause], default=None)
        case Starting(ours=True) | Proving(ours=True):
            return judged.get(Cause.OPERATOR)  # its settings changed: it would not serve with them
        case _:
            return None
