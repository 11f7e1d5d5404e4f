"""The workers of a gateway place the adapters of their servers together: real processes, real sockets."""

import asyncio
import functools
import json

import pytest

from gateway.sim.server import SimConfig
from tests.stories.served import served
from tests.stories.support import story as story_within
from tests.stories.test_adapters import held, lora
from tests.stories.test_workers import admin, all_asked, ask, client, kill, order, workers

pytestmark = pytest.mark.timeout(180)
story = functools.partial(story_within, seconds=170.0)
SIM = SimConfig(model="m", speed=0)
TWO = "workers: 2\nshutdown: {grace: 3s}"


def two_workers(*names, most=1):
    """Start two workers with a server that has room for so many of these adapters."""
    backends = [{"url": "<0>", "max_cpu_loras": most}]
    pools = json.dumps({"m": {"backends": backends, "adapters": [*map(lora, names)]}})
    return served(SIM, extra=TWO, pools=f"pools: {pools}")


async def asked(world, name, times=8):
    """Ask for an adapter over so many new connections, which any worker may accept."""
    return await all_asked(world, until=lambda replies: len(replies) >= times, model=name)


async def listed(world):
    told = (await admin(world, "/admin/v1/adapters"))["data"]
    return {each["adapter"]: each for each in told}


@story
async def test_requests_of_any_worker_get_their_adapter_though_one_fits_at_a_time():
    async with two_workers("a", "b") as world:
        await workers(world)
        for name in ("a", "b", "a", "b"):
            assert {each.status_code for each in await asked(world, name)} == {200}
            assert held(world).keys() == {name}


@story
async def test_the_worker_that_follows_a_dead_one_may_unload_what_that_loaded():
    async with two_workers("a", "b") as world:
        before = await workers(world)
        assert {each.status_code for each in await asked(world, "a")} == {200}
        await kill(world, before[1])
        await workers(world)
        assert {each.status_code for each in await asked(world, "b")} == {200}
        assert held(world).keys() == {"b"}


@story
async def test_an_order_holds_in_all_workers_until_it_is_lifted():
    async with two_workers("a", "b", most=2) as world:
        before = await workers(world)
        await world.until(lambda: held(world).keys() == {"a", "b"})
        assert (
            await order(world, "backends/m/b1/adapters:unload", {"adapter": "a"})
        ).status_code < 300
        await world.until(lambda: held(world).keys() == {"b"})
        await kill(world, before[2])  # the next one must not take the order for its own
        await workers(world)
        refused = await asked(world, "a")
        assert {each.status_code for each in refused} == {503}
        assert (
            await order(world, "backends/m/b1/adapters:release", {"adapter": "a"})
        ).status_code < 300
        await world.until(lambda: held(world).keys() == {"a", "b"})
        await asyncio.sleep(1.0)  # the other worker has told what it knows
        assert (await listed(world))["a"]["order"] is None
        async with client(world) as http:
            assert (await ask(http, model="a")).status_code == 200
