"""How long a request may take, and what an engine that works without a word is given."""

import asyncio
import json
import math

import pytest

from gateway.core.errors import ConnectFailed, StreamBroke
from gateway.core.types import Phase
from gateway.ingress.drain import end_late
from gateway.pools.table import Backend
from gateway.sim.server import SimConfig
from gateway.upstream.client import BackendConnections
from gateway.upstream.connection import Connection
from tests.stories.stubs import page, stub
from tests.stories.support import FAST, frames, gateway, story

SLOW = SimConfig(model="m", decode_step_s=0.02)


@story
async def test_a_long_answer_is_waited_for_while_its_engine_shows_progress():
    async with gateway(SLOW, extra="timeouts: {first_byte: 1s}") as world:
        reply = await world.chat(max_tokens=100)
        assert reply.status_code == 200
        assert reply.json()["usage"]["completion_tokens"] == 100


@story
async def test_an_engine_that_stands_still_is_given_up():
    async with gateway(SLOW, extra="timeouts: {first_byte: 1s}") as world:
        world.sims[0].inject("frozen")
        reply = await world.chat(max_tokens=100)
        assert reply.status_code == 504
        assert "sent nothing for 1 s" in reply.json()["error"]["message"]
        assert world.process.table.backends("m")[0].health.traffic_failures == 1


@story
async def test_one_large_step_that_reads_a_prompt_has_the_time_it_needs_beside_a_stream():
    reads = SimConfig(model="m", prefill_tokens_per_s=1500.0, max_batched_tokens=8192)
    async with gateway(reads, health="progress: 800ms") as world:
        async with asyncio.TaskGroup() as group:
            writes = group.create_task(world.chat(max_tokens=60, stream=True))
            await world.until(lambda: world.sims[0].engine.gauges.running == 1)
            long = await world.chat("word " * 4000, max_tokens=1, stream=True)
        assert (long.status_code, writes.result().status_code) == (200, 200)
        assert "error" not in long.text + writes.result().text
        assert all(each.after is not Phase.DOWN for each in world.process.table.transitions)


@pytest.mark.parametrize("stream", [False, True])
def test_the_whole_request_is_bounded_and_that_is_not_held_against_its_backend(stream):
    @story
    async def check():
        async with gateway(SLOW, extra="timeouts: {total: 1s}") as world:
            reply = await world.chat(max_tokens=500, stream=stream)
            said = frames(reply.text)[-2] if stream else reply.text
            assert json.loads(said)["error"]["code"] == "request_timeout"
            assert reply.status_code == (200 if stream else 504)
            await world.until(lambda: world.sims[0].engine.running == 0)
            await world.settled()
            backend = world.process.table.backends("m")[0]
            assert (backend.phase, backend.health.traffic_failures) == (Phase.READY, 0)
            assert 'outcome="time_limit"' in await world.metrics()

    check()


@pytest.mark.parametrize(
    ("backends", "begun", "told"),
    [
        (2, True, ("time_limit", "request_timeout")),  # another one could go on with it
        (2, False, ("time_limit", "request_timeout")),
        (1, True, ("stream_broken", "backend_error")),  # its client was told by then
        (1, False, ("time_limit", "request_timeout")),
    ],
)
def test_a_stream_that_breaks_in_the_turn_in_which_its_time_is_over_is_told_one_thing(
    backends, begun, told
):
    @story
    async def check():
        slow = SimConfig(model="m", decode_step_s=0.02 if begun else 30.0)
        async with gateway(*[slow] * backends, access=True) as world, asyncio.TaskGroup() as group:
            asked = group.create_task(world.chat(max_tokens=500, stream=True))
            live = world.process.ingress.live
            await world.until(lambda: any(each.relay for each in live))
            (down,) = live
            await world.until(lambda: down.answering is begun)
            down.relay.on_lost(StreamBroke("the connection was reset"))
            end_late(live, math.inf, 600.0)
            reply = await asked
            said = frames(reply.text)[-2] if begun else reply.text
            assert json.loads(said)["error"]["code"] == told[1]
            await world.settled()
            (line,) = world.access_lines()
            assert (line["outcome"], line["code"]) == told
            assert line["attempts"] == 1

    check()


@story
async def test_the_time_in_the_queue_counts_too():
    pools = "pools: {m: {backends: [{url: <0>, max_in_flight: 1}], queue: {max_wait: 30s}}}"
    async with gateway(FAST, pools=pools, extra="timeouts: {total: 1s}") as world:
        place = world.process.table.take("m/b1", world.process.clock.now())
        try:
            assert (await world.chat(max_tokens=1)).status_code == 504
        finally:
            place.release()
        assert (await world.chat(max_tokens=1)).status_code == 200


@story
async def test_a_refused_connection_waits_for_another_backend_that_is_full():
    pools = "pools: {m: {backends: [<0>, {url: <1>, max_in_flight: 1}], queue: {max_wait: 10s}}}"
    async with gateway(FAST, SLOW, pools=pools) as world:
        world.sims[0].inject("refuse")
        async with asyncio.TaskGroup() as group:
            running = group.create_task(world.chat(max_tokens=25))
            await world.until(lambda: world.sims[1].engine.running == 1)
            waited = await world.chat(max_tokens=1)
        assert running.result().status_code == 200
        assert waited.status_code == 200, waited.text
        assert waited.headers["x-gateway-backend"] == "m/b2"
        await world.settled()


class Lost(Connection):
    """A connection that is lost before anybody can use it."""

    def connection_made(self, transport):
        super().connection_made(transport)
        self.abort()


@story
async def test_a_connection_that_is_lost_as_it_is_made_is_none_and_leaves_no_entry():
    async with stub(lambda path: page()) as (url, _):
        connections = BackendConnections(Backend("m", "b1", url), connect_s=1, keep_alive_s=3)
        with pytest.raises(ConnectFailed):
            await connections.connect(Lost)
        assert (connections.busy, connections.idle, connections.connecting) == (set(), 0, 0)
