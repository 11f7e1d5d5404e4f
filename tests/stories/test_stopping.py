"""A gateway that is told to stop: what a load balancer in front of it sees, in order."""

import asyncio
import collections
import functools
import signal

import httpx2
import pytest

from gateway.sim.server import SimConfig
from tests import loopback
from tests.stories.served import served
from tests.stories.support import FAST, frames
from tests.stories.support import story as story_within

pytestmark = pytest.mark.timeout(120)
story = functools.partial(story_within, seconds=110.0)
SLOW = SimConfig(model="m", decode_step_s=0.05)


async def ask(http, **more):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **more}
    return await http.post("/v1/chat/completions", json=body)


def client(world):
    return loopback.client(timeout=30, base_url=world.url, headers=world.bearer)


async def readiness(world):
    async with loopback.client(base_url=world.url) as http:
        return (await http.get("/readyz")).status_code


@story
async def test_readiness_goes_first_and_what_comes_meanwhile_is_served():
    async with served(SLOW, extra="shutdown: {announce: 5s, grace: 20s}") as world:
        async with client(world) as http, client(world) as kept, asyncio.TaskGroup() as group:
            assert (await ask(kept)).headers.get("connection") != "close"
            running = group.create_task(ask(http, stream=True, max_tokens=100))
            await world.until(lambda: world.sims[0].engine.running)
            world.started.send_signal(signal.SIGTERM)
            await world.until(lambda: world.lines("announcing"), 60)
            assert await readiness(world) == 503
            for _ in range(2):  # the second over a new connection
                reply = await ask(kept)
                assert (reply.status_code, reply.headers["connection"]) == (200, "close")
            await world.until(lambda: world.lines("draining"), 60)
            with pytest.raises(httpx2.ConnectError):
                await readiness(world)
        assert frames(running.result().text)[-1] == "[DONE]"
        assert world.started.wait(20) == 0


@story
async def test_who_has_connected_may_still_ask_when_nobody_may_connect_any_more():
    async with served(FAST, extra="shutdown: {announce: 200ms, grace: 20s}") as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        world.started.send_signal(signal.SIGTERM)
        await world.until(lambda: world.lines("draining"), 60)
        writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        told = await reader.read()
        assert told.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in told
        writer.close()


@story
async def test_at_a_terminal_nobody_has_to_learn_of_the_end_first():
    async with served(FAST, extra="shutdown: {announce: 60s, grace: 90s}") as world:
        world.started.send_signal(signal.SIGINT)
        await world.until(lambda: world.started.poll() == 0)
        assert not world.lines("announcing")


@pytest.mark.parametrize("workers", [1, 2])
@story
async def test_who_has_connected_is_answered_and_all_others_are_refused(workers):
    extra = f"workers: {workers}\nshutdown: {{announce: 500ms, grace: 20s}}"
    async with served(FAST, extra=extra) as world:
        told, refused = collections.Counter(), asyncio.Event()

        async def knock():
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
            except ConnectionRefusedError:
                refused.set()
                return
            try:
                writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
                told[await reader.readline()] += 1
            except OSError as error:
                told[repr(error)] += 1
            finally:
                writer.close()

        async def keep_knocking():
            while not refused.is_set():
                await knock()

        async with asyncio.TaskGroup() as group:
            for _ in range(30):
                group.create_task(keep_knocking())
            await world.until(lambda: told.total() > 200, 60)
            world.started.send_signal(signal.SIGTERM)
        assert set(told) == {b"HTTP/1.1 200 OK\r\n"}
