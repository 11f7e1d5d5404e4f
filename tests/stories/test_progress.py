"""An engine that works is left alone, however slow or silent; one that does not loses its requests."""

import asyncio
import contextlib
import json
from dataclasses import replace
from functools import partial

import pytest

from gateway.core.events import EventKind
from gateway.core.types import Phase
from gateway.heal.observed import Timing
from gateway.sim.server import SimConfig
from tests.stories.supervised import fleet, launched, machine
from tests.stories.support import frames, gateway, story


@story
async def test_load_is_no_evidence_against_a_server_without_metrics():
    """The canary queues behind a full batch. Our own streams tell that the engine works."""
    async with machine() as on:
        slot = on["m/b1"]
        slot.speed, slot.max_num_seqs = 1.0, 1
        quick = {"supervision": {"canary": "200ms"}}
        # A test request waits longer than half a second, in which bytes of streams are noticed.
        async with fleet(on, launched(slot), timing=Timing(0.02, token_s=1.0), **quick) as world:
            first = slot.sim
            first.inject("no_metrics")
            await world.until(lambda: world.backend().stale(world.process.clock.now()))
            async with asyncio.TaskGroup() as group:
                streams = [
                    group.create_task(world.chat(max_tokens=250, stream=True)) for _ in range(2)
                ]
                asked = len(first.received("/v1/completions"))
                await world.until(lambda: len(first.received("/v1/completions")) > asked + 2)
            assert all(each.result().text.endswith("data: [DONE]\n\n") for each in streams)
            assert not world.told(EventKind.RESTART)
            assert slot.sim is first
            assert all(each.after is not Phase.DOWN for each in world.process.table.transitions)


SLOW = SimConfig(model="m", decode_step_s=0.02)


@story
async def test_a_frozen_server_gets_no_new_requests_within_seconds_and_its_own_go_on_if_it_does():
    async with gateway(SLOW, SLOW) as world, asyncio.TaskGroup() as group:
        first, other = world.sims
        streams = [group.create_task(world.chat(max_tokens=250, stream=True)) for _ in range(2)]
        await world.until(lambda: all(sim.engine.running == 1 for sim in world.sims))
        backend = world.process.table.get("m/b1")
        await world.until(lambda: backend.pulse.moved_at > 0)
        first.inject("frozen")
        await world.until(lambda: backend.reason == "silent", seconds=15.0)
        assert backend.phase is Phase.DEGRADED
        taken = len(first.received("/v1/chat/completions"))
        for _ in range(10):  # the other one is the busier by far
            reply = await world.chat(max_tokens=1)
            assert reply.headers["x-gateway-backend"] == "m/b2"
        assert len(first.received("/v1/chat/completions")) == taken
        first.clear()
        await world.until(lambda: backend.phase is Phase.READY)
        for each in streams:
            assert (await each).text.endswith("data: [DONE]\n\n")
        reasons = {
            each.reason for each in world.process.table.transitions if each.after is not Phase.READY
        }
        assert reasons <= {"silent", "new"}
        assert other.engine.running == 0


@story
async def test_a_frozen_server_whose_clients_give_up_and_come_back_is_one_story_not_many():
    async with gateway(SLOW, health="progress: 12s") as world:
        backend = world.process.table.get("m/b1")

        async def impatient():
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(5.0):
                        await world.chat(max_tokens=250, stream=True)
                await asyncio.sleep(0.6)  # two looks at what waits

        client = asyncio.get_running_loop().create_task(impatient())
        await world.until(lambda: world.sims[0].engine.gauges.running == 1)
        await world.until(lambda: backend.sample is not None and backend.sample.running == 1)
        before = len(world.process.table.transitions)
        world.sims[0].inject("frozen")
        await world.until(lambda: backend.phase is Phase.DOWN, seconds=20.0)
        told = [each.reason for each in [*world.process.table.transitions][before:]]
        assert told == ["silent", "no_progress"]
        client.cancel()
        await asyncio.wait([client])


@story
async def test_requests_of_a_server_that_is_declared_down_end_at_once_and_are_told_why():
    async with gateway(SLOW, health="progress: 1s") as world, asyncio.TaskGroup() as group:
        stream = group.create_task(world.chat(max_tokens=400, stream=True))
        whole = group.create_task(world.chat(max_tokens=400))
        await world.until(lambda: world.sims[0].engine.gauges.running == 2)
        world.sims[0].inject("frozen")
        told = json.loads(frames((await stream).text)[-2])["error"]
        assert told["code"] == "backend_down"
        assert "taken out of service" in told["message"]
        reply = await whole
        assert (reply.status_code, reply.json()["error"]["code"]) == (502, "backend_down")
        await world.settled()
        world.sims[0].clear()
        backend = world.process.table.get("m/b1")
        await world.until(lambda: backend.phase is Phase.READY)  # they are not held against it


@story
async def test_requests_end_with_the_order_to_restart_their_server():
    async with machine() as on:
        slot = on["m/b1"]
        slot.speed, slot.decode_step_s = 1.0, 0.02
        async with fleet(on, launched(slot), supervision={"drain": "100ms"}) as world:
            async with asyncio.TaskGroup() as group:
                stream = group.create_task(world.chat(max_tokens=3000, stream=True))
                await world.until(lambda: slot.sim.engine.running == 1)
                assert (await world.order("restart", force=True)).status_code < 300
            told = json.loads(frames(stream.result().text)[-2])["error"]
            assert told["code"] == "backend_down"
            assert "is being restarted" in told["message"]
            await world.serves()


@pytest.mark.timeout(100)
@partial(story, seconds=90.0)
async def test_a_slow_peer_loses_share_through_its_pace_and_gets_it_back():
    quick = SimConfig(model="m", decode_step_s=0.02)
    async with gateway(quick, quick) as world:
        engine, usual = world.sims[0].engine, world.sims[0].engine.config
        backend, other = world.process.table
        over, ended = asyncio.Event(), list[int]()

        async def client() -> None:
            while not over.is_set():
                ended.append((await world.chat(max_tokens=20)).status_code)

        async def share(requests: int) -> float:
            """Return the first one's part of what both carry, until so many requests have ended."""
            enough, carried = len(ended) + requests, [0, 0]

            def looked() -> bool:
                carried[0] += backend.in_flight
                carried[1] += other.in_flight
                return len(ended) >= enough

            await world.until(looked, seconds=20.0)
            return carried[0] / sum(carried)

        async with asyncio.TaskGroup() as group:
            for _ in range(12):
                group.create_task(client())
            assert 0.4 < await share(60) < 0.6
            # What a busy machine adds to each step leaves it three times as slow.
            engine.config = replace(usual, decode_step_s=0.2)
            await world.until(lambda: backend.slowness > 3, seconds=20.0)
            await share(60)  # those that were under way
            assert await share(60) < 0.3
            assert backend.phase is Phase.READY
            engine.config = usual
            await world.until(lambda: backend.slowness == 1, seconds=40.0)
            await share(12)
            assert 0.4 < await share(60) < 0.6
            over.set()
