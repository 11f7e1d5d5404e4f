"""A pool whose backends have several windows: what the smallest does not take goes to those that do."""

import json
from dataclasses import replace

import pytest

from gateway.core.aio import start
from gateway.sim.server import SimConfig
from tests.stories.support import gateway, story

SMALL = SimConfig(model="m", speed=0, max_model_len=512)
LARGE = replace(SMALL, max_model_len=4096)
LONG = "word " * 1500  # about 1,876 tokens
TOO_LONG = "word " * 4000


def chats(sim):
    return [each for each in sim.requests if each.path.endswith(("completions", "messages"))]


def user(text):
    return {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 5}


async def ask(world, body, path="/v1/chat/completions"):
    return await world.http.post(path, json=body)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", user(LONG)),
        ("/v1/messages", user(LONG)),
        ("/v1/completions", {"model": "m", "prompt": [7] * 1800, "max_tokens": 5}),
    ],
)
@story
async def test_a_prompt_too_long_for_one_goes_to_those_whose_window_it_fits(path, body):
    async with gateway(SMALL, LARGE, SMALL) as world:
        for _ in range(6):
            reply = await ask(world, body, path)
            assert reply.status_code == 200, reply.text
        assert [len(chats(sim)) for sim in world.sims] == [0, 6, 0]


@story
async def test_a_short_prompt_goes_to_any_of_them():
    async with gateway(SMALL, LARGE) as world:
        for number in range(30):
            assert (await ask(world, user(f"hello {number}"))).status_code == 200
        assert all(chats(sim) for sim in world.sims)


@story
async def test_what_fits_none_of_them_is_refused_with_the_largest_window():
    async with gateway(SMALL, LARGE) as world:
        reply = await ask(world, user(TOO_LONG))
        assert reply.status_code == 400
        assert "maximum context length is 4096 tokens" in reply.json()["error"]["message"]
        assert [chats(sim) for sim in world.sims] == [[], []]
        told = (await world.http.get("/v1/models")).json()["data"][0]
        assert told["max_model_len"] == 4096


@story
async def test_while_those_that_it_fits_are_away_it_is_refused_for_now_and_not_for_good():
    async with gateway(SMALL, LARGE) as world:
        world.sims[1].inject("refuse")  # it keeps its port, which others could take
        await world.until(lambda: world.process.table.get("m/b2").phase.value == "down")
        reply = await ask(world, user(LONG))
        assert reply.status_code == 503, reply.text
        assert (await ask(world, user("hello"))).status_code == 200
        world.sims[1].clear()
        await world.until(lambda: world.process.table.get("m/b2").phase.value == "ready")
        assert (await ask(world, user(LONG))).status_code == 200


@story
async def test_the_room_that_a_long_prompt_needs_is_that_of_all_its_output():
    backends = [{"url": f"<{place}>", "max_in_flight": 1} for place in range(2)]
    async with gateway(
        SMALL, LARGE, pools="pools: " + json.dumps({"m": {"backends": backends}})
    ) as world:
        world.sims[1].inject("frozen")
        tasks = [start(ask(world, user(LONG)), name="asks") for _ in range(2)]
        await world.until(lambda: world.process.handler.gate.queues()["m"].requests == 1)
        *_, decision = world.process.handler.gate.decisions
        assert (decision.need.prompt_tokens > 512, decision.need.output_tokens) == (True, 5)
        world.sims[1].clear()
        assert [(await each).status_code for each in tasks] == [200, 200]


@story
async def test_operators_are_told_of_the_largest_window_and_what_goes_where():
    async with gateway(SMALL, LARGE) as world:
        admin = world.admin_url + "/admin/v1/"
        overview = (await world.http.get(admin + "overview")).json()
        assert [pool["window_tokens"] for pool in overview["pools"]] == [4096]
        run = (await world.http.get(admin + "route?model=m&tokens=2000&output=9")).json()
        assert (run["verdict"], run["backend"], run["window_tokens"]) == ("now", "m/b2", 4096)
        assert run["output_tokens"] == 9
        said = {each["id"]: each["verdict"] for each in run["backends"]}
        assert said == {"m/b1": "window_too_small", "m/b2": "room"}
        run = (await world.http.get(admin + "route?model=m&tokens=5000")).json()
        assert (run["verdict"], run["code"]) == ("refused", "context_length_exceeded")
