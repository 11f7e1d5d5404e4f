"""Numbers that no field of a request needs, in fields that change nothing: `1e999` is infinite to an engine."""

from __future__ import annotations

import asyncio
import math

import pytest

from gateway.core.aio import start
from gateway.pools.health import Order
from gateway.sim.server import SimConfig
from tests.stories.support import frames, gateway, story
from tests.stories.test_resume import breaking

QUICK = SimConfig(model="m", decode_step_s=0.005)
SLOW = SimConfig(model="m", decode_step_s=0.1)
JSON = {"content-type": "application/json"}
NUMBERS = ["1e999", "[-1e999, 2]"]


def body(number, tokens=40, *, stream=True):
    return (
        f'{{"model":"m","stream":{str(stream).lower()},"max_tokens":{tokens},"temperature":0,'
        f'"messages":[{{"role":"user","content":"x"}}],"metadata":{{"x":{number}}}}}'
    ).encode()


@pytest.mark.parametrize("fault", ["reset_after:7", "truncate_after:7", "error_frame_after:7"])
@pytest.mark.parametrize("number", NUMBERS)
def test_a_stream_with_such_a_number_ends_when_it_breaks_off(number, fault):
    @story
    async def ends():
        async with gateway(QUICK, QUICK, access=True) as world:
            async with breaking(world, "/v1/chat/completions", fault):
                reply = await world.http.post(
                    "/v1/chat/completions", content=body(number), headers=JSON
                )
            assert "error" in frames(reply.text)[-2]
            await world.settled()
            (line,) = world.access_lines()
            assert (line["outcome"], line["not_resumed"]) == ("stream_broken", "request")
            await asyncio.sleep(1)  # two looks at what waits
            assert {waits.oldest_at for _, waits in world.process.client.waits()} == {math.inf}

    ends()


@pytest.mark.parametrize("number", NUMBERS)
def test_deadlines_hold_while_its_backend_is_drained(number):
    @story
    async def ends():
        timeouts = "timeouts: {total: 2s}\n"
        async with gateway(SLOW, SLOW, pool={"move_after": "0s"}, extra=timeouts) as world:
            asked = world.http.post(
                "/v1/chat/completions", content=body(number, 1000), headers=JSON
            )
            sent = start(asked, name="stream")
            table = world.process.table
            await world.until(lambda: any(each.in_flight for each in table))
            busy = next(each for each in table if each.in_flight)
            table.order(busy.id, Order.DRAIN)
            await world.until(sent.done, seconds=10.0)
            assert "request_timeout" in (await sent).text

    ends()


@pytest.mark.parametrize("number", NUMBERS)
def test_a_reply_that_could_go_on_is_answered(number):
    @story
    async def answered():
        async with gateway(QUICK, QUICK, pool={"resume_replies": 10}) as world:
            reply = await world.http.post(
                "/v1/chat/completions", content=body(number, stream=False), headers=JSON
            )
            assert reply.status_code == 200, reply.text

    answered()
