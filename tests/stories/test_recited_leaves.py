"""Streams of Messages and Responses leave a backend that is drained, though engines tell no token ids of them."""

import asyncio
import json
import time
from dataclasses import replace

import pytest

from gateway.core.events import EventKind
from gateway.core.types import Phase
from gateway.pools.health import Order
from tests.stories.support import gateway, story
from tests.stories.test_resume import THREE
from tests.stories.test_resume_recited import (
    LONG,
    MESSAGES,
    PATHS,
    RESPONSES,
    SIM,
    STOP,
    anonymous,
    calling,
    events,
    large,
    read,
    text_of,
)

AT_ONCE = {"move_after": "0s"}
LIMIT, LONGER = (
    {MESSAGES: {"max_tokens": most}, RESPONSES: {"max_output_tokens": most}} for most in (300, 500)
)
ASKED = {
    MESSAGES: {"messages": [{"role": "user", "content": "tell me"}], "system": "be kind"},
    RESPONSES: {"input": "tell me", "instructions": "be kind"},
}


def at_work(world):
    """Return the backend that writes, and its simulator."""
    backends = world.process.table.backends("m")
    number = next(number for number, each in enumerate(backends) if each.in_flight)
    return backends[number], world.sims[number]


async def drained(world, path, *, then=lambda: None, moves=1, **more):
    """Return the events of a stream whose backend is drained after its first bytes.

    `then` is called at that moment. With more `moves`, so is each that goes on, while the one before serves again.
    """
    table, raw, left = world.process.table, b"", []
    body = {"model": "m", "stream": True, "temperature": 0, **LIMIT[path], **ASKED[path], **more}
    async with world.http.stream("POST", path, json=body) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for part in reply.aiter_raw():
            raw += part
            backend, _ = at_work(world) if world.in_flight() else (None, None)
            if backend is not None and len(left) < moves and backend.id not in left:
                for each in left:
                    table.order(each, Order.RESUME)
                left = [*left, backend.id]
                table.order(backend.id, Order.DRAIN)
                then()
    await world.settled()
    return events(raw)


def last(world):
    line = world.access_lines()[-1]
    return line["outcome"], line["attempts"], line["resumed"]


MOVED, STAYED = ("ok", 2, 1), ("ok", 1, 0)


def asked_of(world):
    """Return the questions that backends were asked for token ids."""
    return [each for sim in world.sims for each in sim.requests if each.path == "/tokenize"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_stream_leaves_a_backend_that_is_drained(path, temperature):
    @story
    async def check():
        async with gateway(SIM, SIM, pool=AT_ONCE, access=True) as world:
            more = {"temperature": temperature} | LIMIT[path]
            whole = await read(world, path, **more)
            told = await drained(world, path, **more)
            assert anonymous(told) == anonymous(whole)
            assert last(world) == MOVED
            page = await world.metrics()
            assert 'gateway_streams_resumed_total{cause="drain",pool="m"} 1' in page
            assert "gateway_upstream_failures_total{" not in page
            left = next(each for each in world.process.table if each.phase is Phase.DRAINING)
            event = next(world.process.supervisor.events.newest())
            assert (event.kind, event.backend_id) == (EventKind.MOVED, left.id)

    check()


@pytest.mark.parametrize("path", PATHS)
def test_it_may_leave_twice(path):
    @story
    async def check():
        pools = THREE.replace("m: {", "m: {move_after: 0s, ")
        async with gateway(SIM, SIM, SIM, pools=pools, access=True) as world:
            whole = await read(world, path, **LONGER[path])
            told = await drained(world, path, moves=2, **LONGER[path])
            assert anonymous(told) == anonymous(whole)
            assert last(world) == ("ok", 3, 2)

    check()


@pytest.mark.parametrize("path", PATHS)
def test_it_may_still_call_tools(path):
    @story
    async def check():
        async with gateway(SIM, SIM, pool=AT_ONCE, access=True) as world:
            asked = calling(path, after=150) | LIMIT[path]
            whole = await read(world, path, **asked)
            assert "look" in json.dumps(whole)
            told = await drained(world, path, **asked)
            assert anonymous(told) == anonymous(whole)
            assert last(world) == MOVED

    check()


@pytest.mark.parametrize("path", PATHS)
def test_behind_a_tool_call_it_stays(path):
    @story
    async def check():
        async with gateway(SIM, SIM, pool=AT_ONCE, access=True) as world:
            asked = calling(path, after=3) | LIMIT[path]
            whole = await read(world, path, **asked)
            told = await drained(world, path, **asked)
            assert anonymous(told) == anonymous(whole)
            assert last(world) == STAYED
            assert not asked_of(world)

    check()


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_with_stop_strings_may_leave_twice_too(path):
    @story
    async def check():
        pools = THREE.replace("m: {", "m: {move_after: 0s, ")
        async with gateway(SIM, SIM, SIM, pools=pools, access=True) as world:
            stops = {STOP[path]: ["never said"]} | LONGER[path]
            whole = await read(world, path, **stops)
            told = await drained(world, path, moves=2, **stops)
            assert anonymous(told) == anonymous(whole)
            assert last(world) == ("ok", 3, 2)

    check()


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_of_a_large_body_leaves_too(path):
    @story
    async def check():
        quick = replace(LONG, prefill_tokens_per_s=1_000_000.0)
        async with gateway(quick, quick, pool=AT_ONCE, access=True) as world:
            asked = large(path, after=400) | LIMIT[path]
            whole = await read(world, path, **asked)
            told = await drained(world, path, **asked)
            assert anonymous(told) == anonymous(whole)
            assert last(world) == MOVED
            assert world.process.handler.passing.keeping.held_bytes == 0

    check()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("pool", "more"),
    [
        ({"move_after": "60s"}, {}),
        ({"move_after": "0s"}, {"seed": 7, "temperature": 0.5}),
        ({"move_after": "0s", "resume": "off"}, {}),
    ],
)
def test_what_cannot_leave_is_not_asked_about(path, pool, more):
    @story
    async def check():
        async with gateway(SIM, SIM, pool=pool, access=True) as world:
            await drained(world, path, **more)
            assert last(world) == STAYED
            assert not asked_of(world)

    check()


@pytest.mark.parametrize("path", PATHS)
def test_nor_where_nobody_else_has_a_place(path):
    @story
    async def check():
        async with gateway(SIM, SIM, pool=AT_ONCE, access=True) as world:

            def drain_all():
                for each in world.process.table.backends("m"):
                    world.process.table.order(each.id, Order.DRAIN)

            await drained(world, path, then=drain_all)
            assert last(world) == STAYED
            assert not asked_of(world)

    check()


@pytest.mark.parametrize("path", PATHS)
def test_where_nobody_tells_token_ids_it_goes_on_as_if_nobody_had_been_asked(path):
    @story
    async def check():
        silent = replace(SIM, paths=tuple(each for each in SIM.paths if each != "/tokenize"))
        async with gateway(silent, silent, pool=AT_ONCE, access=True) as world:
            whole = await read(world, path, **LIMIT[path])
            began = time.monotonic()
            told = await drained(world, path)
            assert anonymous(told) == anonymous(whole)
            assert last(world) == STAYED
            # 1 s before the second, 2 s before the third.
            paused_s = 2 ** (len(asked_of(world)) - 1) - 1
            assert paused_s <= time.monotonic() - began

    check()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("after", [10, 100])
def test_a_backend_that_dies_meanwhile_is_gone_on_with_as_ever(path, after):
    """Its stream may be about to leave, or have left."""

    @story
    async def check():
        async with gateway(SIM, SIM, pool=AT_ONCE, access=True) as world:
            whole = await read(world, path, **LIMIT[path])

            def breaks_soon():
                _, sim = at_work(world)
                sim.inject(f"reset_after:{after}")

            told = await drained(world, path, then=breaks_soon)
            assert anonymous(told) == anonymous(whole)
            assert last(world) == MOVED

    check()


def test_a_backend_that_dies_of_the_prompt_leaves_the_stream_where_it_is():
    """To tell its token ids, an engine reads it."""

    @story
    async def check():
        async with gateway(SIM, SIM, SIM, pool=AT_ONCE, access=True) as world:
            whole = await read(world, RESPONSES, **LIMIT[RESPONSES])

            def die():
                _, sim = at_work(world)
                for other in world.sims:
                    if other is not sim:
                        other.inject("die_on_prompt:tell me")

            told = await drained(world, RESPONSES, then=die)
            assert anonymous(told) == anonymous(whole)
            assert last(world) == STAYED
            asked = [
                each
                for sim in world.sims
                for each in sim.requests
                if each.path == RESPONSES and b'"max_output_tokens":1,' in each.body
            ]
            assert len(asked) == 1  # nobody else is put at risk

    check()


@pytest.mark.parametrize("path", PATHS)
def test_many_leave_at_once(path):
    @story
    async def check():
        async with gateway(SIM, SIM, pool=AT_ONCE, access=True) as world:
            whole = text_of(await read(world, path, **LONGER[path]))
            backends = world.process.table.backends("m")
            world.process.table.order(backends[1].id, Order.CORDON)
            await world.until(lambda: backends[1].phase is Phase.CORDONED)

            async def one():
                body = {"model": "m", "stream": True, "temperature": 0, **ASKED[path]}
                reply = await world.http.post(path, json=body | LONGER[path])
                return text_of(events(reply.content))

            async with asyncio.TaskGroup() as group:
                told = [group.create_task(one()) for _ in range(24)]
                await world.until(lambda: backends[0].in_flight == 24)
                world.process.table.order(backends[1].id, Order.RESUME)
                world.process.table.order(backends[0].id, Order.DRAIN)
            await world.settled()
            assert {each.result() for each in told} == {whole}
            lines = world.access_lines()[1:]
            assert {each["outcome"] for each in lines} == {"ok"}
            assert sum(each["resumed"] for each in lines) == 24

    check()
