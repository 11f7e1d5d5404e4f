"""Two gateways on a real Redis place the adapters of the same servers together."""

import asyncio
import contextlib
import json

import pytest

from gateway.core.aio import start
from gateway.sim.server import SimConfig
from tests.redisserver import redis_server
from tests.stories.support import gateway, story
from tests.stories.test_adapters import held, loads, lora
from tests.stories.test_upgrade_adapters import waits_while_another_takes_over

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
SIM = SimConfig(model="m", speed=0)


def pools(names, urls, most):
    backends = [{"url": url, "max_cpu_loras": most} for url in urls]
    return "pools: " + json.dumps({"m": {"backends": backends, "adapters": [*map(lora, names)]}})


@contextlib.asynccontextmanager
async def pair(names, sims=(SIM,), most=1):
    """Two gateways with the same servers; the first leads."""
    with redis_server() as redis:
        extra = f"redis: {redis.url}\nstate: state"
        text = pools(names, [f"<{place}>" for place in range(len(sims))], most)
        async with gateway(*sims, pools=text, extra=extra) as one:
            await one.until(lambda: leads(one), 20)
            text = pools(names, [each.url for each in one.sims], most)
            async with gateway(SIM, pools=text, extra=extra) as two:
                await one.until(lambda: held(one) and follows(two), 20)
                yield one, two, redis


def leads(world):
    return world.process.adapters.pools["m"].leads


def follows(world):
    """Whether it has heard of the one that places, after that has loaded something."""
    placed = world.process.adapters.pools["m"].known.elsewhere.placed or {}
    return any(each.held for each in placed.values())


def unloads(world, place=0):
    return len(world.sims[place].received("/v1/unload_lora_adapter"))


@story
async def test_what_one_gateway_loaded_makes_room_for_what_the_other_ones_requests_wait_for():
    async with pair(["a", "b"]) as (one, two, _):
        assert [leads(one), leads(two)] == [True, False]
        assert (await one.chat(model="a", max_tokens=1)).status_code == 200
        assert held(one).keys() == {"a"}
        reply = await two.chat(model="b", max_tokens=1)
        assert reply.status_code == 200, reply.text
        assert held(one).keys() == {"b"}
        assert (loads(one), unloads(one)) == (2, 1)
        # And back, and both know where it is.
        for world, name in ((one, "a"), (two, "a"), (two, "b"), (one, "b")):
            assert (await world.chat(model=name, max_tokens=1)).status_code == 200


@story
async def test_what_streams_of_the_other_gateway_use_is_not_unloaded_under_them():
    slow = SimConfig(model="m", decode_step_s=0.05)
    async with pair(["a", "b"], sims=(slow,)) as (one, two, _):
        assert (await two.chat(model="a", max_tokens=1)).status_code == 200
        stream = start(two.chat(model="a", max_tokens=80), name="stream")
        await two.until(lambda: two.process.table.get("m/b1").adapter_requests)
        other = start(one.chat(model="b", max_tokens=1), name="other")
        await two.until(lambda: "a" in two.process.table.get("m/b1").lacking)
        assert held(one).keys() == {"a"}
        assert (await stream).json()["usage"]["completion_tokens"] == 80
        assert unloads(one) == 0
        assert (await other).status_code == 200
        assert held(one).keys() == {"b"}


@story
async def test_both_load_each_adapter_once_and_a_calm_pool_moves_nothing():
    async with pair(["a", "b", "c"], sims=(SIM, SIM), most=3) as (one, two, _):
        await one.until(lambda: len(held(one)) == len(held(one, 1)) == 3)
        before = loads(one), loads(one, 1)
        for _ in range(4):
            for world in (one, two):
                for name in "abc":
                    assert (await world.chat(model=name, max_tokens=1)).status_code == 200
        await asyncio.sleep(1.5)  # some looks
        assert (loads(one), loads(one, 1)) == before == (3, 3)
        assert (unloads(one), unloads(one, 1)) == (0, 0)


@story
async def test_both_ones_demand_decides_what_stays_where_not_all_fit():
    """More adapters than places, asked for in turn through both: all are served, and none is starved."""
    async with pair(["a", "b", "c", "d"], sims=(SIM, SIM), most=1) as (one, two, _):
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(world.chat(model=name, max_tokens=1))
                for _ in range(2)
                for world, name in ((one, "a"), (two, "b"), (one, "c"), (two, "d"))
            ]
        assert {each.result().status_code for each in asked} == {200}


@story
async def test_when_the_one_that_places_them_ends_the_other_does_and_may_unload_what_it_loaded():
    with redis_server() as redis:
        extra = f"redis: {redis.url}\nstate: state"
        async with contextlib.AsyncExitStack() as first, contextlib.AsyncExitStack() as second:
            one = await first.enter_async_context(
                gateway(SIM, pools=pools(["a", "b"], ["<0>"], 1), extra=extra)
            )
            text = pools(["a", "b"], [one.sims[0].url], 1)
            two = await second.enter_async_context(gateway(SIM, pools=text, extra=extra))
            assert (await one.chat(model="a", max_tokens=1)).status_code == 200
            await two.until(lambda: two.process.adapters.memory.loaded("m/b1") == {"a"})
            await one.until(lambda: leads(one))
            one.process.stopping.set()
            await two.until(lambda: leads(two), 20)
            assert (await two.chat(model="b", max_tokens=1)).status_code == 200
            assert held(one).keys() == {"b"}


@story
async def test_an_order_that_the_other_gateway_was_given_is_carried_out():
    from gateway.adapters.memory import Order

    async with pair(["a", "b"], most=2) as (one, two, _):
        await one.until(lambda: held(one).keys() == {"a", "b"})
        two.process.adapters.order("m/b1", "a", Order(keep=False, at=two.process.clock.wall()))
        await one.until(lambda: held(one).keys() == {"b"}, 10)
        two.process.adapters.order("m/b1", "a", None)
        await one.until(lambda: held(one).keys() == {"a", "b"}, 10)


@story
async def test_without_the_store_who_placed_them_goes_on():
    async with pair(["a", "b"]) as (one, two, redis):
        assert (await one.chat(model="a", max_tokens=1)).status_code == 200
        redis.kill()
        await two.until(lambda: two.process.store.trouble, 10)
        await one.until(lambda: one.process.store.trouble, 10)
        assert (await one.chat(model="b", max_tokens=1)).status_code == 200
        assert held(one).keys() == {"b"}
        assert [leads(one), leads(two)] == [True, False]


@story
async def test_a_version_that_mixes_adapters_up_loads_none_while_the_other_gateways_run():
    old = SimConfig(model="m", version="0.24.0", decode_step_s=0.05)
    names = ["a", "b", "c"]
    async with pair(names, sims=(old,), most=2) as (one, two, _):
        await one.until(lambda: len(held(one)) == 2)
        kept = sorted(held(one))
        (third,) = {*names} - {*kept}
        await two.until(lambda: set(two.process.table.get("m/b1").adapters) == {*kept}, 15)
        stream = start(two.chat(model=kept[0], max_tokens=80), name="stream")
        await two.until(lambda: two.process.table.get("m/b1").adapter_requests)
        other = start(one.chat(model=third, max_tokens=1), name="other")
        reply = await stream
        assert reply.json()["usage"]["completion_tokens"] == 80
        assert third not in held(one)
        assert (await other).status_code == 200


def test_what_waits_in_a_process_whose_place_another_takes_is_served():
    with redis_server() as redis:
        story(waits_while_another_takes_over, seconds=58.0)(f"redis: {redis.url}")
