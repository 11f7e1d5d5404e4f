"""When a request may enter an engine: at once, after a wait, or not at all."""

import asyncio
import json
import math
import socket

import msgspec
import pytest

from gateway.admission.decisions import State
from gateway.core.errors import ContextLengthExceeded, Overloaded, TooManyWaiting, Unavailable
from gateway.core.exclusion import Chance, Exclusion
from gateway.core.prefix import Prefix
from gateway.core.traffic import Queued
from gateway.core.types import (
    Call,
    Caller,
    Demand,
    Dialect,
    Endpoint,
    Need,
    Outcome,
    Phase,
    ProbeFailed,
    ProbePassed,
    RequestRecord,
    ScrapeFailed,
    ShedReason,
    Usage,
    UsageSource,
)
from gateway.ops.explain import why_it_waited
from gateway.pools.configured import Withheld
from gateway.pools.facts import Tending
from gateway.pools.health import Order
from gateway.routing.choice import failed_at
from gateway.wire.calls import ENDPOINTS, parse_call
from tests.gatehouse import CAPACITY, Guest, Holds, House, held, passes, turns

ONE, TWO = (f"http://127.0.0.1:{port}" for port in (8001, 8002))


def single(url, limit=1):
    return {"url": url, "max_in_flight": limit}


ONE_AT_A_TIME = (single(ONE),)


def house(*, backends=ONE_AT_A_TIME, priorities=frozenset({0}), **settings):
    """Return a gate before one pool, by default of one backend that takes one request at a time."""
    return House(priorities, m={"backends": list(backends), **settings})


def numbers(guests):
    """Return the places in the list of those who were let in."""
    return [place for place, each in enumerate(guests) if each.inside]


async def order_of(*guests):
    """End whoever is inside until all have been; return the order in which they were let in."""
    order, left = [], list(guests)
    while left:
        inside = [each for each in left if each.inside]
        assert len(inside) == 1
        order.append(guests.index(inside[0]))
        left.remove(inside[0])
        inside[0].end()
        await turns()
    return order


# --- at once --------------------------------------------------------------------------------------


@held
async def test_with_room_a_request_goes_in_at_once_and_nothing_awaits():
    world = house()
    slot = world.gate.enter(world.ask())
    assert slot.backend_id == "m/b1"
    assert world.in_flight() == {"m/b1": 1}
    assert world.gate.queues() == {"m": Queued()}
    slot.release()
    assert world.in_flight() == {"m/b1": 0}


@held
async def test_a_slot_that_is_given_back_twice_frees_one_place():
    world = house(backends=[single(ONE, 2)])
    first, _ = world.gate.enter(world.ask()), world.gate.enter(world.ask())
    first.release()
    first.release()
    assert world.in_flight() == {"m/b1": 1}
    assert world.gate.enter(world.ask()) is not None
    assert world.gate.enter(world.ask()) is None


@held
async def test_what_a_request_needs_is_credited_to_its_backend_until_it_leaves():
    world = house(backends=[ONE])
    world.scrape("m/b1", running=1, kv=0.5)
    slot = world.gate.enter(world.ask(tokens=3000))
    assert world.table.get("m/b1").room.projection(100.0).tokens == 8000
    assert world.gate.enter(world.ask(tokens=1001)) is None
    slot.release()
    assert world.gate.enter(world.ask(tokens=1001)) is not None


# --- waits, and goes ------------------------------------------------------------------------------


@held
async def test_a_request_waits_and_has_the_place_the_moment_another_leaves():
    world = house()
    first, second = await world.guests(2, tokens=100)
    assert (first.inside, second.waits) == (True, True)
    assert world.gate.queues() == {"m": Queued(1, 100, 0.0)}
    first.end()
    assert world.gate.queues() == {"m": Queued()}  # in the same call: nobody can come between
    assert world.in_flight() == {"m/b1": 1}
    assert world.gate.enter(world.ask()) is None
    await turns()
    assert second.inside
    assert second.slot.taken_at == second.ended == 100.0


@held
async def test_what_comes_later_waits_behind_even_if_it_asks_first():
    world = house()
    first, second = await world.guests(2)
    first.end()
    latecomer = world.guest()
    await turns()
    assert second.inside
    assert latecomer.waits


@pytest.mark.parametrize("freed", [0, 1])
def test_the_backend_is_chosen_only_when_one_has_room(freed):
    @held
    async def check():
        world = house(backends=[single(ONE), single(TWO)])
        inside = await world.guests(2)
        (waiting,) = await world.guests(1)
        assert {each.slot.backend_id for each in inside} == {"m/b1", "m/b2"}
        inside[freed].end()
        await turns()
        assert waiting.slot.backend_id == inside[freed].slot.backend_id

    check()


@held
async def test_a_scrape_that_shows_room_lets_in_as_many_as_fit():
    world = house(backends=[ONE])
    world.scrape("m/b1", running=3, kv=0.95)
    waiting = await world.guests(4, tokens=3000)
    assert world.waiting() == 4
    world.loop.at += 2
    world.scrape("m/b1", running=1, kv=0.1)
    await turns()
    assert numbers(waiting) == [0, 1]  # 1,000 and 3,000 each, up to 9,000 of the 10,000 tokens
    assert world.waiting() == 2


@held
async def test_a_backend_that_comes_up_takes_what_waits():
    world = house(backends=[single(ONE), single(TWO)])
    world.down("m/b2")
    _, waiting = await world.guests(2)
    assert waiting.waits
    world.up("m/b2")
    await turns()
    assert waiting.slot.backend_id == "m/b2"


@held
async def test_a_backend_that_an_operator_resumes_takes_what_waits():
    world = house(backends=[single(ONE), single(TWO)])
    world.table.order("m/b2", Order.CORDON)
    _, waiting = await world.guests(2)
    assert waiting.waits
    world.table.order("m/b2", Order.RESUME)
    await turns()
    assert waiting.slot.backend_id == "m/b2"


@held
async def test_an_adapter_that_appears_takes_what_waits_for_it():
    world = house(backends=[single(ONE), single(TWO)])
    world.up("m/b1", "lora")
    inside, waiting = await world.guests(2, adapter="lora")
    assert (inside.slot.backend_id, waiting.waits) == ("m/b1", True)
    world.up("m/b2", "lora")
    await turns()
    assert waiting.slot.backend_id == "m/b2"


@held
async def test_who_waits_for_another_backend_holds_up_nobody():
    world = house(backends=[single(ONE), single(TWO)])
    world.up("m/b1", "lora")
    _, waiting = await world.guests(2, adapter="lora")
    plain = world.guest()
    await turns()
    assert waiting.waits
    assert plain.slot.backend_id == "m/b2"


@held
@pytest.mark.parametrize("kv", [None, 0.88], ids=["no place", "too little cache"])
async def test_a_long_line_for_a_full_backend_holds_up_nobody_who_can_use_an_idle_one(kv):
    world = house(backends=[single(ONE) if kv is None else ONE, TWO])
    for backend_id in ("m/b1", "m/b2"):
        world.scrape(backend_id, running=backend_id == "m/b1" and kv is not None, kv=kv or 0.0)
    world.scrape("m/b2")
    world.up("m/b1", "lora")
    if kv is None:
        await world.guests(1, adapter="lora")
    waiting = await world.guests(130, adapter="lora", tokens=1000)
    assert all(each.waits for each in waiting)
    (own,), (other,) = await world.guests(1, tokens=100), await world.guests(1, "other", tokens=100)
    assert all(each.inside for each in (own, other))
    assert world.waiting() == 130


@held
async def test_of_a_kind_that_waited_for_its_backend_none_is_lost_or_overtaken():
    world = house(backends=[single(ONE), single(TWO)])
    world.up("m/b1", "lora")
    adapter = await world.guests(40, adapter="lora")
    plain = await world.guests(3)
    assert plain[0].slot.backend_id == "m/b2"
    for place in (0, 1):
        plain[place].end()
        await turns()
        assert plain[place + 1].slot.backend_id == "m/b2"
    assert await order_of(*adapter) == [*range(40)]


# --- who goes first -------------------------------------------------------------------------------


@held
async def test_tenants_take_turns_however_many_one_has_waiting():
    world = house()
    guests = await world.guests(5, "flood", tokens=2048)
    guests += await world.guests(2, "calm", tokens=2048)
    assert await order_of(*guests) == [0, 1, 5, 2, 6, 3, 4]


@held
async def test_who_came_again_goes_first_of_its_own_and_not_before_others():
    world = house()
    guests = await world.guests(4, "a", tokens=256)
    guests += await world.guests(2, "b", tokens=256)
    guests += await world.guests(1, "a", tokens=256, returned=True)
    assert await order_of(*guests) == [0, 1, 4, 6, 5, 2, 3]


@held
async def test_the_higher_priority_goes_first_and_in_a_class_who_came_first():
    world = house()
    guests = await world.guests(2, priority=0)
    guests += await world.guests(2, priority=1)
    guests += await world.guests(2, priority=5)
    assert await order_of(*guests) == [0, 4, 5, 2, 3, 1]


async def of_classes(*backends):
    """Return a house in which the class of priority 7 has just been."""
    world = house(backends=[*backends], priorities=frozenset({0, 7}))
    (high,) = await world.guests(1, "high", priority=7)
    high.end()
    await turns()
    return world


@held
async def test_the_last_tenth_is_kept_for_the_highest_of_several_priorities():
    world = await of_classes(single(ONE, 10))
    low = await world.guests(10, "low", priority=0)
    assert numbers(low) == [*range(9)]
    (high,) = await world.guests(1, "high", priority=7)
    assert high.inside
    assert high.ended == high.began
    assert world.in_flight() == {"m/b1": 10}
    high.end()
    await turns()
    assert low[9].waits  # the place that came back is the reserve
    low[0].end()
    await turns()
    assert low[9].inside


@held
async def test_before_the_highest_class_came_nothing_is_kept_for_it():
    world = house(backends=[single(ONE, 10)], priorities=frozenset({0, 7}))
    low = await world.guests(11, "low")
    assert numbers(low) == [*range(10)]
    (high,) = await world.guests(1, "high", priority=7)
    assert high.waits
    for each in low[:2]:
        each.end()
        await turns()
    assert high.inside
    assert low[10].waits  # the reserve holds from now on, from those who came before, too


@held
async def test_a_minute_after_the_highest_class_nothing_is_kept_for_it():
    world = await of_classes(single(ONE, 10))
    await passes(30.0)
    low = await world.guests(10, "low", wait_s=60.0)
    await passes(29.0)
    assert low[9].waits
    await passes(2.0)
    assert low[9].inside


@held
async def test_each_request_of_the_highest_class_keeps_the_reserve_for_another_minute():
    world = await of_classes(single(ONE, 10))
    await passes(59.0)
    (high,) = await world.guests(1, "high", priority=7)
    high.end()
    await passes(59.0)
    assert numbers(await world.guests(10, "low")) == [*range(9)]


async def reads(world, priority=0):
    """Have one prompt of 2,000 tokens read in a second, then another be sent; return that one."""
    (first,) = await world.guests(1, tokens=2000, stream=True)
    await passes(1.0)
    first.read()
    first.end()
    (second,) = await world.guests(1, tokens=2000, stream=True, priority=priority)
    assert second.inside
    return second


@held
@pytest.mark.parametrize("how", ["first token", "end"])
async def test_while_a_prompt_is_read_lower_classes_wait_and_the_highest_goes_in(how):
    world = house(backends=[ONE], priorities=frozenset({0, 7}))
    reading = await reads(world)
    (low,) = await world.guests(1, "low", stream=True)
    (high,) = await world.guests(1, "high", stream=True, priority=7)
    assert low.waits
    assert high.inside
    for each in (high, reading):
        assert low.waits
        each.read() if how == "first token" else each.end()
        await turns()
    assert low.inside


@held
async def test_a_few_short_prompts_of_lower_classes_are_read_together():
    world = house(backends=[ONE], priorities=frozenset({0, 7}))
    world.table.highest_came("m", world.loop.time())
    second = await reads(world)
    await passes(1.0)
    second.read()  # 2,000 tokens a second: what a step reads is not known closer
    assert numbers(await world.guests(7, tokens=100, stream=True)) == [0, 1, 2, 3, 4]


@held
async def test_of_one_class_too_no_more_is_sent_than_is_read_in_a_fifth_of_a_second():
    world = house(backends=[ONE], priorities=frozenset({7}))
    first = await reads(world, priority=7)
    second, third = await world.guests(2, tokens=2000, priority=7, stream=True)
    assert second.waits
    for each in (first, second):
        each.read()
        await turns()
    assert second.inside
    assert third.inside


@held
async def test_of_many_alike_that_find_no_room_one_is_looked_at():
    """Those that need as much or more are skipped; a smaller one still goes in."""
    world = house(backends=[ONE])
    world.scrape("m/b1", running=1, kv=0.5)
    (small,) = await world.guests(1, tokens=100)
    alike = await world.guests(10, tokens=5000)
    larger = await world.guests(10, tokens=6000)
    world.chooser.count = 0
    small.end()
    await turns()
    assert not numbers([*alike, *larger])
    assert world.chooser.count == 1
    (small,) = await world.guests(1, tokens=100)
    assert small.inside
    world.chooser.count = 0
    world.scrape("m/b1")
    await turns()
    assert numbers(alike) == [0]
    assert numbers(larger) == []
    assert world.chooser.count == 2  # the first goes in; the second does not


@held
async def test_those_whose_attempts_failed_at_one_server_cost_one_look_whenever_that_was():
    """A server that crashes sends all that it had back to the queue, one after the other."""
    world = house(backends=[single(ONE, 9), single(TWO)])
    held_up = world.gate.enter(world.ask(tried=["m/b1"]))
    again = []
    for _ in range(20):
        await passes(0.125)
        ask = world.ask()
        failed_at(ask, world.table.get("m/b1"))
        again.append(Guest(world, ask, 30.0, math.inf, 0))
        await turns()
    world.chooser.count = 0
    held_up.release()
    await turns()
    assert numbers(again) == [0]
    assert world.chooser.count == 2  # the first goes in; the second does not


@held
@pytest.mark.parametrize("held_tokens", [0, 4000])
async def test_one_whose_prompt_is_cached_is_looked_at_behind_one_whose_is_not(held_tokens):
    world = house(backends=[ONE])
    world.table.get("m/b1").prefix_index = Holds(b=held_tokens)
    (await reads(world)).end()
    (reading,) = await world.guests(1, tokens=300, stream=True)
    fresh = await world.guests(3, tokens=3000, prefix=begins(3000)["prefix"])
    (cached,) = await world.guests(1, tokens=4000, prefix=begins(4000, "b")["prefix"])
    assert reading.inside
    assert not numbers(fresh)
    assert cached.inside == bool(held_tokens)


@held
async def test_a_batch_is_looked_at_behind_one_request_that_finds_no_room():
    """The engine runs a batch in parts, so it asks for less of the cache than it needs in all."""
    world = house(backends=(single(ONE, limit=50),))
    world.scrape("m/b1")
    await world.guests(1, tokens=2000)
    (large,) = await world.guests(1, "x", need=Need(8000, 0))
    (batch,) = await world.guests(1, "x", need=Need(9900, 0, sequences=10))
    assert large.waits
    assert batch.inside


@held
async def test_a_prompt_of_any_length_is_read_when_no_other_is():
    world = house(backends=[ONE], priorities=frozenset({0, 7}))
    reading = await reads(world)
    (long,) = await world.guests(1, tokens=5000, stream=True)
    assert long.waits
    reading.read()
    await turns()
    assert long.inside


@held
async def test_with_one_priority_nothing_is_kept_back():
    world = house(backends=[single(ONE, 10)], priorities=frozenset({3}))
    assert world.gate.top_priority is None
    assert numbers(await world.guests(11, priority=3)) == [*range(10)]


@held
async def test_the_last_tenth_is_kept_for_tenants_with_little_in_flight_from_one_with_much():
    world = house(backends=[single(ONE, 10)])
    (calm,) = await world.guests(1, "calm")
    greedy = await world.guests(9, "greedy")
    assert numbers(greedy) == [*range(8)]
    (again,) = await world.guests(1, "calm")
    assert again.inside
    calm.end()
    again.end()
    await turns()
    assert greedy[8].inside  # it is alone again


@held
async def test_of_the_cache_a_tenth_is_kept_so_too():
    world = house(backends=[ONE])
    world.scrape("m/b1", running=1)
    (calm,) = await world.guests(1, "calm", tokens=100)
    greedy = await world.guests(2, "greedy", tokens=4000)
    assert numbers(greedy) == [0]  # 4,000 more leave less than the tenth below 9,000
    (other,) = await world.guests(1, "other", tokens=4900)
    assert other.inside
    assert calm.inside
    assert greedy[1].waits


@held
async def test_what_a_tenant_with_much_in_flight_claims_is_not_what_is_kept_for_the_others():
    world = house(backends=[ONE])
    world.scrape("m/b1", running=1)
    await world.guests(1, "calm", tokens=100)
    small = await world.guests(15, "greedy", tokens=500)
    (large,) = await world.guests(1, "greedy", tokens=3000)
    for _ in range(20):  # each takes the place of one that ended, and passes the large one
        small.append(world.guest("greedy", tokens=500))
        await turns()
        next(each for each in small if each.inside).end()
        await turns()
    assert large.waits
    assert not small[-1].inside  # room adds up for it
    (other,) = await world.guests(1, "other", tokens=600)
    assert other.inside


@held
async def test_a_large_request_is_not_passed_for_ever():
    world = house(backends=[ONE])
    world.scrape("m/b1", running=1)
    small = await world.guests(4, "small", tokens=2000)
    (large,) = await world.guests(1, "large", tokens=8000)
    assert large.waits
    passes = 0
    while not large.inside:
        small.append(world.guest("small", tokens=2000))
        passes += 1
        assert passes < 60
        next(each for each in small if each.inside).end()
        await turns()
    assert 16 <= passes <= 24  # it is passed 16 times, then room adds up


# --- refused at once ------------------------------------------------------------------------------


def refused_at_once(guest, kind, reason=None):
    """Check a refusal that came without any wait; return it."""
    assert isinstance(guest.refusal, kind), guest.task
    assert guest.ended == guest.began
    if reason is not None:
        assert guest.refusal.shed_reason is reason
        assert 1 <= guest.refusal.retry_after_s <= 30
    return guest.refusal


@held
async def test_a_full_queue_refuses_with_503():
    world = house(queue={"max_requests": 3, "tenant_share": 1})
    guests = await world.guests(5)
    error = refused_at_once(guests[4], Overloaded, ShedReason.QUEUE_FULL)
    assert error.status == 503
    assert [each.waits for each in guests[1:4]] == [True] * 3
    assert world.waiting() == 3


@pytest.mark.parametrize(
    ("queue", "asked"),
    [
        ({"max_tokens": 1000}, {"tokens": 500}),
        ({"max_bytes": "1KiB"}, {"body_bytes": 512}),
    ],
    ids=["tokens", "bytes"],
)
def test_a_queue_is_full_by_tokens_and_bytes_too(queue, asked):
    @held
    async def check():
        world = house(queue={**queue, "tenant_share": 1})
        guests = await world.guests(4, **asked)
        assert [each.waits for each in guests] == [False, True, True, False]
        refused_at_once(guests[3], Overloaded, ShedReason.QUEUE_FULL)

    check()


@held
async def test_a_tenant_whose_share_is_full_gets_429_while_others_may_wait():
    world = house(queue={"max_requests": 4, "tenant_share": 0.5})
    guests = await world.guests(4, "flood")
    error = refused_at_once(guests[3], TooManyWaiting, ShedReason.TENANT_QUEUE_FULL)
    assert error.status == 429
    (calm,) = await world.guests(1, "calm")
    assert calm.waits


@held
@pytest.mark.parametrize(
    "queue", [{"max_requests": 4}, {"max_tokens": 4000}, {"max_bytes": "4KiB"}]
)
async def test_a_queue_that_is_full_of_a_lower_class_takes_one_of_the_highest(queue):
    """Requests with a higher priority go first; they are not refused because others were there before."""
    world = house(backends=[single(ONE, 1)], priorities=frozenset({0, 7}), queue=queue)
    (inside,) = await world.guests(1, "low", tokens=1000)
    await world.guests(2, "a", tokens=1000, body_bytes=1024)
    await world.guests(2, "b", tokens=1000, body_bytes=1024)
    (high,) = await world.guests(1, "high", tokens=1000, body_bytes=1024, priority=7)
    assert high.refusal is None, high.refusal.message
    inside.end()
    await turns()
    assert high.inside


@held
async def test_what_a_tenant_has_waiting_in_a_lower_class_does_not_refuse_its_own_of_the_highest():
    """One company, with a key for batches and one for its users."""
    world = house(
        backends=[single(ONE, 1)], priorities=frozenset({0, 7}), queue={"max_requests": 8}
    )
    (inside,) = await world.guests(1, "company")
    await world.guests(4, "company")  # batches: the tenant's share of the queue
    (high,) = await world.guests(1, "company", priority=7)
    assert high.refusal is None, high.refusal.message
    inside.end()
    await turns()
    assert high.inside


async def told(world, count, tenant, **asked):
    """Have so many come that are refused; return when each is to come again."""
    guests = await world.guests(count, tenant, tokens=100, **asked)
    return [each.refusal.retry_after_s for each in guests]


@held
async def test_who_is_refused_is_told_later_and_later_times_and_a_calm_tenant_is_not():
    world = house(queue={"max_requests": 0})
    await drained(world)
    await world.guests(1)
    first, *_, fifth = await told(world, 5, "flood")
    assert 3.8 < fifth / first < 6.5  # five times as much is promised; both are jittered
    (calm,) = await told(world, 1, "calm")
    assert calm < 2 * first
    world.gate.foresee(world.ask("flood"), body_bytes=0)  # promises nothing
    (again,) = await told(world, 1, "flood", returned=True)  # its promise is kept, and made anew
    assert 0.75 < again / fifth < 1.35


@held
async def test_who_comes_again_and_is_let_in_is_waited_for_no_more():
    world = house(queue={"max_requests": 0})
    await drained(world)
    (held_by,) = await world.guests(1)
    first, *_ = await told(world, 3, "flood")
    held_by.end()
    for _ in range(3):
        (again,) = await world.guests(1, "flood", tokens=100, returned=True)
        assert again.inside
        again.end()
    await world.guests(1)
    (new,) = await told(world, 1, "flood")
    assert 0.75 < new / first < 1.35


@held
async def test_with_a_queue_of_0_nothing_waits():
    world = house(queue={"max_requests": 0})
    _, refused = await world.guests(2)
    refused_at_once(refused, Overloaded, ShedReason.NO_ROOM)


@held
async def test_who_has_no_time_left_may_wait_none_and_not_less():
    world = house()
    await world.guests(2, wait_s=-0.001)
    assert world.gate.decisions.get("r").may_wait_s == 0


@pytest.mark.parametrize(
    ("setting", "wait_s"), [({"max_requests": 0}, 30), ({"max_wait": "0s"}, 0)]
)
def test_where_nothing_may_wait_a_dry_run_says_so_too(setting, wait_s):
    @held
    async def check():
        world = house(queue=setting)
        free = world.gate.foresee(world.ask(), body_bytes=0)
        _, refused = await world.guests(2, wait_s=wait_s)
        error = refused_at_once(refused, Overloaded, ShedReason.NO_ROOM)
        assert "wait" not in error.message
        told = world.gate.foresee(world.ask(), body_bytes=0)
        kept = world.gate.decisions.get("r")
        assert (free.state, told.state) == (State.ADMITTED, State.REFUSED)
        assert told.shed_reason is kept.shed_reason is ShedReason.NO_ROOM
        assert told.setting == kept.setting == ("pools", "m", "queue", *setting)

    check()


@held
async def test_a_client_that_waits_for_nothing_is_told_so_by_its_own_setting():
    world = house()
    _, refused = await world.guests(2, patience_s=0)
    refused_at_once(refused, Overloaded, ShedReason.NO_ROOM)
    kept = world.gate.decisions.get("r")
    assert kept.setting is None
    assert kept.timed_out


@held
async def test_who_may_not_wait_is_let_in_where_there_is_room_that_others_cannot_use():
    world = house(backends=[single(ONE), single(TWO)])
    world.up("m/b1", "lora")
    _, waiting = await world.guests(2, adapter="lora")
    (plain,) = await world.guests(1, wait_s=0)
    assert waiting.waits
    assert plain.inside
    assert world.gate.decisions.get("r").shed_reason is None


@held
async def test_what_waited_makes_place_in_the_queue_when_it_goes():
    world = house(queue={"max_requests": 1, "tenant_share": 1})
    first, second, third = await world.guests(3)
    assert third.refusal is not None
    first.end()
    (fourth,) = await world.guests(1)
    assert second.inside
    assert fourth.waits


async def drained(world, seconds=10, tokens=1000):
    """Have a request of so many tokens take that long, while others find no room: the rate is known."""
    (guest,) = await world.guests(1, tokens=tokens)
    others = await world.guests(1, tokens=1)
    await passes(0.5)
    others += await world.guests(1, tokens=1)
    world.loop.at += seconds - 0.5
    guest.end()
    await turns()
    for other in others:
        if other.inside:
            other.end()
            await turns()


@held
async def test_a_pool_with_little_to_do_is_not_thought_slow_when_a_burst_comes():
    world = house(backends=[single(ONE, 4)])
    for _ in range(20):  # one after the other: 10 tokens a second were asked for, not refused
        (guest,) = await world.guests(1, tokens=10)
        await passes(1)
        guest.end()
    guests = await world.guests(24, tokens=100, wait_s=30.0)
    assert len(numbers(guests)) == 4
    assert world.waiting() == 20


@held
async def test_a_pool_is_not_thought_slow_because_the_gateway_stood_still():
    world = house(backends=[single(ONE, 4)])

    async def client():
        while True:
            guest = world.guest(wait_s=1000.0)
            slot = await guest.task
            await asyncio.sleep(1.0)
            slot.release()

    clients = [world.loop.create_task(client()) for _ in range(24)]
    await passes(60)
    world.loop.at += 40.0
    await passes(1)
    error = refused_at_once((await world.guests(1, wait_s=0.0))[0], Overloaded)
    assert error.retry_after_s < 10  # some 5 s of work are ahead of it
    (guest,) = await world.guests(1, wait_s=20.0)
    assert guest.waits
    for each in clients:
        each.cancel()


@held
async def test_whose_turn_would_come_after_its_deadline_is_refused_at_once():
    world = house()
    await drained(world)
    _, waiting = await world.guests(2, tokens=30_000, wait_s=10_000)
    late, patient = world.guest(wait_s=30.0), world.guest(wait_s=10_000.0)
    await turns()
    assert waiting.waits
    error = refused_at_once(late, Overloaded, ShedReason.TOO_LATE)
    assert "at most 30 s" in error.message
    assert patient.waits
    assert world.waiting() == 2


@held
async def test_it_is_not_late_where_it_has_its_turn_before_what_another_tenant_waits_for():
    world = house()
    await drained(world)
    await world.guests(2, "large", tokens=30_000, wait_s=10_000)
    (small,) = await world.guests(1, "small", wait_s=30.0)
    assert small.waits


@held
async def test_it_is_not_late_where_only_lower_priorities_wait_before_it():
    world = house(priorities=frozenset({0, 1}))
    await drained(world)
    await world.guests(2, tokens=30_000, wait_s=10_000)
    (high,) = await world.guests(1, priority=1, wait_s=30.0)
    assert high.waits


@held
async def test_while_nobody_knows_how_fast_a_pool_drains_all_wait():
    world = house()
    guests = await world.guests(20, tokens=30_000, wait_s=1.0)
    assert world.waiting() == 19
    assert numbers(guests) == [0]


@held
async def test_without_a_backend_that_serves_a_request_is_refused_at_once():
    world = house()
    world.down("m/b1")
    (guest,) = await world.guests(1)
    error = refused_at_once(guest, Unavailable, ShedReason.NO_BACKEND)
    assert (error.status, error.code) == (503, "model_unavailable")
    assert world.waiting() == 0


@held
async def test_absence_is_told_as_absence_even_where_nothing_may_wait():
    world = house(queue={"max_requests": 0})
    world.down("m/b1")
    (guest,) = await world.guests(1)
    refused_at_once(guest, Unavailable, ShedReason.NO_BACKEND)


@held
async def test_without_a_backend_that_holds_the_adapter_a_request_is_refused_at_once():
    world = house(backends=[single(ONE), single(TWO)])
    (guest,) = await world.guests(1, adapter="lora")
    refused_at_once(guest, Unavailable, ShedReason.NO_BACKEND)


@held
async def test_a_request_is_refused_when_all_that_could_serve_it_were_tried():
    world = house(backends=[single(ONE), single(TWO)])
    (guest,) = await world.guests(1, tried=["m/b1", "m/b2"])
    refused_at_once(guest, Unavailable, ShedReason.NO_BACKEND)


@held
async def test_a_request_larger_than_every_kv_cache_is_told_so_at_once():
    world = house(backends=[ONE, TWO])
    for backend_id in ("m/b1", "m/b2"):
        world.scrape(backend_id, running=1)
    (guest,) = await world.guests(1, tokens=CAPACITY + 1)
    error = refused_at_once(guest, ContextLengthExceeded)
    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert str(CAPACITY + 1) in error.message


@held
async def test_a_request_larger_than_one_kv_cache_waits_for_a_larger_one():
    world = house(backends=[ONE, single(TWO)])
    world.scrape("m/b1", running=1)
    world.scrape("m/b2", capacity=2 * CAPACITY)
    small, large = world.guest(), world.guest(tokens=CAPACITY + 1)
    await turns()
    if small.slot.backend_id == "m/b2":
        assert large.waits
        small.end()
        await turns()
    assert large.slot.backend_id == "m/b2"


@pytest.mark.parametrize("wait_s", [30.0, 10_000.0], ids=["too late", "queue full"])
def test_who_waits_for_another_backend_has_nobody_refused_for_whom_there_is_room(wait_s):
    @held
    async def check():
        world = house(
            backends=[single(ONE), single(TWO)], queue={"max_requests": 1, "tenant_share": 1}
        )
        world.up("m/b1", "lora")
        await drained(world)
        _, waiting = await world.guests(2, adapter="lora", tokens=30_000, wait_s=10_000)
        assert waiting.waits
        (plain,) = await world.guests(1, wait_s=wait_s)
        assert plain.inside
        assert plain.slot.backend_id == "m/b2"

    check()


# --- refused while it waits -----------------------------------------------------------------------


@held
async def test_a_request_is_refused_when_its_deadline_passes_and_no_later():
    world = house()
    inside, waiting = await world.guests(2, wait_s=30.0)
    await passes(29.75)
    assert waiting.waits
    await passes(1)
    assert waiting.ended == 130.0
    assert isinstance(waiting.refusal, Overloaded)
    assert waiting.refusal.shed_reason is ShedReason.QUEUE_TIMEOUT
    assert 1 <= waiting.refusal.retry_after_s <= 30
    assert "waited 30.0 s" in waiting.refusal.message
    assert world.waiting() == 0
    inside.end()
    assert world.in_flight() == {"m/b1": 0}


@held
async def test_each_is_refused_at_its_own_deadline_whenever_it_came():
    world = house()
    _, *waiting = [world.guest(wait_s=wait_s) for wait_s in (1, 20, 5, 40, 5)]
    await passes(50)
    assert [each.ended for each in waiting] == [120.0, 105.0, 140.0, 105.0]
    reasons = {each.refusal.shed_reason for each in waiting}
    assert reasons == {ShedReason.QUEUE_TIMEOUT}


@held
async def test_a_deadline_says_nothing_to_who_was_let_in():
    world = house()
    first, second = await world.guests(2, wait_s=10)
    await passes(9)
    first.end()
    await passes(9)
    assert second.inside


@held
async def test_who_waits_while_the_gateway_stands_still_gets_the_room_that_there_is_by_then():
    world = house()
    first, second, third = await world.guests(3, wait_s=30.0)
    ours, server = socket.socketpair()
    ours.setblocking(False)

    async def replied():
        await world.loop.sock_recv(ours, 1)
        first.end()

    with ours, server:
        reply = world.loop.create_task(replied())
        await turns()
        server.send(b"x")
        world.loop.at += 40.0
        await passes(1)
        await reply
    assert second.inside
    assert third.refusal.shed_reason is ShedReason.QUEUE_TIMEOUT
    assert third.ended - third.began < 40.25


@held
async def test_all_that_wait_are_refused_at_once_when_the_last_backend_goes_down():
    world = house(backends=[single(ONE), single(TWO)])
    guests = await world.guests(12)
    world.down("m/b1")
    await turns()
    assert world.waiting() == 10
    world.down("m/b2")
    await turns()
    for guest in guests[2:]:
        refused_at_once(guest, Unavailable, ShedReason.NO_BACKEND)
    assert world.waiting() == 0
    for guest in guests[:2]:
        guest.end()
    assert set(world.in_flight().values()) == {0}


@held
async def test_however_many_wait_all_are_refused_when_the_last_backend_goes_down():
    world = house()
    guests = await world.guests(100)
    world.down("m/b1")
    await turns()
    assert world.waiting() == 0
    assert all(isinstance(each.refusal, Unavailable) for each in guests[1:])


@held
async def test_only_those_are_refused_whom_the_others_cannot_serve():
    world = house(backends=[single(ONE), single(TWO)])
    world.up("m/b1", "lora")
    _, adapter = await world.guests(2, adapter="lora")
    _, plain = await world.guests(2)
    world.down("m/b1")
    await turns()
    refused_at_once(adapter, Unavailable, ShedReason.NO_BACKEND)
    assert plain.waits


# --- told while it waits --------------------------------------------------------------------------


async def steady(world, seconds, count):
    """Have requests of 1,000 tokens take so long, each while the next waits; the last is inside."""
    (inside,) = await world.guests(1, tokens=1000)
    for _ in range(count):
        (after,) = await world.guests(1, tokens=1000)
        await passes(seconds)
        inside.end()
        await turns()
        inside = after
    return inside


async def in_public(world, tenant="t", **asked):
    """Have a request wait; return a list that grows by what it is told, and when."""
    told, began = [], world.loop.time()

    def tell(*place):
        told.append((world.loop.time() - began, *place))

    waiting = world.gate.wait(
        world.ask(tenant, **asked),
        deadline=began + 60.0,
        body_bytes=0,
        request_id=tenant,
        announce=tell,
    )
    world.loop.create_task(waiting)
    await turns()
    return told


@held
@pytest.mark.parametrize("tokens", [1000, 10])
async def test_who_is_first_is_told_when_a_place_is_likely_to_come_free(tokens):
    world = house()
    inside = await steady(world, 8.0, 12)
    told = await in_public(world, tokens=tokens)
    assert world.gate.decisions.get("t").eta_s == pytest.approx(8.0, rel=0.7)
    await passes(4.5)
    assert [(at, position) for at, position, _ in told] == [(2.0, 1), (4.0, 1)]
    first, second = (eta_s for _, _, eta_s in told)
    assert first == pytest.approx(6.0, rel=0.5)  # a rate is known from few ends only
    assert second < first
    inside.end()


@held
async def test_of_a_crowd_everybody_is_told():
    world = house(queue={"tenant_share": 1})
    inside = await steady(world, 2.0, 1)
    crowd = [await in_public(world, f"t{each}", tokens=10) for each in range(400)]
    await passes(10.0)
    assert min(map(len, crowd)) >= 2
    inside.end()


@held
async def test_no_wait_is_told_that_has_turned_out_too_short():
    world = house()
    await steady(world, 2.0, 20)
    told = await in_public(world, tokens=1000)
    await passes(20.0)
    late = [eta_s for at, _, eta_s in told if at >= 6.0]
    assert len(late) == 8
    assert set(late) == {None}


@held
async def test_who_was_told_too_short_a_wait_is_told_anew_when_the_line_has_moved():
    world = house()
    inside = await steady(world, 1.0, 20)
    (before,) = await world.guests(1, tokens=1000)
    told = await in_public(world, tokens=1000)
    await passes(19.75)
    assert told[-1] == (18.0, 2, None)
    inside.end()
    await passes(2.0)
    at, position, eta_s = told[-1]
    assert (at, position) == (20.0, 1)
    assert eta_s > 0
    before.end()


@held
async def test_a_large_request_that_is_first_is_not_refused_for_its_own_size():
    world = house()
    await steady(world, 2.0, 20)
    (first,) = await world.guests(1, tokens=100_000, wait_s=5.0)
    assert first.waits
    await passes(4.0)
    assert first.waits


# --- none serves for a moment -----------------------------------------------------------------------


STARTS = Tending(Phase.STARTING, "restart", "it starts")


@held
async def test_what_waits_is_served_by_the_backend_that_a_reload_put_in_the_place_of_its_own():
    world = house()
    inside, waiting = await world.guests(2)
    world.reload(m={"backends": [{**single(TWO), "name": "other"}]})
    (newcomer,) = await world.guests(1)
    await passes(1.0)
    assert waiting.waits
    assert newcomer.waits
    world.up("m/other")
    await turns()
    assert waiting.slot.backend_id == "m/other"
    waiting.end()
    inside.end()
    await turns()
    assert newcomer.slot.backend_id == "m/other"


@held
async def test_what_waits_outlives_a_restart_of_the_only_backend():
    world = house()
    inside, waiting = await world.guests(2)
    world.table.tend("m/b1", Tending(Phase.DRAINING, "restart", "it is to be restarted"))
    await passes(1.0)
    inside.end()
    world.table.tend("m/b1", STARTS)
    (newcomer,) = await world.guests(1)
    await passes(10.0)
    assert waiting.waits
    assert newcomer.waits
    world.table.observe("m/b1", ProbeFailed(world.loop.time(), "refused"))
    await passes(1.0)
    assert waiting.waits
    world.table.tend("m/b1", None)
    world.up("m/b1")
    await turns()
    assert waiting.inside


@held
async def test_who_waits_for_a_backend_that_rises_again_is_let_in():
    world = house()
    world.down("m/b1")
    now = world.loop.time()
    world.table.observe("m/b1", ProbePassed(now))  # the first of two
    (guest,) = await world.guests(1)
    await passes(1.0)
    assert guest.waits
    world.up("m/b1")
    await turns()
    assert guest.inside


@held
async def test_who_waits_for_a_start_is_refused_at_its_deadline_because_none_serves():
    world = house()
    world.table.tend("m/b1", STARTS)
    (guest,) = await world.guests(1, wait_s=5.0)
    await passes(4.75)
    assert guest.waits
    await passes(0.5)
    assert guest.ended == 105.0
    assert isinstance(guest.refusal, Unavailable)
    assert "its only backend is down" in guest.refusal.message


def starts_at(at):
    return Tending(Phase.STARTING, "restart", "it starts", ready_at=at)


@held
async def test_who_cannot_wait_until_the_start_is_over_hears_it_at_once():
    """The start's own forecast decides and is told; what drained before the outage does not."""
    world = house(queue={"max_wait": "30s"})
    world.table.tend("m/b1", starts_at(148.0))
    patient, hasty = await world.guests(1, wait_s=60.0) + await world.guests(1, wait_s=30.0)
    assert patient.waits
    refused_at_once(hasty, Unavailable)
    assert "expected to serve in about 48 s, but this request can wait at most 30 s" in (
        hasty.refusal.message
    )
    assert 45.0 <= hasty.refusal.retry_after_s <= 60.0
    decision = world.gate.decisions.get("r")
    assert decision.eta_s == 48.0
    assert decision.setting == ("pools", "m", "queue", "max_wait")
    world.table.tend("m/b1", None)
    world.up("m/b1")
    await turns()
    assert patient.inside


@held
async def test_who_waits_is_told_as_soon_as_the_start_will_surely_take_too_long():
    world = house()
    world.table.tend("m/b1", starts_at(110.0))
    (guest,) = await world.guests(1, wait_s=20.0)
    assert guest.waits
    world.table.tend("m/b1", starts_at(128.0))  # a bit late is still possible
    await passes(1.0)
    assert guest.waits
    world.table.tend("m/b1", starts_at(150.0))
    await passes(1.0)
    assert isinstance(guest.refusal, Unavailable)
    assert "in about 48 s" in guest.refusal.message


@held
async def test_who_waited_for_a_start_that_is_late_is_told_how_long_it_waited():
    world = house()
    world.table.tend("m/b1", starts_at(104.0))
    (guest,) = await world.guests(1, wait_s=5.0)
    await passes(5.5)
    assert guest.ended == 105.0
    assert "expected to serve in about 1 s. This request waited 5.0 s." in guest.refusal.message


@held
async def test_an_outage_is_not_measured_as_a_slow_drain():
    world = house(backends=[single(ONE, 2)])
    first, *_ = await world.guests(4, tokens=1000, wait_s=60.0)
    await passes(2.0)
    first.end()
    await passes(2.0)

    def estimate():
        return world.gate.foresee(world.ask(tokens=1000), body_bytes=1).eta_s

    before = estimate()
    world.table.tend("m/b1", starts_at(125.0))  # two requests hang on it, and one waits
    await passes(20.0)
    world.table.tend("m/b1", None)
    world.up("m/b1")
    await passes(0.5)
    assert estimate() == pytest.approx(before, rel=0.2)


@held
async def test_one_that_will_be_started_again_at_a_known_time_is_waited_for():
    world = house()
    down = Tending(Phase.DOWN, "exited", "its process ended", ready_at=104.0)
    world.table.tend("m/b1", down)
    (guest,) = await world.guests(1, wait_s=5.0)
    assert guest.waits
    await passes(4.0)
    world.table.tend("m/b1", None)
    world.up("m/b1")
    await turns()
    assert guest.inside


@held
@pytest.mark.parametrize("max_requests", [0, 2])
async def test_no_more_wait_for_a_start_than_the_queue_takes(max_requests):
    world = house(queue={"max_requests": max_requests, "tenant_share": 1})
    world.table.tend("m/b1", STARTS)
    guests = await world.guests(4)
    assert world.waiting() == max_requests
    assert all(isinstance(each.refusal, Overloaded) for each in guests[max_requests:])


@held
@pytest.mark.parametrize("why", ["suspended", "unreachable", "cordoned", "tried"])
async def test_nobody_waits_for_a_backend_that_is_not_expected(why):
    world = house()
    world.table.tend("m/b1", STARTS)
    (waiting,) = await world.guests(1)
    assert waiting.waits
    if why == "suspended":
        world.table.tend("m/b1", Tending(Phase.DOWN, "suspended", "it fails again and again"))
    elif why == "unreachable":  # nobody starts it, and it never answered
        world.table.observe("m/b1", ProbeFailed(world.loop.time(), "refused"))
        world.table.tend("m/b1", None)
    elif why == "cordoned":
        world.table.order("m/b1", Order.CORDON)
    if why != "tried":
        await passes(0.5)
        assert isinstance(waiting.refusal, Unavailable)
    (newcomer,) = await world.guests(1, tried=["m/b1"] if why == "tried" else [])
    refused_at_once(newcomer, Unavailable, ShedReason.NO_BACKEND)


# --- its client leaves ----------------------------------------------------------------------------


@held
async def test_a_client_that_leaves_while_it_waits_is_forgotten_in_the_next_turn():
    world = house()
    first, second, third = await world.guests(3)
    second.hang_up()
    await turns(1)
    assert world.gate.queues() == {"m": Queued(1, 100, 0.0)}
    first.end()
    await turns()
    assert second.task.cancelled()
    assert third.inside


@held
async def test_who_leaves_in_the_moment_a_place_comes_back_is_passed_over():
    world = house()
    first, second, third = await world.guests(3)
    second.hang_up()
    first.end()  # the second has not yet run: it stands in the queue still
    assert world.in_flight() == {"m/b1": 1}
    await turns()
    assert second.task.cancelled()
    assert third.inside


@held
async def test_a_place_that_was_just_given_goes_to_the_next_when_its_client_leaves():
    world = house()
    first, second, third = await world.guests(3)
    first.end()
    second.hang_up()  # the place is its own, but it has not heard of it
    await turns()
    assert second.task.cancelled()
    assert third.inside
    assert world.in_flight() == {"m/b1": 1}
    third.end()
    assert world.in_flight() == {"m/b1": 0}


@held
async def test_who_leaves_in_the_moment_it_is_refused_leaves_nothing():
    world = house()
    first, second = await world.guests(2)
    world.down("m/b1")
    second.hang_up()
    await turns()
    assert second.task.cancelled()
    assert world.waiting() == 0
    first.end()
    assert world.in_flight() == {"m/b1": 0}


@held
async def test_when_all_that_waited_have_left_no_timer_brings_them_back():
    world = house()
    _, second = await world.guests(2, wait_s=10)
    second.hang_up()
    await passes(20)
    assert second.ended == 100.0
    (third,) = await world.guests(1, wait_s=10)
    await passes(20)
    assert third.ended == 130.0
    assert third.refusal.shed_reason is ShedReason.QUEUE_TIMEOUT


async def claimed_by_a_large_one(world):
    """Have a large request passed until it claims the backend, and a small one wait behind it."""
    world.scrape("m/b1", running=1)
    small = await world.guests(4, "small", tokens=2000)
    (large,) = await world.guests(1, "large", tokens=8000, wait_s=10)
    behind = small[0]
    while not behind.waits:
        small.append(behind := world.guest("small", tokens=2000))
        await turns()
        next(each for each in small if each.inside).end()
        await turns()
    assert large.waits
    assert world.in_flight()["m/b1"] == 3
    return large, behind


def beginning(key, tokens):
    return Prefix([key], (4 * tokens,), 4 * tokens, tokens, 10)


@held
@pytest.mark.parametrize("tenant", ["t", "other"])
async def test_a_crowd_that_waits_for_one_backend_hides_nobody_from_an_idle_one(tenant):
    world = house(backends=[single(ONE, 8), single(TWO, 8)], queue={"tenant_share": 1})
    for number, key in ((1, "a"), (2, "b")):
        world.table.get(f"m/b{number}").prefix_index = Holds(**{key: 8000})
        world.scrape(f"m/b{number}", running=0, kv=0.0, capacity=10_000_000)
    hot = {"tokens": 8000, "prefix": beginning("a", 8000)}
    await world.guests(8, **hot)
    assert world.in_flight() == {"m/b1": 8, "m/b2": 0}
    crowd = await world.guests(100, **hot)
    (late,) = await world.guests(1, tenant, tokens=8000, prefix=beginning("b", 8000))
    assert late.inside
    assert sum(each.waits for each in crowd) > 90


@held
async def test_what_stood_back_for_a_large_request_goes_when_that_leaves():
    world = house(backends=[ONE])
    large, behind = await claimed_by_a_large_one(world)
    large.hang_up()
    await turns()
    assert behind.inside


@held
@pytest.mark.parametrize("wait_s", [0.0, 5.0])
@pytest.mark.parametrize("second_is_down", [False, True])
async def test_who_stands_back_is_told_that_the_room_is_reserved(wait_s, second_is_down):
    world = house(backends=[ONE, TWO] if second_is_down else [ONE])
    if second_is_down:
        world.down("m/b2")
    await claimed_by_a_large_one(world)
    (late,) = await world.guests(1, "small", tokens=1000, wait_s=wait_s)
    await passes(wait_s + 0.5)
    told = "its only backend is reserved for an earlier request"
    if second_is_down:
        told = "of its 2 backends, 1 is reserved for an earlier request and 1 is down"
    assert told in late.refusal.message


@held
async def test_what_stood_back_for_a_large_request_goes_when_that_is_refused():
    world = house(backends=[ONE])
    large, behind = await claimed_by_a_large_one(world)
    await passes(10)
    assert large.refusal.shed_reason is ShedReason.QUEUE_TIMEOUT
    assert behind.inside


# --- load that is not known -----------------------------------------------------------------------


@held
async def test_who_waits_for_a_full_backend_goes_when_nobody_knows_any_more_that_it_is_full():
    world = house(backends=[ONE])
    world.scrape("m/b1", running=1, kv=0.95)
    (waiting,) = await world.guests(1)
    assert waiting.waits
    await passes(4)
    world.table.observe("m/b1", ScrapeFailed(world.loop.time()))
    await turns()
    assert waiting.inside


# --- reload ---------------------------------------------------------------------------------------


@held
async def test_what_waits_for_a_pool_that_a_reload_removes_is_refused():
    world = House(m=[single(ONE)], other=[TWO])
    inside, *waiting = await world.guests(50)
    world.reload(other=[TWO])
    await turns()
    for guest in waiting:
        refused_at_once(guest, Unavailable, ShedReason.NO_BACKEND)
    assert world.gate.queues() == {"other": Queued()}
    inside.end()
    assert set(world.in_flight().values()) == {0}


@held
async def test_a_request_for_a_pool_that_is_gone_is_refused():
    world = House(m=[single(ONE)], other=[TWO])
    ask = world.ask()
    world.reload(other=[TWO])
    assert world.gate.enter(ask) is None
    with pytest.raises(Unavailable):
        await world.gate.wait(ask, deadline=130.0, body_bytes=0, request_id="r")


@held
async def test_what_is_shed_after_its_pool_is_gone_is_not_kept():
    world = house()
    (guest,) = await world.guests(1)
    world.reload(other=[TWO])
    error = Overloaded("full", reason=ShedReason.ENGINE, retry_after_s=1.0)
    world.gate.shed(guest.ask, error, "r", "m/b1")
    assert world.gate.decisions.get("r") is None


@held
async def test_what_waits_stays_when_a_reload_makes_the_queue_smaller_than_it():
    world = house(queue={"max_requests": 8, "tenant_share": 1})
    guests = await world.guests(5)
    world.reload(m={"backends": [single(ONE)], "queue": {"max_requests": 1, "tenant_share": 1}})
    await turns()
    assert world.waiting() == 4
    (late,) = await world.guests(1)
    refused_at_once(late, Overloaded, ShedReason.QUEUE_FULL)
    assert await order_of(*guests) == [0, 1, 2, 3, 4]


@held
async def test_a_larger_queue_takes_more():
    world = house(queue={"max_requests": 1, "tenant_share": 1})
    await world.guests(2)
    world.reload(m={"backends": [single(ONE)], "queue": {"max_requests": 2, "tenant_share": 1}})
    assert [each.waits for each in await world.guests(2)] == [True, False]


@held
async def test_a_higher_limit_or_another_backend_takes_what_waits():
    world = house()
    guests = await world.guests(5)
    world.reload(m=[single(ONE, 2)])
    for second in (1, 2, 3):  # a limit is grown into, scrape by scrape
        world.loop.at = 100.0 + second
        world.scrape("m/b1", running=1)
    await turns()
    assert numbers(guests) == [0, 1]
    world.reload(m=[single(ONE, 2), single(TWO, 2)])
    assert world.waiting() == 3
    world.up("m/b2")
    await turns()
    assert numbers(guests) == [0, 1, 2, 3]


@held
async def test_a_lower_limit_lets_nobody_in_until_as_many_have_left():
    world = house(backends=[single(ONE, 3)])
    guests = await world.guests(5)
    world.reload(m=[single(ONE, 1)])
    guests[0].end()
    guests[1].end()
    await turns()
    assert numbers(guests) == [2]
    guests[2].end()
    await turns()
    assert numbers(guests) == [3]


@held
async def test_admission_that_is_switched_off_lets_all_in_that_wait():
    world = house(backends=[ONE])
    world.scrape("m/b1", running=1, kv=0.95)
    guests = await world.guests(5)
    assert numbers(guests) == []
    world.reload(m={"backends": [ONE], "admission": "off"})
    await turns()
    assert numbers(guests) == [0, 1, 2, 3, 4]


@held
async def test_a_place_on_a_backend_that_was_taken_away_comes_back_and_is_not_given_again():
    world = house(backends=[single(ONE), single(TWO)])
    guests = await world.guests(3)
    gone = next(each for each in guests[:2] if each.slot.backend_id == "m/b1")
    world.reload(m=[{"name": "b2", **single(TWO)}])
    gone.end()
    await turns()
    assert guests[2].waits
    assert world.in_flight() == {"m/b2": 1}


@held
async def test_a_pool_that_came_back_does_not_think_itself_slow_for_requests_of_before():
    world = House(m=[single(ONE)], other=[TWO])
    (before,) = await world.guests(1)
    world.reload(other=[TWO])
    world.reload(m=[single(ONE)], other=[TWO])
    world.up("m/b1")
    before.end()
    world.loop.at += 1000  # idle: it has nothing to drain
    guests = await world.guests(3)
    assert [each.waits for each in guests] == [False, True, True]
    assert guests[0].inside


# --- again, after a failure -----------------------------------------------------------------------


@held
async def test_one_that_was_let_in_before_goes_ahead_of_those_who_wait():
    world = house(backends=[ONE, single(TWO)])
    world.scrape("m/b2", running=1, kv=0.5)
    world.scrape("m/b1", running=1, kv=0.95)
    (large,) = await world.guests(1, tokens=5000)
    assert large.waits
    assert world.gate.enter(world.ask()) is None  # a new one takes its turn
    again = world.ask(tried=["m/b1"])
    assert world.gate.chance(again) is Chance.NOW
    assert world.gate.enter(again).backend_id == "m/b2"
    assert world.gate.chance(again) is Chance.LATER  # it may wait for b2, which is only full
    assert world.gate.enter(again) is None


@held
async def test_one_that_may_be_tried_where_it_failed_goes_ahead_of_those_who_wait_too():
    world = house(backends=[single(ONE, 2)])
    world.scrape("m/b1", running=1, kv=0.5)
    (again,) = await world.guests(1)
    (large,) = await world.guests(1, tokens=5000)
    again.end()
    await turns()
    assert large.waits
    assert world.gate.enter(world.ask()) is None
    assert world.gate.enter(again.ask).backend_id == "m/b1"


@held
async def test_one_that_was_let_in_before_goes_first_of_its_tenant():
    world = house(backends=[single(ONE)])
    (first,) = await world.guests(1)
    others = await world.guests(3)
    again = world.guest()
    again.ask.let_in = True
    await turns()
    first.end()
    await turns()
    others[0].end()  # it was next when the other came, and stays so
    await turns()
    assert again.inside


@held
@pytest.mark.parametrize("waits", [False, True])
async def test_what_is_tried_again_is_no_new_demand(waits):
    world = house(backends=[single(ONE)])
    before = await world.guests(1, "other") if waits else []
    (guest,) = await world.guests(1, tokens=1000, returned=True)
    for each in before:
        each.end()
    await turns()
    guest.end()
    line = world.gate._lines["m"]
    came = dict(line.patience._came)
    assert came["t"] == 1000
    line.forecast._promises.made("t", 5000)
    assert world.gate.enter(guest.ask)
    assert line.patience._came == came
    assert line.forecast._promises.of("t") == 5000  # it was told before that it has its turn


@held
async def test_what_would_be_of_a_pool_that_a_reload_took_away_is_told():
    world = House(m=[single(ONE)], z=[single(TWO)])
    ask = world.ask(pool="z")
    world.reload(m=[single(ONE)])
    with pytest.raises(Unavailable):
        world.gate.foresee(ask, body_bytes=1)


@held
async def test_one_that_was_let_in_before_is_not_sent_to_the_same_backend_again():
    world = house(backends=[single(ONE), single(TWO)])
    world.down("m/b2")
    again = world.ask(tried=["m/b1"])
    assert world.gate.chance(again) is Chance.NEVER
    assert world.gate.enter(again) is None
    assert world.gate.enter(world.ask()).backend_id == "m/b1"


# --- what no engine works on ----------------------------------------------------------------------

ASIDE = [Endpoint.TOKENIZE, Endpoint.DETOKENIZE, Endpoint.COUNT_TOKENS]


@pytest.mark.parametrize("endpoint", ASIDE)
def test_what_no_engine_works_on_passes_the_queue_and_takes_no_place(endpoint):
    @held
    async def check():
        world = house(backends=[single(ONE)])
        inside, waits = await world.guests(2)
        need = world.gate.needs.of(call(endpoint=endpoint), Demand(10**6, exact=False), CALLER)
        asks = world.guest(endpoint=endpoint, need=need)
        await turns()
        assert asks.slot.backend_id == "m/b1"
        assert world.in_flight() == {"m/b1": 1}
        assert waits.waits
        asks.end()
        await turns()
        assert waits.waits
        inside.end()
        await turns()
        assert waits.inside

    check()


@held
async def test_what_needs_no_engine_and_came_before_a_backend_was_up_waits_for_no_room_there():
    world = house()
    world.table.tend("m/b1", STARTS)
    chats = await world.guests(3)
    asks = world.guest(endpoint=Endpoint.TOKENIZE)
    await turns()
    assert asks.waits
    world.table.tend("m/b1", None)
    world.up("m/b1")
    await turns()
    assert numbers(chats) == [0]
    assert not asks.waits
    assert world.in_flight() == {"m/b1": 1}


@held
async def test_what_needs_no_engine_and_came_before_its_adapter_was_loaded_waits_for_no_room_there():
    world = house()
    world.table.withhold(Withheld(world.table.get("m/b1"), {"sql": Exclusion.ADAPTER_LOADING}))
    chats = await world.guests(3)
    (asks,) = await world.guests(1, adapter="sql", endpoint=Endpoint.TOKENIZE)
    world.up("m/b1", "sql")
    await turns()
    assert asks.waits
    world.table.withhold(Withheld(world.table.get("m/b1"), {}))
    await turns()
    assert numbers(chats) == [0]
    assert asks.slot.backend_id == "m/b1"


@held
async def test_what_no_engine_works_on_goes_to_a_backend_whose_cache_is_full():
    world = house(backends=[ONE])
    world.scrape("m/b1", running=9, waiting=9, kv=1.0)
    asks = world.guest(endpoint=Endpoint.TOKENIZE)
    await turns()
    assert asks.slot.backend_id == "m/b1"


@held
async def test_what_no_engine_works_on_needs_a_backend_that_serves_its_model():
    world = house(backends=[ONE, TWO])
    world.down("m/b1")
    world.up("m/b2", "sql")
    asks = world.guest(endpoint=Endpoint.TOKENIZE, adapter="sql")
    await turns()
    assert asks.slot.backend_id == "m/b2"
    world.down("m/b2")
    asks = world.guest(endpoint=Endpoint.TOKENIZE)
    await turns()
    assert isinstance(asks.refusal, Unavailable)


@held
async def test_what_no_engine_works_on_keeps_no_reserve_for_its_class():
    world = house(backends=[single(ONE, 10)], priorities=frozenset({0, 7}))
    world.guest("high", priority=7, endpoint=Endpoint.TOKENIZE)
    await turns()
    assert len(numbers(await world.guests(10, "low"))) == 10


@held
async def test_a_dry_run_of_what_no_engine_works_on_says_that_it_goes_at_once():
    world = house(backends=[single(ONE)])
    await world.guests(2)
    said = world.gate.foresee(world.ask(endpoint=Endpoint.TOKENIZE), body_bytes=10)
    assert said.state is State.ADMITTED
    assert said.backend_id == "m/b1"


# --- what a request needs -------------------------------------------------------------------------


CALLER = Caller("key", "anyone", "t")


def call(text_bytes=None, choices=1, stream=False, endpoint=Endpoint.CHAT, **more):
    return Call(
        *(endpoint, Dialect.CHAT, "m", stream, b"{}"),
        choices=choices,
        text_bytes=text_bytes,
        **more,
    )


def ended(tokens, *, outcome=Outcome.OK, most=None, choices=1, key="key", model="m"):
    """Return the record of a request that ended with so many tokens written."""
    record = RequestRecord("r", Endpoint.CHAT, 0.0, Caller(key, "n", "t"), model)
    record.demand, record.outcome = Demand(10, exact=True, max_new_tokens=most), outcome
    record.choices, record.usage = choices, Usage(10, tokens, UsageSource.UPSTREAM)
    return record


def output(world, *, most=None, choices=1, caller=CALLER):
    demand = Demand(10, exact=True, max_new_tokens=most)
    return world.gate.needs.of(call(choices=choices), demand, caller).output_tokens


@pytest.mark.parametrize(
    ("demand", "text_bytes", "prompt"),
    [
        (Demand(700, exact=True), 4000, 700),
        (Demand(4000, exact=False), 4000, 1001),  # bytes are a bound; four make a token
        (Demand(50, exact=False), 4000, 50),
        (Demand(90_000, exact=False), None, 1024),  # pictures
        (Demand(300, exact=False), None, 300),
    ],
)
def test_a_prompt_counts_as_what_it_is_likely_to_have(demand, text_bytes, prompt):
    @held
    async def check():
        need = house().gate.needs.of(call(text_bytes, stream=True), demand, CALLER)
        assert need.prompt_tokens == prompt
        assert need.streams

    check()


@held
async def test_an_output_of_unknown_length_is_expected_to_be_usual_and_never_over_its_bound():
    world = house()
    assert output(world) == 256
    assert output(world, most=100) == 100
    assert output(world, most=100_000) == 256
    assert output(world, most=100, choices=3) == 300


@held
async def test_the_length_of_outputs_is_learnt_of_model_and_key():
    world = house()
    for _ in range(100):
        world.gate.learn([ended(40)])
    other = Caller("other", "other", "t")
    assert 38 <= output(world) <= 43
    assert output(world, caller=other) <= 43  # of a new key what the model's others do
    for _ in range(100):
        world.gate.learn([ended(1000, key="other")])
    assert output(world, caller=other) > 900
    assert 38 <= output(world) <= 43


@held
async def test_outputs_are_learnt_by_the_choice():
    world = house()
    for _ in range(100):
        world.gate.learn([ended(400, choices=4)])
    assert 95 <= output(world) <= 105
    assert 4 * 95 <= output(world, choices=4) <= 4 * 105


@pytest.mark.parametrize(
    "cut", [{"outcome": Outcome.CLIENT_GONE}, {"outcome": Outcome.STREAM_BROKEN}, {"most": 20}]
)
def test_an_output_that_was_cut_short_is_no_short_output(cut):
    @held
    async def check():
        world = house()
        for _ in range(100):
            world.gate.learn([ended(20, **cut)])
        assert output(world) == 256
        for _ in range(100):
            world.gate.learn([ended(2000, **cut)])
        assert output(world) > 1500

    check()


@held
async def test_what_ended_without_an_output_teaches_nothing():
    world = house()
    for _ in range(50):
        world.gate.learn([ended(0)])
    for missing in ("usage", "demand", "model", "caller"):
        record = ended(5)
        setattr(record, missing, None)
        for _ in range(50):
            world.gate.learn([record])
    assert output(world) == 256


@held
async def test_a_request_is_admitted_by_what_its_output_is_expected_to_take():
    world = house(backends=[ONE])
    world.scrape("m/b1", running=1, kv=0.5)
    ask = world.ask(tokens=3900)
    ask.need = world.gate.needs.of(call(), Demand(3900, exact=True), CALLER)
    assert world.gate.enter(ask) is None  # 4,156 of 4,000
    for _ in range(100):
        world.gate.learn([ended(40)])
    ask.need = world.gate.needs.of(call(), Demand(3900, exact=True), CALLER)
    assert world.gate.enter(ask) is not None


@held
async def test_no_estimate_of_the_output_makes_a_sequence_larger_than_its_window():
    for choices in (1, 8):
        need = house().gate.needs.of(call(choices=choices), Demand(4000, exact=True), CALLER, 4096)
        assert (need.prompt_tokens, need.output_tokens) == (4000, 96 * choices)
    full = house().gate.needs.of(call(), Demand(4096, exact=True), CALLER, 4096)
    assert full.output_tokens == 1


@held
async def test_no_estimate_of_a_prompt_makes_a_sequence_larger_than_its_window():
    """An engine holds its window at least, so no estimate alone may refuse."""
    guess = Demand(4096, exact=False)
    need = house().gate.needs.of(call(text_bytes=40_000), guess, CALLER, 4096)
    assert (need.prompt_tokens, need.output_tokens) == (4095, 1)


@pytest.mark.parametrize(
    ("prompt", "demand", "tokens"),
    [
        (["word " * 200] * 40, Demand(1002, exact=False), 40 * 251),
        (["word " * 200] * 40, Demand(200, exact=True), 40 * 200),
        ([[7] * 100, [8] * 300], Demand(300, exact=True), 400),
    ],
)
def test_a_batch_is_expected_to_take_what_all_of_its_prompts_and_outputs_do(prompt, demand, tokens):
    @held
    async def check():
        body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 100, "stream": True})
        batch = parse_call(ENDPOINTS[b"/v1/completions"], body.encode())
        limited = msgspec.structs.replace(demand, max_new_tokens=100)
        need = house().gate.needs.of(batch, limited, CALLER, 4096)
        assert need.prompt_tokens == tokens
        assert need.output_tokens == 100 * len(prompt)
        assert need.sequences == len(prompt)

    check()


@pytest.mark.parametrize("endpoint", [Endpoint.EMBEDDINGS, Endpoint.RERANK, Endpoint.SCORE])
def test_what_generates_nothing_is_expected_to_have_no_output_however_long_answers_are(endpoint):
    @held
    async def check():
        world = house()
        for _ in range(50):
            world.gate.learn([ended(2000)])
        reads = call(endpoint=endpoint)
        need = world.gate.needs.of(reads, Demand(100, exact=True), CALLER, 4096)
        assert (need.prompt_tokens, need.output_tokens) == (100, 0)

    check()


@held
async def test_what_generates_nothing_teaches_nothing_of_outputs():
    world = house()
    for endpoint in (Endpoint.EMBEDDINGS, Endpoint.TOKENIZE):
        record = ended(5)
        record.endpoint = endpoint
        for _ in range(50):
            world.gate.learn([record])
    assert output(world) == 256


@held
async def test_documents_that_are_ranked_count_together_though_no_window_holds_them_all():
    body = json.dumps({"model": "m", "query": "q", "documents": ["word " * 200] * 100})
    rank = parse_call(ENDPOINTS[b"/v1/rerank"], body.encode())
    need = house().gate.needs.of(rank, Demand(4096, exact=False), CALLER, 4096)
    assert 25_000 <= need.prompt_tokens <= 26_000
    assert need.sequences == 100


@held
async def test_a_tenant_that_sends_batches_is_charged_for_all_of_them():
    world = house(backends=[single(ONE)])
    (first,) = await world.guests(1)
    need = world.gate.needs.of(
        call(longest_ratio=1 / 40, sequences=40), Demand(1000, exact=True), CALLER
    )
    assert need.prompt_tokens == 40_000
    batches = [world.guest("batches", need=need) for _ in range(2)]
    await turns()
    singles = await world.guests(10, "singles", tokens=1000)
    assert (await order_of(first, *batches, *singles))[:11] == [0, *range(3, 13)]


@held
async def test_a_batch_larger_than_any_cache_goes_to_an_idle_backend_and_is_never_refused():
    world = house(backends=[ONE])
    world.scrape("m/b1", running=1, kv=0.6)
    need = world.gate.needs.of(
        call(longest_ratio=1 / 40, sequences=40), Demand(1000, exact=True), CALLER, 4096
    )
    assert need.tokens > CAPACITY
    batch = world.guest(need=need)
    await turns()
    assert batch.waits
    world.scrape("m/b1", running=1, kv=0.1)  # what one more sequence holds
    await turns()
    assert batch.inside
    assert not (await world.guests(1))[0].inside  # it is credited with all that it holds


# --- a queue that stands ----------------------------------------------------------------------------


def decision_of(world, guest):
    return world.gate.decisions.get(guest.request_id)


async def overloaded(world, seconds=12):
    """Have a tenant stream, then send several times what one place can do; return those who wait."""
    for _ in range(30):  # quiet first tokens of a sixteenth of a second
        (guest,) = await world.guests(1, "flood", stream=True)
        await passes(0.0625)
        guest.read()
        guest.end()
        await turns()
    running, guests = None, []
    for _ in range(4 * seconds):
        for _ in range(4):
            asked = {"stream": True, "wait_s": 60.0, "request_id": f"r{len(guests)}"}
            guests += await world.guests(1, "flood", **asked)
        if running is not None and running.inside:
            running.end()
        await passes(0.25)
        running = next((each for each in guests if each.inside), None)
    return guests


@held
async def test_in_an_overload_no_backend_looks_ahead_for_room():
    world = house()
    (backend,) = world.table.backends("m")
    await passes(1.0)
    assert backend.room.peak.calm
    await overloaded(world)
    assert not backend.room.peak.calm


@held
async def test_a_queue_that_stands_holds_nobody_longer_than_is_of_use():
    world = house()
    guests = await overloaded(world)
    late = [each for each in guests[-40:] if each.refusal is not None]
    assert late
    assert all(each.ended - each.began < 1.0 for each in late)
    assert world.waiting() < 10
    for each in late:
        assert each.refusal.shed_reason in (ShedReason.QUEUE_TIMEOUT, ShedReason.TOO_LATE)
        assert decision_of(world, each).setting == ("pools", "m", "admission")


@held
async def test_who_is_refused_hears_it_at_once_or_at_the_deadline_it_has_by_then():
    world = house()
    refused = [each for each in await overloaded(world) if each.refusal is not None]
    assert len(refused) > 100
    off = []
    for each in refused:
        took_s, wait_s = each.ended - each.began, decision_of(world, each).may_wait_s
        if took_s > 0.05 and abs(took_s - wait_s) > 0.002:
            off.append((took_s, wait_s))
    assert not off


@held
async def test_another_tenant_waits_as_long_as_it_takes():
    world = house()
    await overloaded(world)
    (calm,) = await world.guests(1, "calm", stream=True, wait_s=60.0)
    await passes(1.5)
    assert calm.waits


@held
async def test_with_admission_off_the_setting_alone_bounds_the_wait():
    world = house(admission="off")
    guests = await overloaded(world)
    assert not any(each.refusal for each in guests)


@held
async def test_a_refusal_after_a_wait_that_was_shortened_names_admission():
    world = house()
    guests = await overloaded(world)
    late = [each for each in guests if each.refusal is not None and each.ended > each.began]
    assert late
    assert all(decision_of(world, each).hurried for each in late)


@held
async def test_a_wait_that_is_shorter_because_of_one_before_ends_by_the_setting_not_by_its_client():
    """The pool's `max_wait` is for all waits of a request together."""
    world = house(queue={"max_wait": "30s"})
    _, again = await world.guests(2, wait_s=10.0)
    await passes(10.5)
    assert again.refusal.shed_reason is ShedReason.QUEUE_TIMEOUT
    assert decision_of(world, again).setting == ("pools", "m", "queue", "max_wait")


# --- adapters -------------------------------------------------------------------------------------


@held
async def test_who_waits_for_an_adapter_waits_for_its_load_also_in_an_overload():
    world = house()
    await overloaded(world)
    backend = world.table.get("m/b1")
    world.table.withhold(Withheld(backend, {"sql": Exclusion.ADAPTER_LOADING}))
    (guest,) = await world.guests(1, "flood", adapter="sql", stream=True, wait_s=60.0)
    assert world.gate.awaited("m") >= {"sql"}
    await passes(5.0)
    assert guest.waits
    world.table.withhold(Withheld(backend, {"sql": Exclusion.ADAPTER_FAILED}))
    await passes(0.6)
    assert "could not load it" in guest.refusal.message


@held
async def test_what_waits_for_loads_alone_is_no_standing_queue():
    world = house()
    world.table.withhold(Withheld(world.table.get("m/b1"), {"sql": Exclusion.ADAPTER_DUE}))
    (guest,) = await world.guests(1, "b", adapter="sql", wait_s=60.0)
    for _ in range(8):
        (other,) = await world.guests(1, "a", tokens=100)
        await passes(1.0)
        other.end()
    assert guest.waits
    assert world.gate._lines["m"].forecast.drain.tokens_per_s is None


@held
async def test_who_waits_for_a_load_is_no_demand_that_the_pool_fails_to_drain():
    def demand():
        patience.tick(1.0, 1.0)
        return patience._demand.amount

    world = house()
    patience = world.gate._lines["m"].patience
    backend = world.table.get("m/b1")
    world.table.withhold(Withheld(backend, {"sql": Exclusion.ADAPTER_DUE}))
    await world.guests(1, "a", adapter="sql", tokens=100)
    assert demand() == 0
    world.up("m/b1", "sql")
    world.table.withhold(Withheld(backend, {}))
    await world.guests(2, "a", adapter="sql", tokens=100)
    assert demand() > 0


@held
async def test_an_adapter_that_is_not_there_is_asked_for_in_the_turn_in_which_its_request_comes():
    world = house()
    world.gate.on_wanted.append(
        lambda route, leaving: world.table.withhold(
            Withheld(world.table.get("m/b1"), {route.adapter: Exclusion.ADAPTER_LOADING})
        )
    )
    (guest,) = await world.guests(1, adapter="sql")
    assert guest.waits
    world.up("m/b1", "sql")
    await turns()
    assert guest.waits  # its keeper says when it may be used
    world.table.withhold(Withheld(world.table.get("m/b1"), {}))
    await turns()
    assert guest.inside
    assert world.table.get("m/b1").adapter_requests == {"sql": 1}
    guest.end()
    await turns()
    assert world.table.get("m/b1").adapter_requests == {}


@held
async def test_an_adapter_that_is_to_be_loaded_at_another_backend_than_before_is_still_waited_for():
    world = house(backends=[ONE, single(TWO)])
    one, two = (world.table.get(each) for each in ("m/b1", "m/b2"))
    due = {"sql": Exclusion.ADAPTER_DUE}
    world.table.withhold(Withheld(one, due), Withheld(two, {}))
    (guest,) = await world.guests(1, adapter="sql")
    world.table.withhold(Withheld(one, {}), Withheld(two, due))
    await turns()
    assert guest.waits
    world.table.withhold(Withheld(two, {}))
    await turns()
    assert "both backends have not loaded it" in guest.refusal.message


@held
async def test_what_waits_for_an_adapter_claims_no_room_of_others():
    world = House(m={"backends": [{"url": "http://h:1", "max_in_flight": 1}]})
    world.table.withhold(Withheld(world.table.get("m/b1"), {"sql": Exclusion.ADAPTER_DUE}))
    (guest,) = await world.guests(1, "a", adapter="sql", wait_s=600.0)
    (inside,) = await world.guests(1, "b")
    for _ in range(40):  # many times more than what is overtaken stands for
        (after,) = await world.guests(1, "b", wait_s=600.0)
        inside.end()
        await turns()
        assert after.inside
        inside = after
    assert guest.waits


@held
async def test_those_who_wait_for_loads_cost_no_look_until_something_was_loaded():
    names = [f"a{number}" for number in range(50)]
    world = house(backends=[single(ONE, 2), single(TWO, 2)])
    for backend in world.table:
        world.table.withhold(Withheld(backend, dict.fromkeys(names, Exclusion.ADAPTER_DUE)))
    guests = {name: world.guest(adapter=name, wait_s=600.0) for name in names}
    await turns()
    world.chooser.count = 0
    for _ in range(20):
        (other,) = await world.guests(1)
        assert other.inside
        other.end()
        await turns()
    assert world.chooser.count < 3 * 50  # each of them once, and those who went in
    world.up("m/b2", "a7")
    others = dict.fromkeys([name for name in names if name != "a7"], Exclusion.ADAPTER_DUE)
    world.table.withhold(Withheld(world.table.get("m/b2"), others))
    await turns()
    assert [name for name, each in guests.items() if each.inside] == ["a7"]


@held
async def test_what_has_no_room_where_its_adapter_is_claims_none_where_that_is_only_loaded():
    world = house(backends=[ONE, single(TWO)])
    world.up("m/b1", "sql")
    world.scrape("m/b1", running=1, kv=0.85)
    world.scrape("m/b2")
    world.table.withhold(Withheld(world.table.get("m/b2"), {"sql": Exclusion.ADAPTER_LOADING}))
    await world.guests(2, "c", adapter="sql", tokens=10)
    (guest,) = await world.guests(1, "a", adapter="sql", tokens=5000, wait_s=600.0)
    (inside,) = await world.guests(1, "b", tokens=2000)
    for _ in range(40):
        (after,) = await world.guests(1, "b", tokens=2000, wait_s=600.0)
        inside.end()
        await turns()
        assert after.inside
        inside = after
    assert guest.waits
    world.up("m/b2", "sql")
    world.table.withhold(Withheld(world.table.get("m/b2"), {}))
    inside.end()
    await turns()
    assert guest.slot.backend_id == "m/b2"


# --- where a prompt is cached ---


def begins(tokens, key="a"):
    """Return a prompt's beginning, and what it needs."""
    return {"prefix": Prefix([key], (4,), 4, tokens, 0), "need": Need(tokens, 0)}


@held
async def test_a_request_waits_for_the_backend_that_has_its_prompt_though_another_is_free():
    home = house(backends=[single(ONE), single(TWO)])
    home.table.get("m/b1").prefix_index = Holds(a=4000)
    home.table.get("m/b2").prefix_index = Holds(b=4000)
    first, second = await home.guests(2, **begins(4000))
    assert first.slot.backend_id == "m/b1"
    assert second.waits
    assert why_it_waited(decision_of(home, second)) == (
        "m/b1, which has its prompt cached, had no room, so it waited for that."
    )
    (other,) = await home.guests(1, **begins(4000, "b"))  # is not held up by it
    assert other.slot.backend_id == "m/b2"
    first.end()
    await turns()
    assert second.slot.backend_id == "m/b1"


@held
async def test_a_request_waits_for_its_prompt_no_longer_than_reading_it_anew_holds_up():
    home = house(backends=[single(ONE), single(TWO)])
    for backend in home.table:
        backend.prefix_index = Holds()
    home.table.get("m/b1").prefix_index = Holds(a=8000)
    first, second = await home.guests(2, **begins(8000))
    longest_s = 8000 * home.table.get("m/b2").token_cost.prompt_s * 2
    assert longest_s > 1
    await passes(longest_s / 2)
    assert second.waits
    await passes(longest_s / 2 + 0.5)  # a tick looks again
    assert second.slot.backend_id == "m/b2"
    assert first.inside


@held
async def test_a_request_that_may_not_wait_goes_where_its_prompt_is_not():
    home = house(backends=[single(ONE), single(TWO)])
    home.table.get("m/b1").prefix_index = Holds(a=8000)
    home.table.get("m/b2").prefix_index = Holds()
    (first,) = await home.guests(1, **begins(8000))
    (second,) = await home.guests(1, wait_s=0.0, **begins(8000))
    assert first.slot.backend_id == "m/b1"
    assert second.slot.backend_id == "m/b2"


@held
async def test_a_reply_counts_from_when_it_was_sent_and_whole_ones_only_while_nobody_waits():
    world = house(backends=[single(ONE, 1)])
    patience = world.gate._lines["m"].patience
    record = ended(40)
    record.pool, record.sent_at, record.ended_at = "m", 10.0, 13.0  # it came at 0
    world.gate.learn([record])
    known_s = patience.whole.base_s
    assert patience.reply_s == 3.0
    assert known_s < 3.0
    await world.guests(2)
    record.ended_at = 20.0
    world.gate.learn([record])
    assert patience.reply_s > 3.0
    assert patience.whole.base_s == known_s
