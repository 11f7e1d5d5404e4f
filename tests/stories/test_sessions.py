"""A session goes where it was, while that is quicker; also if its prompts do not show where that is."""

import asyncio
import dataclasses

from gateway.core.aio import start
from gateway.sim.server import SimConfig
from tests.stories.support import FAST, gateway, story

TELLS = dataclasses.replace(FAST, prompt_tokens_details=True)
SESSIONS = 6


async def turn(world, session, number, *, header="x-session-id"):
    """Ask a turn of a conversation, whose client writes the same messages otherwise at every second turn."""
    names = ("role", "content") if number % 2 else ("content", "role")
    texts = [
        f"This is the story of hero {session}. " * 40,
        *(f"And then {n}?" for n in range(number)),
    ]
    messages = [{name: {"role": "user", "content": text}[name] for name in names} for text in texts]
    headers = {header: f"hero-{session}"} if header else {}
    body = {"model": "m", "messages": messages, "max_tokens": 2, "stream": number % 3 == 0}
    reply = await world.http.post("/v1/chat/completions", json=body, headers=headers)
    assert reply.status_code == 200, reply.text


def places(world, session):
    """Return the places of the backends that had requests of a session."""
    told = f"hero {session}.".encode()
    return {
        place
        for place, sim in enumerate(world.sims)
        for each in sim.received("/v1/chat/completions")
        if told in each.body
    }


async def play(world, **more):
    for number in range(5):
        for session in range(SESSIONS):
            await turn(world, session, number, **more)
    return sum(len(places(world, session)) for session in range(SESSIONS))


@story
async def test_a_session_stays_though_its_client_never_writes_it_the_same_way():
    async with gateway(TELLS, TELLS, TELLS) as world:
        assert await play(world) == SESSIONS
    async with gateway(TELLS, TELLS, TELLS) as world:
        assert await play(world, header=None) > SESSIONS


@story
async def test_the_header_may_have_another_name():
    async with gateway(TELLS, TELLS, TELLS, extra="session_header: X-Conversation\n") as world:
        assert await play(world, header="x-conversation") == SESSIONS
    async with gateway(TELLS, TELLS, TELLS, extra="session_header: X-Conversation\n") as world:
        assert await play(world) > SESSIONS


@story
async def test_it_moves_when_its_backend_is_much_busier():
    slow = SimConfig(model="m", decode_step_s=0.02)
    async with gateway(slow, slow) as world:
        await turn(world, 0, 0)
        await turn(world, 0, 1)
        (place,) = places(world, 0)
        sim, backend = world.sims[place], world.process.table.get(f"m/b{place + 1}")
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3000}
        url = sim.url + "/v1/chat/completions"
        others = [start(world.http.post(url, json=body), name="others") for _ in range(12)]
        await world.until(lambda: backend.foreign >= 12)
        sim.requests.clear()
        await turn(world, 0, 2)
        assert places(world, 0) == {1 - place}
        for each in others:
            each.cancel()
        await asyncio.wait(others)


@story
async def test_a_restart_forgets_sessions():
    async with gateway(FAST, FAST) as world:
        await turn(world, 0, 0)
        (place,) = places(world, 0)
        backend = world.process.table.get(f"m/b{place + 1}")
        assert len(backend.sessions) == 1
        await world.sims[place].stop()
        await world.until(lambda: len(backend.sessions) == 0)
        await world.sims[place].start()


@story
async def test_nobody_sees_what_a_session_is_called():
    async with gateway(FAST, FAST, access=True) as world:
        await turn(world, 0, 0)
        world.access_lines()
        assert "hero-0" not in world.log.read_text() + await world.metrics()
        received = [each for sim in world.sims for each in sim.received("/v1/chat/completions")]
        assert [each.header("x-session-id") for each in received] == [None]


@story
async def test_where_one_backend_serves_nothing_is_kept_of_sessions():
    async with gateway(FAST) as world:
        await turn(world, 0, 0)
        assert [len(each.sessions) for each in world.process.table] == [0]
