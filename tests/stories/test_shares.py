"""Weights and labels, as an operator changes them under way."""

from __future__ import annotations

import asyncio

from gateway.process import reload
from gateway.sim.server import SimConfig
from tests.stories.support import FAST, gateway, story
from tests.stories.test_ejection import chats, until_tried_again
from tests.stories.test_explain import route
from tests.stories.test_supervision_signs import Forward

POOLS = """\
pools:
  m:
    backends:
      - {url: <0>, weight: 1}
      - {url: <1>, labels: {zone: eu}}
"""


@story
async def test_a_backend_with_weight_0_is_kept_in_reserve_after_a_reload_and_route_names_the_setting():
    async with gateway(FAST, FAST, pools=POOLS) as world:
        text = world.path.read_text()
        world.path.write_text(text.replace("weight: 1", "weight: 0"))
        assert (await reload(world.process)).done
        for _ in range(10):
            assert (await world.chat(max_tokens=1)).status_code == 200
        assert (chats(world.sims[0]), chats(world.sims[1])) == (0, 10)
        first, second = (await route(world))["backends"]
        assert first["verdict"] == "in_reserve"
        assert first["setting"]["name"] == "pools.m.backends[0].weight"
        assert second["verdict"] == "room"
        world.sims[1].inject("refuse")
        await world.until(lambda: world.process.table.get("m/b2").phase.value == "down")
        assert (await world.chat(max_tokens=1)).status_code == 200
        assert chats(world.sims[0]) == 1


SPARE = """\
pools:
  m:
    backends:
      - {url: <0>}
      - {url: <1>, weight: 0}
"""


@story
async def test_who_fails_elsewhere_goes_to_the_reserve():
    async with gateway(FAST, FAST, pools=SPARE, as_shipped=True) as world:
        world.sims[0].inject("reset_after:5")
        broken = await world.chat(max_tokens=20, stream=True)
        assert "error" not in broken.text
        assert chats(world.sims[1]) == 1
        world.sims[0].clear()
        assert (await world.chat(max_tokens=1)).headers["x-gateway-backend"] == "m/b1"
        world.sims[0].inject("refuse")
        refused = await world.chat(max_tokens=1)
        assert refused.headers["x-gateway-backend"] == "m/b2"


@story
async def test_who_waits_for_a_full_backend_is_not_sent_to_the_reserve():
    slow = SimConfig(model="m", decode_step_s=0.02)
    pools = SPARE.replace("<0>", "<0>, max_in_flight: 1")
    async with gateway(slow, FAST, pools=pools) as world:
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(world.chat(max_tokens=10))
        assert (chats(world.sims[0]), chats(world.sims[1])) == (3, 0)


@story
async def test_while_one_is_tried_again_the_others_go_to_the_reserve():
    clock = Forward()
    slow = SimConfig(model="m", decode_step_s=0.02)
    async with gateway(slow, FAST, pools=SPARE, clock=clock) as world:
        first = world.process.table.get("m/b1")
        await until_tried_again(world, first, clock)
        async with asyncio.TaskGroup() as group:
            trial = group.create_task(world.chat(max_tokens=80))
            await world.until(lambda: first.probation.slots)
            world.sims[0].inject("frozen")  # it lasts as long as it has to
            beside = await world.chat(max_tokens=1)
            assert beside.headers["x-gateway-backend"] == "m/b2"
            assert not trial.done()
            world.sims[0].clear()


@story
async def test_a_backend_in_reserve_moves_no_conversation_of_the_others():
    pools = "pools: {m: {backends: [{url: <0>}, {url: <1>}, {url: <2>, weight: 0}]}}"
    async with gateway(FAST, FAST, FAST, pools=pools) as world:
        for number in range(8):
            turns = [{"role": "system", "content": f"talk {number} " + "be kind " * 150}]
            backends = set()
            for question in range(6):
                turns.append({"role": "user", "content": f"question {question} " + "word " * 100})
                asked = {"model": "m", "messages": turns, "max_tokens": 50}
                reply = await world.http.post("/v1/chat/completions", json=asked)
                turns.append(reply.json()["choices"][0]["message"])
                backends.add(reply.headers["x-gateway-backend"])
            assert len(backends) == 1, number


@story
async def test_backends_of_another_zone_are_used_when_the_near_ones_are_full():
    slow = SimConfig(model="m", reply_tokens=4000)
    prefer = "    prefer: {labels: {zone: eu}}\n"
    pools = POOLS.replace("labels: {zone: eu}", "labels: {zone: eu}, max_in_flight: 1")
    async with gateway(FAST, slow, pools=pools + prefer) as world:
        body = {"model": "m", "messages": [{"role": "user", "content": "go on"}], "stream": True}
        async with world.http.stream("POST", "/v1/chat/completions", json=body) as near:
            assert near.headers["x-gateway-backend"] == "m/b2"
            far = await world.chat(max_tokens=1)
            assert far.headers["x-gateway-backend"] == "m/b1"
