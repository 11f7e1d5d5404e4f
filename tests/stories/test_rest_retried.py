"""The rest of a stream that broke off meets small trouble on its way: it is not lost for it."""

import asyncio
from dataclasses import replace

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from gateway.pools.health import Order
from tests.stories.fakes import serving
from tests.stories.support import gateway, story
from tests.stories.test_resume import PATHS, SIM, THREE, anonymous, breaking, chunks, read, text

UNLIKE = {"id": "", "created": 0}  # in two streams


async def warmed(world):
    """Have each backend used, so that a connection to it rests; return what a whole stream says."""
    async with asyncio.TaskGroup() as group:
        both = [group.create_task(read(world)) for _ in range(4)]
    assert all(any(each.body for each in sim.requests) for sim in world.sims)
    await world.settled()
    await world.rested()
    return both[0].result()


def test_a_rest_that_met_a_dead_idle_connection_is_sent_on_a_fresh_one():
    @story
    async def check():
        async with gateway(SIM, SIM, access=True) as world:
            whole = await warmed(world)
            resumed = await read(world, fault="reset_after:7", others=["keepalive_close@1"])
            assert anonymous(resumed) == anonymous(whole)
            await world.settled()
            told = world.access_lines()[-1]
            assert (told["outcome"], told["attempts"], told["resumed"]) == ("ok", 3, 1)

    check()


@pytest.mark.parametrize("refusals", [1, 2, 3])
def test_a_rest_that_the_last_backend_has_no_room_for_is_sent_there_again(refusals):
    @story
    async def check():
        async with gateway(SIM, SIM, access=True) as world:
            whole = await warmed(world)
            full = [f"admission_503@{refusals}"]
            resumed = await read(world, fault="reset_after:7", others=full)
            if refusals < 3:
                assert anonymous(resumed) == anonymous(whole)
            else:  # it is no use
                assert b'"error"' in resumed
            await world.settled()
            assert world.access_lines()[-1]["attempts"] == min(2 + refusals, 4)

    check()


def test_a_rest_that_nobody_has_room_for_in_time_was_not_gone_on_with():
    """Neither to operators nor in the metrics."""
    pools = """pools: {m: {queue: {max_wait: 300ms}, backends: [
        {url: <0>, max_in_flight: 1}, {url: <1>, max_in_flight: 1}]}}"""
    asked = {"model": "m", "prompt": "tell me", "stream": True, "max_tokens": 400}

    @story
    async def check():
        slow = replace(SIM, decode_step_s=0.02)
        async with gateway(slow, slow, pools=pools, access=True) as world:
            async with world.http.stream("POST", PATHS[1], json=asked):  # which has the one place
                idle = next(sim for sim in world.sims if not sim.received(PATHS[1]))
                idle.inject("reset_after:7")
                reply = await world.http.post(PATHS[1], json=asked)
            assert b"no other backend could go on with it" in reply.content
            await world.settled()
            line = next(each for each in world.access_lines() if each["outcome"] != "client_gone")
            told = line["outcome"], line["attempts"], line["resumed"], line["not_resumed"]
            assert told == ("stream_broken", 1, 0, "no_backend")
            assert "gateway_streams_resumed_total{" not in await world.metrics()

    check()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "other",
    ["refuse", "http_500", "admission_503@1", "reset_before_headers", "error_frame_after:0"],
)
def test_what_was_shown_beyond_the_seam_is_said_once_though_the_first_to_go_on_fails(path, other):
    """With a stop string there is such text."""

    @story
    async def check():
        more = {"stop": ["never said"]}
        async with gateway(SIM, SIM, SIM, pools=THREE) as world:
            whole = await read(world, path, **more)
            resumed = await read(world, path, "reset_after:20", others=[other], **more)
            assert text(resumed) == text(whole)
            assert chunks(resumed)[-1] | UNLIKE == chunks(whole)[-1] | UNLIKE

    check()


@story
async def test_what_was_told_is_counted_though_the_rest_is_refused():
    async with gateway(SIM, SIM, access=True) as world:
        broken = await read(world, fault="reset_after:7", others=["admission_503@3"])
        assert b'"error"' in broken
        await world.settled()
        assert world.access_lines()[-1]["completion_tokens"] == 7


@story
async def test_a_rest_that_is_refused_where_the_backend_is_cordoned_meanwhile_is_no_bug():
    async def cordons(request):
        cordoned.order("m/b2", Order.CORDON)
        return JSONResponse({}, 503, {"retry-after": "1"})

    routes = [
        Route("/health", lambda request: JSONResponse({})),
        Route("/v1/models", lambda request: JSONResponse({"data": [{"id": "m"}]})),
        Route("/v1/chat/completions", cordons, methods=["POST"]),
    ]
    async with serving(Starlette(routes=routes), port=0) as other:
        port = other.servers[0].sockets[0].getsockname()[1]
        backends = f"[<0>, {{url: 'http://127.0.0.1:{port}', weight: 0.000000001}}]"
        pools = f"pools: {{m: {{resume_replies: '16', backends: {backends}}}}}"
        async with gateway(SIM, pools=pools, wait=False, access=True) as world:
            await world.ready(2)
            cordoned = world.process.table
            world.sims[0].inject("reset_after:7@1")
            reply = await world.chat("tell me", max_tokens=40)
            assert "Internal error" not in reply.text
            await world.settled()
            assert world.access_lines()[-1]["attempts"] > 1


@pytest.mark.parametrize("second", ["abort_finish:1", "clean_end_without_done:1", "http_500"])
def test_a_reply_that_nobody_can_go_on_with_is_begun_anew(second):
    @story
    async def check():
        three = THREE.replace("pools: {m: {", 'pools: {m: {resume_replies: "16", ')
        async with gateway(SIM, SIM, SIM, pools=three) as world:
            more = {"max_tokens": 40, "temperature": 0, "stop": ["never said at all"]}
            async with breaking(world, PATHS[0], "reset_after:7", [second]):
                reply = (await world.chat("tell me", **more)).json()
            for each in world.sims:
                each.clear()
            again = (await world.chat("tell me", **more)).json()
            assert reply["choices"] == again["choices"]

    check()


TWO_POOLS = """\
pools:
  m:
    resume_replies: "16"
    fallback: {no_backend: small, overload: small}
    queue: {max_requests: 0}
    backends: [<0>, {url: <1>, max_in_flight: 1}]
  small:
    backends: [<2>, <3>]
"""


@pytest.mark.parametrize("fault", ["refuse", "full"])
def test_the_rest_of_a_reply_is_sent_to_no_other_pool(fault):
    """What was said of it is another model's, and is no prompt of that one."""

    @story
    async def check():
        small = replace(SIM, model="small")
        async with gateway(SIM, SIM, small, small, pools=TWO_POOLS, access=True) as world:
            broken = await whole_reply(world, PATHS[0], "reset_after:7", others=fault)
            assert broken.status_code == 502, broken.text
            assert "no other backend" in broken.json()["error"]["message"]
            assert [each.body for sim in world.sims[2:] for each in sim.requests if each.body] == []

    check()


@story
async def test_who_refuses_the_rest_of_a_stream_is_no_worse_for_it():
    async with gateway(SIM, SIM, SIM, pools=THREE) as world:
        for _ in range(2):
            resumed = await read(world, fault="reset_after:7", others=["http_500:400"])
            assert b'"error"' not in resumed
        told = await world.metrics()
        assert 'reason="rest_refused"' in told  # of one backend or of two
        assert 'reason="broke"' not in told


async def whole_reply(world, path, fault, others):
    def full(number):
        backend = world.process.table.backends("m")[number]
        world.process.table.order(backend.id, Order.CORDON)

    body = {"model": "m", "max_tokens": 40, "messages": [{"role": "user", "content": "tell me"}]}
    async with breaking(world, path, fault, [full if others == "full" else others]):
        return await world.http.post(path, json=body)


@pytest.mark.parametrize(
    "other",
    [
        "refuse",
        "reset_before_headers",
        "http_500",
        "http_500:400",
        "error_frame_after:0",
        "admission_503",
    ],
)
def test_who_cannot_go_on_with_a_reply_is_passed_over(other):
    @story
    async def check():
        three = THREE.replace("pools: {m: {", 'pools: {m: {resume_replies: "16", ')
        async with gateway(SIM, SIM, SIM, pools=three, access=True) as world:
            broken = await whole_reply(world, PATHS[0], "reset_after:7", others=other)
            assert broken.status_code == 200, broken.text
            assert broken.json()["usage"]["completion_tokens"] == 40
            await world.settled()
            assert [each["attempts"] for each in world.access_lines()] == [3]

    check()
