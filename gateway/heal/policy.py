"""What to do about what is seen: pure rules, from all backends to decisions.

`decide` is asked about once a second with every backend of the pools it is to judge. For each one
whose state calls for a restart (`states.calls_for`), the first line that applies wins (`rules._RULES` is
this table):

    it cannot be seen, so no incarnation is known      Wait UNSEEN
    an operator holds it: cordoned, drained            Wait HELD
    planned, and saturated                             Wait BUSY        but not when it is SLOW
    suspended                                          Wait SUSPENDED   until an operator clears it
    `automatic: false`                                 Wait MANUAL
    restarts are on hold: its own, its pool's or all   Wait ON_HOLD     until that time
    another replica holds the pool's lease             Wait FOLLOWER
    its incarnation was restarted, and runs            Wait ORDERED     until another one is seen
    we suspect ourselves, and its process lives        Wait SUSPECTED   for 60 s
    scheduled, outside its window                      Wait WINDOW      until it opens
    `max_restarts` within `within` are used up, or
      a restart cannot help and one more did not       Suspend          once
    its backoff runs                                   Wait BACKOFF     until it is over
    its process lives; another's restart goes on       Wait TURN
    it serves, and the pool has enough out already     Wait BUDGET
    it alone serves, and may have work                 Wait LAST        until idle for 5 minutes
    a start that uses its GPUs goes on                 Wait GPU         until that is over
    otherwise                                          Restart

An operator's order passes all of them but GPU. Backends that are asleep are left alone.

At most one restart per incarnation: one that runs and was restarted is never restarted again, for it
survived that, and is for a person. An order that its launcher could not carry out changed nothing:
it stays due, with backoff. What has ended may be started again, which restarts nothing. Who carries
an order out claims (backend, incarnation, attempt) in the shared store after the drain.

We suspect ourselves when two or more backends went bad within 10 s, and they are half of a pool or
of two pools; or when `decide` was not asked for 10 s, so this process stood still and its view is
old. A process that has ended is no illusion, so its start waits for neither this, nor a turn, nor the
budget. A backend that is down costs the pool nothing by being restarted either, but one such restart
goes on at a time: what cured the first need not cure the rest.

Starts on one GPU go one after the other: vLLM measures free memory while it starts, and a neighbour
that starts or ends meanwhile makes it measure wrong. What failed often goes behind what did not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from gateway.core.types import Phase
from gateway.heal.decisions import Cause, Decision, Restart, Sign
from gateway.heal.members import Case, Circumstances, Member, Starts, View
from gateway.heal.record import History, Policy, Record
from gateway.heal.rules import Question, judged
from gateway.heal.states import Serving

BLIND_S: Final = 60.0  # that we suspect ourselves
TOGETHER_S: Final = 10.0  # what goes bad within this time goes bad together
STOOD_STILL_S: Final = 10.0  # between two calls: ours was the failure

_SPREAD: Final = 0.25  # the last backend of a pool is due this part of `restart_every` early
_FORGET_S: Final = 86400.0  # a backend that left the configuration


def decide(
    members: Sequence[Member],
    history: History,
    policies: Mapping[str, Policy],
    circumstances: Circumstances,
) -> tuple[History, tuple[Decision, ...]]:
    """Return what to do now, and what to remember of it.

    Every backend of a pool has to be among the `members`, for the budget counts them. Their order
    changes nothing. Time that goes back stands still. A pool without a policy is a `KeyError`.
    """
    now = max(circumstances.now, history.at)
    records = {
        backend_id: record
        for backend_id, record in history.records.items()
        if now - record.seen_at < _FORGET_S
    }
    pools: dict[str, list[Member]] = {}
    for each in sorted(members, key=lambda each: each.backend_id):
        if each.phase is not Phase.STOPPED:
            pools.setdefault(each.pool, []).append(each)
    views = [
        _view(policies[pool], each, records, replace(circumstances, now=now), pool)
        for pool, each in pools.items()
    ]
    records |= {case.id: case.record for view in views for case in view.cases}
    blind_until = _blind_until(views, history, now)
    starts = Starts.of(members)
    decisions: list[Decision] = []
    cases = [(case, view) for view in views for case in view.cases]
    for case, view in sorted(cases, key=lambda each: each[0].urgency()):
        decision = judged(Question(case, view, blind_until, starts))
        if decision is not None:
            decisions.append(decision)
        if isinstance(decision, Restart):
            records[case.id] = _ordered(case, view, decision)
            starts.begin(case.member)
    return History(records, now, blind_until), tuple(decisions)


def _ordered(case: Case, view: View, order: Restart) -> Record:
    """Count an order, and return the record that remembers it."""
    now = view.circumstances.now
    if case.member.ordered is not None:
        return case.record.cleared().ordered(order.incarnation, now, counts=False)
    view.turn_taken |= not case.member.ended
    # The first launch restarts nothing, and what it brings up may fail for the first time.
    launch = order.incarnation is None and not case.record.orders_for(None).times
    counts = order.cause is not Cause.SCHEDULED and not launch
    return case.record.ordered(order.incarnation, now, counts=counts)


# --- one pool as it is seen ---


def _view(
    policy: Policy,
    members: Sequence[Member],
    records: Mapping[str, Record],
    circumstances: Circumstances,
    pool: str,
) -> View:
    size = len(members)
    cases = [
        _case(each, records.get(each.backend_id, Record()), policy, place / size, circumstances.now)
        for place, each in enumerate(members)
    ]
    turn_taken = any(each.under_restart for each in members)
    out = sum(not each.serving for each in members)
    return View(policy, circumstances, cases, pool in circumstances.leads, turn_taken, out)


def _case(member: Member, record: Record, policy: Policy, rank_ratio: float, now: float) -> Case:
    sign = None if member.asleep and not member.ended else member.sign
    record = record.looked(
        member.incarnation,
        now,
        ours=member.ours,
        ails=sign is not None,
        well_s=member.well_s(now),
        idle=member.idle,
    )
    if sign is None and _schedule_due(member, record, policy, rank_ratio, now):
        why = f"it has run for {policy.restart_every_s:.0f} s (restart_every)"
        sign = Sign(Cause.SCHEDULED, why)
    return Case(member, record, sign)


def _schedule_due(
    member: Member, record: Record, policy: Policy, rank_ratio: float, now: float
) -> bool:
    """Whether it serves, and has run for `restart_every_s`.

    `rank_ratio` (0..1) is its place in its pool: backends that started together come due one after
    the other over the last quarter of that time.
    """
    serves = isinstance(member.state, Serving) and member.serving
    if policy.restart_every_s is None or not serves:
        return False
    age_s = member.age_s
    if age_s is None:
        age_s = now - record.since if record.since is not None else 0.0
    return age_s >= policy.restart_every_s * (1 - _SPREAD * rank_ratio)


def _blind_until(views: Iterable[View], history: History, now: float) -> float:
    until = history.blind_until
    if now - history.at > STOOD_STILL_S and history.records:
        until = max(until, now + TOGETHER_S)
    pools_struck, latest, half = 0, -math.inf, False
    for view in views:
        times = [case.member.bad_at for case in view.cases if case.member.bad_at is not None]
        struck = [at for at in times if now - at <= TOGETHER_S]
        pools_struck += bool(struck)
        half = half or (len(struck) >= 2 and len(struck) * 2 >= len(view.cases))
        latest = max(latest, *struck) if struck else latest
    return max(until, latest + BLIND_S) if half or pools_struck >= 2 else until
