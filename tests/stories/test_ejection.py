"""Backends that live and fail: their pool leaves them out, tries them again, and never does without the only one."""

import asyncio
import contextlib

import httpx2

from gateway.core.types import Phase
from gateway.sim.server import SimConfig
from tests import loopback
from tests.stories.support import FAST, gateway, story
from tests.stories.test_supervision_signs import Forward

SLOW = SimConfig(model="m", decode_step_s=0.02)


def chats(sim):
    return len(sim.received("/v1/chat/completions"))


async def overview(world):
    async with loopback.client() as http:
        return (await http.get(world.admin_url + "/admin/v1/overview")).json()


async def until_out(world, backend, most=300):
    """Send requests until a backend is left out; return their statuses."""
    statuses = []
    while not backend.kept_out:
        statuses.append((await world.chat(max_tokens=1)).status_code)
        assert len(statuses) < most
    return statuses


async def until_tried_again(world, backend, clock):
    """Have a backend left out, and be well again when the time comes to try it."""
    sim = world.sims[0]
    sim.inject("http_500")
    await until_out(world, backend)
    sim.clear()
    clock.ahead_s += 30
    await world.until(lambda: backend.probation is not None)


@story
async def test_a_backend_that_fails_half_of_its_requests_is_out_within_half_a_minute():
    async with gateway(FAST, FAST, FAST) as world:
        sim, first = world.sims[0], world.process.table.get("m/b1")
        replies = []
        while not first.kept_out:
            sim.clear()
            if chats(sim) % 2:  # every other one: never two in a row
                sim.inject("http_500")
            replies.append((await world.chat(max_tokens=1)).status_code)
            assert len(replies) < 300
        assert replies.count(500) <= 12
        assert set(replies) == {200, 500}
        before = chats(world.sims[0])
        after = [(await world.chat(max_tokens=1)).status_code for _ in range(60)]
        assert after == [200] * 60
        assert chats(world.sims[0]) == before
        text = await world.metrics()
        assert 'gateway_backend_ejected{backend="b1",pool="m"} 1.0' in text
        assert 'gateway_backend_ejected{backend="b2",pool="m"} 0.0' in text
        told = (await overview(world))["pools"][0]["backends"][0]
        assert told["state"] == "failing"
        assert "it gets no new requests for 30 s, then one at a time" in told["detail"]


@story
async def test_the_only_backend_is_asked_however_often_it_fails():
    async with gateway(FAST) as world:
        world.sims[0].inject("http_500@30")
        statuses = [(await world.chat(max_tokens=1)).status_code for _ in range(31)]
        assert statuses == [500] * 30 + [200]
        only = world.process.table.get("m/b1")
        assert not only.kept_out
        assert only.phase is Phase.READY


@story
async def test_one_that_works_again_is_tried_by_one_request_and_starts_slowly():
    clock = Forward()
    async with gateway(SLOW, FAST, clock=clock) as world:
        first, sim = world.process.table.get("m/b1"), world.sims[0]
        await until_tried_again(world, first, clock)
        before, table = chats(sim), world.process.table
        table.get("m/b2").limit.fix(1)
        other = table.take("m/b2", clock.now())  # so that the first request goes to b1
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 50}
        async with asyncio.TaskGroup() as group:
            trial = group.create_task(world.http.post("/v1/chat/completions", json=body))
            await world.until(lambda: first.probation.slots)
            sim.inject("frozen")  # it lasts as long as it has to
            other.release()
            replies = [(await world.chat(max_tokens=1)).status_code for _ in range(5)]
            assert replies == [200] * 5
            assert chats(sim) == before + 1
            assert not trial.done()
            sim.clear()
        assert trial.result().status_code == 200
        await world.until(lambda: first.phase is Phase.READY)
        assert first.limit.starts(clock.now())


@story
async def test_a_trial_that_fails_keeps_it_out_for_twice_as_long():
    clock = Forward()
    async with gateway(FAST, FAST, clock=clock) as world:
        first, sim = world.process.table.get("m/b1"), world.sims[0]
        sim.inject("http_500")
        await until_out(world, first)
        clock.ahead_s += 30
        await world.until(lambda: first.probation is not None)
        statuses = [(await world.chat(max_tokens=1)).status_code for _ in range(30)]
        assert statuses.count(500) == 1
        assert first.health.ejection.times == 2
        assert "for 60 s (time 2 in a row)" in first.health.detail


@story
async def test_what_clients_and_engines_do_in_order_is_held_against_nobody():
    async with gateway(SLOW, SLOW) as world:
        for sim in world.sims:
            sim.inject("http_500:400")
        assert {(await world.chat(max_tokens=1)).status_code for _ in range(60)} == {400}
        for sim in world.sims:
            sim.clear()
            sim.inject("admission_503@3")
        await world.chat(max_tokens=1)
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 500}
        for _ in range(12):
            with contextlib.suppress(httpx2.TimeoutException):
                await world.http.post("/v1/chat/completions", json=body, timeout=0.02)
        await world.settled()
        for backend in world.process.table.backends("m"):
            assert backend.phase is Phase.READY
            assert (backend.tally.failed, backend.health.traffic_failures) == (0, 0)
