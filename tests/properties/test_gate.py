"""The gate, over any order of events: nothing is lost, given twice or kept waiting for nothing."""

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from gateway.core.endings import Ending
from gateway.core.errors import ContextLengthExceeded, Rejected
from gateway.core.exclusion import Chance
from gateway.core.traffic import NOTHING_QUEUED
from gateway.core.types import LoadSample, Phase, ShedReason, TrafficFailed
from gateway.pools.health import Order
from gateway.routing.choice import Chooser
from tests.gatehouse import CAPACITY, HeldLoop, House, passes, turns

# It computes for six seconds; on two cores that twenty others want too, for more than a minute.
pytestmark = pytest.mark.timeout(300)

NAMES = ("b1", "b2", "b3")
POOLS = ("m", "n")
PRIORITIES = frozenset({0, 5})
PASSES = 16  # after so many a request that waits may claim a backend

places = st.integers(0, 30)
backends = st.sampled_from([f"{pool}/{name}" for pool in POOLS for name in NAMES])
comes = st.fixed_dictionaries(
    {
        "tenant": st.sampled_from("abc"),
        "pool": st.sampled_from(["m", "m", "m", "n"]),
        "priority": st.sampled_from([0, 0, 0, 5]),
        "tokens": st.sampled_from([1, 10, 100, 1000, 3000, 6000, CAPACITY, CAPACITY + 1]),
        "adapter": st.sampled_from([None, None, None, None, None, "lora"]),
        "wait_s": st.sampled_from([60.0, 60.0, 2.0, 1.0, 0.5]),
        "body_bytes": st.sampled_from([0, 0, 600]),
        "stream": st.booleans(),
        "returned": st.sampled_from([False, False, True]),
    }
)
loads = st.builds(
    lambda running, waiting, kv: {"running": running, "waiting": waiting, "kv": kv},
    st.integers(0, 3),
    st.sampled_from([0, 0, 0, 8]),
    st.sampled_from([0.0, 0.0, 0.1, 0.5, 0.85, 0.95]),
)
some_come = st.tuples(st.just("come"), comes)
leaves = st.tuples(
    st.sampled_from(["end", "end", "read", "hang_up", "hang_up", "all_hang_up", "fail"]), places
)
events = (
    some_come
    | some_come
    | leaves
    | leaves
    | st.tuples(st.just("scrape"), backends, loads)
    | st.tuples(
        st.sampled_from(["down", "up", "load_adapter", "cordon", "resume", "degrade"]), backends
    )
)
queues = st.fixed_dictionaries(
    {
        "max_requests": st.sampled_from([12, 12, 12, 2, 0]),
        "max_tokens": st.sampled_from([100_000, 100_000, 8000]),
        "max_bytes": st.sampled_from(["1MiB", "1MiB", "1KiB"]),
        "tenant_share": st.sampled_from([0.5, 1.0]),
    }
)


def pool(first_port):
    """Return strategies for a pool's settings; an address that changes is another backend."""
    backend = st.fixed_dictionaries(
        {
            "url": st.sampled_from(
                [f"http://127.0.0.1:{first_port}", f"http://127.0.0.1:{first_port + 1}"]
            ),
            "max_in_flight": st.sampled_from([1, 1, 2, None]),
        }
    )
    return st.fixed_dictionaries(
        {
            "backends": st.lists(backend, min_size=1, max_size=3).map(
                lambda listed: [
                    {"name": name, **each} for name, each in zip(NAMES, listed, strict=False)
                ]
            ),
            "queue": queues,
            "admission": st.sampled_from(["on", "on", "on", "on", "on", "off"]),
        }
    )


configurations = st.fixed_dictionaries({"m": pool(8001)}, optional={"n": pool(8101)}) | (
    st.fixed_dictionaries({"n": pool(8101)})
)


class AtTheGate(RuleBasedStateMachine):
    """Guests come, go and leave, in any order and many in one turn of the loop."""

    def __init__(self):
        super().__init__()
        self.loop = HeldLoop()
        self.guests = []
        self.gone = set()  # guests whose clients left
        self.let_in_before = {}  # by guest, when it came
        self.reloads = 0
        self.held_over = {}  # by pool: what waited when its bounds were last changed

    def run(self, coro):
        self.loop.run_until_complete(coro)

    @initialize(config=configurations)
    def open(self, config):
        async def opened():
            self.house = House(priorities=PRIORITIES, **config)
            self.config = config
            self.look_up()

        self.run(opened())

    @rule(crowd=st.lists(comes, min_size=2, max_size=8))
    def many_come(self, crowd):
        async def happen():
            for what in crowd:
                self.come(what)
            await turns()

        self.run(happen())
        self.check()

    @precondition(lambda self: self.guests)
    @rule(acts=st.lists(events, min_size=1, max_size=8))
    def in_one_turn(self, acts):
        async def happen():
            for name, *what in acts:
                getattr(self, name)(*what)
            await turns()

        self.run(happen())
        self.check()

    @precondition(lambda self: len(self.guests) > 8 * (self.reloads + 1))
    @rule(config=configurations)
    def reload(self, config):
        async def happen():
            self.reloads += 1
            self.house.reload(PRIORITIES, **config)
            self.config = config
            self.look_up()
            await turns()
            self.held_over = dict(self.house.gate.queues())

        self.run(happen())
        self.check()

    @precondition(lambda self: self.guests)
    @rule(seconds=st.sampled_from([0.25, 0.5, 2.5]), load=loads)
    def time_passes(self, seconds, load):
        """Every backend is scraped in the end, as it is each second."""

        async def happen():
            await passes(seconds)
            for backend in tuple(self.house.table):
                self.house.scrape(backend.id, **load)
            await turns()

        self.run(happen())
        self.check()

    # --- what may happen in a turn ---

    def come(self, what):
        guest = self.house.guest(**what)
        guest.deadline = guest.began + what["wait_s"]
        guest.pool = what["pool"]
        self.guests.append(guest)
        self.let_in_before[guest] = self.count_let_in()

    def end(self, place):
        inside = [each for each in self.guests if each.inside]
        if inside:
            inside[place % len(inside)].end()

    def read(self, place):
        inside = [each for each in self.guests if each.inside]
        if inside:
            inside[place % len(inside)].read()

    def hang_up(self, place):
        waiting = [each for each in self.guests if each.waits]
        if waiting:
            guest = waiting[place % len(waiting)]
            guest.hang_up()
            self.gone.add(guest)

    def all_hang_up(self, _):
        for guest in self.guests:
            if guest.waits:
                guest.hang_up()
                self.gone.add(guest)

    def fail(self, place):
        """Have one's backend refuse it; it is sent elsewhere when there is room, as the handler does."""
        inside = [each for each in self.guests if each.inside]
        if not inside:
            return
        guest = inside[place % len(inside)]
        ask = guest.ask
        ask.tried[guest.slot.backend_id] = math.inf
        chance = self.house.gate.chance(ask)
        guest.end()
        if chance is Chance.NOW:
            again = self.house.gate.enter(ask)
            if again is not None:
                assert again.backend_id not in ask.tried
                again.release()

    def scrape(self, backend_id, load):
        if self.house.table.get(backend_id) is not None:
            self.house.scrape(backend_id, **load)

    def down(self, backend_id):
        backend = self.house.table.get(backend_id)
        if backend is not None and backend.phase in (Phase.READY, Phase.DEGRADED):
            self.house.down(backend_id)

    def up(self, backend_id):
        backend = self.house.table.get(backend_id)
        if backend is not None and backend.phase in (Phase.STARTING, Phase.DOWN):
            self.house.up(backend_id, *(["lora"] if backend.name == "b1" else []))

    def load_adapter(self, backend_id):
        backend = self.house.table.get(backend_id)
        if backend is not None and backend.phase is Phase.READY:
            self.house.up(backend_id, "lora")

    def cordon(self, backend_id):
        if self.house.table.get(backend_id) is not None:
            self.house.table.order(backend_id, Order.CORDON)

    def resume(self, backend_id):
        if self.house.table.get(backend_id) is not None:
            self.house.table.order(backend_id, Order.RESUME)

    def degrade(self, backend_id):
        for _ in range(5):
            self.house.table.observe(backend_id, TrafficFailed(self.loop.time(), Ending.BROKE))

    def look_up(self):
        for backend in tuple(self.house.table):
            self.up(backend.id)

    # --- what always holds ---

    def count_let_in(self):
        return sum(each.slot is not None for each in self.guests)

    def check(self):
        self.every_slot_is_counted_where_it_is()
        self.the_queues_hold_who_waits_within_their_bounds()
        self.who_is_done_ended_in_one_way()
        self.nobody_waits_for_nothing()

    def every_slot_is_counted_where_it_is(self):
        table = self.house.table
        counted = {}
        for backend in (*table, *table.leaving()):
            counted[backend.id] = counted.get(backend.id, 0) + backend.in_flight
            assert backend.room.sequences == backend.in_flight
        for backend_id, count in counted.items():
            inside = [e for e in self.guests if e.inside and e.slot.backend_id == backend_id]
            assert count == len(inside)

    def the_queues_hold_who_waits_within_their_bounds(self):
        queues = self.house.gate.queues()
        assert set(queues) == set(self.config)
        for name, queued in queues.items():
            requests, tokens = queued.requests, queued.tokens
            waiting = [each for each in self.guests if each.waits and each.pool == name]
            assert requests == len(waiting)
            assert tokens == sum(each.ask.need.tokens for each in waiting)
            before = self.held_over.get(name, NOTHING_QUEUED)
            for priority in PRIORITIES:
                alike = [each.ask for each in waiting if each.ask.caller.priority == priority]
                self.is_within_bounds(alike, self.config[name]["queue"], before)

    def is_within_bounds(self, alike, bounds, before):
        """What waits with one priority is; there may be as much of each."""
        assert len(alike) <= max(bounds["max_requests"], before.requests)
        assert sum(each.need.tokens for each in alike) <= max(bounds["max_tokens"], before.tokens)
        if not before.requests:
            for tenant in "abc":
                own = sum(each.caller.tenant == tenant for each in alike)
                assert own <= max(1, -(-bounds["max_requests"] * bounds["tenant_share"] // 1))

    def who_is_done_ended_in_one_way(self):
        for guest in self.guests:
            if guest.waits:
                assert self.loop.time() < guest.deadline
            elif guest.task.cancelled():
                assert guest in self.gone
            elif guest.refusal is not None:
                assert isinstance(guest.refusal, Rejected | ContextLengthExceeded)
                timed_out = getattr(guest.refusal, "shed_reason", None) is ShedReason.QUEUE_TIMEOUT
                # In a standing queue the pool ends waits sooner than the setting does (`Patience`).
                assert not timed_out or guest.began < guest.ended <= guest.deadline
            else:
                assert guest.slot is not None

    def nobody_waits_for_nothing(self):
        """As long as nobody can have a claim, who waits finds no room anywhere."""
        waiting = [each for each in self.guests if each.waits]
        let_in = self.count_let_in()
        if any(let_in - self.let_in_before[each] >= PASSES for each in waiting):
            return
        for guest in waiting:
            chooser = Chooser(self.house.table)
            assert chooser.find(guest.ask, self.loop.time()) is None
            why = chooser.explain(guest.ask, self.loop.time()).excluded
            assert any(reason.passes for reason in why.values())  # it waits for something

    def teardown(self):
        try:
            if self.guests:
                self.everything_comes_to_an_end()
        finally:
            for guest in self.guests:
                guest.hang_up()
            self.run(turns())
            self.loop.close()

    def everything_comes_to_an_end(self):
        async def close():
            for _ in range(62):  # longer than anybody waits; who waited may get in meanwhile
                await passes(1.0)
                while inside := [each for each in self.guests if each.inside]:
                    for guest in inside:
                        guest.end()
                    await turns()

        self.run(close())
        self.check()
        assert not any(each.waits or each.inside for each in self.guests)
        for backend in (*self.house.table, *self.house.table.leaving()):
            backend.room.observe(LoadSample(self.loop.time(), 0, 0, None, CAPACITY))
            assert (backend.in_flight, backend.room.sequences) == (0, 0)
            assert (backend.room.unread_tokens, backend.room.shares.by_tenant) == (0, {})
            assert backend.room.projection(self.loop.time()).tokens == 0
        assert not self.house.table.leaving()


TestAtTheGate = AtTheGate.TestCase
TestAtTheGate.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
