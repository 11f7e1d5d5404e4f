"""Streams of Messages and Responses go on at another backend, though engines tell no token ids of them."""

import asyncio
import json
import re
from dataclasses import replace

import pytest

from gateway.core.types import Call, Dialect, Endpoint
from gateway.sim.server import SimConfig
from tests.stories.support import gateway, story
from tests.stories.test_resume import CUTS, THREE, breaking

SIM = SimConfig(model="m", decode_step_s=0.005)
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
ASKED = {
    MESSAGES: {
        "messages": [{"role": "user", "content": "tell me"}],
        "system": "be kind",
        "max_tokens": 40,
    },
    RESPONSES: {"input": "tell me", "instructions": "be kind", "max_output_tokens": 40},
}
PATHS = [*ASKED]


async def read(world, path, fault=None, others=(), **more):
    """Return the events of a stream; its first backend has `fault`, the others have `others`, in their order."""
    for sim in world.sims:
        sim.clear()
    raw = b""
    body = {"model": "m", "stream": True, "temperature": 0, **ASKED[path], **more}
    async with (
        breaking(world, path, fault, others),
        world.http.stream("POST", path, json=body) as reply,
    ):
        assert reply.status_code == 200, await reply.aread()
        async for part in reply.aiter_raw():
            raw += part
    for sim in world.sims:
        sim.clear()
    return events(raw)


def events(raw):
    """Return the events, each of which is named as its data says."""
    found = []
    for frame in raw.split(b"\n\n"):
        if frame and not frame.startswith(b":"):
            name, data = frame.split(b"\n")
            found.append(json.loads(data.removeprefix(b"data: ")))
            assert name == b"event: " + found[-1]["type"].encode()
    return found


def anonymous(told):
    """Return events with one name in place of each of the reply's own ones; they have to be the same throughout."""
    names = {}
    for event in told:
        inner = event.get("message") or event.get("response") or {}
        item = event.get("item") or {"id": event.get("item_id")}
        at = f"item {event.get('output_index')}"
        for kind, name in (("reply", inner.get("id")), (at, item["id"])):
            if name is not None:
                assert names.setdefault(kind, name) == name
    text = re.sub(r"chatcmpl-tool-\w+", "call", json.dumps(told))
    for kind, name in sorted(names.items(), key=lambda each: -len(each[1])):
        text = text.replace(name, kind)
    found = json.loads(text)
    for event in found:
        response = event.get("response") or {}
        response.pop("created_at", None)
        if usage := response.get("usage"):  # how much was cached is told as 0 of one that went on
            usage["input_tokens_details"] |= {"cached_tokens": 0, "cache_write_tokens": 0}
    return found


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("cut", CUTS)
def test_a_stream_that_is_cut_goes_on_elsewhere_as_if_nothing_had_happened(path, cut):
    @story
    async def check():
        async with gateway(SIM, SIM, access=True) as world:
            whole = await read(world, path)
            resumed = await read(world, path, cut)
            assert anonymous(resumed) == anonymous(whole)
            await world.settled()
            lines = world.access_lines()
            assert [(each["outcome"], each["attempts"]) for each in lines] == [("ok", 1), ("ok", 2)]
            assert [each["resumed"] for each in lines] == [0, 1]
            assert [each["completion_tokens"] for each in lines] == [40, 40]
            assert lines[0]["prompt_tokens"] == lines[1]["prompt_tokens"]
            assert [each["usage_source"] for each in lines] == ["upstream"] * 2

    check()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("cut", ["reset_after:1", "reset_after:39"])
def test_it_may_be_cut_anywhere(path, cut):
    @story
    async def check():
        async with gateway(SIM, SIM) as world:
            whole = await read(world, path)
            assert anonymous(await read(world, path, cut)) == anonymous(whole)

    check()


@pytest.mark.parametrize("path", PATHS)
def test_one_that_is_cut_behind_its_last_text_comes_to_its_end(path):
    """Nobody has told that it was the last one: the other backend finds that its model writes no more."""

    @story
    async def check():
        async with gateway(SIM, SIM, access=True) as world:
            more = {"messages": [{"role": "user", "content": "say [[sim:tokens=5]]"}]}
            more = more if path == MESSAGES else {"input": "say [[sim:tokens=5]]"}
            whole = await read(world, path, **more)
            told = await read(world, path, "clean_end_without_done:5", **more)
            assert [each["type"] for each in told] == [each["type"] for each in whole]
            assert [each.get("delta") for each in told] == [each.get("delta") for each in whole]
            await world.settled()
            lines = world.access_lines()
            assert [(each["outcome"], each["resumed"]) for each in lines] == [("ok", 0), ("ok", 1)]

    check()


def test_it_may_be_cut_before_the_engine_said_anything():
    @story
    async def check():
        async with gateway(SIM, SIM) as world:
            whole = await read(world, RESPONSES)
            resumed = await read(world, RESPONSES, "reset_after:0")
            assert anonymous(resumed) == anonymous(whole)

    check()


@pytest.mark.parametrize("path", PATHS)
def test_it_may_go_on_twice(path):
    @story
    async def check():
        async with gateway(SIM, SIM, SIM, pools=THREE, access=True) as world:
            whole = await read(world, path)
            resumed = await read(world, path, "reset_after:7", ["reset_after:9"])
            assert anonymous(resumed) == anonymous(whole)
            await world.settled()
            assert world.access_lines()[-1]["attempts"] == 3

    check()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "other", ["refuse", "reset_before_headers", "http_500", "error_frame_after:0"]
)
def test_who_cannot_go_on_is_passed_over(path, other):
    @story
    async def check():
        async with gateway(SIM, SIM, SIM, pools=THREE) as world:
            whole = await read(world, path)
            resumed = await read(world, path, "reset_after:7", [other])
            assert anonymous(resumed) == anonymous(whole)

    check()


async def ends_with_an_error(world, path, fault, barrier, **more):
    """A stream that breaks off ends with an error, which is numbered like any event; the access log tells why."""
    told = await read(world, path, fault, **more)
    assert told[-1]["type"] == "error"
    if path == RESPONSES:
        assert [each["sequence_number"] for each in told] == list(range(len(told)))
    await world.settled()
    line = world.access_lines()[-1]
    assert (line["outcome"], line["not_resumed"]) == ("stream_broken", barrier)
    return told


@pytest.mark.parametrize("path", PATHS)
def test_where_nobody_tells_token_ids_the_client_is_told(path):
    @story
    async def check():
        silent = replace(SIM, paths=tuple(each for each in SIM.paths if each != "/tokenize"))
        async with gateway(silent, silent, access=True) as world:
            await ends_with_an_error(world, path, "reset_after:7", "ids")

    check()


@pytest.mark.parametrize("path", PATHS)
def test_of_a_server_that_is_no_vllm_nothing_is_kept(path):
    """None of its kind could go on."""

    @story
    async def check():
        async with gateway(SIM, SIM, pool={"engine": "openai"}, access=True) as world:
            await ends_with_an_error(world, path, "reset_after:7", None)

    check()


OLD = replace(SIM, version="0.26.0", takes_prompt_ids=False)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("cut", ["reset_after:7", "stall_after:7", "error_frame_after:7"])
def test_it_goes_on_at_engines_that_take_ids_for_completions_only(path, cut):
    """So does vLLM before 0.27."""

    @story
    async def check():
        async with gateway(OLD, OLD, access=True, extra="timeouts: {stall: 300ms}") as world:
            whole, resumed = await read(world, path), await read(world, path, cut)
            assert anonymous(resumed) == anonymous(whole)
            await world.settled()
            assert [each["resumed"] for each in world.access_lines()] == [0, 1]

    check()


@pytest.mark.parametrize("padding", [0, 100_000])
@pytest.mark.parametrize("path", PATHS)
def test_where_tools_are_offered_nobody_goes_on_at_such_engines(path, padding):
    """A completion has no parser that would find a call."""

    @story
    async def check():
        sim = replace(OLD, max_model_len=100_000)
        async with gateway(sim, sim, access=True) as world:
            asked = calling(path)
            tools = [each | {"description": "look " + "x" * padding} for each in asked["tools"]]
            asked |= {"tools": tools}
            await ends_with_an_error(world, path, "reset_after:2", "old_engine", **asked)

    check()


@pytest.mark.parametrize("path", PATHS)
def test_one_that_begins_anew_is_not_passed_on(path):
    @story
    async def check():
        old = replace(SIM, takes_prompt_ids=False)
        async with gateway(old, old, access=True) as world:
            whole = await read(world, path)
            told = await ends_with_an_error(world, path, "reset_after:7", "strayed")
            assert anonymous(told[:-1]) == anonymous(whole[: len(told) - 1])

    check()


SCHEMA = {"type": "object", "properties": {"value": {"type": "string"}}}
TOOLS = {
    MESSAGES: [{"name": "look", "description": "look it up", "input_schema": SCHEMA}],
    RESPONSES: [{"type": "function", "name": "look", "parameters": SCHEMA, "strict": False}],
}
STOP = {MESSAGES: "stop_sequences", RESPONSES: "stop"}
FORCED = {MESSAGES: {"type": "any"}, RESPONSES: "required"}
CALLED_BEHIND = 6  # tokens of text


def calling(path, after=CALLED_BEHIND):
    """Return what has a model call a tool behind so many tokens of text."""
    field = "messages" if path == MESSAGES else "input"
    text = f"look it up [[sim:call={after}]]"
    return {field: [{"role": "user", "content": text}], "tools": TOOLS[path]}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("cut", ["reset_after:2", "stall_after:6", "error_frame_after:6"])
def test_a_tool_is_called_by_who_goes_on(path, cut, temperature):
    @story
    async def check():
        stall = "timeouts: {stall: 300ms}"
        asked = calling(path) | {"temperature": temperature}
        async with gateway(SIM, SIM, access=True, extra=stall) as world:
            whole = await read(world, path, **asked)
            assert "look" in json.dumps(whole)
            resumed = await read(world, path, cut, **asked)
            assert anonymous(resumed) == anonymous(whole)
            await world.settled()
            lines = world.access_lines()
            assert [each["resumed"] for each in lines] == [0, 1]
            assert lines[0]["completion_tokens"] == lines[1]["completion_tokens"]
            assert lines[0]["prompt_tokens"] == lines[1]["prompt_tokens"]

    check()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("after", "cut"), [(6, 7), (0, 1)])
def test_the_beginning_of_a_call_that_a_parser_held_back_is_made_again(path, after, cut):
    @story
    async def check():
        async with gateway(SIM, SIM) as world:
            asked = calling(path, after)
            whole = await read(world, path, **asked)
            resumed = await read(world, path, f"reset_after:{cut}", **asked)
            assert anonymous(resumed) == anonymous(whole)

    check()


@pytest.mark.parametrize("path", PATHS)
def test_the_answer_may_be_text_though_there_are_tools(path):
    @story
    async def check():
        async with gateway(SIM, SIM) as world:
            whole = await read(world, path, tools=TOOLS[path])
            resumed = await read(world, path, "reset_after:7", tools=TOOLS[path])
            assert anonymous(resumed) == anonymous(whole)

    check()


@pytest.mark.parametrize("path", PATHS)
def test_behind_a_tool_call_nobody_goes_on(path):
    @story
    async def check():
        async with gateway(SIM, SIM, access=True) as world:
            await ends_with_an_error(world, path, "reset_after:9", "reply", **calling(path))

    check()


@pytest.mark.parametrize("path", PATHS)
def test_nor_behind_one_that_came_from_who_went_on(path):
    @story
    async def check():
        async with gateway(SIM, SIM, SIM, pools=THREE, access=True) as world:
            asked = calling(path)
            told = await read(world, path, "reset_after:3", ["reset_after:6"], **asked)
            assert told[-1]["type"] == "error"
            assert "look" in json.dumps(told)
            await world.settled()
            assert world.access_lines()[-1]["not_resumed"] == "reply"

    check()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("several", [True, False])
def test_who_goes_on_is_told_of_the_same_tools(path, several):
    @story
    async def check():
        more = {"parallel_tool_calls": several}
        if path == MESSAGES:
            more = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": not several}}
        async with gateway(SIM, SIM) as world:
            await read(world, path, "reset_after:3", **calling(path), **more)
            bodies = [
                json.loads(each.body)
                for sim in world.sims
                for each in sim.requests
                if each.path == "/v1/chat/completions"
            ]
            [body] = bodies
            [tool] = body["tools"]
            assert (tool["type"], tool["function"]["name"]) == ("function", "look")
            assert tool["function"]["parameters"] == SCHEMA
            assert body["tool_choice"] == "auto"
            assert body.get("parallel_tool_calls", True) is several

    check()


@pytest.mark.parametrize("path", PATHS)
def test_a_call_that_is_forced_ends_with_an_error(path):
    @story
    async def check():
        async with gateway(SIM, SIM, access=True) as world:
            asked = {"tools": TOOLS[path], "tool_choice": FORCED[path]}
            await ends_with_an_error(world, path, "reset_after:1", "request", **asked)

    check()


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "custom", "name": "patch"},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
    ],
)
def test_a_tool_that_is_no_function_ends_with_an_error(tool):
    @story
    async def check():
        async with gateway(SIM, SIM, access=True) as world:
            tools = [*TOOLS[RESPONSES], tool]
            await ends_with_an_error(world, RESPONSES, "reset_after:2", "request", tools=tools)

    check()


@pytest.mark.parametrize("functions", [True, False])
def test_a_tool_that_vllm_does_not_show_its_model_bars_nobody(functions):
    @story
    async def check():
        asked = calling(RESPONSES) if functions else {"tools": []}
        asked["tools"] = [*asked["tools"], {"type": "web_search"}]
        async with gateway(SIM, SIM) as world:
            whole = await read(world, RESPONSES, **asked)
            resumed = await read(world, RESPONSES, "reset_after:3", **asked)
            assert anonymous(resumed) == anonymous(whole)

    check()


@pytest.mark.parametrize("path", PATHS)
def test_nobody_goes_on_where_that_is_switched_off(path):
    @story
    async def check():
        pools = "pools: {m: {backends: [{url: <0>}, {url: <1>}], resume: off}}"
        async with gateway(SIM, SIM, pools=pools, access=True) as world:
            await ends_with_an_error(world, path, "reset_after:7", None)

    check()


@pytest.mark.parametrize("path", PATHS)
def test_whoever_is_asked_for_ids_keeps_tenants_apart(path):
    @story
    async def check():
        pools = "pools: {m: {backends: [{url: <0>}, {url: <1>}], prefix_cache: per_tenant}}"
        async with gateway(SIM, SIM, pools=pools) as world:
            whole = await read(world, path)
            resumed = await read(world, path, "reset_after:7")
            assert anonymous(resumed) == anonymous(whole)
            bodies = [
                json.loads(each.body) for sim in world.sims for each in sim.requests if each.body
            ]
            generating = [each for each in bodies if {"messages", "input"} & each.keys()]
            told = [each for each in generating if "max_tokens" in each or "stream" in each]
            assert len(told) >= 3
            assert len({each["cache_salt"] for each in told}) == 1

    check()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("how", ["reset_after:40", "truncate_after:40", "error_frame_after:40"])
def test_where_all_tokens_were_told_only_the_end_is_added(path, how):
    @story
    async def check():
        async with gateway(SIM, SIM, access=True) as world:
            whole = await read(world, path)
            ended = await read(world, path, how)
            assert anonymous(ended) == anonymous(whole)
            await world.settled()
            first, line = world.access_lines()
            assert (line["outcome"], line["status"], line["not_resumed"]) == ("ok", 200, None)
            assert (line["attempts"], line["resumed"]) == (1, 0)
            for name in ("prompt_tokens", "completion_tokens"):
                assert line[name] == first[name]
            assert line["usage_source"] == "counted"
            assert line["cached_tokens"] == (None if path == RESPONSES else first["cached_tokens"])
            paces = [each.room.writing.gap_s for each in world.process.table.backends("m")]
            assert max(each or 0.0 for each in paces) < 0.1

    check()


@pytest.mark.parametrize(
    ("path", "prefill_tokens_per_s", "said"),
    [
        (MESSAGES, 20_000.0, ""),
        (RESPONSES, 50.0, ""),
        (MESSAGES, 1_000_000.0, "tell me " * 10_000),
        (RESPONSES, 50_000.0, "tell me " * 10_000),
    ],
)
def test_it_does_not_take_the_whole_pool_with_it(path, prefill_tokens_per_s, said):
    """Each server dies as it works on it; to read its prompt for the token ids is work, too."""

    @story
    async def check():
        pace = {"decode_step_s": 0.02, "prefill_tokens_per_s": prefill_tokens_per_s}
        slow = replace(SIM, max_model_len=65536, max_batched_tokens=65536, **pace)
        async with gateway(slow, slow, slow, slow) as world:
            down, begins_s = [], 0.2

            async def killer():
                while True:
                    for sim in world.sims:
                        if sim.state.in_flight and sim not in down:
                            down.append(sim)
                            await asyncio.sleep(begins_s)
                            await sim.stop()
                    await asyncio.sleep(0.01)

            async with asyncio.TaskGroup() as group:
                kills = group.create_task(killer())
                body = {"model": "m", "stream": True, **ASKED[path]}
                if said:
                    body |= {
                        "messages" if path == MESSAGES else "input": [
                            {"role": "user", "content": said}
                        ]
                    }
                limit = {each: 200 for each in body if each.startswith("max_")}
                reply = await world.http.post(path, json=body | limit)
                kills.cancel()
            assert len(down) == 2
            told = events(reply.content)[-1]
            assert told["type"] == "error"
            assert "two servers crashed" in json.dumps(told)

    check()


def large(path, after=CALLED_BEHIND):
    """Return a body above 64 KiB, most of which are tools and what was said before."""
    field = "messages" if path == MESSAGES else "input"
    tools = [
        tool | {"name": f"{tool['name']}_{number}", "description": "it looks this up " * 500}
        for number in range(10)
        for tool in TOOLS[path]
    ]
    text = "a long prompt " * 3000 + f"[[sim:call={after}]]"
    return {field: [{"role": "user", "content": text}], "tools": tools}


def filled(keeping):
    """Fill all room for kept bodies."""
    other = Call(Endpoint.MESSAGES, Dialect.MESSAGES, "m", True, b"x" * 2**23, places={})
    while keeping.keep(other) is not None:
        pass


LONG = replace(SIM, max_model_len=65536)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("cut", ["reset_after:2", "error_frame_after:6"])
def test_a_stream_of_a_large_body_goes_on_too(path, cut):
    @story
    async def check():
        asked = large(path)
        assert len(json.dumps(asked)) > 100_000
        async with gateway(LONG, LONG, access=True) as world:
            keeping = world.process.handler.passing.keeping
            whole = await read(world, path, **asked)
            resumed = await read(world, path, cut, **asked)
            assert anonymous(resumed) == anonymous(whole)
            await world.settled()
            assert [each["resumed"] for each in world.access_lines()] == [0, 1]
            assert keeping.held_bytes == 0

    check()


@pytest.mark.parametrize("path", PATHS)
def test_whoever_goes_on_with_a_large_body_knows_its_model_by_another_name(path):
    @story
    async def check():
        served = replace(LONG, model="served")
        pools = "pools: {m: {served_model: served, backends: [{url: <0>}, {url: <1>}], prefix_cache: per_tenant}}"
        async with gateway(served, served, pools=pools) as world:
            asked = large(path) | {"cache_salt": "own"}
            whole = await read(world, path, **asked)
            assert anonymous(await read(world, path, "reset_after:3", **asked)) == anonymous(whole)

    check()


@pytest.mark.parametrize("path", PATHS)
def test_a_large_body_is_kept_as_long_as_its_stream_runs(path):
    @story
    async def check():
        async with gateway(LONG, LONG) as world:
            keeping = world.process.handler.passing.keeping
            world.sims[0].inject("stall_after:3")
            world.sims[1].inject("stall_after:3")
            body = {"model": "m", "stream": True, **ASKED[path], **large(path)}
            async with world.http.stream("POST", path, json=body) as reply:
                pieces = reply.aiter_raw()  # who lets go of it leaves
                await anext(pieces)
                await world.until(lambda: keeping.held_bytes > 0)
                held = keeping.held_bytes
                assert held > 100_000
                assert f"gateway_kept_body_bytes {float(held)}" in await world.metrics()
                assert keeping.held_bytes == held
            await world.until(lambda: keeping.held_bytes == 0)

    check()


@pytest.mark.parametrize("path", PATHS)
def test_where_there_is_no_room_for_a_large_body_its_stream_ends_with_an_error(path):
    @story
    async def check():
        async with gateway(LONG, LONG, access=True) as world:
            keeping = world.process.handler.passing.keeping
            filled(keeping)
            asked = large(path)
            await ends_with_an_error(world, path, "reset_after:2", "body", **asked)
            del asked["tools"]
            asked |= {STOP[path]: ["nev!"], "metadata": {"notes": "x" * 100_000}}
            await ends_with_an_error(world, path, "reset_after:2", "body", **asked)

    check()


@pytest.mark.parametrize("path", PATHS)
def test_of_a_large_body_that_nobody_could_go_on_with_nothing_is_kept(path):
    @story
    async def check():
        async with gateway(LONG, LONG, access=True) as world:
            forced = large(path) | {"tool_choice": FORCED[path]}
            keeping = world.process.handler.passing.keeping
            filled(keeping)
            await ends_with_an_error(world, path, "reset_after:2", "request", **forced)

    check()


def text_of(told):
    """Return the text that events show."""
    deltas = [each["delta"] for each in told if each["type"].endswith("delta")]
    return "".join(each if isinstance(each, str) else each.get("text", "") for each in deltas)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("cut", "stops_at"), [(5, 60), (5, 200), (13, 60), (14, 60)])
def test_a_stream_with_stop_strings_goes_on(path, cut, stops_at):
    @story
    async def check():
        async with gateway(SIM, SIM) as world:
            said = text_of(await read(world, path))
            stops = {STOP[path]: [said[stops_at : stops_at + 8] or "never said", "no"]}
            whole = await read(world, path, **stops)
            assert len(text_of(whole)) <= len(said)
            resumed = await read(world, path, f"reset_after:{cut}", **stops)
            assert anonymous(resumed) == anonymous(whole)

    check()


@pytest.mark.parametrize("path", PATHS)
def test_one_with_stop_strings_may_go_on_twice_too(path):
    @story
    async def check():
        async with gateway(SIM, SIM, SIM, pools=THREE, access=True) as world:
            said = text_of(await read(world, path))
            stops = {STOP[path]: [said[150:158] or "never said"]}
            whole = await read(world, path, **stops)
            resumed = await read(world, path, "reset_after:7", ["reset_after:9"], **stops)
            assert anonymous(resumed) == anonymous(whole)
            await world.settled()
            assert world.access_lines()[-1]["attempts"] == 3

    check()


@pytest.mark.parametrize("path", PATHS)
def test_what_is_drawn_by_chance_does_not_go_on_where_an_engine_holds_back_text(path):
    @story
    async def check():
        async with gateway(SIM, SIM, access=True) as world:
            asked = {STOP[path]: ["nev!"], "temperature": 1}
            await ends_with_an_error(world, path, "reset_after:7", "seam", **asked)

    check()


@pytest.mark.parametrize("path", PATHS)
def test_a_stop_string_of_one_character_holds_nothing_back(path):
    @story
    async def check():
        async with gateway(SIM, SIM) as world:
            asked = {STOP[path]: ["!"], "temperature": 1}
            whole = await read(world, path, **asked)
            resumed = await read(world, path, "reset_after:7", **asked)
            assert anonymous(resumed) == anonymous(whole)

    check()


INLINE = [
    {"role": "user", "content": "tell me"},
    {"role": "system", "content": [{"type": "text", "text": "keep to the point"}]},
    {"role": "assistant", "content": "well"},
    {"role": "user", "content": "go on"},
]
CODING = {
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: 1", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "you write code"},
    ],
    "metadata": {"user_id": "u"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"},
}  # fmt: skip


@pytest.mark.parametrize("template", [{}, {"system_first": True}, {"reads_effort": True}])
@pytest.mark.parametrize(
    "asked",
    [
        CODING | {"messages": INLINE},
        {"thinking": {"type": "disabled"}},
        {"output_config": {"effort": "low"}, "messages": INLINE},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_what_coding_agents_ask_of_messages_goes_on(template, asked):
    @story
    async def check():
        sim = replace(SIM, **template)
        async with gateway(sim, sim) as world:
            whole = await read(world, MESSAGES, **asked)
            resumed = await read(world, MESSAGES, "reset_after:7", **asked)
            assert anonymous(resumed) == anonymous(whole)

    check()


@pytest.mark.parametrize("template", [{}, {"reads_effort": True}])
def test_what_coding_agents_ask_of_responses_goes_on(template):
    @story
    async def check():
        sim = replace(SIM, **template)
        asked = {
            "reasoning": {"effort": "medium", "summary": "auto"},
            "client_metadata": {"session": "s"},
            "prompt_cache_key": "k",
            "text": {"verbosity": "low"},
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "tools": [*TOOLS[RESPONSES], {"type": "web_search"}],
        }
        async with gateway(sim, sim) as world:
            whole = await read(world, RESPONSES, **asked)
            resumed = await read(world, RESPONSES, "reset_after:7", **asked)
            assert anonymous(resumed) == anonymous(whole)

    check()


def test_one_with_a_budget_for_thinking_goes_on():
    @story
    async def check():
        asked = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000}
        asked["messages"] = [{"role": "user", "content": "say [[sim:tokens=40]]"}]  # of the 2000
        async with gateway(SIM, SIM) as world:
            whole = await read(world, MESSAGES, **asked)
            told = await read(world, MESSAGES, "reset_after:7", **asked)
            assert anonymous(told) == anonymous(whole)

    check()


def test_grammars_end_with_an_error():
    @story
    async def check():
        schema = {"type": "object", "properties": {"long": {"type": "string", "minLength": 80}}}
        asked = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
        async with gateway(SIM, SIM, access=True) as world:
            await ends_with_an_error(world, MESSAGES, "reset_after:7", "request", **asked)

    check()
