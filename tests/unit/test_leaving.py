"""When a stream leaves a backend that is drained, or has lost it, and what is asked for then."""

import asyncio
from types import SimpleNamespace

import pytest

from gateway.core.types import Ask, Caller, Demand, Endpoint, Phase, Route
from gateway.ingress.leaving import Leaving, placed_at
from gateway.pools.table import PoolTable
from gateway.upstream.relay import Relay
from gateway.upstream.silence import Patience, Silence
from tests.gatehouse import House, held, turns
from tests.unit.test_resume import FAULT, call, frame, role, stream

DRAINED = SimpleNamespace(
    id="b1", revision="", models={}, phase=Phase.DRAINING, health=SimpleNamespace(since=0.0)
)
CLOCK = SimpleNamespace(now=lambda: 100.0)


class Gate:
    """One that has no place, and keeps what it was asked for."""

    def __init__(self):
        self.needs = SimpleNamespace(of=lambda *_: None)
        self.asked = []

    def enter(self, ask):
        self.asked.append(ask.demand)


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_what_was_said_counts_once_however_often_a_stream_moved(moves):
    gate = Gate()
    asked, demand = call(max_tokens=20), Demand(3, exact=True, max_new_tokens=20)
    ask = Ask(Route("m", "m", "m"), asked, demand, Caller("k", "n", "t", 0))
    watch = stream(asked, demand)
    watch.feed(role([1, 2, 3]))
    ids = [1, 2, 3]
    for move in range(moves + 1):
        if move:
            assert watch.broken(FAULT) == b""
            ask.call, ask.demand = watch.rest(moved=True)
            watch.feed(role(ids))
        for token in (4, 5):
            watch.feed(frame("a", [token]))
            ids.append(token)
    assert Leaving(gate, PoolTable(CLOCK), CLOCK).leaves(ask, watch, DRAINED, 0) is None
    # The first backend's frame with the role is an event, too.
    said = 2 * (moves + 1) + (moves == 0)
    assert gate.asked == [Demand(3 + said, exact=True, max_new_tokens=20 - said)]


STALL_S = 45.0
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def leaves(*, quiet_s=STALL_S, kept_waiting_s=50.0, works=True, unread_s=None, **asked):
    """Whether another place is asked for: after so long a silence, with requests kept waiting so long ago."""
    gate, now = Gate(), CLOCK.now()
    request, demand = call(max_tokens=20, **asked), Demand(3, exact=True, max_new_tokens=20)
    watch = stream(request, demand)
    watch.feed(role([1, 2, 3]) + frame("a", [4]))
    backend = SimpleNamespace(
        id="b1", revision="", models={}, phase=Phase.READY, health=SimpleNamespace(since=0.0),
        works=lambda since, now: works,
        pulse=SimpleNamespace(held_up_at=now - kept_waiting_s),
    )  # fmt: skip
    silence = Silence(Patience(600.0, STALL_S, 15.0, 60.0), 0.0)
    if quiet_s is not None:
        silence.broken(now - quiet_s)
    if unread_s is not None:
        silence.suspend()
        silence.restart(now - unread_s)
    ask = Ask(Route("m", "m", "m"), request, demand, Caller("k", "n", "t", 0))
    assert Leaving(gate, PoolTable(CLOCK), CLOCK).leaves(ask, watch, backend, 0, silence) is None
    return bool(gate.asked)


def test_a_stream_that_is_silent_while_all_others_are_written_leaves():
    assert leaves()


def test_one_that_may_have_waited_leaves_as_late_after_nothing_waits_any_more():
    assert not leaves(quiet_s=300.0, kept_waiting_s=STALL_S - 0.5)
    assert leaves(quiet_s=300.0, kept_waiting_s=STALL_S)


@pytest.mark.parametrize(
    "otherwise",
    [
        {"quiet_s": STALL_S - 0.5},
        {"quiet_s": None},  # nothing came yet: its prompt may be read still
        {"kept_waiting_s": 40.0},  # it may be the one that waits
        {"works": False},  # they are not written: that has deadlines of its own
        {"unread_s": 10.0},  # its client did not read
        {"tools": TOOLS},  # its text may be held back
    ],
)
def test_it_stays_where_its_silence_proves_nothing(otherwise):
    assert not leaves(**otherwise)


def test_one_that_is_written_again_as_its_tick_comes_is_silent_no_more():
    async def check():
        silence, seen = Silence(Patience(600.0, STALL_S, 15.0, 60.0), 0.0), []
        connection = SimpleNamespace(loop=asyncio.get_running_loop(), silence=silence)
        client = SimpleNamespace(
            started=True,
            answering=True,
            writing_paused=False,
            write=lambda data: None,
            write_chunk=None,
            beat=lambda reply, comment: None,
        )
        watch = stream(call(max_tokens=20), Demand(3, exact=True, max_new_tokens=20))
        relay = Relay(SimpleNamespace(connection=connection), watch, client, 0.0)
        relay.leaves = lambda: seen.append(silence.open_at)
        relay.on_data(role([1, 2, 3]) + frame("a", [4]))
        relay.on_tick(0.5)
        relay.on_tick(45.0)
        relay.on_data(frame("b", [5]))
        relay.on_tick(45.5)
        assert seen == [0.5, 0.5, 45.5]

    asyncio.run(check())


@held
async def moves_the_name():
    house = House(m=[{"name": "b1", "url": "http://127.0.0.1:8001"}])
    (chat,) = await house.guests(1)
    counts = house.ask(endpoint=Endpoint.TOKENIZE)
    visit = house.gate.enter(counts)  # it takes no place
    (before,) = house.table
    assert placed_at(house.table, chat.slot, chat.ask) is before
    assert placed_at(house.table, visit, counts) is before
    house.reload(m=[{"name": "b1", "url": "http://127.0.0.1:8002"}])
    await turns()
    (after,) = house.table
    assert after is not before
    assert placed_at(house.table, chat.slot, chat.ask) is None
    assert placed_at(house.table, visit, counts) is after
    house.reload(n=[{"name": "b1", "url": "http://127.0.0.1:8002"}])
    assert placed_at(house.table, visit, counts) is None


def test_a_request_goes_to_no_server_that_a_reload_gave_the_name_of_the_one_where_it_has_its_place():
    moves_the_name()
