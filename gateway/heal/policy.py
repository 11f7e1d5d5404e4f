"""What to do about what is seen: pure rules, from all backends to decisions.

`decide` is asked about once a second with every backend of the pools it is to judge. For each one
whose state calls for a restart (`states.calls_for`), the first of the `_RULES` that applies decides;
where none does, it is restarted. An operator's order passes all of them but the last. Backends that are
asleep are left alone.

At most one restart per incarnation: one that runs and was restarted is never restarted again, for it
survived that, and is for a person. An order that its launcher could not carry out changed nothing:
it stays due, with backoff. One that another replica claimed is due again if nothing came of it for
twenty minutes. What has ended may be started again, which restarts nothing. Who carries
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from gateway.config.supervision import SupervisionConfig
from gateway.core.types import Phase
from gateway.heal.decisions import GRAVITY, Cause, Decision, Restart, Sign, Suspend, Wait, Why
from gateway.heal.members import ALL_GPUS, Circumstances, Member, overlap
from gateway.heal.record import History, Record
from gateway.heal.states import Absent, Failed, Serving

BLIND_S: Final = 60.0  # that we suspect ourselves
TOGETHER_S: Final = 10.0  # what goes bad within this time goes bad together
STOOD_STILL_S: Final = 10.0  # between two calls: ours was the failure
IDLE_S: Final = 300.0  # nobody comes to the last one that serves: nothing is lost

_SPREAD: Final = 0.25  # the last backend of a pool is due this part of `restart_every` early
_FORGET_S: Final = 86400.0  # a backend that left the configuration
_DAY_MIN: Final = 24 * 60


def decide(
    members: Sequence[Member],
    history: History,
    policies: Mapping[str, SupervisionConfig],
    circumstances: Circumstances,
) -> tuple[History, tuple[Decision, ...]]:
    """Return what to do now, and what to remember of it.

    Every backend of a pool has to be among the `members`, for the budget counts them. Their order
    changes nothing. Time that goes back stands still. A pool without a policy is a `KeyError`.
    """
    now = max(circumstances.now, history.at)
    circumstances = replace(circumstances, now=now)
    kept = history.records.items()
    records = {name: record for name, record in kept if now - record.seen_at < _FORGET_S}
    by_pool: dict[str, list[Member]] = {}
    for each in sorted(members, key=lambda each: each.backend_id):
        if each.phase is not Phase.STOPPED:
            by_pool.setdefault(each.pool, []).append(each)
    pools = [
        _Pool.of(every, policies[name], records, circumstances) for name, every in by_pool.items()
    ]
    cases = [case for pool in pools for case in pool.cases]
    records |= {case.id: case.record for case in cases}
    blind_until = _blind_until(pools, history, now)
    starts: dict[int, str] = {}  # that go on, by the GPUs that they use
    for each in members:
        if each.under_way:
            starts |= dict.fromkeys(each.gpus, each.backend_id)
    decisions: list[Decision] = []
    for case in sorted(cases, key=_Case.urgency):
        case.blind_until, case.starts = blind_until, starts
        decision = case.decision()
        if decision is not None:
            decisions.append(decision)
        if isinstance(decision, Restart):
            records[case.id] = case.ordered(decision)
            starts |= dict.fromkeys(case.member.gpus, case.id)
    return History(records, now, blind_until), tuple(decisions)


def _blind_until(pools: Iterable[_Pool], history: History, now: float) -> float:
    until = history.blind_until
    if now - history.at > STOOD_STILL_S and history.records:
        until = max(until, now + TOGETHER_S)
    pools_struck, latest, half = 0, -math.inf, False
    for pool in pools:
        times = [case.member.bad_at for case in pool.cases if case.member.bad_at is not None]
        struck = [at for at in times if now - at <= TOGETHER_S]
        pools_struck += bool(struck)
        half = half or (len(struck) >= 2 and len(struck) * 2 >= len(pool.cases))
        latest = max(latest, *struck) if struck else latest
    return max(until, latest + BLIND_S) if half or pools_struck >= 2 else until


# --- a pool, and each backend in it ---------------------------------------------------------------


@dataclass(slots=True)
class _Pool:
    """One pool; `turn_taken` comes true with what is decided."""

    policy: SupervisionConfig
    circumstances: Circumstances
    leads: bool
    turn_taken: bool  # a restart in it goes on
    out: int  # do not serve, for whatever reason
    cases: list[_Case] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        members: Sequence[Member],
        policy: SupervisionConfig,
        records: Mapping[str, Record],
        circumstances: Circumstances,
    ) -> _Pool:
        """Return a pool with the cases of its members, and take what is seen of them into their records."""
        leads = members[0].pool in circumstances.leads
        turn_taken = any(each.under_restart for each in members)
        pool = cls(
            policy, circumstances, leads, turn_taken, out=sum(not each.serving for each in members)
        )
        for place, member in enumerate(members):
            sign = None if member.asleep and not member.ended else member.sign
            record = records.get(member.backend_id, Record())
            record = record.looked(member, circumstances.now, ails=sign is not None)
            case = _Case(pool, member, record, sign)
            if sign is None and case.schedule_due(place / len(members)):
                why = f"it has run for {policy.restart_every:.0f} s (restart_every)"
                case.sign = Sign(Cause.SCHEDULED, why)
            pool.cases.append(case)
        return pool

    @property
    def allowed_out(self) -> int:
        """How many backends may be out at a time."""
        return max(1, int(self.policy.max_unavailable * len(self.cases)))


@dataclass(slots=True)
class _Case:
    """One backend in its pool, and what calls for its restart, if anything."""

    pool: _Pool
    member: Member
    record: Record
    sign: Sign | None
    blind_until: float = -math.inf
    starts: Mapping[int, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The backend's id."""
        return self.member.backend_id

    @property
    def now(self) -> float:
        """The moment."""
        return self.pool.circumstances.now

    @property
    def lives(self) -> bool:
        """Whether something of it runs."""
        return not self.member.ended

    @property
    def hopeless(self) -> bool:
        """Whether it failed to start, and a restart cannot help."""
        state = self.member.state
        return isinstance(state, Failed) and state.hopeless

    @property
    def cause(self) -> Cause | None:
        """What calls for its restart."""
        return self.sign.cause if self.sign is not None else None

    def urgency(self) -> tuple[bool, int, int, float, str]:
        """Sort operators' orders first, then by failures, by gravity, and by how long it has ailed."""
        record, sign = self.record, self.sign
        gravity = GRAVITY[sign.cause] if sign is not None else len(GRAVITY)
        ordered = self.member.ordered is not None
        return not ordered, record.in_a_row, gravity, record.failed_at or 0.0, self.id

    def decision(self) -> Decision | None:
        """Return what is decided; None where nothing calls for a decision."""
        member, rules = self.member, _RULES
        if member.ordered is not None:
            self.sign, rules = member.ordered, _RULES[-1:]
        elif self.sign is None or member.state is None:
            return None
        cause, evidence = self.sign.cause, self.sign.evidence
        for rule in rules:
            if not rule.applies(self):
                continue
            if rule.why is None:
                return Suspend(self.id, cause, f"{self.used_up()}: {evidence}")
            until = rule.until(self)
            waits_for = self.other_start() if rule.why is Why.GPU else ""
            ends_at = None if until == math.inf else until
            return Wait(self.id, rule.why, ends_at, cause, evidence, waits_for)
        attempt = self.record.orders_for(member.incarnation).times + 1
        return Restart(self.id, cause, evidence, member.incarnation, cause.planned, attempt)

    def ordered(self, order: Restart) -> Record:
        """Count an order, and return the record that remembers it."""
        if self.member.ordered is not None:
            return self.record.cleared().ordered(order.incarnation, self.now, counts=False)
        self.pool.turn_taken |= self.lives
        # The first launch restarts nothing, and what it brings up may fail for the first time.
        absent = order.incarnation is None or isinstance(self.member.state, Absent)
        launch = absent and not self.record.orders_for(order.incarnation).times
        counts = order.cause is not Cause.SCHEDULED and not launch
        record = self.record.ordered(order.incarnation, self.now, counts=counts)
        return replace(record, once_more=self.hopeless)

    def schedule_due(self, rank_ratio: float) -> bool:
        """Whether it serves, and has run for `restart_every`.

        `rank_ratio` (0..1) is its place in its pool: backends that started together come due one after
        the other over the last quarter of that time.
        """
        every_s, member, since = self.pool.policy.restart_every, self.member, self.record.since
        if every_s is None or not (isinstance(member.state, Serving) and member.serving):
            return False
        age_s = member.age_s
        if age_s is None:
            age_s = self.now - since if since is not None else 0.0
        return age_s >= every_s * (1 - _SPREAD * rank_ratio)

    # --- what the rules ask ---

    def busy(self) -> bool:
        """Whether it is full, which is no time for a planned restart; what is slow is full by that."""
        planned = self.cause is not None and self.cause.planned and self.cause is not Cause.SLOW
        return self.lives and planned and self.member.saturated

    def held_until(self) -> float:
        """Return until when its restarts are on hold."""
        holds = self.pool.circumstances.holds
        return max(holds.get(of, -math.inf) for of in (None, self.member.pool, self.id))

    def again_at(self) -> float:
        """When it may be restarted once more: never if it survived that, later if another replica does it."""
        return self.record.orders_for(self.member.incarnation).again_at

    def opens_in_min(self) -> int:
        """In how many minutes it may be restarted for its age alone; 0: now."""
        if self.cause is not Cause.SCHEDULED:
            return 0
        return opens_in_min(self.pool.policy.restart_window, self.pool.circumstances.minute)

    def used_up(self) -> str:
        """Return what did not help, so that no further restart will; empty while one may."""
        policy = self.pool.policy
        if self.cause is Cause.SCHEDULED:
            return ""
        if self.record.restarts_since(self.now - policy.within) >= policy.max_restarts:
            many = f"{policy.max_restarts} restart{'s' * (policy.max_restarts > 1)}"
            return f"{many} within {policy.within:.0f} s did not help"
        if self.hopeless and self.record.once_more:
            return "it was started once more, and a restart cannot help"
        return ""

    def due_at(self) -> float:
        """Return when backoff allows its restart."""
        return self.record.due_at(self.pool.policy, self.now)

    def last(self) -> bool:
        """Whether it alone serves its pool, and may have work."""
        others = any(each.member.serving and each is not self for each in self.pool.cases)
        idle_since = self.record.idle_since
        idle = idle_since is not None and self.now - idle_since >= IDLE_S
        return self.member.serving and not others and not idle

    def other_start(self) -> str:
        """Return which other start uses its GPUs; empty where none does."""
        for gpu, backend_id in sorted(self.starts.items()):
            if overlap((gpu,), self.member.gpus) and backend_id != self.id:
                where = "" if gpu == ALL_GPUS else f" on GPU {gpu}"
                return f"until {backend_id} has started{where}"
        return ""


# --- the rules ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rule:
    """Why a backend waits, or (None) is suspended; when that is so; until when, where time ends it."""

    why: Why | None
    applies: Callable[[_Case], object]
    until: Callable[[_Case], float] = lambda it: math.inf


_RULES: Final[tuple[_Rule, ...]] = (
    # it cannot be seen, so no incarnation is known
    _Rule(Why.UNSEEN, lambda it: not it.member.visible),
    # an operator holds it: cordoned, drained
    _Rule(Why.HELD, lambda it: it.member.taken_out),
    # planned, and it is full
    _Rule(Why.BUSY, _Case.busy),
    # until an operator clears it
    _Rule(Why.SUSPENDED, lambda it: it.member.suspended),
    # `automatic: false`
    _Rule(Why.MANUAL, lambda it: not it.pool.policy.automatic),
    # restarts are on hold: its own, its pool's or all
    _Rule(Why.ON_HOLD, lambda it: it.now < it.held_until(), _Case.held_until),
    # it is not sure to hold the pool's lease, as the store does not answer
    _Rule(Why.NO_STORE, lambda it: not (it.pool.leads or it.pool.circumstances.store_answers)),
    # another replica holds the pool's lease
    _Rule(Why.FOLLOWER, lambda it: not it.pool.leads),
    # its incarnation was restarted, and runs: until another one is seen, or the replica that claimed it is late
    _Rule(Why.ORDERED, lambda it: it.lives and it.now < it.again_at(), _Case.again_at),
    # we suspect ourselves, and its process lives
    _Rule(
        Why.SUSPECTED, lambda it: it.lives and it.now < it.blind_until, lambda it: it.blind_until
    ),
    # scheduled, outside its window
    _Rule(Why.WINDOW, _Case.opens_in_min, lambda it: it.now + 60.0 * it.opens_in_min()),
    # suspended, once: `max_restarts` within `within` are used up, or a restart cannot help and one more did not
    _Rule(None, _Case.used_up),
    # its backoff runs
    _Rule(Why.BACKOFF, lambda it: it.now < it.due_at(), _Case.due_at),
    # its process lives, no start of its own is under way, and another's restart goes on
    _Rule(Why.TURN, lambda it: it.lives and it.pool.turn_taken and not it.member.under_way),
    # it serves, and its pool has enough out already
    _Rule(Why.BUDGET, lambda it: it.member.serving and it.pool.out >= it.pool.allowed_out),
    # it alone serves, and may have work: until it is idle for 5 minutes
    _Rule(Why.LAST, _Case.last),
    # a start that uses its GPUs goes on
    _Rule(Why.GPU, _Case.other_start),
)


def opens_in_min(window: str | None, minute: int) -> int:
    """Return in how many minutes a window of the local day opens, such as 02:00-05:00; 0: it is open."""
    if window is None:
        return 0
    first, end = (int(at[:2]) * 60 + int(at[3:]) for at in window.split("-"))
    length = (end - first) % _DAY_MIN or _DAY_MIN
    return 0 if (minute - first) % _DAY_MIN < length else (first - minute) % _DAY_MIN
