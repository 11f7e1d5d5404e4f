from collections import Counter
from dataclasses import dataclass, field
from itertools import cycle

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.admission.queue import Blocked, FairQueue, Full, Held, Limits, Placed, Ticket

QUANTUM, PASSES, LOOKS = 100, 3, 6
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


def anywhere(item, claimed):
    return Placed("x", None)


def nowhere(item, claimed):
    return Blocked(frozenset())


def shut(item, claimed):
    return Blocked(frozenset(), kind=True)


@dataclass
class Walk:
    """A gate with a little room on `free` backends; an item's kind is the set of those it could use."""

    free: set
    looks: list = field(default_factory=list)  # item, claimed, verdict

    def place(self, item, claimed):
        free = item.backends & self.free
        backends = [] if item.large else sorted(free - claimed.keys())
        placed = Placed(backends[0], item) if backends else None
        verdict = placed or Blocked(item.backends, kind=not free)
        self.looks.append((item, {**claimed}, verdict))
        return verdict


class Item:
    """One request of the model: it is queued, or has left in exactly one way."""

    def __init__(self, backends, large):
        self.backends = backends
        self.large = large  # too large for the little room that there is
        self.ticket = None
        self.passes = 0
        self.left = None


class Queue(RuleBasedStateMachine):
    """Offers, takes with room on some backends, leaving, expiry and reloads, beside a plain list."""

    def __init__(self):
        super().__init__()
        self.limits = Limits(20, 4000, 200, tenant_ratio=0.5)
        self.queue = FairQueue(
            self.limits, quantum_tokens=QUANTUM, max_passes=PASSES, max_looks=LOOKS
        )
        self.now = 0.0
        self.queued = []  # in the order of the offers
        self.lines = {}  # by tenant, priority and kind, in the order in which they go
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
            ticket = item.ticket = Ticket(
                item, tenant, priority, cost, size, self.now, deadline, returned, backends
            )
            line = self.lines.setdefault(self.line(item), [])
            before = [each for each in line if not returned or goes_before_a_returned(each.ticket)]
            full = self.queue.offer(ticket)
            assert full is self.why_full(ticket)
            if full is None:
                self.queued.append(item)
                line.insert(len(before), item)

    def why_full(self, new):
        own = [each.ticket for each in self.queued if each.ticket.tenant == new.tenant]
        share = self.limits.tenant_ratio
        for tickets, ratio, fulls in (
            ([each.ticket for each in self.queued], 1, (Full.REQUESTS, Full.TOKENS, Full.BYTES)),
            (own, share, (Full.TENANT_REQUESTS, Full.TENANT_TOKENS, Full.TENANT_BYTES)),
        ):
            requests, tokens, size = fulls
            if len(tickets) >= self.limits.requests * ratio:
                return requests
            if sum(each.cost_tokens for each in (*tickets, new)) > self.limits.tokens * ratio:
                return tokens
            if sum(each.body_bytes for each in (*tickets, new)) > self.limits.bytes * ratio:
                return size
        return None

    @rule(free=st.sets(st.sampled_from(BACKENDS)), times=st.integers(1, 6))
    def take(self, free, times):
        for _ in range(times):
            walk = Walk(free)
            taken = self.queue.take(walk.place)
            self.check_walk(walk)
            if taken is None:
                assert not any(isinstance(verdict, Placed) for _, _, verdict in walk.looks)
                self.check_what_was_left_out(walk, self.queued)
                return
            ticket, value = taken
            (item, _, verdict), earlier = walk.looks[-1], walk.looks[:-1]
            assert ticket.item is value is item
            for passed, _, _ in earlier:  # none of those whose kind had no room
                passed.passes += verdict.backend_id in passed.backends
            self.leave(item, "taken")

    def check_walk(self, walk):
        """Nothing is tried twice, kinds in order; who is passed often claims all it could use."""
        items = [item for item, _, _ in walk.looks]
        assert len(items) <= 2 * LOOKS
        assert len(set(items)) == len(items)
        assert all(item.left is None for item in items)
        claims = {}
        for item, claimed, _ in walk.looks:
            assert claimed == claims
            if item.passes >= PASSES and item.backends & walk.free:
                claims |= {each: (*claims.get(each, ()), item) for each in item.backends}
        for key in {self.line(item) for item in items}:
            mine = [item for item in items if self.line(item) == key]
            assert mine == self.lines[key][: len(mine)]

    @staticmethod
    def check_what_was_left_out(walk, queued):
        """Of a kind with no room one was tried, of another all or as many as it had looks."""
        looked = Counter(item.backends for item, _, _ in walk.looks)
        assert all(looks == 1 for kind, looks in looked.items() if not kind & walk.free)
        waits = Counter(item.backends for item in queued)
        roomy = [
            kind for kind in looked if kind & walk.free
        ]  # in the order in which they were tried
        if len(looked) <= 4:  # 6, 3, 2 and 1 looks
            assert looked.keys() == waits.keys()
        if roomy and len(roomy) == len(looked):
            assert looked[roomy[0]] == min(LOOKS, waits[roomy[0]])

    @staticmethod
    def line(item):
        return item.ticket.tenant, item.ticket.priority, item.backends

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def remove(self, data):
        item = data.draw(st.sampled_from(self.queued))
        assert self.queue.remove(item.ticket)
        self.leave(item, "removed")

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def remove_what_has_left(self, data):
        item = data.draw(st.sampled_from(self.gone))
        assert not self.queue.remove(item.ticket)

    @rule(pause=st.floats(0, 10))
    def wait(self, pause):
        self.now += pause
        expired = self.queue.expired(self.now)
        late = [each.ticket for each in self.queued if each.ticket.deadline <= self.now]
        assert expired == sorted(late, key=lambda ticket: (ticket.deadline, ticket.number))
        for ticket in expired:
            self.leave(ticket.item, "expired")

    @rule(limits=limits)
    def resize(self, limits):
        self.limits = limits
        self.queue.resize(limits)

    @rule()
    def drain_when_it_is_long(self):
        if len(self.queued) > 12:
            assert [ticket.item for ticket in self.queue.drain()] == self.queued
            for item in [*self.queued]:
                self.leave(item, "drained")

    @invariant()
    def what_is_queued_is_counted(self):
        assert len(self.queue) == len(self.queued)
        assert all(item.ticket in self.queue for item in self.queued)
        assert not any(item.ticket in self.queue for item in self.gone)
        tickets = [item.ticket for item in self.queued]
        assert self.queue.held == total(tickets)
        assert self.queue.tenants == {
            name: total([each for each in tickets if each.tenant == name])
            for name in {each.tenant for each in tickets}
        }
        deadlines = [each.deadline for each in tickets]
        assert self.queue.next_deadline() == min(deadlines, default=None)

    @invariant()
    def nobody_is_passed_more_often_than_allowed(self):
        assert all(item.passes <= PASSES for item in (*self.queued, *self.gone))

    @invariant()
    def what_is_ahead_is_at_most_all_the_others(self):
        for item in self.queued:
            requests, tokens = self.queue.ahead(item.ticket)
            assert 0 <= requests < len(self.queued)
            assert 0 <= tokens <= self.queue.held.tokens - item.ticket.cost_tokens

    def teardown(self):
        while self.queue.take(anywhere) is not None:
            pass
        assert (self.queue.held, self.queue.tenants) == (Held(), {})


def goes_before_a_returned(ticket):
    """Whether one that returns now finds this one before it: it has returned too, or was up already."""
    return ticket.returned or ticket.turn > 0


def total(tickets):
    return Held(
        len(tickets),
        sum(each.cost_tokens for each in tickets),
        sum(each.body_bytes for each in tickets),
    )


TestQueue = Queue.TestCase
TestQueue.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def backlog(queue, tenant, costs, priority=0, *, returned=lambda: False, kind=lambda: None):
    """Offer a ticket for each cost; return the last."""
    for cost in costs:
        ticket = Ticket(cost, tenant, priority, cost, 0, 0.0, 1.0, returned(), kind())
        assert queue.offer(ticket) is None
    return ticket


workloads = st.lists(st.lists(costs, min_size=1, max_size=12), min_size=2, max_size=5)


def steps(other):
    return st.lists(st.sampled_from(["take", "take", other]), max_size=80)


@settings(deadline=None)
@given(workloads, steps("no room") | steps("none of its kind") | steps("leave"), st.data())
def test_backlogged_tenants_never_differ_by_more_than_a_quantum_and_a_ticket(
    workloads, steps, data
):
    """At times there is no room, or a client leaves; whatever goes, its tenant has more.

    (With both, by the cost of what left after it was blocked, too: those behind it keep their turns. So
    do the next of its tenant's other kinds when one leaves.)
    """
    queue = FairQueue(WIDE, quantum_tokens=QUANTUM, max_looks=LOOKS)
    names = [str(number) for number in range(len(workloads))]
    more = {name: cycle(costs) for name, costs in zip(names, workloads, strict=True)}
    some = cycle(data.draw(st.lists(st.booleans(), min_size=1, max_size=7))).__next__
    some_kinds = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=7))
    kinds = cycle(some_kinds).__next__
    queued = [
        backlog(queue, name, [next(more[name])], returned=some, kind=kinds) for name in names * 5
    ]
    given_tokens = dict.fromkeys(names, 0)
    most = max(max(costs) for costs in workloads)
    late = most * (len({*some_kinds}) - 1) if "leave" in steps else 0
    for step in [*steps, *["take"] * 10]:
        if step in ("no room", "none of its kind"):
            assert queue.take(nowhere if step == "no room" else shut) is None
            continue
        if step == "take":
            ticket, _ = queue.take(anywhere)
            given_tokens[ticket.tenant] += ticket.cost_tokens
        else:
            ticket = data.draw(st.sampled_from(queued))
            assert queue.remove(ticket)
        queued.remove(ticket)
        own = ticket.tenant
        queued.append(backlog(queue, own, [next(more[own])], returned=some, kind=kinds))
        assert max(given_tokens.values()) - min(given_tokens.values()) < QUANTUM + most + late


kinds = st.sampled_from("pqrst")
crowds = st.lists(st.tuples(names, st.integers(0, 2), kinds, st.integers(1, 40)), max_size=12)


@settings(deadline=None)
@given(crowds, st.lists(st.sets(kinds), max_size=20))
def test_as_long_as_any_kind_that_waits_has_room_one_of_it_goes(crowds, rooms):
    """However many of the other kinds wait before it, of whatever tenant and priority."""
    queue = FairQueue(WIDE, quantum_tokens=QUANTUM, max_looks=LOOKS)
    waits = Counter()
    for tenant, priority, kind, count in crowds:
        waits[kind] += count
        for _ in range(count):
            assert queue.offer(Ticket(kind, tenant, priority, 9, 0, 0.0, 1.0, kind=kind)) is None
    for room in rooms:

        def place(kind, claimed, room=room):
            free = kind in room and kind not in claimed
            return Placed(kind, kind) if free else Blocked(frozenset(kind), kind=True)

        taken = queue.take(place)
        assert (taken is None) == (not any(waits[kind] for kind in room))
        if taken is not None:
            waits[taken[1]] -= 1
            assert taken[1] in room


@settings(deadline=None)
@given(
    low=st.integers(1, 60),
    floods=st.lists(st.tuples(st.integers(1, 3), costs), min_size=1, max_size=3),
)
def test_no_band_starves_however_busy_those_above(low, floods):
    """Higher bands always have more to serve, and always could."""
    queue = FairQueue(WIDE, quantum_tokens=QUANTUM)
    for priority, cost in floods:
        backlog(queue, "flood", [cost], priority)
    waiting = backlog(queue, "low", [low])
    above = 0
    for _ in range(20 * low + 10):
        ticket, _ = queue.take(anywhere)
        if ticket is waiting:
            break
        above += ticket.cost_tokens
        backlog(queue, "flood", [ticket.cost_tokens], ticket.priority)
    assert waiting not in queue
    assert above < 20 * low + sum(cost for _, cost in floods)


@settings(deadline=None)
@given(
    large=st.integers(1, 4000),
    newcomers=st.integers(1, 4),
    data=st.data(),
)
def test_nobody_starves_behind_ever_new_tenants(large, newcomers, data):
    """New tenants come all the time; a ticket of so many quanta waits for as many turns of theirs."""
    queue = FairQueue(WIDE, quantum_tokens=QUANTUM)
    waiting = backlog(queue, "large", [large])
    turns = -(-large // QUANTUM)
    for number in range(newcomers):
        backlog(queue, f"new {number}", [1])
    served = 0
    while waiting in queue and served <= newcomers * turns:
        taken, _ = queue.take(anywhere)
        served += 1
        if taken is not waiting:
            backlog(queue, f"newer {served}", [data.draw(st.integers(1, QUANTUM))])
    assert waiting not in queue


@given(st.lists(st.integers(1, 8), min_size=1, max_size=30), st.integers(8, 20))
def test_a_large_request_gets_its_room_before_many_small_ones(smalls, need):
    """One backend, whose room comes back one by one; small requests would always fit first."""
    queue = FairQueue(WIDE, max_passes=PASSES)
    large = backlog(queue, "large", [need])
    free, passes = 0, 0

    def place(need_tokens, claimed):
        if need_tokens <= free and "x" not in claimed:
            return Placed("x", None)
        return Blocked(frozenset("x"))

    for step in range(need + 8 * PASSES):
        backlog(queue, "small", [smalls[step % len(smalls)]])
        free += 1
        while (taken := queue.take(place)) is not None:
            free -= taken[0].cost_tokens
            passes += large in queue
    assert large not in queue
    assert passes <= PASSES


@given(workloads, names, costs, st.lists(st.booleans(), min_size=1, max_size=7), st.booleans())
def test_the_estimate_of_what_is_ahead_is_right_within_a_turn(
    workloads, tenant, cost, some, returned
):
    queue = FairQueue(WIDE, quantum_tokens=QUANTUM)
    some = cycle(some).__next__
    for number, costs in enumerate(workloads):
        backlog(queue, "abcde"[number], costs, returned=some)
    mine = Ticket("mine", tenant, 0, cost, 0, 0.0, 1.0, returned)
    before = queue.ahead(mine)
    queue.offer(mine)
    assert queue.ahead(mine) == before
    tokens = 0
    while (ticket := queue.take(anywhere)[0]) is not mine:
        tokens += ticket.cost_tokens
    most = max(max(costs) for costs in workloads)
    assert abs(tokens - before.tokens) <= len(workloads) * (QUANTUM + most)
