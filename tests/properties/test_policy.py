"""The healing rules in a simulated fleet: what is done is judged by what is true, not by the rules.

The world ticks every four seconds. Its backends crash, hang, slow down, saturate, sleep and are held
by operators; restarts take time, fail to stop or to start, and bring what starts, hangs or crashes.
"""

import math
import os
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.config.supervision import SupervisionConfig
from gateway.core.types import Phase
from gateway.heal.decisions import Cause, Restart, Setback, Sign, Suspend
from gateway.heal.members import Circumstances, Member
from gateway.heal.policy import decide
from gateway.heal.record import History
from gateway.heal.sight import after_look
from gateway.heal.states import (
    Absent,
    Draining,
    Failed,
    Proving,
    Replacing,
    Serving,
    Starting,
    Suspect,
    Suspended,
    calls_for,
    checked,
    lives,
)
from gateway.launch.launcher import Runs, Seen
from gateway.store.memory import MemoryStore

# `SCHEDULES=10000 pytest --timeout=0` tries as many of each kind; that takes minutes for each.
schedules = settings(deadline=None, max_examples=int(os.environ.get("SCHEDULES", "100")))
TICK_S = 4.0
HUNG_S = 80.0
POLICY = SupervisionConfig(max_restarts=5, within="30m")
SCHEDULED = POLICY.model_copy(update={"restart_every": 300.0, "restart_window": "00:03-00:50"})
UP = (Phase.READY, Phase.DEGRADED)
# What ails a process that runs, as it shows: its phase, what its unit suspects, what its judges find.
ILLS = {
    "frozen": (Phase.DOWN, Cause.FROZEN, None),
    "dead": (Phase.DOWN, Cause.ENGINE_DEAD, None),
    "muddled": (Phase.READY, Cause.FROZEN, None),
    "failing": (Phase.DEGRADED, None, Cause.ERRORS),
    "slow": (Phase.READY, None, Cause.SLOW),
    "fat": (Phase.READY, None, Cause.MEMORY),
}
WELL = (Phase.READY, None, None)


@dataclass
class Truth:
    """One backend as it really is."""

    id: str
    pool: str
    number: int = 0  # of its incarnation
    runs: bool = True
    ill: str = ""
    starts_until: float | None = None
    # Of the next launches: well, refused (to start), crash or hang while starting.
    fate: str = "well"
    stubborn: bool = False  # its launcher cannot stop what runs
    hung: bool = False
    asleep: bool = False
    held: bool = False
    saturated: bool = False
    works: bool = True
    seen: bool = True
    began: float = 0.0

    @property
    def incarnation(self):
        return f"{self.id}#{self.number}"

    @property
    def up(self):
        return self.runs and self.starts_until is None

    @property
    def well(self):
        return self.up and not self.asleep and not self.held and self.shows()[0] in UP

    @property
    def computes(self):
        """Whether it gives a token to whoever asks."""
        return self.up and self.shows()[1] is None

    def shows(self):
        if not self.up:
            return Phase.DOWN, None, None
        return ILLS.get(self.ill, WELL)


@dataclass
class Watched:
    """What one replica knows of a backend: a unit whose steps take no time but the world's."""

    truth: Truth
    state: object = None
    since: float = 0.0
    phase: Phase = Phase.READY
    bad_at: float | None = None
    launched: str | None = None
    suspended: bool = False
    acts_at: float = 0.0
    misled: bool = False  # its order was decided by a view that stood still
    tests: dict = field(default_factory=dict)  # that failed in a row, by incarnation
    signs: dict = field(default_factory=dict)

    def to(self, state, now):
        if isinstance(self.state, Serving) and isinstance(state, Suspect | Failed):
            self.bad_at = now
        self.state = checked(self.state, state)

    def look(self, now):
        """Take the step that this moment calls for."""
        truth, state = self.truth, self.state
        if truth.seen and not isinstance(state, Draining | Replacing):
            runs = Runs.RUNNING if truth.runs else Runs.ENDED
            after = after_look(state, Seen(truth.incarnation, runs), now, launches=True)
            if after is not state:
                self.to(after, now)
        _, suspects, judged = truth.shows()
        if judged is Cause.ERRORS and judged not in self.signs:
            self.bad_at = now
        self.signs = {judged: Sign(judged, judged.value)} if judged is not None else {}
        match self.state:
            case Failed(examined=False) as state:
                self.to(replace(state, examined=True), now)
            case Failed(lives=True) | Suspended(lives=True) as state if truth.computes:
                self.to(Proving(now, state.incarnation), now)
            case Starting() as state if truth.up:
                self.to(Proving(now, state.incarnation or truth.incarnation), now)
            case Starting() as state if now - state.since >= HUNG_S:
                sign = Sign(Cause.START_HUNG, "silent")
                self.to(Failed(now, state.incarnation, sign=sign, lives=True), now)
            case Proving() as state if truth.computes:
                self.to(Serving(now, state.incarnation), now)
            case Proving() as state:
                sign = Sign(Cause.START_HUNG, "no token")
                self.to(Suspect(now, state.incarnation, sign=sign, out=True, proved=False), now)
            case Serving() as state if suspects is not None and not (truth.asleep or truth.held):
                proof_at = now + (30.0 if suspects is Cause.ENGINE_DEAD else 0.0)
                sign = Sign(suspects, suspects.value)
                self.to(Suspect(now, state.incarnation, sign=sign, proof_at=proof_at), now)
            case Suspect() as state:
                self.test(state, now)
        self.show(now)

    def test(self, state, now):
        if self.truth.computes:
            self.tests.pop(state.incarnation, None)
            known = (now, state.incarnation)
            self.to(Serving(*known) if state.proved else Proving(*known), now)
        elif now >= state.test_at:
            self.tests[state.incarnation] = self.tests.get(state.incarnation, 0) + 1
            self.to(state.after_failure("timeout", now, 5.0, 1.0), now)

    def show(self, now):
        """Have the phase that the pool table would show."""
        phase = self.truth.shows()[0]
        match self.state:
            case _ if self.truth.held:
                phase = Phase.CORDONED
            case Draining():
                phase = Phase.DRAINING
            case Starting() | Proving() | Replacing():
                phase = Phase.STARTING
            case Failed() | Suspended() | Suspect(out=True) | Absent():
                phase = Phase.DOWN
            case _ if self.truth.asleep:
                phase = Phase.DOWN
        if phase is not self.phase:
            self.phase, self.since = phase, now

    def member(self, now, drained_elsewhere=False):
        truth = self.truth
        return Member(
            truth.id,
            truth.pool,
            self.phase,
            since=self.since,
            state=self.state,
            sign=calls_for(self.state, self.signs, now),
            visible=truth.seen,
            ours=self.launched is not None and self.launched == self.state.incarnation,
            held=truth.held,
            suspended=self.suspended,
            asleep=truth.asleep,
            saturated=truth.saturated,
            idle=not truth.works,
            age_s=now - truth.began,
            bad_at=self.bad_at,
            drained_elsewhere=drained_elsewhere,
        )


@dataclass
class Watcher:
    """What the test itself remembers of one backend, to judge what is done."""

    orders: dict = field(default_factory=dict)  # of incarnations that ran
    times: list = field(default_factory=list)  # of the restarts that count
    row: int = 0
    well_since: float | None = None
    suspended: bool = False
    good: bool = True
    bad_at: float = -math.inf
    forgiven: Restart | None = None


class Held:
    at = 0.0

    def now(self):
        return self.at


def done(coro):
    """Run a call of the memory store, which never waits."""
    with pytest.raises(StopIteration) as ended:
        coro.send(None)
    return ended.value.value


class World:
    """A fleet, the replicas that watch it, and the checks of everything they do."""

    def __init__(self, sizes, policy=POLICY, replicas=1, paced=True):
        self.now, self.policy = 0.0, policy
        self.paced = paced  # the rules have the right time
        self.clock = Held()
        self.store = MemoryStore(self.clock)
        self.fleet = {
            f"{pool}/{place}": Truth(f"{pool}/{place}", f"{pool}")
            for pool, size in zip("pqr", sizes, strict=False)
            for place in range(size)
        }
        self.watchers = {each: Watcher() for each in self.fleet}
        self.replicas = [
            {each.id: Watched(each, Serving(0.0, each.incarnation)) for each in self.fleet.values()}
            for _ in range(replicas)
        ]
        self.histories = [History() for _ in range(replicas)]
        self.leaders = {0}
        self.views = {}  # of replicas whose view stands still
        self.holds = {}
        self.jump_s = 0.0
        self.killed = {}  # incarnations that ran when they were stopped, and how often
        self.tick()

    # --- time -------------------------------------------------------------------------------------

    def tick(self):
        self.now += TICK_S
        self.clock.at = self.now
        for truth in self.fleet.values():
            self.go_on(truth)
        for units in self.replicas:
            for unit in units.values():
                self.step(unit)
        self.watch()
        for replica in range(len(self.histories)):
            self.ask(replica)

    def go_on(self, truth):
        """Starts come to their end."""
        starts = truth.runs and truth.starts_until is not None and not truth.hung
        if starts and self.now >= truth.starts_until:
            if truth.fate == "crash":
                truth.runs = False
            elif truth.fate == "hang":
                truth.hung = True
            else:
                truth.starts_until = None

    def step(self, unit):
        replica = next(n for n, units in enumerate(self.replicas) if units[unit.truth.id] is unit)
        state = unit.state
        if isinstance(state, Draining) and self.now >= unit.acts_at:
            known = {"order": state.order, "before": state.before}
            unit.to(Replacing(self.now, state.incarnation, **known), self.now)
        if isinstance(unit.state, Replacing):
            self.replace(unit, unit.state, replica)
        unit.look(self.now)

    def replace(self, unit, state, replica):
        """Claim, stop, launch."""
        truth, order = unit.truth, state.order
        claimed = done(self.store.claim_restart(truth.id, order.incarnation, order.attempt))
        if not claimed:
            self.came_to(replica, Setback.ANOTHERS, order)
            self.go_back(unit, state)
        elif order.incarnation != truth.incarnation or (truth.runs and truth.stubborn):
            self.came_to(replica, Setback.FAILED, order)
            self.go_back(unit, state)
        else:
            self.stop(truth, order, unit)
            if truth.fate == "refused":
                self.came_to(replica, Setback.FAILED, order)
                sign = Sign(Cause.START_FAILED, "refused")
                unit.to(Failed(self.now, truth.incarnation, sign=sign), self.now)
                return
            self.start(truth)
            unit.launched = truth.incarnation
            unit.to(Starting(self.now, truth.incarnation, ours=True), self.now)

    def go_back(self, unit, state):
        before = state.before
        if isinstance(before, Suspect):
            before = replace(before, failures=0)
        unit.to(before, self.now)

    def came_to(self, replica, setback, order):
        self.histories[replica] = self.histories[replica].came_to(setback, order)

    def stop(self, truth, order, unit):
        if self.paced and len(self.leaders) == 1:
            self.check_pace(order, self.watchers[truth.id])
        if truth.runs:
            self.killed[truth.incarnation] = self.killed.get(truth.incarnation, 0) + 1
            assert self.killed[truth.incarnation] == 1, "restarted twice"
            if not (order.planned or truth.hung or unit.misled):
                assert unit.tests.get(truth.incarnation, 0) >= 2, "killed without proof"
        truth.runs = False

    def start(self, truth):
        truth.number += 1
        truth.runs, truth.began = True, self.now
        truth.starts_until = self.now + 40.0
        truth.ill, truth.hung, truth.asleep, truth.stubborn = "", False, False, False

    def drained_elsewhere(self, truth, replica):
        """Whether another replica, which led before, drains a backend still, as it tells."""
        others = [units for units in self.replicas if units is not self.replicas[replica]]
        return any(isinstance(each[truth.id].state, Draining) for each in others)

    def hand_over(self):
        """Another replica has the lease from now on."""
        self.leaders = {(min(self.leaders) + 1) % len(self.histories)}

    # --- the replicas -----------------------------------------------------------------------------

    def ask(self, replica):
        units = self.replicas[replica]
        members = self.views.get(replica) or [
            each.member(self.now, self.drained_elsewhere(each.truth, replica))
            for each in units.values()
        ]
        leads = {each.pool for each in members} if replica in self.leaders else set()
        minute = int(self.now // 60) % 60
        holds = {pool: until for pool, until in self.holds.items() if until > self.now}
        circumstances = Circumstances(self.now + self.jump_s, leads, minute, holds)
        policies = dict.fromkeys("pqr", self.policy)
        before = {each.backend_id: each for each in members}
        self.histories[replica], decisions = decide(
            members, self.histories[replica], policies, circumstances
        )
        for decision in decisions:
            unit = units[decision.backend_id]
            if isinstance(decision, Restart):
                if replica in self.views and isinstance(unit.state, Draining | Replacing):
                    continue  # an old view: its unit knows better
                self.check(replica, decision, before[decision.backend_id])
                unit.misled = replica in self.views
                self.begin(unit, decision)
            elif isinstance(decision, Suspend) and len(self.leaders) == 1:
                watcher = self.watchers[decision.backend_id]
                assert not watcher.suspended, "told once"
                watcher.suspended = unit.suspended = True
                self.holds[decision.backend_id] = math.inf
                if isinstance(unit.state, Failed | Suspect):
                    sign = Sign(decision.cause, decision.evidence)
                    known = (self.now, unit.state.incarnation)
                    unit.to(Suspended(*known, sign=sign, lives=lives(unit.state)), self.now)

    def begin(self, unit, order):
        state, now = unit.state, self.now
        before = state.before if isinstance(state, Draining | Replacing) else state
        known = {"order": order, "before": before}
        if order.planned and isinstance(state, Serving | Suspect):
            unit.acts_at = now + 20.0
            unit.to(Draining(now, before.incarnation, until=unit.acts_at, **known), now)
        else:
            unit.to(Replacing(now, before.incarnation, **known), now)
        unit.show(now)

    # --- the checks -------------------------------------------------------------------------------

    def unit(self, truth):
        """Return what the leader knows of a backend."""
        return self.replicas[min(self.leaders)][truth.id]

    def serves(self, truth):
        unit = self.unit(truth)
        return truth.well and unit.phase in UP and isinstance(unit.state, Serving | Suspect)

    def in_hand(self, truth):
        return isinstance(self.unit(truth).state, Draining | Replacing)

    def known(self, truth):
        """Whether the leader has seen what runs; not if another replica has started it anew in this very tick."""
        return self.unit(truth).state.incarnation == truth.incarnation

    def is_stopped(self, truth):
        """Whether it runs, and the leader is about to stop it.

        Not if another replica has started it anew in this very tick: the launcher refuses that order.
        """
        if not (self.in_hand(truth) and truth.runs):
            return False
        return self.unit(truth).state.order.incarnation == truth.incarnation

    def watch(self):
        for truth in self.fleet.values():
            watcher = self.watchers[truth.id]
            well = self.serves(truth) and isinstance(self.unit(truth).state, Serving)
            if not well or self.unit(truth).phase is not Phase.READY:
                watcher.well_since = None
            elif watcher.well_since is None:
                watcher.well_since = self.now
            elif self.now - watcher.well_since >= 600:
                watcher.row = 0
            bad = not truth.runs or truth.ill in ("failing", "muddled", "frozen", "dead")
            watched = truth.seen and not (truth.asleep or truth.held or truth.starts_until)
            # Of a replica that led before, too: what it stops is no evidence to it.
            in_hand = any(
                isinstance(units[truth.id].state, Draining | Replacing) for units in self.replicas
            )
            if bad and watched and watcher.good and not in_hand:
                watcher.bad_at = self.now
            watcher.good = self.serves(truth) and not bad

    def check(self, replica, order, seen):
        truth, watcher = self.fleet[order.backend_id], self.watchers[order.backend_id]
        assert replica in self.leaders
        assert self.holds.get(truth.pool, 0) <= self.now
        assert self.holds.get(None, 0) <= self.now
        if replica in self.views:
            return  # it sees what was; what it does is judged by what comes of it
        if len(self.replicas) > 1 and order.incarnation != truth.incarnation:
            return  # another replica was quicker; its launcher refuses
        assert order.incarnation == truth.incarnation
        assert not truth.held
        if truth.runs:
            self.check_living(order, truth)
        assert not watcher.suspended or len(self.leaders) > 1

    def check_living(self, order, truth):
        assert not truth.asleep
        assert truth.starts_until is None or truth.hung
        if order.planned and order.cause is not Cause.SLOW:
            assert not truth.saturated
        if len(self.leaders) > 1 or not self.paced:
            return
        members = [each for each in self.fleet.values() if each.pool == truth.pool]
        others = [each for each in members if each is not truth]
        assert not any(self.is_stopped(each) for each in others), "two at a time"
        if self.serves(truth):
            serving = sum(self.serves(each) or not self.known(each) for each in others)
            out = len(others) - serving
            assert out + 1 <= max(1, len(members) // 4), "more out than allowed"
            assert order.planned, "it serves, and was to be killed"
            if truth.works:
                assert serving, "the last one, with work"
        struck = {each.id for each in members if self.now - self.watchers[each.id].bad_at < 60}
        together = self.together(struck)
        assert not (len(together) >= 2 and len(together) * 2 >= len(members)), "our blindness"

    def together(self, ids):
        """Return the largest set of backends that went bad within 8 s of each other."""
        times = sorted(self.watchers[each].bad_at for each in ids)
        groups = [[at for at in times if 0 <= at - first <= 8] for first in times]
        return max(groups, key=len, default=[])

    def check_pace(self, order, watcher):
        if order.cause is Cause.SCHEDULED or order is watcher.forgiven:
            return
        recent = [at for at in watcher.times if self.now - at < self.policy.within]
        assert len(recent) < self.policy.max_restarts, "more restarts than allowed"
        if watcher.row and watcher.times:
            pause = min(10.0 * 2 ** (watcher.row - 1), 300.0)
            assert self.now - watcher.times[-1] >= pause, "sooner than backoff allows"
        watcher.times.append(self.now)
        watcher.row += 1

    # --- what happens -----------------------------------------------------------------------------

    def happen(self, event):
        kind, place, what = event
        truth = [*self.fleet.values()][place % len(self.fleet)]
        match kind:
            case "crash":
                truth.runs = False
            case "ill" if truth.runs and truth.starts_until is None:
                truth.ill = what
            case "restarted elsewhere" if not self.in_hand(truth):
                truth.stubborn = False
                truth.runs, truth.number, truth.ill = True, truth.number + 1, ""
                truth.starts_until, truth.hung, truth.began = self.now + 40.0, False, self.now
            case "set":
                name, value = what
                setattr(truth, name, value)
            case "pool":
                for each in self.fleet.values():
                    if each.pool == truth.pool:
                        self.happen((what[0], [*self.fleet].index(each.id), what[1]))
            case "hold":
                self.holds[what[0]] = self.now + what[1]
            case "clear":
                watcher = self.watchers[truth.id]
                watcher.times, watcher.row, watcher.suspended = [], 0, False
                for units in self.replicas:
                    state = units[truth.id].state
                    if isinstance(state, Draining | Replacing):
                        watcher.forgiven = state.order  # ordered before: it counts no more
                self.holds.pop(truth.id, None)
                self.histories = [each.clear(truth.id) for each in self.histories]
                for units in self.replicas:
                    self.clear(units[truth.id])
            case "hand over" if len(self.leaders) == 1:
                self.hand_over()
            case "both lead":
                self.leaders = set(range(len(self.histories)))
            case "stands still":
                replica = place % len(self.histories)
                members = [each.member(self.now) for each in self.replicas[replica].values()]
                self.views = {} if self.views else {replica: members}
            case "jump":
                self.jump_s = what

    def clear(self, unit):
        unit.suspended, state = False, unit.state
        if isinstance(state, Suspended) and state.lives:
            unit.to(Starting(self.now, state.incarnation), self.now)
        elif isinstance(state, Suspended):
            unit.to(Failed(self.now, state.incarnation, sign=state.sign), self.now)

    def run(self, steps):
        for ticks, event in steps:
            for _ in range(ticks):
                self.tick()
            self.happen(event)

    def calm_down(self):
        """Faults cease, operators let go."""
        self.views, self.holds, self.jump_s = {}, {}, 0.0
        self.leaders = {min(self.leaders)}
        for truth in self.fleet.values():
            truth.fate, truth.stubborn, truth.asleep, truth.held = "well", False, False, False
            truth.saturated, truth.works, truth.seen = False, False, True


places = st.integers(0, 3)  # few, so that what happens meets
ills = st.sampled_from(sorted(ILLS))
crashes = st.tuples(st.just("crash"), places, st.none())
sickness = st.tuples(st.just("ill"), places, ills)
states = st.tuples(
    st.just("set"),
    places,
    st.sampled_from(
        [
            *((name, value) for name in ("asleep", "held", "saturated") for value in (True, False)),
            *((("works"), value) for value in (True, False)),
            *((("seen"), value) for value in (True, False)),
            *((("fate"), value) for value in ("well", "refused", "crash", "hang")),
        ]
    ),
)
correlated = st.tuples(
    st.just("pool"),
    places,
    st.tuples(st.just("ill"), ills) | st.tuples(st.just("crash"), st.none()),
)
orders = st.one_of(
    st.tuples(
        st.just("hold"), places, st.tuples(st.sampled_from(["p", "q", None]), st.floats(0, 400))
    ),
    st.tuples(st.just("clear"), places, st.none()),
)
elsewhere = st.tuples(st.just("restarted elsewhere"), places, st.none())
jumps = st.tuples(st.just("jump"), places, st.floats(-1000, 1000))
stubborn = st.tuples(st.just("set"), places, st.just(("stubborn", True)))
faults = crashes | sickness | states | correlated | orders
pauses = st.sampled_from([0, 0, 1, 2, 3, 10, 40])
steps = st.lists(st.tuples(pauses, faults), max_size=30)
wild = st.lists(st.tuples(pauses, faults | elsewhere | stubborn), max_size=30)
sizes = st.sampled_from([(1,), (2,), (4,), (8,), (1, 1), (3, 5), (2, 2, 2)])


@schedules
@given(sizes, wild, st.sampled_from([POLICY, SCHEDULED]))
def test_every_restart_keeps_the_rules(sizes, steps, policy):
    world = World(sizes, policy)
    world.run([*steps, (60, ("clear", 0, None))])


@schedules
@given(sizes, steps, st.sampled_from([POLICY, SCHEDULED]))
@example(
    (2,),
    [
        (0, ("clear", 0, None)),
        (0, ("ill", 1, "dead")),
        (2, ("ill", 0, "frozen")),
        (0, ("crash", 1, None)),
    ],
    POLICY,
)
@example((2,), [(0, ("ill", 0, "fat")), (1, ("pool", 0, ("ill", "dead")))], POLICY)
@example((3, 5), [(40, ("crash", 3, None)), (40, ("crash", 3, None))], SCHEDULED)
def test_the_rules_are_kept_while_the_lease_goes_from_replica_to_replica(sizes, steps, policy):
    world = World(sizes, policy, replicas=2)
    for ticks, event in steps:
        world.run([(ticks, event), (1, ("hand over", 0, None))])
    world.run([(60, ("clear", 0, None))])


still = st.tuples(st.just("stands still"), places, st.none())


@schedules
@given(sizes, st.lists(st.tuples(pauses, faults | elsewhere | still | stubborn), max_size=30))
@example(
    (2,),
    [
        (0, ("crash", 0, None)),
        (0, ("ill", 1, "dead")),
        (10, ("stands still", 1, None)),
        (0, ("pool", 0, ("ill", "failing"))),
    ],
)
def test_two_leaders_with_old_views_restart_no_incarnation_twice(sizes, steps):
    """Their claims see to it: `World.replace` asserts it of every process that it stops."""
    world = World(sizes, replicas=2)
    world.happen(("both lead", 0, None))
    world.run([*steps, (60, ("clear", 0, None))])


@schedules
@given(sizes, st.lists(st.tuples(pauses, crashes | sickness | jumps), max_size=30))
def test_a_clock_that_jumps_makes_nothing_happen_twice(sizes, steps):
    world = World(sizes, paced=False)
    world.run([*steps, (60, ("clear", 0, None))])


@schedules
@given(sizes, steps)
@example((4,), [(0, ("pool", 0, ("ill", "frozen")))])
@example(
    (2,), [(0, ("set", 0, ("fate", "refused"))), (0, ("crash", 0, None)), (25, ("clear", 0, None))]
)
@example(
    (4,), [(0, ("set", 0, ("fate", "hang"))), (0, ("crash", 0, None)), (20, ("clear", 0, None))]
)
def test_once_faults_cease_everything_is_healed(sizes, steps):
    world = World(sizes)
    world.run(steps)
    world.calm_down()
    for place in range(len(world.fleet)):
        world.happen(("clear", place, None))
    for _ in range(int(len(world.fleet) * 500 / TICK_S) + 300):
        world.tick()
        if all(world.serves(each) and not each.ill for each in world.fleet.values()):
            break
    assert {
        each.id: (each.ill, world.unit(each).state)
        for each in world.fleet.values()
        if not world.serves(each)
    } == {}
    assert {each.id: each.ill for each in world.fleet.values() if each.ill} == {}


@schedules
@given(sizes, steps, st.randoms(use_true_random=False))
def test_the_order_in_which_backends_are_shown_changes_nothing(sizes, steps, rng):
    world = World(sizes)
    world.run(steps)
    members = [each.member(world.now) for each in world.replicas[0].values()]
    now = Circumstances(world.now + 1, set("pqr"))
    policies = dict.fromkeys("pqr", POLICY)
    shuffled = rng.sample(members, len(members))
    history = world.histories[0]
    assert decide(members, history, policies, now) == decide(shuffled, history, policies, now)


def test_a_crash_loop_ends_in_suspension_and_nothing_more_is_done():
    world = World((2,))
    world.happen(("set", 0, ("fate", "crash")))
    world.happen(("crash", 0, None))
    for _ in range(2000):
        world.tick()
    watcher = world.watchers["p/0"]
    assert watcher.suspended
    assert len(watcher.times) == 5
