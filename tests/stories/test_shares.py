"""Weights and labels, as an operator changes them under way."""

from __future__ import annotations

from gateway.process import reload
from gateway.sim.server import SimConfig
from tests.stories.support import FAST, gateway, story
from tests.stories.test_explain import route

POOLS = """\
pools:
  m:
    backends:
      - {url: <0>, weight: 1}
      - {url: <1>, labels: {zone: eu}}
"""


def chats(sim):
    return len(sim.received("/v1/chat/completions"))


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
