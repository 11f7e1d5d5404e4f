"""What to do about what is seen: pure rules, from the facts about all backends to decisions.

`decide` is asked about once a second with every backend of the pools it is to judge. For each one
that ails, or is due, the first line that applies wins (`_RULES` is this table):

    it cannot be seen, so no incarnation is known      Wait UNSEEN
    an operator holds it: cordoned, draining           Wait HELD
    saturated and progressing; or planned, saturated   Wait BUSY        but not when it is SLOW
    suspended                                          Wait SUSPENDED   until an operator clears it
    `automatic: false`                                 Wait MANUAL
    restarts are on hold: its own, its pool's or all   Wait ON_HOLD     until that time
    another replica holds the pool's lease             Wait FOLLOWER
    its incarnation was ordered to restart, and runs   Wait ORDERED     until `look` shows another
    we suspect ourselves, and its process lives        Wait SUSPECTED   for 60 s
    scheduled, outside its window                      Wait WINDOW      until it opens
    `max_restarts` within `within` are used up         Suspend          once
    its backoff runs                                   Wait BACKOFF     until it is over
    its process lives; another's restart goes on       Wait TURN
    it serves, and the pool has enough out already     Wait BUDGET
    it alone serves, and may have work                 Wait LAST        until idle for 5 minutes
    otherwise                                          Restart

Never looked at: backends without a launcher, STOPPED, under restart already, asleep, or starting
(`signs.trouble` tells which signs count then). What has exited neither sleeps, starts nor is busy.

One restart per incarnation:

    the incarnation ...     and runs              and does not run
    was never ordered       order it, attempt 1   order it, attempt 1
    was ordered before      never again: ORDERED  attempt n+1, once the one before is over and backoff allows

An attempt is over when `settled` says so, when another incarnation is seen, when it was seen under
way and no longer is, or when nobody took it up for 30 s. So a server that lives is ordered to restart
once, whatever happens; one that is gone may be started again, which restarts nothing. An incarnation
that survives its restart is for a person.

Who carries a decision out claims (backend, incarnation, attempt) in the shared store, after the drain
and before the stop; refused means that another replica did, which is an attempt like any other. One
given up before that claim, because the lease was lost or an operator stopped the drain, is
`withdrawn`: as if never ordered. Who carries out Suspend puts the backend on hold in the store, for
other replicas have not seen what this one has.

Suspecting ourselves: two or more backends went bad within 10 s, and they are half of a pool or of
two pools; or `decide` was not asked for 10 s, so this process stood still and its view is old.
A process that has exited is no illusion, so its start waits for neither this, nor a turn, nor the
budget: nothing is lost by it. A backend that is down costs the pool nothing by being restarted
either, but one such restart goes on at a time: what cured the first need not cure the rest.

SLOW passes BUSY: its pace was judged at the load of its past and of its peers, so a full queue is
what came of it. It is drained before it is restarted, like everything that is planned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gateway.core.types import Phase
from gateway.heal.backoff import (
    History,
    Past,
    Policy,
    clear,
    learned,
    operated,
    ordered,
    schedule_due,
    settled,
    suspended,
    withdrawn,
)
from gateway.heal.healing import (
    GRAVITY,
    Cause,
    Decision,
    Facts,
    Moment,
    Restart,
    Sign,
    Suspend,
    Wait,
    Why,
)
from gateway.heal.signs import trouble
from gateway.launch.launcher import Incarnation

__all__ = ["History", "clear", "decide", "operated", "settled", "suspended", "withdrawn"]

SUSPICION_S: Final = 60.0
TOGETHER_S: Final = 10.0  # what goes bad within this time goes bad together
STOOD_STILL_S: Final = 10.0  # between two calls: ours was the failure
IDLE_S: Final = 300.0  # nobody comes to the last one that serves: nothing is lost
MOVES_S: Final = 30.0  # since its last token: it progresses (`health.progress` by default)

_LAST_WORDS_S: Final = 2.0  # what moves so soon after it went down was on its way before
_HELD: Final = frozenset({Phase.CORDONED, Phase.DRAINING})
_FORGET_S: Final = 86400.0  # a backend that left the configuration


def decide(
    facts: Sequence[Facts], history: History, policies: Mapping[str, Policy], moment: Moment
) -> tuple[History, tuple[Decision, ...]]:
    """Return what to do now, and what to remember of it.

    Every backend of a pool has to be among its `facts`, for the budget counts them. The order of
    `facts` changes nothing. Time that goes back stands still. A pool without a policy is a `KeyError`.
    """
    moment = replace(moment, now=max(moment.now, history.at))
    pools: dict[str, list[Facts]] = {}
    for each in sorted(facts, key=lambda each: each.backend_id):
        if each.phase is not Phase.STOPPED:
            pools.setdefault(each.pool, []).append(each)
    kept = {
        backend_id: past
        for backend_id, past in history.pasts.items()
        if moment.now - past.seen_at < _FORGET_S
    }
    views = [_view(pool, members, kept, policies[pool], moment) for pool, members in pools.items()]
    pasts = kept | {case.id: case.past for view in views for case in view.cases}
    suspect_until = _suspect_until(views, history, moment.now)
    decisions: list[Decision] = []
    for view in views:
        for case in sorted(view.cases, key=_Case.urgency):
            decision = _judged(case, view, suspect_until)
            if decision is not None:
                decisions.append(decision)
                pasts[case.id] = view.note(case, decision)
    return History(pasts, moment.now, suspect_until), tuple(decisions)


# --- one pool as it is seen -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Case:
    """One backend, and what calls for its restart, if anything."""

    facts: Facts
    past: Past
    sign: Sign | None

    @property
    def id(self) -> str:
        return self.facts.backend_id

    @property
    def incarnation(self) -> Incarnation | None:
        return self.facts.seen.incarnation if self.facts.seen is not None else None

    @property
    def under_way(self) -> bool:
        """Whether a restart of it goes on, until it serves or ails again."""
        starting = self.facts.starting or self.facts.phase is Phase.STARTING
        return self.in_hand or (self.past.healing and starting and self.sign is None)

    @property
    def in_hand(self) -> bool:
        """Whether its restart was ordered, or is carried out."""
        return self.facts.restarting or self.past.ordered_at is not None

    def urgency(self) -> tuple[int, float, str]:
        """Sort by gravity, then by how long it has ailed."""
        gravity = GRAVITY[self.sign.cause] if self.sign is not None else len(GRAVITY)
        return gravity, self.past.failed_at or 0.0, self.id


@dataclass(slots=True)
class _View:
    """One pool; `turn_taken` comes true with what is decided."""

    policy: Policy
    moment: Moment
    cases: list[_Case]
    leads: bool
    turn_taken: bool  # a restart in it goes on
    out: int  # do not serve, for whatever reason

    @property
    def allowed_out(self) -> int:
        return max(1, int(self.policy.max_unavailable_ratio * len(self.cases)))

    def note(self, case: _Case, decision: Decision) -> Past:
        """Count a decision and return the past that remembers it."""
        past, now = case.past, self.moment.now
        if isinstance(decision, Restart):
            self.turn_taken |= not case.facts.exited
            # The first launch restarts nothing, and what it brings up may fail for the first time.
            launch = decision.incarnation is None and not past.orders_for(None)
            counts = decision.cause is not Cause.SCHEDULED and not launch
            return ordered(past, decision.incarnation, now, counts=counts)
        return replace(past, suspended=True) if isinstance(decision, Suspend) else past


def _view(
    pool: str,
    members: Sequence[Facts],
    pasts: Mapping[str, Past],
    policy: Policy,
    moment: Moment,
) -> _View:
    cases = [
        _case(each, pasts.get(each.backend_id, Past()), policy, place / len(members), moment.now)
        for place, each in enumerate(members)
    ]
    turn_taken = any(case.under_way for case in cases)
    out = sum(not case.facts.serving for case in cases)
    return _View(policy, moment, cases, pool in moment.leads, turn_taken, out)


def _case(facts: Facts, past: Past, policy: Policy, rank_ratio: float, now: float) -> _Case:
    sign = trouble(facts, now)
    past = learned(past, facts, now, ails=sign is not None)
    if sign is None and facts.serving and schedule_due(past, facts, policy, rank_ratio, now):
        sign = Sign(
            Cause.SCHEDULED, f"it has run for {policy.restart_every_s:.0f} s (restart_every)"
        )
    return _Case(facts, past, sign)


def _suspect_until(views: Iterable[_View], history: History, now: float) -> float:
    until = history.suspect_until
    if now - history.at > STOOD_STILL_S and history.pasts:
        until = max(until, now + TOGETHER_S)
    pools_struck, latest, half = 0, -math.inf, False
    for view in views:
        times = [case.past.bad_at for case in view.cases if case.past.bad_at is not None]
        struck = [at for at in times if now - at <= TOGETHER_S]
        pools_struck += bool(struck)
        half = half or (len(struck) >= 2 and len(struck) * 2 >= len(view.cases))
        latest = max(latest, *struck) if struck else latest
    return max(until, latest + SUSPICION_S) if half or pools_struck >= 2 else until


# --- the rules ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Question:
    """What a rule is asked about: a backend that calls for a restart, in its pool, now."""

    case: _Case
    view: _View
    cause: Cause
    suspect_until: float

    @property
    def lives(self) -> bool:
        return not self.case.facts.exited

    @property
    def now(self) -> float:
        return self.view.moment.now

    @property
    def due_at(self) -> float:
        return self.case.past.due_at(self.view.policy, self.now)

    @property
    def held_until(self) -> float:
        holds = self.view.moment.holds
        scopes = (None, self.case.facts.pool, self.case.id)
        return max(holds.get(scope, -math.inf) for scope in scopes)

    @property
    def opens_in_min(self) -> int:
        return self.view.policy.opens_in(self.view.moment.minute)

    def busy(self) -> bool:
        facts = self.case.facts
        if not self.lives or self.cause in (Cause.SLOW, Cause.START_HUNG):
            return False
        if self.cause is Cause.ENGINE_DEAD and facts.moved_at > facts.since + _LAST_WORDS_S:
            return self.now - facts.moved_at < MOVES_S
        return facts.saturated and (self.cause.planned or self.now - facts.moved_at < MOVES_S)

    def used_up(self) -> bool:
        policy = self.view.policy
        restarts = self.case.past.restarts_since(self.now - policy.within_s)
        return self.cause is not Cause.SCHEDULED and restarts >= policy.max_restarts

    def last(self) -> bool:
        others = any(
            each.facts.serving and not each.in_hand and each.id != self.case.id
            for each in self.view.cases
        )
        idle_since = self.case.past.idle_since
        idle = idle_since is not None and self.now - idle_since >= IDLE_S
        return self.case.facts.serving and not others and not idle


# In this order; None stands for Suspend.
_RULES: Final[tuple[tuple[Why | None, Callable[[_Question], bool]], ...]] = (
    (Why.UNSEEN, lambda q: q.case.facts.seen is None),
    (Why.HELD, lambda q: q.case.facts.held or q.case.facts.phase in _HELD),
    (Why.BUSY, _Question.busy),
    (Why.SUSPENDED, lambda q: q.case.past.suspended),
    (Why.MANUAL, lambda q: not q.view.policy.automatic),
    (Why.ON_HOLD, lambda q: q.now < q.held_until),
    (Why.FOLLOWER, lambda q: not q.view.leads),
    (Why.ORDERED, lambda q: q.lives and q.case.past.orders_for(q.case.incarnation) > 0),
    (Why.SUSPECTED, lambda q: q.lives and q.now < q.suspect_until),
    (Why.WINDOW, lambda q: q.cause is Cause.SCHEDULED and q.opens_in_min > 0),
    (None, _Question.used_up),
    (Why.BACKOFF, lambda q: q.now < q.due_at),
    (Why.TURN, lambda q: q.lives and q.view.turn_taken),
    (Why.BUDGET, lambda q: q.case.facts.serving and q.view.out >= q.view.allowed_out),
    (Why.LAST, _Question.last),
)


def _judged(case: _Case, view: _View, suspect_until: float) -> Decision | None:
    sign = case.sign
    if sign is None or case.in_hand or not case.facts.supervised:
        return None
    question = _Question(case, view, sign.cause, suspect_until)
    for why, applies in _RULES:
        if applies(question):
            if why is None:
                used_up = f"{view.policy.max_restarts} restarts within {view.policy.within_s:.0f} s"
                return Suspend(case.id, sign.cause, f"{used_up} did not help: {sign.evidence}")
            return Wait(case.id, why, _until(why, question), sign.cause, sign.evidence)
    incarnation, planned = case.incarnation, sign.cause.planned
    attempt = case.past.orders_for(incarnation) + 1
    return Restart(case.id, sign.cause, sign.evidence, incarnation, planned, attempt)


def _until(why: Why, question: _Question) -> float | None:
    match why:
        case Why.ON_HOLD:
            return None if question.held_until == math.inf else question.held_until
        case Why.SUSPECTED:
            return question.suspect_until
        case Why.WINDOW:
            return question.now + 60.0 * question.opens_in_min
        case Why.BACKOFF:
            return question.due_at
        case _:
            return None
