from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import combinations, cycle

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.admission.bounds import Full, Held, Limits
from gateway.admission.queue import Blocked, FairQueue
from gateway.core.types import Slot
from tests.waitingroom import offer, request, slot

PASSES, LOOKS = 3, 12
BACKENDS = ("x", "y", "z")
WIDE = Limits(10_000, 10**9, 10**9, tenant_ratio=1.0)

costs = st.integers(1, 400)
names = st.sampled_from("abc")
usable = st.sets(st.sampled_from(BACKENDS)).map(frozenset)
limits = st.builds(
    Limits,
    requests=st.integers(0, 30),
    tokens=st.integers(0, 6000),
    bytes=st.integers(0, 300),
    tenant_ratio=st.sampled_from([0.25, 0.5, 1.0]),
)


def anywhere(waiting, claimed):
    return slot("x")


def nowhere(waiting, claimed):
    return Blocked(frozenset())


def shut(waiting, claimed):
    return Blocked(frozenset(), shut=True)


@dataclass
class Walk:
    """A gate with a little room on `free` backends; an item's kind is the set of those it could use."""

    free: set
    looks: list = field(default_factory=list)  # item, claimed, verdict

    def place(self, waiting, claimed):
        item = waiting.name
        free = item.backends & self.free
        backends = [] if item.large else sorted(free - claimed.keys())
        verdict = slot(backends[0]) if backends else Blocked(item.backends, shut=not free)
        self.looks.append((item, {**claimed}, verdict))
        return verdict


class Item:
    """One request of the model: it is queued, or has left in exactly one way."""

    def __init__(self, backends, large):
        self.backends = backends
        self.large = large  # too large for the little room that there is
        self.waiting = None
        self.passes = 0
        self.left = None


class Queue(RuleBasedStateMachine):
    """Offers, takes with room on some backends, leaving, expiry and reloads, beside a plain list."""

    def __init__(self):
        super().__init__()
        self.limits = Limits(20, 4000, 200, tenant_ratio=0.5)
        self.queue = FairQueue(self.limits, max_passes=PASSES, max_looks=LOOKS)
        self.now = 0.0
        self.queued = []  # in the order of the offers
        self.lines = defaultdict(list)  # by tenant and priority, in the order in which they go
        self.gone = []

    def leave(self, item, how):
        assert item.left is None
        item.left = how
        self.queued.remove(item)
        self.lines[self.line(item)].remove(item)
        self.gone.append(item)

    @rule(
        tenant=names,
        priority=st.integers(0, 2),
        cost=costs,
        size=st.integers(0, 30),
        wait=st.floats(0.1, 20),
        backends=usable,
        times=st.integers(1, 4),
        returned=st.booleans(),
        large=st.booleans(),
    )
    def offer(self, tenant, priority, cost, size, wait, backends, times, returned, large):
        for _ in range(times):
            item = Item(backends, large)
            deadline = self.now + wait
            item.waiting = request(
                item, tenant, priority, cost, size, deadline, returned, backends, self.now
            )
            line = self.lines[self.line(item)]
            before = [  # the next stays the next
                each for each in line if each is line[0] or not returned or each.waiting.returned
            ]
            full = offer(self.queue, item.waiting)
            assert full is self.why_full(item.waiting)
            if full is None:
                self.queued.append(item)
                line.insert(len(before), item)

    def why_full(self, new):
        counted = [each.waiting for each in self.queued if each.waiting.priority >= new.priority]
        own = [each for each in counted if each.tenant == new.tenant]
        share = self.limits.tenant_ratio
        for held, ratio, fulls in (
            (counted, 1, (Full.REQUESTS, Full.TOKENS, Full.BYTES)),
            (own, share, (Full.TENANT_REQUESTS, Full.TENANT_TOKENS, Full.TENANT_BYTES)),
        ):
            requests, tokens, size = fulls
            if len(held) >= self.limits.requests * ratio:
                return requests
            if sum(each.cost_tokens for each in (*held, new)) > self.limits.tokens * ratio:
                return tokens
            if sum(each.body_bytes for each in (*held, new)) > self.limits.bytes * ratio:
                return size
        return None

    @rule(free=st.sets(st.sampled_from(BACKENDS)), times=st.integers(1, 6))
    def take(self, free, times):
        for _ in range(times):
            walk = Walk(free)
            taken = self.queue.take(walk.place)
            self.check_walk(walk)
            if taken is None:
                assert not any(isinstance(verdict, Slot) for _, _, verdict in walk.looks)
                self.check_what_was_left_out(walk, self.queued)
                return
            (item, _, verdict), earlier = walk.looks[-1], walk.looks[:-1]
            assert taken == (item.waiting, verdict)
            for passed, _, _ in earlier:  # none of those whose kind had no room
                passed.passes += verdict.backend_id in passed.backends
            self.leave(item, "taken")

    def check_walk(self, walk):
        """Nothing is tried twice, each tenant's in order; who is passed often claims all it could use."""
        items = [item for item, _, _ in walk.looks]
        assert len(items) <= LOOKS
        assert len(set(items)) == len(items)
        assert all(item.left is None for item in items)
        claims = {}
        for item, claimed, _ in walk.looks:
            assert claimed == claims
            if item.passes >= PASSES and item.backends & walk.free:
                claims |= {each: (*claims.get(each, ()), item.waiting) for each in item.backends}
        for key in {self.line(item) for item in items}:
            line, mine = self.lines[key], [item for item in items if self.line(item) == key]
            assert mine == sorted(mine, key=line.index)
            for kind in {item.backends for item in mine}:
                looked = [item for item in mine if item.backends == kind]
                assert looked == [item for item in line if item.backends == kind][: len(looked)]

    @staticmethod
    def check_what_was_left_out(walk, queued):
        """Of a kind with no room one was tried, of another all or as many as were left for the others."""
        looked = Counter(item.backends for item, _, _ in walk.looks)
        assert all(looks == 1 for kind, looks in looked.items() if not kind & walk.free)
        waits = Counter(item.backends for item in queued)
        for kind, count in waits.items():
            tried = count if kind & walk.free else 1
            assert looked[kind] == tried or looked[kind] >= LOOKS - looked.total()

    @staticmethod
    def line(item):
        return item.waiting.tenant, item.waiting.priority

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def remove(self, data):
        item = data.draw(st.sampled_from(self.queued))
        assert self.queue.remove(item.waiting)
        self.leave(item, "removed")

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def remove_what_has_left(self, data):
        item = data.draw(st.sampled_from(self.gone))
        assert not self.queue.remove(item.waiting)

    @rule(pause=st.floats(0, 10))
    def wait(self, pause):
        self.now += pause
        expired = self.queue.expired(self.now)
        late = [each.waiting for each in self.queued if each.waiting.deadline <= self.now]
        assert expired == sorted(late, key=lambda waiting: (waiting.deadline, waiting.number))
        for waiting in expired:
            self.leave(waiting.name, "expired")

    @rule(limits=limits)
    def resize(self, limits):
        self.limits = self.queue.limits = limits

    @rule()
    def drain_when_it_is_long(self):
        if len(self.queued) > 12:
            assert [waiting.name for waiting in self.queue.drain()] == self.queued
            for item in [*self.queued]:
                self.leave(item, "drained")

    @invariant()
    def what_is_queued_is_counted(self):
        assert len(self.queue) == len(self.queued)
        assert all(item.waiting in self.queue for item in self.queued)
        assert not any(item.waiting in self.queue for item in self.gone)
        requests = [item.waiting for item in self.queued]
        assert self.queue.held == total(requests)
        assert self.queue.tenants == {
            name: total([each for each in requests if each.tenant == name])
            for name in {each.tenant for each in requests}
        }
        deadlines = [each.deadline for each in requests]
        assert self.queue.next_deadline() == min(deadlines, default=None)

    @invariant()
    def nobody_is_passed_more_often_than_allowed(self):
        assert all(item.passes <= PASSES for item in (*self.queued, *self.gone))

    @invariant()
    def what_is_ahead_is_at_most_all_the_others(self):
        for item in self.queued:
            ahead = self.queue.ahead(item.waiting)
            assert 0 <= ahead.requests < len(self.queued)
            assert 0 <= ahead.tokens <= self.queue.held.tokens - item.waiting.cost_tokens

    def teardown(self):
        while self.queue.take(anywhere) is not None:
            pass
        assert (self.queue.held, self.queue.tenants) == (Held(), {})


def total(requests):
    return Held(
        len(requests),
        sum(each.cost_tokens for each in requests),
        sum(each.body_bytes for each in requests),
    )


TestQueue = Queue.TestCase
TestQueue.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def backlog(queue, tenant, costs, priority=0, *, returned=lambda: False, kind=lambda: None):
    """Offer a request for each cost; return the last."""
    for cost in costs:
        waiting = request(cost, tenant, priority, cost, returned=returned(), kind=kind())
        assert offer(queue, waiting) is None
    return waiting


workloads = st.lists(st.lists(costs, min_size=1, max_size=12), min_size=2, max_size=5)


steps = st.lists(
    st.sampled_from(["take", "take", "take", "no room", "none of its kind", "leave"]), max_size=80
)


@settings(deadline=None)
@given(workloads, st.data())
def test_backlogged_tenants_never_differ_by_more_than_a_request(workloads, data):
    """At times there is no room, of any kind, or a client leaves; whatever goes, its tenant has more.

    Since they came together, a tenant was given no more than another but for the largest request of
    that other. Between any two moments, but for the largest of both.
    """
    queue = FairQueue(WIDE, max_looks=LOOKS)
    names = [str(number) for number in range(len(workloads))]
    more = {name: cycle(costs) for name, costs in zip(names, workloads, strict=True)}
    most = {name: max(costs) for name, costs in zip(names, workloads, strict=True)}
    returned = cycle(data.draw(st.lists(st.booleans(), min_size=1, max_size=7))).__next__
    kind = cycle(data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=7))).__next__
    queued = [
        backlog(queue, name, [next(more[name])], returned=returned, kind=kind) for name in names * 5
    ]
    given_tokens = dict.fromkeys(names, 0)
    apart = {pair: [0] for pair in combinations(names, 2)}
    for step in [*data.draw(steps), *["take"] * 10]:
        if step in ("no room", "none of its kind"):
            assert queue.take(nowhere if step == "no room" else shut) is None
            continue
        if step == "take":
            waiting, _ = queue.take(anywhere)
            given_tokens[waiting.tenant] += waiting.cost_tokens
        else:
            waiting = data.draw(st.sampled_from(queued))
            assert queue.remove(waiting)
        queued.remove(waiting)
        own = waiting.tenant
        queued.append(backlog(queue, own, [next(more[own])], returned=returned, kind=kind))
        for (one, other), found in apart.items():
            found.append(given_tokens[one] - given_tokens[other])
            assert -most[one] <= found[-1] <= most[other]
            assert max(found) - min(found) <= most[one] + most[other]


@settings(deadline=None)
@given(workloads, st.lists(st.booleans(), min_size=20, max_size=60), costs)
def test_a_newcomer_is_served_evenly_from_the_moment_it_comes(workloads, rooms, cost):
    """Whatever waited in vain before; one that was blocked while others went has not saved up turns."""
    queue = FairQueue(WIDE)
    names = [str(number) for number in range(len(workloads))]
    more = {name: cycle(costs) for name, costs in zip(names, workloads, strict=True)}
    for name in names * 2:
        backlog(queue, name, [next(more[name])], kind=lambda name=name: name)
    for room in rooms:  # at times there is none for the first tenant

        def place(waiting, claimed, room=room):
            return (
                slot("x") if room or waiting.tenant != "0" else Blocked(frozenset("y"), shut=True)
            )

        waiting, _ = queue.take(place)
        own = waiting.tenant
        backlog(queue, own, [next(more[own])], kind=lambda own=own: own)
    backlog(queue, "new", [cost] * 100, kind=lambda: "new")
    given_tokens = dict.fromkeys([*names, "new"], 0)
    most = max(cost, *map(max, workloads))
    for _ in range(60):
        waiting, _ = queue.take(anywhere)
        given_tokens[waiting.tenant] += waiting.cost_tokens
        if waiting.tenant != "new":
            backlog(queue, waiting.tenant, [next(more[waiting.tenant])])
        assert max(given_tokens.values()) - given_tokens["new"] <= 2 * most


kinds = st.sampled_from("pqrst")
crowds = st.lists(st.tuples(names, st.integers(0, 2), kinds, st.integers(1, 40)), max_size=12)


@settings(deadline=None)
@given(crowds, st.lists(st.sets(kinds), max_size=20))
def test_as_long_as_any_kind_that_waits_has_room_one_of_it_goes(crowds, rooms):
    """However many of the other kinds wait before it, of whatever tenant and priority."""
    queue = FairQueue(WIDE, max_looks=LOOKS)
    waits = Counter()
    for tenant, priority, kind, count in crowds:
        waits[kind] += count
        for _ in range(count):
            assert offer(queue, request(kind, tenant, priority, 9, kind=kind)) is None
    for room in rooms:

        def place(waiting, claimed, room=room):
            kind = waiting.name
            free = kind in room and kind not in claimed
            return slot(kind) if free else Blocked(frozenset(kind), shut=True)

        taken = queue.take(place)
        assert (taken is None) == (not any(waits[kind] for kind in room))
        if taken is not None:
            waits[taken[0].name] -= 1
            assert taken[0].name == taken[1].backend_id in room


@settings(deadline=None)
@given(
    low=st.integers(1, 60),
    floods=st.lists(st.tuples(st.integers(1, 3), costs), min_size=1, max_size=3),
)
def test_no_band_starves_however_busy_those_above(low, floods):
    """Higher bands always have more to serve, and always could."""
    queue = FairQueue(WIDE)
    for priority, cost in floods:
        backlog(queue, "flood", [cost], priority)
    waiting = backlog(queue, "low", [low])
    above = 0
    for _ in range(20 * low + 10):
        taken, _ = queue.take(anywhere)
        if taken is waiting:
            break
        above += taken.cost_tokens
        backlog(queue, "flood", [taken.cost_tokens], taken.priority)
    assert waiting not in queue
    assert above < 20 * low + sum(cost for _, cost in floods)


@settings(deadline=None)
@given(large=st.integers(1, 2000), newcomers=st.integers(1, 4), data=st.data())
def test_nobody_starves_behind_ever_new_tenants(large, newcomers, data):
    """New tenants come all the time, so many at once: each place of theirs has as many tokens before it."""
    queue = FairQueue(WIDE)
    waiting = backlog(queue, "large", [large])
    for number in range(newcomers):
        backlog(queue, f"new {number}", [1])
    before, served = 0, 0
    while waiting in queue and before <= newcomers * large:
        taken, _ = queue.take(anywhere)
        served += 1
        if taken is not waiting:
            before += taken.cost_tokens
            backlog(queue, f"newer {served}", [data.draw(st.integers(1, 100))])
    assert waiting not in queue


@given(st.lists(st.integers(1, 8), min_size=1, max_size=30), st.integers(8, 20))
def test_a_large_request_gets_its_room_before_many_small_ones(smalls, need):
    """One backend, whose room comes back one by one; small requests would always fit first.

    They have as many tokens in their own turn, then pass it a few times.
    """
    queue = FairQueue(WIDE, max_passes=PASSES)
    large = backlog(queue, "large", [need])
    free, passes = 0, 0

    def place(waiting, claimed):
        if waiting.cost_tokens <= free and "x" not in claimed:
            return slot("x")
        return Blocked(frozenset("x"))

    for step in range(2 * need + 8 * PASSES):
        backlog(queue, "small", [smalls[step % len(smalls)]])
        free += 1
        while (taken := queue.take(place)) is not None:
            free -= taken[0].cost_tokens
            passes += large in queue
    assert large not in queue
    assert passes <= need + PASSES


@given(workloads, names, costs, st.lists(st.booleans(), min_size=1, max_size=7), st.booleans())
def test_the_estimate_of_what_is_ahead_is_right_within_a_request_of_each_tenant(
    workloads, tenant, cost, some, returned
):
    queue = FairQueue(WIDE)
    some = cycle(some).__next__
    for number, costs in enumerate(workloads):
        backlog(queue, "abcde"[number], costs, returned=some)
    mine = request("mine", tenant, 0, cost, returned=returned)
    before = queue.ahead(mine)
    queue.offer(mine)
    assert queue.ahead(mine) == before
    tokens = 0
    while (taken := queue.take(anywhere)[0]) is not mine:
        tokens += taken.cost_tokens
    most = max(max(costs) for costs in workloads)
    assert abs(tokens - before.tokens) <= len(workloads) * most
