"""A stream whose backend fails goes on at another one, and its client sees one whole answer."""

import asyncio
import contextlib
import gc
import json
from dataclasses import replace

import pytest

from gateway.core.aio import start
from gateway.core.events import EventKind
from gateway.core.types import Phase
from gateway.ingress.server import GatewayProtocol
from gateway.pools.health import Order
from gateway.resume.stream import TrailedStream
from gateway.sim.server import SimConfig
from tests.abuse.support import front_of, scripted
from tests.stories.support import gateway, story

SIM = SimConfig(model="m", decode_step_s=0.005)
PATHS = ["/v1/chat/completions", "/v1/completions"]
# The third takes what the others cannot: who is asked is drawn by weight.
THREE = "pools: {m: {backends: [{url: <0>}, {url: <1>}, {url: <2>, weight: 0.000000001}]}}"
CUTS = [
    "reset_after:7",
    "truncate_after:7",
    "truncate_chunk:7",
    "clean_end_without_done:7",
    "error_frame_after:7",
    "abort_finish:7",
]


@contextlib.asynccontextmanager
async def breaking(world, path, fault, others=()):
    """Have the backend that is asked first break so, and the others have `others`, in their order: faults,
    or what is called with their number.

    They get them as soon as the first one is asked: by the time the client reads, it may have broken.
    """

    def asked():
        return [len(sim.received(path)) for sim in world.sims]

    async def spare(before):
        while (counts := asked()) == before:
            await asyncio.sleep(0)
        rest = [
            sim for sim, count, was in zip(world.sims, counts, before, strict=True) if count == was
        ]
        for sim in rest:
            sim.clear()
        for sim, other in zip(rest, others, strict=False):
            if callable(other):
                other(world.sims.index(sim))
            else:
                sim.inject(other)

    async with asyncio.TaskGroup() as group:
        if fault is not None:
            for sim in world.sims:
                sim.inject(fault)
            group.create_task(spare(asked()))
        yield


async def read(world, path=PATHS[0], fault=None, others=(), **more):
    """Return the bytes of a stream; its first backend has `fault`, the others have `others`, in their order."""
    asked = {"model": "m", "stream": True, "max_tokens": 40, "temperature": 0, **more}
    asked.setdefault("stream_options", {"include_usage": True})
    asked = (
        {"prompt": "tell me"}
        if path == PATHS[1]
        else {"messages": [{"role": "user", "content": "tell me"}]}
    ) | asked
    raw = b""
    async with (
        breaking(world, path, fault, others),
        world.http.stream("POST", path, json=asked, timeout=30.0) as reply,
    ):
        assert reply.status_code == 200
        async for part in reply.aiter_raw():
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
            assert (
                'gateway_streams_resumed_total{cause="failure",pool="m"} 1' in await world.metrics()
            )

    check()


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_that_is_cut_behind_its_last_text_has_its_usage(path):
    @story
    async def check():
        async with gateway(SIM, SIM, access=True) as world:
            whole = await read(world, path)
            cut = await read(world, path, "reset_after:40")
            told, expected = anonymous(cut), anonymous(whole)
            expected[-1].pop("system_fingerprint", None)  # vLLM writes it into this frame alone
            assert told == expected
            await world.settled()
            lines = world.access_lines()
            assert [(each["outcome"], each["attempts"]) for each in lines] == [("ok", 1)] * 2
            assert lines[0]["prompt_tokens"] == lines[1]["prompt_tokens"]

    check()


def test_nobody_goes_on_behind_the_end_of_an_answer():
    """An engine that fails there tells an error, behind the finish reason."""

    @story
    async def check():
        async with gateway(SIM, SIM, access=True) as world:
            asked = {"path": PATHS[1], "prompt": "tell me [[sim:tokens=9]]"}
            whole = chunks(await read(world, **asked))
            told = chunks(await read(world, **asked, fault="error_frame_after:9"))
            assert "error" in told.pop()
            assert [each["choices"] for each in told] == [each["choices"] for each in whole[:-1]]
            await world.settled()
            assert [each["outcome"] for each in world.access_lines()] == ["ok", "stream_broken"]

    check()


@pytest.mark.parametrize("path", PATHS)
def test_the_last_frame_has_it_too_where_each_frame_tells_it_so_far(path):
    @story
    async def check():
        async with gateway(SIM, SIM) as world:
            more = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
            whole = await read(world, path, **more)
            told, expected = (
                anonymous(await read(world, path, "reset_after:40", **more)),
                anonymous(whole),
            )
            expected[-1].pop("system_fingerprint", None)
            assert told == expected

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
    "other",
    ["refuse", "reset_before_headers", "http_500", "http_500:400", "error_frame_after:0"],
)
def test_who_cannot_go_on_is_passed_over(other):
    @story
    async def check():
        async with gateway(SIM, SIM, SIM, pools=THREE, access=True) as world:
            whole = await read(world)
            resumed = await read(world, fault="reset_after:7", others=[other])
            assert anonymous(resumed) == anonymous(whole)
            await world.settled()
            first, last = (each["attempts"] for each in world.access_lines())
            # A reset on a connection that was used before may be that connection's end alone.
            assert (first, last - (other == "reset_before_headers" and last == 4)) == (1, 3)

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


CALLS = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}


@pytest.mark.parametrize("parsed", [False, True])
def test_a_stream_that_its_engine_lost_among_others_goes_on_elsewhere(parsed):
    """Its metrics show progress, and one request less among a dozen may have just ended.

    A parser of calls may hold text back as long, so what has one waits until that is proven.
    """
    asked, slow = (CALLS if parsed else {}), replace(SIM, decode_step_s=0.02)

    @story
    async def check():
        extra = "timeouts: {first_byte: 20s, stall: 2s}"
        async with gateway(slow, slow, extra=extra, access=True) as world:
            whole = await read(world, max_tokens=40, **asked)
            for sim in world.sims:
                sim.inject("stall_after:7@1")
            lost = start(read(world, max_tokens=40, **asked), name="lost")
            await world.until(lambda: not all(sim.state.faults.active for sim in world.sims))
            for sim in world.sims:
                sim.clear()
            others = [start(read(world, max_tokens=300), name="other") for _ in range(30)]
            told = await lost
            assert (
                all(each.done() for each in others) == any(each.done() for each in others) == parsed
            )
            assert anonymous(told) == anonymous(whole)
            for each in others:
                assert "error" not in chunks(await each)[-1]
            await world.settled()
            assert sum(each["resumed"] for each in world.access_lines()) == 1

    check()


def test_a_stream_that_its_engine_lost_behind_its_finish_reason_ends_with_what_it_said():
    """Its last frame waits here for the usage, which comes at once: that others are written says nothing."""

    @story
    async def check():
        extra = "timeouts: {first_byte: 20s, stall: 2s}"
        slow = replace(SIM, decode_step_s=0.02)
        async with gateway(slow, extra=extra, access=True) as world:
            whole = await read(world, max_tokens=5)
            world.sims[0].inject("stall_after:5@1")
            lost = start(read(world, max_tokens=5), name="lost")
            await world.until(lambda: not world.sims[0].state.faults.active)
            world.sims[0].clear()
            others = [start(read(world, max_tokens=300), name="other") for _ in range(30)]
            told = await lost
            assert not any(each.done() for each in others)
            assert anonymous(told) == anonymous(whole)[:-1]  # its usage was not told
            for each in others:
                await each

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


OLD = SimConfig(model="m", decode_step_s=0.005, version="0.26.0", takes_prompt_ids=False)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("newer", [OLD, SIM])
def test_a_chat_goes_on_at_engines_that_take_ids_for_completions_only(cut, newer):
    """So does vLLM before 0.27."""

    @story
    async def check():
        async with gateway(OLD, newer, access=True) as world:
            whole, resumed = await read(world), await read(world, fault=cut)
            told = anonymous(whole), anonymous(resumed)
            for each in told:  # tells which of the two engines wrote the end
                assert each[-1].pop("system_fingerprint").startswith("vllm-0.")
            assert told[0] == told[1]
            assert chunks(resumed)[-1]["usage"]["completion_tokens"] == 40
            await world.settled()
            assert [each["resumed"] for each in world.access_lines()] == [0, 1]

    check()


@pytest.mark.parametrize(
    "more",
    [
        {"max_tokens": None, "max_completion_tokens": 30},
        {"stop": ["xyz"]},
        {"temperature": 1, "top_p": 0.5, "min_tokens": 30},
        {"tools": []},
    ],
)
def test_what_a_chat_asks_for_holds_for_its_rest_at_such_engines(more):
    @story
    async def check():
        async with gateway(OLD, OLD) as world:
            whole, resumed = await read(world, **more), await read(world, fault=CUTS[0], **more)
            assert anonymous(resumed) == anonymous(whole)

    check()


def test_a_chat_without_a_limit_has_the_rest_of_the_window_at_such_engines():
    """A completion without one would end after 16 tokens. (The simulator ends a completion at its limit only.)"""

    @story
    async def check():
        sim = replace(OLD, max_model_len=64)
        async with gateway(sim, sim) as world:
            whole = await read(world, max_tokens=None)
            resumed = await read(world, max_tokens=None, fault=CUTS[0])
            assert text(resumed).startswith(text(whole))
            assert chunks(resumed)[-1]["usage"]["total_tokens"] == 64

    check()


def test_a_chat_that_fails_twice_goes_on_at_such_engines():
    @story
    async def check():
        async with gateway(OLD, OLD, OLD, pools=THREE) as world:
            whole = await read(world)
            resumed = await read(world, fault="reset_after:7", others=("reset_after:9",))
            assert anonymous(resumed) == anonymous(whole)

    check()


TOOLS = [{"type": "function", "function": {"name": "f"}}]


def test_a_chat_without_a_limit_may_fill_the_window_of_the_engine_that_goes_on():
    """Not of the smallest one of its pool."""

    @story
    async def check():
        large, small = replace(OLD, max_model_len=128), replace(OLD, max_model_len=32)
        async with gateway(large, large, small, pools=THREE) as world:
            world.process.table.order("m/b3", Order.DRAIN)
            whole = await read(world, max_tokens=None)
            resumed = await read(world, max_tokens=None, fault="reset_after:20")
            assert text(resumed).startswith(text(whole))
            assert chunks(resumed)[-1]["usage"]["total_tokens"] == 128

    check()


@pytest.mark.parametrize("drains", [True, False])
def test_a_chat_stays_where_the_old_engines_complete_nothing(drains):
    @story
    async def check():
        pool = {"move_after": "0s", "endpoints": ["chat"]}
        async with gateway(OLD, OLD, pool=pool, access=True) as world:
            if drains:
                await drained(world, **LONG)
                assert attempts(world) == [("ok", 1, 0)]
            else:
                assert "error" in chunks(await read(world, fault="reset_after:7"))[-1]
                await world.settled()
                assert world.access_lines()[-1]["not_resumed"] == "old_engine"

    check()


def test_in_a_pool_of_several_versions_what_needs_a_parser_goes_on_at_a_newer_one():
    @story
    async def check():
        more = {"tools": TOOLS, "max_tokens": 40}
        async with gateway(SIM, SIM, OLD, pools=THREE, access=True) as world:
            whole, resumed = await read(world, **more), await read(world, fault=CUTS[0], **more)
            assert anonymous(resumed) == anonymous(whole)

    check()


def test_a_chat_of_which_no_token_came_yet_is_begun_again_at_such_an_engine():
    @story
    async def check():
        pools = "pools: {m: {backends: [{url: <0>}, {url: <1>, weight: 0.000000001}]}}"
        async with gateway(OLD, OLD, pools=pools, access=True) as world:
            whole = await read(world)
            world.sims[0].inject("abort_finish:0")
            assert anonymous(await read(world)) == anonymous(whole)
            await world.settled()
            assert [each["attempts"] for each in world.access_lines()] == [1, 2]

    check()


def test_a_completion_of_which_nothing_was_shown_yet_goes_on_at_such_engines():
    @story
    async def check():
        more = {"stop": ["x" * 60]}
        async with gateway(OLD, OLD) as world:
            whole = await read(world, PATHS[1], **more)
            resumed = await read(world, PATHS[1], "reset_after:3", **more)
            assert text(resumed) == text(whole)

    check()


@pytest.mark.parametrize("more", [{"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}, {}])
def test_where_a_parser_looks_for_tool_calls_nobody_goes_on_at_such_engines(more):
    """A completion has no parser."""

    @story
    async def check():
        async with gateway(OLD, OLD, access=True) as world:
            broken = await read(world, fault="reset_after:7", **more)
            assert ("error" in chunks(broken)[-1]) == ("tools" in more)
            await world.settled()
            told = "old_engine" if more else None
            assert [each["not_resumed"] for each in world.access_lines()] == [told]

    check()


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2, "temperature": 1},
        {"seed": 7, "temperature": 0.5},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"logprobs": True},
        {"stop": ["xyz"], "min_tokens": 20},
        {"response_format": {"type": "json_object"}},
        {"return_token_ids": True},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
    ],
)
def test_what_would_not_go_on_exactly_ends_with_an_error(more):
    @story
    async def check():
        async with gateway(SIM, SIM) as world:
            broken = await read(world, fault="reset_after:5", **more)
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
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "temperature": 1},
        {"min_tokens": 20, "ignore_eos": True},
        {"stop": ["xyz", "never said"]},
        {"stop": "z"},
        {"stop": "z", "temperature": 1},
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


@pytest.mark.parametrize("path", PATHS[:2])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_stream_whose_frames_have_several_tokens_goes_on(path, temperature):
    @story
    async def check():
        async with gateway(SIM, SIM) as world:
            more = {"stream_interval": 4, "temperature": temperature}
            whole = await read(world, path, **more)
            resumed = await read(world, path, fault="reset_after:7", **more)
            assert text(resumed) == text(whole)
            assert chunks(resumed)[-1]["usage"] == chunks(whole)[-1]["usage"]

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


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("cut", CUTS)
def test_where_the_pool_says_so_it_goes_on_by_its_text(path, cut):
    @story
    async def check():
        async with gateway(SIM, SIM, pool={"resume": "text"}, access=True) as world:
            # The seam is between two tokens.
            more = {"prompt": "tell me!"} if path == PATHS[1] else {}
            whole = await read(world, path, **more)
            resumed = await read(world, path, cut, **more)
            assert anonymous(resumed) == anonymous(whole)
            assert all("return_token_ids" not in each for each in bodies(world))
            await world.settled()
            assert [each["resumed"] for each in world.access_lines()] == [0, 1]

    check()


@pytest.mark.parametrize(
    "more",
    [
        {"messages": [{"role": "user", "content": "tell me " * 20_000}]},
        {"continue_final_message": True, "add_generation_prompt": False},
        {"seed": 7},
    ],
)
def test_by_its_text_not_all_goes_on(more):
    @story
    async def check():
        roomy = replace(SIM, max_model_len=100_000)
        async with gateway(roomy, roomy, pool={"resume": "text"}) as world:
            broken = await read(world, fault="reset_after:7", **more, temperature=1)
            assert "error" in chunks(broken)[-1]

    check()


def without_null(value):
    """Return a reply without what vLLM says of features that were not asked for."""
    if isinstance(value, list):
        return [without_null(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {name: without_null(each) for name, each in value.items() if each is not None}


async def whole_reply(world, path, fault=None, **more):
    """Return the reply to a request that is not streamed; its first backend has `fault`."""
    asked = {"model": "m", "max_tokens": 40, "temperature": 0, **more}
    asked |= (
        {"prompt": "tell me"}
        if path == PATHS[1]
        else {"messages": [{"role": "user", "content": "tell me"}]}
    )
    for sim in world.sims:
        sim.clear()
    async with breaking(world, path, fault):
        return await world.http.post(path, json=asked)


@pytest.mark.parametrize("path", PATHS)
def test_a_reply_that_is_not_streamed_is_a_stream_inside_where_the_pool_says_so(path):
    @story
    async def check():
        async with gateway(SIM, SIM, pool={"resume_replies": "16"}, access=True) as world:
            short = await whole_reply(world, path, max_tokens=8)
            plain = await whole_reply(world, path, seed=7, temperature=1)
            resumed = await whole_reply(world, path, "reset_after:7")
            whole = await whole_reply(world, path)
            assert [short.status_code, plain.status_code, resumed.status_code] == [200] * 3
            expected, told = whole.json(), resumed.json()
            for each in (expected, told):
                del each["id"], each["created"]
            assert told == expected
            assert told["usage"]["completion_tokens"] == 40
            (choice,) = told["choices"]
            assert choice["finish_reason"] == "length"
            assert "token_ids" not in resumed.text
            assert resumed.headers["x-gateway-resumed"] == "1"
            assert "x-gateway-resumed" not in whole.headers
            streams = [bool(each.get("stream")) for each in bodies(world) if "model" in each]
            assert streams.count(True) == 3  # of which two were sent for one reply
            await world.settled()
            lines = world.access_lines()
            assert [(each["stream"], each["resumed"]) for each in lines][2] == (False, 1)

    check()


@pytest.mark.parametrize("path", PATHS)
def test_what_is_put_together_is_what_an_engine_answers(path):
    @story
    async def check():
        async with gateway(SIM, SIM, pool={"resume_replies": "16"}) as world:
            inside = (await whole_reply(world, path)).json()
            as_it_is = (await whole_reply(world, path, seed=7, temperature=1)).json()
            sent = [bool(each.get("stream")) for each in bodies(world) if "model" in each]
            assert sorted(sent) == [False, True]
            for each in (inside, as_it_is):
                del each["id"], each["created"]
            assert without_null(inside) == without_null(as_it_is)

    check()


@story
async def test_a_batch_of_one_chat_is_no_stream_inside():
    """Engines answer it as a whole, whatever it asks for; in a large reply nobody would find a frame."""
    sim = replace(SIM, speed=0, max_model_len=1 << 16)
    async with gateway(sim, sim, pool={"resume_replies": "16"}) as world:
        for tokens in (40, 40_000):
            chats = [[{"role": "user", "content": "tell me"}]]
            asked = {"model": "m", "max_tokens": tokens, "messages": chats}
            reply = await world.http.post("/v1/chat/completions/batch", json=asked)
            (choice,) = reply.json()["choices"]
            assert len(choice["message"]["content"]) == 4 * tokens
            assert not choice.get("token_ids")
        sent = [
            json.loads(each.body)
            for sim in world.sims
            for each in sim.received("/v1/chat/completions/batch")
        ]
        assert [each.get("stream") for each in sent] == [None, None]
        await world.settled()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("cut", ["clean_end_without_done:7", "abort_finish:7"])
def test_a_reply_that_is_made_anew_has_nothing_of_the_one_before(path, cut):
    """Its backend ended it in order, so it may be sent again, and nobody can go on with what was said."""

    @story
    async def check():
        async with gateway(SIM, SIM, pool={"resume_replies": "16"}, access=True) as world:
            again = await whole_reply(world, path, cut, stop=["never said"], temperature=1)
            assert again.status_code == 200, again.text
            choice = again.json()["choices"][0]
            assert len(choice.get("text") or choice["message"]["content"]) == 40 * 4
            assert again.json()["usage"]["completion_tokens"] == 40
            await world.settled()
            assert attempts(world) == [("ok", 2, 0)]

    check()


def test_a_reply_whose_rest_nobody_takes_is_an_error_with_its_status():
    @story
    async def check():
        async with gateway(SIM, SIM, pool={"resume_replies": "16"}) as world:
            for sim in world.sims:
                sim.inject("reset_after:7")
            body = {"model": "m", "max_tokens": 40, "prompt": "tell me"}
            broken = await world.http.post(PATHS[1], json=body)
            assert broken.status_code == 502
            assert "no other backend" in broken.json()["error"]["message"]

    check()


@pytest.mark.parametrize("path", PATHS)
def test_a_stop_string_ends_the_stream_behind_the_seam(path):
    @story
    async def check():
        async with gateway(SIM, SIM, access=True) as world:
            stop = text(await read(world, path))[60:66]
            whole = await read(world, path, stop=[stop, "never said"])
            resumed = await read(world, path, "reset_after:7", stop=[stop, "never said"])
            assert anonymous(resumed) == anonymous(whole)
            assert len(text(whole)) == 60
            assert b'"finish_reason":"stop"' in resumed

    check()


def test_a_large_body_and_a_cache_of_its_own_do_not_keep_it_from_going_on():
    @story
    async def check():
        roomy = replace(SIM, max_model_len=100_000)
        async with gateway(roomy, roomy, pool={"prefix_cache": "per_tenant"}) as world:
            more = {"messages": [{"role": "user", "content": "tell me " * 20_000}]}
            whole = await read(world, **more)
            resumed = await read(world, fault="reset_after:7", **more)
            assert anonymous(resumed) == anonymous(whole)
            sent = [each for each in bodies(world) if "stream" in each]
            assert len({each["cache_salt"] for each in sent}) == 1
            assert len(sent) == 3

    check()


@pytest.mark.parametrize("prompt", ["tell me", "tell me " * 10_000])
def test_a_prompt_that_is_to_be_echoed_is_there_whoever_could_go_on(prompt):
    @story
    async def check():
        roomy = replace(SIM, max_model_len=100_000)
        async with gateway(roomy, roomy) as world:
            echoed = text(await read(world, PATHS[1], prompt=prompt, echo=True))
            assert echoed == prompt + text(await read(world, PATHS[1], prompt=prompt))

    check()


def test_the_ids_that_a_client_asks_for_in_a_large_body_are_there():
    @story
    async def check():
        roomy = replace(SIM, max_model_len=100_000)
        async with gateway(roomy, roomy) as world:
            messages = [{"role": "user", "content": "tell me " * 10_000}]
            raw = await read(world, messages=messages, return_token_ids=True)
            assert raw.count(b'"token_ids":[') == 40

    check()


def test_a_pool_without_it_ends_with_an_error():
    @story
    async def check():
        async with gateway(SIM, SIM, pool={"resume": "off"}) as world:
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


async def drained(world, *, others=(), **more):
    """Return the bytes of a stream whose backend is drained after its first bytes."""
    asked = {"model": "m", "stream": True, "temperature": 0, **more}
    asked["messages"] = [{"role": "user", "content": "tell me"}]
    raw, ordered = b"", False
    async with world.http.stream("POST", PATHS[0], json=asked) as reply:
        async for part in reply.aiter_raw():
            raw += part
            if not ordered:
                backends = world.process.table.backends("m")
                for each in backends:
                    if each.in_flight or each.name in others:
                        world.process.table.order(each.id, Order.DRAIN)
                ordered = True
    await world.settled()
    return raw


def attempts(world):
    return [(each["outcome"], each["attempts"], each["resumed"]) for each in world.access_lines()]


LONG = {"max_tokens": 300}


def test_a_stream_leaves_a_backend_that_is_drained():
    @story
    async def check():
        async with gateway(SIM, SIM, pool={"move_after": "0s"}, access=True) as world:
            whole = await read(world, stream_options=None, **LONG)
            raw = await drained(world, **LONG)
            assert anonymous(raw) == anonymous(whole)
            assert attempts(world) == [("ok", 1, 0), ("ok", 2, 1)]
            told = await world.metrics()
            assert 'gateway_streams_resumed_total{cause="drain",pool="m"} 1' in told
            assert "gateway_upstream_failures_total{" not in told
            left = next(each for each in world.process.table if each.phase is Phase.DRAINING)
            event = next(world.process.supervisor.events.newest())
            assert (event.kind, event.backend_id) == (EventKind.MOVED, left.id)
            assert event.detail.startswith("1 stream went")

    check()


@pytest.mark.parametrize(
    ("pool", "more"),
    [
        ({"move_after": "60s"}, {}),
        ({"move_after": "0s"}, {"seed": 7, "temperature": 0.5}),
        ({"move_after": "0s", "resume": "off"}, {}),
        ({"move_after": "0s", "resume": "text"}, {"add_generation_prompt": True}),
        ({"move_after": "0s"}, {"tools": TOOLS}),
    ],
)
def test_what_cannot_leave_yet_finishes_where_it_is(pool, more):
    @story
    async def check():
        sim = OLD if "tools" in more else SIM
        async with gateway(sim, sim, pool=pool, access=True) as world:
            await drained(world, **LONG, **more)
            assert attempts(world) == [("ok", 1, 0)]

    check()


def test_a_stream_stays_where_it_is_while_nobody_else_has_a_place():
    @story
    async def check():
        async with gateway(SIM, SIM, pool={"move_after": "0s"}, access=True) as world:
            await drained(world, others=("b1", "b2"), **LONG)
            assert attempts(world) == [("ok", 1, 0)]

    check()


@pytest.mark.parametrize(("step_s", "more"), [(0.005, LONG), (0.1, {})])
def test_a_stream_does_not_leave_for_a_backend_whose_window_is_too_small_by_now(step_s, more):
    """One that was restarted with a smaller window, say."""

    @story
    async def check():
        large = replace(SIM, decode_step_s=step_s)
        async with gateway(large, large, pool={"move_after": "0s"}, access=True) as world:
            task = start(chat_text(world, **more), name="stream")
            await world.until(lambda: world.in_flight() == 1)
            here, other = sorted(world.process.table.backends("m"), key=lambda b: -b.in_flight)
            sim = next(each for each in world.sims if each.url == other.url)
            sim.state.config = replace(large, max_model_len=64)
            await world.until(lambda: other.window_tokens == 64)
            world.process.table.order(here.id, Order.DRAIN)
            raw = await task
            assert chunks(raw)
            assert b'"error"' not in raw
            await world.settled()
            assert attempts(world) == [("ok", 1, 0)]

    check()


async def chat_text(world, **more):
    asked = {"model": "m", "stream": True, "temperature": 0, **more}
    asked["messages"] = [{"role": "user", "content": "tell me " * 60}]
    return (await world.http.post(PATHS[0], json=asked)).content


def bodies(world):
    return [json.loads(each.body) for sim in world.sims for each in sim.requests if each.body]


def test_a_stream_whose_first_frame_says_that_the_engine_is_full_is_answered_by_another():
    """What the first one said is no part of the answer."""
    error = {"message": "full", "type": "ServiceUnavailableError", "param": None, "code": 503}
    refusal = b"data: %b\n\ndata: [DONE]\n\n" % json.dumps({"error": error}).encode()
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    last = chunk | {"choices": [{"index": 0, "delta": {"content": "yes"}, "finish_reason": "stop"}]}
    answer = b"data: %b\n\ndata: [DONE]\n\n" % json.dumps(last, separators=(",", ":")).encode()
    asked = []

    def says(request):
        asked.append(request)
        said = refusal if len(asked) == 1 else answer
        return b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n%b" % (
            len(said), said,
        )  # fmt: skip

    @story
    async def check():
        async with (
            scripted(says) as one,
            scripted(says) as other,
            front_of(one, other) as world,
        ):
            raw = await read(world, stream_options=None)
            assert (len(asked), text(raw)) == (2, "yes")

    check()


@story
async def test_a_connection_that_rests_holds_nothing_of_its_last_stream():
    async with gateway(SIM, SIM) as world:
        await read(world)
        await world.settled()
        gc.collect()
        connections = [each for each in gc.get_objects() if isinstance(each, GatewayProtocol)]
        assert len(connections) == 1  # it is still there, and may be for minutes
        assert not [each for each in gc.get_objects() if isinstance(each, TrailedStream)]


@pytest.mark.parametrize("path", ["/loras/1", "/loras/2"])
def test_the_rest_of_an_adapters_stream_goes_to_no_backend_that_has_it_from_another_path(path):
    """A new version of it is loaded on one backend after the other."""

    @story
    async def check():
        async with gateway(SIM, SIM, pool={"adapters": "auto"}, access=True) as world:
            backends = world.process.table.backends("m")
            for sim, root in zip(world.sims, ["/loras/1", path], strict=True):
                sim.state.loaded["sql"] = root
            await world.until(lambda: all("sql" in each.adapters for each in backends))
            raw = await read(world, fault="reset_after:7", model="sql")
            await world.settled()
            alike, line = path == "/loras/1", world.access_lines()[-1]
            assert (line["outcome"], line["resumed"]) == (
                ("ok", 1) if alike else ("stream_broken", 0)
            )
            assert (b'"error"' in raw) is not alike

    check()
