"""A stream that waits in public: comments tell its place, and every ending is still its protocol's."""

import asyncio

import pytest

from gateway.pools.health import Order
from gateway.sim.server import SimConfig
from tests.stories.support import gateway, story

SLOW = SimConfig(model="m", decode_step_s=0.05)
ONE_AT_A_TIME = (
    "pools: {m: {backends: [{url: <0>, max_in_flight: 1}], queue: {announce: true, max_wait: %s}}}"
)


async def streamed(world, **more):
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "x"}], **more}
    async with world.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        return reply.status_code, (await reply.aread()).decode()


def was_told(world):
    """Whether the one that waits was told its place: whole replies were told nothing yet."""
    return any(each.bytes_out for each in world.process.ingress.live)


@story
async def test_a_waiting_stream_is_told_its_place_and_then_answered():
    async with gateway(SLOW, pools=ONE_AT_A_TIME % "20s") as world, asyncio.TaskGroup() as group:
        group.create_task(world.chat(max_tokens=80))
        await world.until(lambda: world.in_flight() == 1)
        status, text = await streamed(world, max_tokens=3)
        assert status == 200
        assert text.startswith(": queued position=1")
        assert text.count('"finish_reason":"length"') == 1
        assert text.endswith("data: [DONE]\n\n")
        await world.settled()


@story
async def test_a_stream_that_waited_in_vain_ends_with_an_error_in_its_own_protocol():
    async with gateway(SLOW, pools=ONE_AT_A_TIME % "3s") as world, asyncio.TaskGroup() as group:
        holder = group.create_task(world.chat(max_tokens=2000))
        await world.until(lambda: world.in_flight() == 1)
        status, text = await streamed(world, max_tokens=3)
        assert status == 200
        assert ": queued position=1" in text
        assert '"code":"server_is_overloaded"' in text
        assert text.endswith("data: [DONE]\n\n")
        holder.cancel()


@pytest.mark.parametrize(
    ("fault", "code"),
    [("http_500:400", "invalid_request"), ("reset_before_headers", "backend_error")],
)
def test_a_backend_that_refuses_after_the_wait_is_told_in_the_stream(fault, code):
    @story
    async def check():
        async with (
            gateway(SLOW, pools=ONE_AT_A_TIME % "20s") as world,
            asyncio.TaskGroup() as group,
        ):
            holder = group.create_task(world.chat(max_tokens=2000))
            await world.until(lambda: world.in_flight() == 1)
            waiting = group.create_task(streamed(world, max_tokens=3))
            await world.until(lambda: was_told(world))
            world.sims[0].inject(fault)
            holder.cancel()
            status, text = await waiting
            assert status == 200
            assert ": queued position=1" in text
            assert '"error":{' in text
            assert code in text
            assert text.endswith("data: [DONE]\n\n")

    check()


@story
async def test_without_the_setting_a_stream_that_waits_keeps_its_status():
    pools = "pools: {m: {backends: [{url: <0>, max_in_flight: 1}], queue: {max_wait: 3s}}}"
    async with gateway(SLOW, pools=pools) as world, asyncio.TaskGroup() as group:
        holder = group.create_task(world.chat(max_tokens=2000))
        await world.until(lambda: world.in_flight() == 1)
        status, text = await streamed(world)
        assert status == 503
        assert "server_is_overloaded" in text
        holder.cancel()


@story
async def test_a_client_that_leaves_while_it_is_told_its_place_is_forgotten():
    async with gateway(SLOW, pools=ONE_AT_A_TIME % "20s") as world, asyncio.TaskGroup() as group:
        holder = group.create_task(world.chat(max_tokens=2000))
        await world.until(lambda: world.in_flight() == 1)
        waiting = group.create_task(streamed(world))
        await world.until(lambda: was_told(world))
        waiting.cancel()
        await world.until(lambda: world.process.handler.gate.queues()["m"][0] == 0)
        holder.cancel()


TWO = """\
pools:
  m:
    queue: {announce: true, max_wait: %s}
    backends: [{url: <0>}, {url: <1>, max_in_flight: 1}%s]
"""
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


async def waits_for_its_rest(world, group, held_tokens, **more):
    """Return the task of a stream that broke off after 7 tokens, once it waits for the one other backend."""
    table, gate = world.process.table, world.process.handler.gate
    others = [each.id for each in table.backends("m") if each.name != "b2"]
    for each in others:
        table.order(each, Order.CORDON)
    group.create_task(world.chat(max_tokens=held_tokens))
    await world.until(lambda: world.in_flight() == 1)
    table.order(others[0], Order.RESUME)
    world.sims[0].inject("reset_after:7@1")
    cut = group.create_task(streamed(world, max_tokens=60, **more))
    await world.until(lambda: gate.queues()["m"][0] == 1)
    return cut


@story
async def test_a_stream_that_waits_for_its_rest_in_vain_has_what_its_client_got():
    async with (
        gateway(SLOW, SLOW, pools=TWO % ("3s", ""), access=True) as world,
        asyncio.TaskGroup() as group,
    ):
        cut = await waits_for_its_rest(world, group, 120)
        _, text = await cut
        assert ": queued position=1" in text
        assert '"error":{' in text
        await world.until(lambda: world.access_lines())
        line = world.access_lines()[0]
        assert (line["outcome"], line["completion_tokens"]) == ("stream_broken", 7)


@story
async def test_a_rest_that_waits_does_not_go_to_an_old_engine_that_comes_back():
    old = SimConfig(model="m", version="0.26.0", takes_prompt_ids=False)
    pools = TWO % ("20s", ", {url: <2>}")
    async with (
        gateway(SLOW, SLOW, old, pools=pools, access=True) as world,
        asyncio.TaskGroup() as group,
    ):
        cut = await waits_for_its_rest(world, group, 40, tools=TOOLS)
        world.process.table.order("m/b3", Order.RESUME)
        _, text = await cut
        assert '"error":{' not in text
        assert text.count('"role":"assistant"') == 1
        assert text.count('"content":') == 1 + 60
        await world.until(lambda: len(world.access_lines()) == 2)
        lines = {each["resumed"]: each for each in world.access_lines()}
        assert (lines[1]["attempts"], lines[1]["backend"]) == (2, "b2")
