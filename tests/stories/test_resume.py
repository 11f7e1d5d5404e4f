"""A stream whose backend fails goes on at another one, and its client sees one whole answer."""

import json

import pytest

from gateway.sim.server import SimConfig
from tests.stories.support import gateway, story

SIM = SimConfig(model="m", decode_step_s=0.005)
PATHS = ["/v1/chat/completions", "/v1/completions"]
# The third takes what the others cannot.
THREE = "pools: {m: {backends: [{url: <0>}, {url: <1>}, {url: <2>, weight: 0.001}]}}"
CUTS = [
    "reset_after:7",
    "truncate_after:7",
    "truncate_chunk:7",
    "clean_end_without_done:7",
    "error_frame_after:7",
    "abort_finish:7",
]


async def read(world, path=PATHS[0], fault=None, others=(), **more):
    """Return the bytes of a stream; its first backend has `fault`, the others have `others`, in their order."""
    asked = {"model": "m", "stream": True, "max_tokens": 40, "temperature": 0, **more}
    asked.setdefault("stream_options", {"include_usage": True})
    asked |= (
        {"prompt": "tell me"}
        if path == PATHS[1]
        else {"messages": [{"role": "user", "content": "tell me"}]}
    )
    if fault is not None:
        for sim in world.sims:
            sim.inject(fault)
    raw = b""
    async with world.http.stream("POST", path, json=asked) as reply:
        assert reply.status_code == 200
        async for part in reply.aiter_raw():
            if fault is not None:
                first = [each.in_flight for each in world.process.table.backends("m")].index(1)
                rest = [sim for number, sim in enumerate(world.sims) if number != first]
                for sim in rest:
                    sim.clear()
                for sim, other in zip(rest, others, strict=False):
                    sim.inject(other)
                fault = None
            raw += part
    for sim in world.sims:
        sim.clear()
    return raw


def chunks(raw):
    frames = [each for each in raw.split(b"\n\n") if each.startswith(b"data: ")]
    assert frames[-1] == b"data: [DONE]"
    return [json.loads(each[6:]) for each in frames[:-1]]


def text(raw):
    return "".join(
        (choice.get("delta") or choice).get("content") or choice.get("text") or ""
        for each in chunks(raw)
        for choice in each.get("choices", ())
    )


def anonymous(raw):
    told = chunks(raw)
    assert len({(each["id"], each["created"]) for each in told}) == 1
    for each in told:
        del each["id"], each["created"]
    return told


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("cut", CUTS)
def test_a_stream_that_is_cut_goes_on_elsewhere_as_if_nothing_had_happened(path, cut):
    @story
    async def check():
        async with gateway(SIM, SIM, access=True) as world:
            whole = await read(world, path)
            resumed = await read(world, path, cut)
            assert anonymous(resumed) == anonymous(whole)
            assert b'token_ids":[' not in resumed + whole
            await world.settled()
            lines = world.access_lines()
            assert [(each["outcome"], each["attempts"]) for each in lines] == [("ok", 1), ("ok", 2)]
            assert [each["resumed"] for each in lines] == [0, 1]
            assert [each["completion_tokens"] for each in lines] == [40, 40]
            assert 'gateway_streams_resumed_total{pool="m"} 1' in await world.metrics()

    check()


def test_nobody_sees_the_usage_that_was_not_asked_for():
    @story
    async def check():
        async with gateway(SIM, SIM) as world:
            whole = await read(world, stream_options=None)
            resumed = await read(world, fault="reset_after:7", stream_options=None)
            assert anonymous(resumed) == anonymous(whole)
            assert b'"usage"' not in resumed

    check()


def test_it_may_go_on_twice():
    @story
    async def check():
        async with gateway(SIM, SIM, SIM, pools=THREE, access=True) as world:
            whole = await read(world)
            resumed = await read(world, fault="reset_after:7", others=["reset_after:9"])
            assert anonymous(resumed) == anonymous(whole)
            await world.settled()
            assert [each["attempts"] for each in world.access_lines()][-1] == 3

    check()


@pytest.mark.parametrize(
    "other", ["refuse", "reset_before_headers", "http_500", "error_frame_after:0"]
)
def test_who_cannot_go_on_is_passed_over(other):
    @story
    async def check():
        async with gateway(SIM, SIM, SIM, pools=THREE, access=True) as world:
            whole = await read(world)
            resumed = await read(world, fault="reset_after:7", others=[other])
            assert anonymous(resumed) == anonymous(whole)
            await world.settled()
            assert [each["attempts"] for each in world.access_lines()] == [1, 3]

    check()


def test_when_nobody_can_go_on_the_client_is_told():
    @story
    async def check():
        async with gateway(SIM, SIM, access=True) as world:
            broken = await read(world, fault="reset_after:7", others=["refuse"])
            assert "error" in chunks(broken)[-1]
            await world.settled()
            assert [each["outcome"] for each in world.access_lines()] == ["stream_broken"]

    check()


def test_a_stream_that_stalls_goes_on_elsewhere():
    @story
    async def check():
        extra = "timeouts: {first_byte: 1s, stall: 1s}"
        async with gateway(SIM, SIM, extra=extra, health="scrape_stale: 100ms") as world:
            whole = await read(world)
            resumed = await read(world, fault="stall_after:7")
            assert anonymous(resumed) == anonymous(whole)

    check()


def test_one_that_begins_anew_is_not_passed_on():
    @story
    async def check():
        old = SimConfig(model="m", decode_step_s=0.005, takes_prompt_ids=False)
        async with gateway(old, old) as world:
            whole, resumed = await read(world), await read(world, fault="reset_after:7")
            assert "could not be resumed" in chunks(resumed)[-1]["error"]["message"]
            shown = text(resumed.replace(b'{"error"', b'{"choices":[],"error"'))
            assert text(whole).startswith(shown)
            assert len(shown) == 7 * 4

    check()


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2, "temperature": 1},
        {"seed": 7, "temperature": 0.5},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"logprobs": True},
        {"stop": ["xyz"]},
        {"response_format": {"type": "json_object"}},
        {"return_token_ids": True},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
    ],
)
def test_what_would_not_go_on_exactly_ends_with_an_error(more):
    @story
    async def check():
        async with gateway(SIM, SIM) as world:
            broken = await read(world, fault="reset_after:7", **more)
            assert "error" in chunks(broken)[-1]
            assert (b'"token_ids":[' in broken) == ("return_token_ids" in more)

    check()


@pytest.mark.parametrize(
    "more",
    [
        {"seed": 7},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "logprobs": False, "stop": None},
        {"response_format": {"type": "text"}, "top_p": 0.9, "temperature": 1.1, "user": "u"},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"min_tokens": 20, "ignore_eos": True},
    ],
)
def test_what_an_sdk_sends_by_default_does_not_keep_it_from_going_on(more):
    @story
    async def check():
        async with gateway(SIM, SIM) as world:
            whole = await read(world, **more)
            resumed = await read(world, fault="reset_after:7", **more)
            assert anonymous(resumed) == anonymous(whole)

    check()


def test_a_stream_without_a_stated_length_goes_on_to_its_own_end():
    @story
    async def check():
        async with gateway(SIM, SIM) as world:
            whole = await read(world, max_tokens=None)
            resumed = await read(world, fault="reset_after:7", max_tokens=None)
            assert anonymous(resumed) == anonymous(whole)
            assert len(text(whole)) == 24 * 4

    check()


@pytest.mark.parametrize("pool", [{"resume": "off"}, {"prefix_cache": "per_tenant"}])
def test_a_pool_without_it_ends_with_an_error(pool):
    @story
    async def check():
        async with gateway(SIM, SIM, pool=pool) as world:
            broken = await read(world, fault="reset_after:7")
            assert "error" in chunks(broken)[-1]
            await read(world)
            assert all("return_token_ids" not in each for each in bodies(world))

    check()


def test_a_single_backend_is_not_asked_for_ids():
    @story
    async def check():
        async with gateway(SIM) as world:
            await read(world)
            assert all("return_token_ids" not in each for each in bodies(world))

    check()


def bodies(world):
    return [json.loads(each.body) for sim in world.sims for each in sim.requests if each.body]
