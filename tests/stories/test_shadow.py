"""Copies of requests go to another pool: nobody gets their replies, and nobody pays or waits for them."""

from __future__ import annotations

import asyncio
import json
import math
from types import SimpleNamespace

import pytest

from gateway.core.types import Ask, Demand, Need
from gateway.pools.elsewhere import UnderWay
from gateway.pools.health import Order
from gateway.process import reload
from gateway.sim.server import SimConfig
from gateway.wire.calls import ENDPOINTS, parse_call
from tests import keyfiles as keys
from tests.stories.support import FAST, gateway, story
from tests.stories.test_supervision_signs import Forward

NEXT = SimConfig(model="next", speed=0)
POOLS = """\
pools:
  m:
    shadow: {{to: next, {how}}}
    backends: [{{url: <0>, max_in_flight: 8}}]
  next:
    backends: [<1>]
"""
ALL = "share: 1"


def pools(how=ALL):
    return POOLS.format(how=how)


def copies(world):
    return world.sims[1].received("/v1/chat/completions")


async def counted(world, outcome):
    name = f'gateway_shadow_requests_total{{outcome="{outcome}",pool="m",to="next"}} '
    found = [line for line in (await world.metrics()).splitlines() if line.startswith(name)]
    return float(found[0].removeprefix(name)) if found else 0.0


def under_way(world):
    return world.process.table.get("next/b1").in_flight


@story
async def test_a_copy_of_a_request_for_an_adapter_is_for_the_base_model():
    tuned = SimConfig(model="m", speed=0, adapters=("sql",))
    async with gateway(tuned, NEXT, pools=pools()) as world:
        assert (await world.chat("hello", model="sql", max_tokens=1)).status_code == 200
        await world.until(lambda: copies(world) and under_way(world) == 0)
        assert json.loads(copies(world)[0].body)["model"] == "next"
        assert await counted(world, "ok") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_the_other_pool_gets_a_copy_and_the_client_its_own_reply(stream):
    @story
    async def copied():
        async with gateway(FAST, NEXT, pools=pools(), access=True) as world:
            reply = await world.chat("hello", max_tokens=3, stream=stream)
            assert reply.status_code == 200
            assert reply.headers["x-gateway-backend"] == "m/b1"
            await world.until(lambda: copies(world) and under_way(world) == 0)
            (copy,) = copies(world)
            asked = json.loads(copy.body)
            assert (asked["model"], asked["messages"][0]["content"]) == ("next", "hello")
            assert asked.get("stream", False) is stream
            # It is told apart from every request of a client.
            (line,) = world.access_lines()
            assert (line["model"], line["pool"]) == ("m", "m")
            text = await world.metrics()
            assert (
                'gateway_requests_total{code="200",endpoint="chat",model="m",outcome="ok",pool="m"} 1.0'
                in text
            )
            assert 'gateway_tokens_total{kind="completion",model="m",pool="m"} 3.0' in text
            assert 'pool="next"} 1' not in "\n".join(
                each for each in text.splitlines() if each.startswith("gateway_requests_total")
            )
            assert await counted(world, "ok") == 1
            await world.settled()

    copied()


@pytest.mark.parametrize(
    "fault", ["http_500", "http_500:422", "reset_before_headers", "stall_after", "refuse"]
)
def test_what_becomes_of_a_copy_is_nothing_to_its_client_and_to_the_backends_health(fault):
    @story
    async def ignored():
        async with gateway(FAST, NEXT, pools=pools("share: 1, max_in_flight: 100")) as world:
            world.sims[1].inject(fault)
            for number in range(8):
                reply = await world.chat(f"c {number}", max_tokens=2, stream=True)
                assert reply.status_code == 200
            backend = world.process.table.get("next/b1")
            assert backend.health.traffic_failures == 0
            if fault not in ("stall_after", "refuse"):
                await world.until(lambda: under_way(world) == 0)
                kind = "rejected" if fault.endswith("422") else "failed"
                assert await counted(world, kind) >= 1
        # What was under way ends with the gateway.

    ignored()


@story
async def test_no_more_copies_than_the_setting_are_under_way():
    slow = SimConfig(model="next", reply_tokens=4000, max_model_len=100_000)
    async with gateway(FAST, slow, pools=pools("share: 1, max_in_flight: 2")) as world:
        world.process.table.get("next/b1").limit.fix(100)
        for number in range(6):
            assert (await world.chat(f"c {number}", stream=True)).status_code == 200
        assert under_way(world) == 2
        assert await counted(world, "dropped") == 4


@story
async def test_copies_leave_half_of_the_places_to_others_and_are_given_up_when_somebody_waits():
    slow = SimConfig(model="next", reply_tokens=4000, max_model_len=100_000)
    text = pools("share: 1, max_in_flight: 100").replace("<1>", "{url: <1>, max_in_flight: 4}")
    async with gateway(FAST, slow, pools=text) as world:
        for number in range(8):
            assert (await world.chat(f"c {number}", stream=True)).status_code == 200
        assert under_way(world) == 2
        body = {"model": "next", "messages": [{"role": "user", "content": "go on"}], "stream": True}

        async def client():
            async with world.http.stream("POST", "/v1/chat/completions", json=body) as reply:
                assert reply.status_code == 200
                await enough.wait()

        enough = asyncio.Event()
        shadows = world.process.handler.shadows
        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(client(), name="client")
            # Two find places; the others wait, so the copies go.
            await world.until(lambda: under_way(world) == 4 and len(shadows) == 0)
            enough.set()
        assert await counted(world, "dropped") == 8


@story
async def test_what_other_gateways_have_at_the_backend_counts_for_copies_too():
    slow = SimConfig(model="next", reply_tokens=4000, max_model_len=100_000)
    text = pools("share: 1, max_in_flight: 100").replace("<1>", "{url: <1>, max_in_flight: 6}")
    async with gateway(FAST, slow, pools=text) as world:

        def others_have(requests):
            world.process.table.hear({"next/b1": UnderWay(requests=requests)}, 2)

        others_have(4)  # half of the places and more are taken
        for number in range(2):
            assert (await world.chat(f"c {number}", stream=True)).status_code == 200
        assert await counted(world, "dropped") == 2
        others_have(2)
        assert (await world.chat("c 2", stream=True)).status_code == 200
        await world.until(lambda: len(copies(world)) == 1 and under_way(world) == 1)
        others_have(5)  # no place is left: others may wait there
        await world.until(lambda: under_way(world) == 0)
        assert await counted(world, "dropped") == 3


@story
async def test_a_drained_backend_does_not_wait_for_copies():
    slow = SimConfig(model="next", reply_tokens=4000, max_model_len=100_000)
    async with gateway(FAST, slow, pools=pools()) as world:
        assert (await world.chat("hello", stream=True)).status_code == 200
        await world.until(lambda: copies(world) and under_way(world) == 1)
        world.process.table.order("next/b1", Order.DRAIN)
        await world.until(lambda: under_way(world) == 0)
        assert await counted(world, "dropped") == 1


@story
async def test_a_share_of_the_conversations_is_copied_each_with_all_its_turns():
    async with gateway(FAST, NEXT, pools=pools("share: 0.4, max_in_flight: 100")) as world:
        # Which ones goes by a hash with the key's id, which is another one each time: so there are many.
        for _ in range(2):
            for number in range(200):
                await world.chat(f"conversation {number}", max_tokens=1)
                await world.until(lambda: under_way(world) == 0)
        said = [json.loads(each.body)["messages"][0]["content"] for each in copies(world)]
        assert 40 < len(set(said)) < 130
        assert all(said.count(each) == 2 for each in said)


@story
async def test_while_somebody_waits_for_the_own_pool_nothing_is_copied():
    slow = SimConfig(model="m", reply_tokens=4000)
    text = pools("share: 1, max_in_flight: 100").replace("max_in_flight: 8", "max_in_flight: 1")
    async with gateway(slow, NEXT, pools=text) as world:
        body = {"model": "m", "messages": [{"role": "user", "content": "go on"}], "stream": True}
        gate = world.process.handler.gate
        async with asyncio.TaskGroup() as group:
            leave = asyncio.Event()

            async def client():
                async with world.http.stream("POST", "/v1/chat/completions", json=body):
                    await leave.wait()

            group.create_task(client(), name="first")
            await world.until(lambda: len(copies(world)) == 1)
            group.create_task(client(), name="second")
            group.create_task(client(), name="third")
            await world.until(lambda: gate.queues()["m"][0] == 2)
            world.process.table.get("m/b1").limit.fix(2)
            world.process.table.on_capacity[0]("m")  # the second goes in, and the third still waits
            await world.until(lambda: gate.queues()["m"][0] == 1)
            await world.until(lambda: world.process.table.get("m/b1").in_flight == 2)
            assert len(copies(world)) == 1
            leave.set()
        assert await counted(world, "dropped") >= 1


@story
async def test_nobody_waits_for_what_a_copy_waits_for():
    # Its prompt is taken as read with the next scrape: else others would stand back for it (`reading`) until
    # its reply has ended. And its silence is not the backend's: nobody is there to hear it.
    slow = SimConfig(model="next", decode_step_s=2.0)
    async with gateway(FAST, slow, pools=pools()) as world:
        backend = world.process.table.get("next/b1")
        assert (await world.chat("word " * 900, max_tokens=2, stream=True)).status_code == 200
        await world.until(lambda: under_way(world) == 1)
        scrapes = backend.scrape_count
        await world.until(lambda: backend.scrape_count > scrapes + 1)
        assert under_way(world) == 1
        assert (backend.room.unread_tokens, backend.room.left()[0]) == (0, 0)
        before = backend.pulse.waits
        await world.until(lambda: backend.pulse.waits is not before)
        assert under_way(world) == 1
        assert backend.pulse.waits.oldest_at == math.inf


@story
async def test_a_copy_that_is_given_up_before_it_began_gives_its_place_back():
    async with gateway(FAST, NEXT, pools=pools()) as world:
        handler = world.process.handler
        spec = ENDPOINTS[b"/v1/chat/completions"]
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
        call = parse_call(spec, json.dumps(body).encode())
        caller = handler.settings.keys.authenticate(f"Bearer {world.key}".encode(), None, None, 0)
        route = handler.catalog().resolve(call, caller)
        ask = Ask(route, call, Demand(1, exact=False), caller, Need(1, 1, True))
        down = SimpleNamespace(hold=None, upload=None, spec=spec)
        handler.shadows.copy(handler.settings, down, ask, handler.settings.patience)
        assert under_way(world) == 1
        handler.shadows.close()
        await world.until(lambda: under_way(world) == 0)
        assert len(handler.shadows) == 0
        assert await counted(world, "dropped") == 1


@story
async def test_a_copy_is_in_the_prefix_cache_of_its_own_tenant():
    apart = pools().replace("  m:\n", "  m:\n    prefix_cache: per_tenant\n")
    apart = apart.replace("  next:\n", "  next:\n    prefix_cache: per_tenant\n")
    async with gateway(FAST, NEXT, pools=apart) as world:
        assert (await world.chat(max_tokens=1)).status_code == 200
        await world.until(lambda: copies(world))
        (asked,) = world.sims[0].received("/v1/chat/completions")
        (copy,) = copies(world)
        salt = json.loads(copy.body)["cache_salt"]
        assert salt
        assert salt == json.loads(asked.body)["cache_salt"]


@pytest.mark.parametrize("stated", [{}, {"max_tokens": 900}])
def test_a_copy_may_write_no_more_than_its_key_lets_the_request(stated):
    @story
    async def bounded():
        text = pools().replace("    shadow:", "    on_overflow: clamp\n    shadow:")
        async with gateway(FAST, NEXT, pools=text) as world:
            made = keys.create(world.path.parent / "keys.yaml", name="small", max_output_tokens=7)
            assert (await reload(world.process)).done
            world.http.headers["authorization"] = f"Bearer {made.key}"
            assert (await world.chat("go on [[sim:tokens=900]]", **stated)).status_code == 200
            await world.until(lambda: copies(world) and under_way(world) == 0)
            (copy,) = copies(world)
            assert copy.tokens_emitted == 7

    bounded()


@story
async def test_a_copy_for_a_model_with_a_smaller_window_asks_for_no_more_than_that():
    text = pools().replace("    shadow:", "    max_context: 4000\n    shadow:")
    small = SimConfig(model="next", speed=0, max_model_len=512)
    async with gateway(FAST, small, pools=text) as world:
        assert (await world.chat()).status_code == 200
        await world.until(lambda: copies(world) and under_way(world) == 0)
        assert await counted(world, "ok") == 1


@story
async def test_what_is_asked_in_the_tokens_of_its_model_is_not_copied_to_another():
    async with gateway(FAST, NEXT, pools=pools()) as world:
        for prompt in ([5, 6, 7], "hi"):
            body = {"model": "m", "prompt": prompt, "max_tokens": 1}
            assert (await world.http.post("/v1/completions", json=body)).status_code == 200
        await world.until(lambda: world.sims[1].received("/v1/completions"))
        (copy,) = world.sims[1].received("/v1/completions")
        assert json.loads(copy.body)["prompt"] == "hi"


@story
async def test_what_the_other_pool_forbids_and_what_is_large_is_not_copied():
    text = pools().replace("  next:\n", "  next:\n    parameters: {deny: [logprobs]}\n")
    async with gateway(FAST, NEXT, pools=text) as world:
        assert (await world.chat(max_tokens=1, logprobs=True)).status_code == 200
        assert await counted(world, "dropped") == 1
        long = await world.chat("word " * 3000, max_tokens=1, user="x" * 80_000)
        assert long.status_code == 200, long.text
        assert await counted(world, "dropped") == 2
        assert (await world.chat(max_tokens=1)).status_code == 200
        await world.until(lambda: copies(world))
        assert len(copies(world)) == 1


@story
async def test_a_copy_is_no_trial_of_a_server_whose_requests_failed():
    """Nobody learns from it, and while it lasts no client's request could be one."""
    clock = Forward()
    slow = SimConfig(model="next", reply_tokens=4000, max_model_len=100_000)
    text = pools("share: 1, max_in_flight: 100").replace("[<1>]", "[<1>, <2>]")
    async with gateway(FAST, slow, NEXT, pools=text, clock=clock) as world:
        first, sim = world.process.table.get("next/b1"), world.sims[1]
        sim.inject("http_500")
        for _ in range(300):
            if first.kept_out:
                break
            await world.chat(model="next", max_tokens=1)
        sim.clear()
        clock.ahead_s += 30
        await world.until(lambda: first.probation is not None)
        for number in range(8):
            assert (await world.chat(f"c {number}", stream=True)).status_code == 200
        assert await counted(world, "ok") + await counted(world, "dropped") > 0
        assert first.in_flight == 0
        assert not first.probation.slots
        while first.probation is not None:
            assert (await world.chat(model="next", max_tokens=1)).status_code == 200
