"""A backend that a reload moved to another address is not blamed for what its old server does."""

import asyncio

from gateway.core.aio import start
from gateway.core.types import Phase
from gateway.process import reload
from gateway.sim.server import SimConfig
from tests.stories.support import FAST, gateway, story

SLOW = SimConfig(model="m", decode_step_s=0.05)
POOLS = 'pools: {m: {resume: "off", backends: [{name: a, url: "<0>"}, {name: b, url: "<1>"}]}}'


@story
async def test_streams_that_its_old_server_breaks_off_are_not_held_against_the_new_one():
    async with gateway(SLOW, SLOW, FAST, pools=POOLS, wait=False) as world:
        old, _, new = world.sims
        table = world.process.table
        await world.until(lambda: all(each.phase is Phase.READY for each in table))
        left = table.get("m/a")
        sent = [start(world.chat(max_tokens=60, stream=True), name="stream") for _ in range(14)]
        begun = old.requests
        await world.until(lambda: sum(each.tokens_emitted > 0 for each in begun) >= 6)
        old.inject("frozen")  # what it carries lasts until it stops
        world.path.write_text(world.path.read_text().replace(old.url, new.url))
        assert (await reload(world.process)).done
        moved = table.get("m/a")
        assert moved is not left
        await world.until(lambda: moved.phase is Phase.READY)
        assert left.in_flight >= 6
        await old.stop()
        await world.until(lambda: not left.in_flight)
        assert moved.health.traffic_failures == 0
        assert moved.health.ejection is None
        await asyncio.wait(sent)
