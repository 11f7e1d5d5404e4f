"""The healing rules in a simulated fleet: what is done is judged by what is true, not by the rules.

The world ticks every four seconds. Its backends crash, hang, slow down, saturate, sleep and are held
by operators; restarts take time, fail to stop or to start, and bring what starts, hangs or crashes.
"""

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.core.types import Phase
from gateway.heal.backoff import Policy
from gateway.heal.healing import Cause, Facts, Moment, Restart, Sign, Suspend
from gateway.heal.remedy import History, clear, decide, settled, withdrawn
from gateway.launch.launcher import Runs, Seen
from gateway.pools.store import MemoryStore

TICK_S = 4.0
POLICY = Policy(max_restarts=5, within_s=1800.0)
SCHEDULED = Policy(max_restarts=5, within_s=1800.0, restart_every_s=300.0, window=(3, 50))
SERVING = (Phase.READY, Phase.DEGRADED)
# What ails a process that runs, as it shows: phase, its reason, a sign.
ILLS = {
    "frozen": (Phase.DOWN, "no_progress", None),
    "dead": (Phase.DOWN, "http_503", None),
    "silent": (Phase.DOWN, "timeout", None),
    "muddled": (Phase.READY, "healthy", Cause.FROZEN),
    "failing": (Phase.DEGRADED, "traffic", Cause.ERRORS),
    "slow": (Phase.READY, "healthy", Cause.SLOW),
    "fat": (Phase.READY, "healthy", Cause.MEMORY),
}


@dataclass
class Truth:
    """One backend as it really is."""

    id: str
    pool: str
    number: int = 0  # of its incarnation
    runs: bool = True
    ill: str = ""
    starts_until: float | None = None
    fate: str = (
        "well"  # of the next launches: well, refused (to start), crash or hang while starting
    )
    stubborn: bool = False  # what runs cannot be stopped
    hung: bool = False
    asleep: bool = False
    held: bool = False
    saturated: bool = False
    works: bool = True
    seen: bool = True
    began: float = 0.0
    since: float = 0.0
    shown: Phase = Phase.READY
    order: Restart | None = None
    by: int = 0
    acts_at: float = 0.0

    @property
    def incarnation(self):
        return f"{self.id}#{self.number}"

    @property
    def serves(self):
        well = self.runs and not self.asleep and not self.held and self.order is None
        return well and self.starts_until is None and self.phase()[0] in SERVING

    def phase(self):
        if self.held:
            return Phase.CORDONED, "cordoned", None
        if not self.runs:
            return Phase.DOWN, "refused", None
        if self.starts_until is not None:
            return Phase.DOWN, "refused", Cause.START_HUNG if self.hung else None
        if self.asleep:
            return Phase.DOWN, "asleep", None
        return ILLS.get(self.ill, (Phase.READY, "healthy", None))

    def facts(self, now, by):
        phase, reason, cause = self.phase()
        restarting = self.order is not None and self.by == by
        if restarting and self.runs:
            phase = Phase.DRAINING
        if phase is not self.shown:
            self.shown, self.since = phase, now
        return Facts(
            self.id,
            self.pool,
            phase,
            reason=reason,
            since=self.since,
            seen=Seen(self.incarnation, Runs.RUNNING if self.runs else Runs.ENDED)
            if self.seen
            else None,
            held=self.held,
            restarting=restarting,
            starting=self.starts_until is not None,
            asleep=self.asleep,
            saturated=self.saturated,
            moved_at=now if self.saturated and self.ill not in ("frozen", "dead") else -math.inf,
            in_flight=int(self.works),
            age_s=now - self.began,
            signs=(Sign(cause, cause.value),) if cause is not None else (),
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
        self.histories = [History() for _ in range(replicas)]
        self.leaders = {0}
        self.views = {}  # of replicas whose view stands still
        self.holds = {}
        self.jump_s = 0.0
        self.killed = {}  # incarnations that ran when they were stopped, and how often that was begun
        self.tick()

    # --- time -------------------------------------------------------------------------------------

    def tick(self):
        self.now += TICK_S
        self.clock.at = self.now
        for truth in self.fleet.values():
            self.go_on(truth)
        self.watch()
        for replica in range(len(self.histories)):
            self.ask(replica)

    def go_on(self, truth):
        """What was begun goes on: starts come to their end, restarts drain, stop and launch."""
        starts = truth.runs and truth.starts_until is not None and not truth.hung
        if starts and self.now >= truth.starts_until:
            if truth.fate == "crash":
                truth.runs = False
            elif truth.fate == "hang":
                truth.hung = True
            else:
                truth.starts_until = None
        if truth.order is not None and self.now >= truth.acts_at:
            self.act(truth, truth.order)

    def act(self, truth, order):
        """The drain is over: claim, stop, launch."""
        by, truth.order = truth.by, None
        claimed = done(self.store.claim_restart(truth.id, order.incarnation, order.attempt))
        if claimed and order.incarnation == truth.incarnation:
            if self.paced and len(self.leaders) == 1:
                self.check_pace(order, self.watchers[truth.id])
            self.replace(truth)
        if order.attempt % 2:  # else it is seen: under way before, and no longer
            self.histories[by] = settled(self.histories[by], truth.id)

    def hand_over(self):
        """Who loses the lease gives up what it drains before another can have it."""
        for truth in self.fleet.values():
            if truth.order is not None:
                self.histories[truth.by] = withdrawn(self.histories[truth.by], truth.order)
                self.watchers[truth.id].orders.pop((truth.by, truth.order.incarnation), None)
                truth.order = None
        self.leaders = {(min(self.leaders) + 1) % len(self.histories)}

    def replace(self, truth):
        if truth.runs:
            self.killed[truth.incarnation] = self.killed.get(truth.incarnation, 0) + 1
            assert self.killed[truth.incarnation] == 1, "restarted twice"
            if truth.stubborn:
                return
        truth.runs = False
        if truth.fate == "refused":
            return
        truth.number += 1
        truth.runs, truth.began = True, self.now
        truth.starts_until = self.now + 40.0
        truth.ill, truth.hung, truth.asleep, truth.stubborn = "", False, False, False

    # --- the replicas -----------------------------------------------------------------------------

    def ask(self, replica):
        facts = self.views.get(replica) or [
            each.facts(self.now, replica) for each in self.fleet.values()
        ]
        leads = {each.pool for each in facts} if replica in self.leaders else set()
        minute = int(self.now // 60) % 60
        holds = {pool: until for pool, until in self.holds.items() if until > self.now}
        moment = Moment(self.now + self.jump_s, leads, minute, holds)
        policies = dict.fromkeys("pqr", self.policy)
        before = {each.backend_id: each for each in facts}
        self.histories[replica], decisions = decide(
            facts, self.histories[replica], policies, moment
        )
        for decision in decisions:
            if isinstance(decision, Restart):
                self.check(replica, decision, before[decision.backend_id])
                self.begin(replica, decision)
            elif isinstance(decision, Suspend) and len(self.leaders) == 1:
                watcher = self.watchers[decision.backend_id]
                assert not watcher.suspended, "told once"
                watcher.suspended = True
                self.holds[decision.backend_id] = math.inf

    def begin(self, replica, order):
        truth = self.fleet[order.backend_id]
        if truth.order is not None:
            self.histories[replica] = settled(self.histories[replica], truth.id)
            return  # the other leader is at it
        truth.order, truth.by = order, replica
        truth.acts_at = self.now + (20.0 if order.planned else TICK_S)

    # --- the checks -------------------------------------------------------------------------------

    def watch(self):
        for truth in self.fleet.values():
            watcher = self.watchers[truth.id]
            well = truth.serves and truth.phase()[0] is Phase.READY
            if not well:
                watcher.well_since = None
            elif watcher.well_since is None:
                watcher.well_since = self.now
            elif self.now - watcher.well_since >= 600:
                watcher.row = 0
            bad = truth.serves and truth.ill in ("failing", "muddled")
            bad = bad or not truth.serves and not (truth.asleep or truth.held or truth.starts_until)
            bad = bad or not truth.runs
            if bad and watcher.good and truth.order is None:
                watcher.bad_at = self.now
            watcher.good = truth.serves and not bad

    def check(self, replica, order, seen):
        truth, watcher = self.fleet[order.backend_id], self.watchers[order.backend_id]
        assert replica in self.leaders
        assert self.holds.get(truth.pool, 0) <= self.now
        assert self.holds.get(None, 0) <= self.now
        if seen.seen.running:
            key = (replica, order.incarnation)
            watcher.orders[key] = watcher.orders.get(key, 0) + 1
            assert watcher.orders[key] == 1, "the same incarnation ordered again"
        if replica in self.views:
            return  # it sees what was; what it does is judged by what comes of it
        assert order.incarnation == truth.incarnation
        assert not truth.held
        assert truth.order is None or truth.by != replica
        if truth.runs:
            self.check_living(order, truth)
        assert not watcher.suspended or len(self.leaders) > 1

    def check_living(self, order, truth):
        assert not truth.asleep
        assert truth.starts_until is None or truth.hung
        assert not truth.saturated or truth.hung or truth.ill in ("slow", "frozen", "dead")
        if len(self.leaders) > 1 or not self.paced:
            return
        members = [each for each in self.fleet.values() if each.pool == truth.pool]
        others = [each for each in members if each is not truth]
        assert not any(each.order and each.runs for each in others), "two at a time"
        if truth.serves:
            out = sum(not each.serves for each in others)
            assert out + 1 <= max(1, len(members) // 4), "more out than allowed"
            if len(members) > 1:
                assert order.planned or truth.ill == "muddled"
            if truth.works:
                assert any(each.serves for each in others), "the last one, with work"
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
        recent = [at for at in watcher.times if self.now - at < self.policy.within_s]
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
            case "restarted elsewhere" if truth.order is None:
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
                watcher.forgiven = truth.order  # ordered before: it counts no more
                self.holds.pop(truth.id, None)
                self.histories = [clear(each, truth.id) for each in self.histories]
            case "hand over" if len(self.leaders) == 1:
                self.hand_over()
            case "both lead":
                self.leaders = set(range(len(self.histories)))
            case "stands still":
                replica = place % len(self.histories)
                facts = [each.facts(self.now, replica) for each in self.fleet.values()]
                self.views = {} if self.views else {replica: facts}
            case "jump":
                self.jump_s = what

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


@settings(deadline=None)
@given(sizes, wild, st.sampled_from([POLICY, SCHEDULED]))
def test_every_restart_keeps_the_rules(sizes, steps, policy):
    world = World(sizes, policy)
    world.run([*steps, (60, ("clear", 0, None))])


@settings(deadline=None)
@given(sizes, steps, st.sampled_from([POLICY, SCHEDULED]))
def test_the_rules_are_kept_while_the_lease_goes_from_replica_to_replica(sizes, steps, policy):
    world = World(sizes, policy, replicas=2)
    for ticks, event in steps:
        world.run([(ticks, event), (1, ("hand over", 0, None))])
    world.run([(60, ("clear", 0, None))])


still = st.tuples(st.just("stands still"), places, st.none())


@settings(deadline=None)
@given(sizes, st.lists(st.tuples(pauses, faults | elsewhere | still | stubborn), max_size=30))
def test_two_leaders_with_old_views_restart_no_incarnation_twice(sizes, steps):
    """Their claims see to it: `World.replace` asserts it of every process that it stops."""
    world = World(sizes, replicas=2)
    world.happen(("both lead", 0, None))
    world.run([*steps, (60, ("clear", 0, None))])


@settings(deadline=None)
@given(sizes, st.lists(st.tuples(pauses, crashes | sickness | jumps), max_size=30))
def test_a_clock_that_jumps_makes_nothing_happen_twice(sizes, steps):
    world = World(sizes, paced=False)
    world.run([*steps, (60, ("clear", 0, None))])


@settings(deadline=None)
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
        if all(each.serves and not each.ill for each in world.fleet.values()):
            break
    assert {
        each.id: each.ill or each.runs for each in world.fleet.values() if not each.serves
    } == {}
    assert {each.id: each.ill for each in world.fleet.values() if each.ill} == {}


@settings(deadline=None)
@given(sizes, steps, st.randoms(use_true_random=False))
def test_the_order_in_which_backends_are_shown_changes_nothing(sizes, steps, rng):
    world = World(sizes)
    world.run(steps)
    facts = [each.facts(world.now, 0) for each in world.fleet.values()]
    moment = Moment(world.now + 1, set("pqr"))
    policies = dict.fromkeys("pqr", POLICY)
    shuffled = rng.sample(facts, len(facts))
    history = world.histories[0]
    assert decide(facts, history, policies, moment) == decide(shuffled, history, policies, moment)


def test_a_crash_loop_ends_in_suspension_and_nothing_more_is_done():
    world = World((2,))
    world.happen(("set", 0, ("fate", "crash")))
    world.happen(("crash", 0, None))
    for _ in range(2000):
        world.tick()
    watcher = world.watchers["p/0"]
    assert watcher.suspended
    assert len(watcher.times) == 5
