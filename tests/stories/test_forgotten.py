"""A reply that will never begin: its engine has forgotten the request, and works on others."""

import json
from dataclasses import replace

import pytest

from gateway.core.aio import start
from gateway.sim.server import SimConfig
from tests.stories.support import gateway, story

SLOW = SimConfig(model="m", decode_step_s=0.02)
EXTRA = "timeouts: {first_byte: 60s, stall: 1s}"


def ask(world, max_tokens, **more):
    body = {"model": "m", "prompt": "tell me", "temperature": 0, "max_tokens": max_tokens, **more}
    return start(world.http.post("/v1/completions", json=body), name="ask")


async def forgotten(world, **more):
    """Send a request of five tokens whose first backend forgets it; the next ones are served everywhere."""
    for sim in world.sims:
        sim.inject("stall_after:0@1")
    sent = ask(world, 5, **more)
    await world.until(lambda: not all(sim.state.faults.active for sim in world.sims))
    for sim in world.sims:
        sim.clear()
    return sent


async def together(sent):
    return [await each for each in sent]


def text(reply):
    frames = [each[6:] for each in reply.text.split("\n\n") if each.startswith("data: {")]
    return "".join(json.loads(each)["choices"][0]["text"] for each in frames or [reply.text])


def second_attempts(world):
    return [each["attempts"] for each in world.access_lines()].count(2)


@pytest.mark.parametrize("stream", [False, True])
def test_it_is_written_by_another_one_if_all_others_got_many_more_tokens_meanwhile(stream):
    @story
    async def check():
        async with gateway(SLOW, SLOW, extra=EXTRA, access=True) as world:
            whole, lost = await ask(world, 5), await forgotten(world, stream=stream)
            others = [ask(world, 300) for _ in range(30)]
            told = await lost
            assert told.status_code == 200
            assert text(told) == text(whole)
            assert not any(each.done() for each in others)
            assert {each.status_code for each in await together(others)} == {200}
            assert second_attempts(world) == 1

    check()


def test_what_is_written_slowly_is_not_cut():
    @story
    async def check():
        slow = replace(SLOW, decode_step_s=0.1)
        async with gateway(slow, slow, extra=EXTRA, access=True) as world:
            sent = [ask(world, 30) for _ in range(4)]
            assert {each.status_code for each in await together(sent)} == {200}
            assert second_attempts(world) == 0

    check()
