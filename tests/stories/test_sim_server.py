"""The simulated vLLM on real sockets: every endpoint, and every way to break."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import pathlib
import socket

import httpx2
import pytest
import uvloop

from gateway.sim.faults import NAMES
from gateway.sim.server import SimConfig, SimServer
from tests import loopback

FAST = SimConfig(model="m", adapters=("a", "b"), speed=0)
CHAT = "/v1/chat/completions"
SUBJECTS = ("sim", "http")
POST = (
    b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
)


def story(test):
    """Run an async test of `sim` and `http`, on the event loop that its parameter `loop` names."""

    def run(loop, **arguments):
        async def main():
            async with asyncio.timeout(20), SimServer(FAST) as sim, client(sim) as http:
                await test(sim, http, **arguments)

        factory = uvloop.new_event_loop if loop == "uvloop" else None
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main())

    # pytest reads the parameters from the signature: those of the test, with `loop` for the rest.
    others = [p for p in inspect.signature(test).parameters.values() if p.name not in SUBJECTS]
    loop = inspect.Parameter("loop", inspect.Parameter.KEYWORD_ONLY)
    functools.update_wrapper(run, test)
    run.__signature__ = inspect.Signature([*others, loop])
    return pytest.mark.parametrize("loop", ["asyncio", "uvloop"])(run)


def client(sim: SimServer, **more) -> httpx2.AsyncClient:
    return loopback.client(base_url=sim.url, timeout=10, **more)


def ask(text: str = "hello", **more):
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


def data_of(text: str) -> list:
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def events_of(text: str) -> list[str]:
    return [line[7:] for line in text.split("\n") if line.startswith("event: ")]


async def raw(
    sim: SimServer, body: dict, path: str = CHAT, *, stays_open: bool = False
) -> tuple[bytes, str]:
    """Send one request; return all bytes of the answer and how the connection ended."""
    reader, writer = await asyncio.open_connection("127.0.0.1", sim.port)
    data = json.dumps(body).encode()
    writer.write(POST % (path.encode(), len(data), data))
    got, end = b"", "open"
    try:
        async with asyncio.timeout(1.0 if stays_open else 10):
            while part := await reader.read(65536):
                got += part
            end = "closed"
    except TimeoutError:
        pass
    except ConnectionResetError:
        end = "reset"
    writer.transport.abort()
    await asyncio.sleep(0)
    return got, end


async def until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


# --- what it serves -------------------------------------------------------------------------------


@story
async def test_it_tells_what_it_is(sim, http):
    assert (await http.get("/health")).content == b""
    assert (await http.get("/version")).json() == {"version": "0.32.0"}
    models = (await http.get("/v1/models")).json()["data"]
    shown = [(m["id"], m["parent"], m["max_model_len"]) for m in models]
    assert shown == [("m", None, 8192), ("a", "m", None), ("b", "m", None)]
    paths = (await http.get("/openapi.json")).json()["paths"]
    assert set(sim.config.paths) < set(paths)


@story
async def test_a_chat_is_answered_and_counted(sim, http):
    body = (await http.post(CHAT, json=ask("12345678", max_tokens=5))).json()
    assert body["usage"]["prompt_tokens"] == 3 + 2 + 2
    assert body["usage"]["completion_tokens"] == 5
    assert body["choices"][0]["finish_reason"] == "length"
    counted = await http.post("/tokenize", json=ask("12345678"))
    assert counted.json()["count"] == 7
    text = body["choices"][0]["message"]["content"]
    again = await http.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
    assert again.json()["count"] == 5
    back = await http.post("/detokenize", json={"tokens": again.json()["tokens"]})
    assert back.json()["prompt"] == text


@story
async def test_a_stream_gives_the_same_text_as_a_whole_reply(sim, http):
    whole = (await http.post(CHAT, json=ask())).json()["choices"][0]
    assert whole["finish_reason"] == "stop"
    chunks = data_of((await http.post(CHAT, json=ask(stream=True))).text)
    assert chunks[-1] == "[DONE]"
    deltas = [c["choices"][0]["delta"] for c in chunks[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(d["content"] for d in deltas) == whole["message"]["content"]
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert sim.requests[-1].tokens_emitted == 24


@story
async def test_several_choices_and_prompts_share_a_stream(sim, http):
    body = {"model": "m", "prompt": ["x", "y"], "n": 2, "stream": True, "max_tokens": 3}
    body["stream_options"] = {"include_usage": True}
    chunks = data_of((await http.post("/v1/completions", json=body)).text)
    finishes = [c["choices"][0] for c in chunks[:-2] if c["choices"][0]["finish_reason"]]
    assert sorted(c["index"] for c in finishes) == [0, 1, 2, 3]
    assert chunks[-2]["choices"] == []
    assert chunks[-2]["usage"] == {"prompt_tokens": 4, "total_tokens": 16, "completion_tokens": 12}


@story
async def test_completions_without_a_limit_have_16_tokens(sim, http):
    body = (await http.post("/v1/completions", json={"prompt": [500, 600]})).json()
    assert body["usage"]["completion_tokens"] == 16
    assert body["model"] == "m"


@story
async def test_the_output_is_cut_to_what_the_window_leaves(sim, http):
    prompt = [500] * 8190
    body = (await http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 100})).json()
    assert body["usage"]["completion_tokens"] == 2
    assert body["choices"][0]["finish_reason"] == "length"


@story
async def test_a_server_may_end_its_replies_before_they_use_up_what_they_may_have(sim, http):
    config = SimConfig(speed=0, reply_tokens=3, ends_itself=True)
    async with SimServer(config) as brief, client(brief) as to_brief:

        async def ended(**fields):
            body = (await to_brief.post(CHAT, json=ask(**fields) | {"model": ""})).json()
            return body["choices"][0]["finish_reason"], body["usage"]["completion_tokens"]

        assert await ended(max_tokens=9) == ("stop", 3)
        assert await ended(max_tokens=2) == ("length", 2)
        assert await ended(max_tokens=9, ignore_eos=True) == ("length", 9)


@story
async def test_a_stop_string_ends_the_reply_before_it(sim, http):
    whole = (await http.post(CHAT, json=ask())).json()["choices"][0]["message"]["content"]
    stop = whole[12:18]
    cut = (await http.post(CHAT, json=ask(stop=[stop]))).json()["choices"][0]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    assert cut["message"]["content"] == whole[: whole.index(stop)]


@story
async def test_adapters_answer_differently_and_echo_their_name(sim, http):
    base, tuned = [(await http.post(CHAT, json=ask() | {"model": m})).json() for m in ("m", "a")]
    assert tuned["model"] == "a"
    assert tuned["choices"][0]["message"] != base["choices"][0]["message"]


@story
async def test_a_prompt_sets_its_own_length_and_pace(sim, http):
    async with SimServer(SimConfig(decode_step_s=0.001)) as slow, client(slow) as to_slow:
        loop = asyncio.get_running_loop()
        before = loop.time()
        text = "[[sim:tokens=3;ttft=100ms;itl=50ms]]"
        asked = loop.create_task(to_slow.post(CHAT, json=ask(text) | {"model": ""}))
        looks = 0  # 10 ms apart, and more where the machine stands still
        while not asked.done():
            await asyncio.sleep(0.01)
            looks += 1
        assert loop.time() - before >= 0.19
        assert looks < 60
        body = (await asked).json()
        assert body["usage"]["completion_tokens"] == 3
        assert body["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
@story
async def test_a_reply_without_text_is_the_token_that_ends_it(sim, http, stream):
    body = ask("[[sim:tokens=0]]", stream=stream, stream_options={"include_usage": True})
    if not stream:
        del body["stream_options"]
    reply = await http.post(CHAT, json=body)
    told = [json.loads(reply.text)] if not stream else data_of(reply.text)[:-1]
    assert told[-1]["usage"]["completion_tokens"] == 1
    (ended,) = [one for each in told for one in each["choices"] if one["finish_reason"]]
    assert ended["finish_reason"] == "stop"
    assert (ended.get("message") or ended["delta"])["content"] == ""


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@story
async def test_the_word_tool_makes_it_call_one(sim, http):
    body = ask("use a tool", tools=[TOOL])
    choice = (await http.post(CHAT, json=body)).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    call = choice["message"]["tool_calls"][0]["function"]
    assert call["name"] == "look"
    assert json.loads(call["arguments"])["value"]
    chunks = data_of((await http.post(CHAT, json=body | {"stream": True})).text)
    deltas = [c["choices"][0]["delta"].get("tool_calls", [{}])[0] for c in chunks[1:-1]]
    assert deltas[0]["function"] == {"name": "look"}
    assert "".join(d["function"]["arguments"] for d in deltas[1:]) == call["arguments"]
    named = {"type": "function", "function": {"name": "look"}}
    forced = (await http.post(CHAT, json=ask(tools=[TOOL], tool_choice=named))).json()
    assert forced["choices"][0]["finish_reason"] == "stop"  # vLLM's own habit
    plain = (await http.post(CHAT, json=ask("hello", tools=[TOOL]))).json()
    assert plain["choices"][0]["finish_reason"] == "stop"


@story
async def test_it_answers_in_words_once_it_has_what_a_tool_returned(sim, http):
    """So an agent's loop ends."""
    said = ask("use a tool", tools=[TOOL])
    call = (await http.post(CHAT, json=said)).json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "a tool: 7"}
    said["messages"] += [call, result]
    assert (await http.post(CHAT, json=said)).json()["choices"][0]["finish_reason"] == "stop"
    said["messages"].append({"role": "user", "content": "use it again"})
    again = (await http.post(CHAT, json=said)).json()["choices"][0]
    assert again["finish_reason"] == "tool_calls"

    said = ask("use a tool", tools=[{"name": "look", "input_schema": {}}], max_tokens=99)
    content = (await http.post("/v1/messages", json=said)).json()["content"]
    result = {"type": "tool_result", "tool_use_id": content[0]["id"], "content": "a tool: 7"}
    said["messages"] += [
        {"role": "assistant", "content": content},
        {"role": "user", "content": [result]},
    ]
    replied = (await http.post("/v1/messages", json=said)).json()
    assert [each["type"] for each in replied["content"]] == ["text"]

    items = [{"role": "user", "content": "use a tool"}]
    said = {"model": "m", "input": items, "tools": [TOOL["function"] | {"type": "function"}]}
    output = (await http.post("/v1/responses", json=said)).json()["output"]
    result = {"type": "function_call_output", "call_id": output[0]["call_id"], "output": "a tool"}
    items += [*output, result]
    replied = (await http.post("/v1/responses", json=said)).json()
    assert [each["type"] for each in replied["output"]] == ["message"]


@story
async def test_where_it_has_to_call_a_tool_it_calls_each_in_turn(sim, http):
    """So the loop of an agent ends whose last tool takes the answer."""
    done = {"type": "function", "function": {"name": "done", "parameters": {"type": "object"}}}
    said = ask("hello", tools=[TOOL, done], tool_choice="required")
    for name in ("look", "done", "done"):
        message = (await http.post(CHAT, json=said)).json()["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert call["function"]["name"] == name
        said["messages"] += [message, {"role": "tool", "tool_call_id": call["id"], "content": "7"}]

    tools = [{"name": name, "input_schema": {}} for name in ("look", "done")]
    said = ask("hello", tools=tools, tool_choice={"type": "any"}, max_tokens=99)
    for name in ("look", "done"):
        content = (await http.post("/v1/messages", json=said)).json()["content"]
        assert content[0]["name"] == name
        result = {"type": "tool_result", "tool_use_id": content[0]["id"], "content": "7"}
        said["messages"] += [
            {"role": "assistant", "content": content},
            {"role": "user", "content": [result]},
        ]

    items = [{"role": "user", "content": "hello"}]
    tools = [each["function"] | {"type": "function"} for each in (TOOL, done)]
    said = {"model": "m", "input": items, "tools": tools, "tool_choice": "required"}
    for name in ("look", "done"):
        (call,) = (await http.post("/v1/responses", json=said)).json()["output"]
        assert call["name"] == name
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "7"}
        items += [call, result]

    text = "Calling tools: [{'function': {'name': 'look'}}]"  # as smolagents writes it back
    said = ask("hello", tools=[TOOL, done], tool_choice="required")
    said["messages"] += [{"role": "assistant", "content": [{"type": "text", "text": text}]}]
    message = (await http.post(CHAT, json=said)).json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["name"] == "done"


@story
async def test_a_tool_that_the_server_is_to_have_is_not_called(sim, http):
    body = {"model": "m", "input": "use a tool", "tools": [{"type": "web_search"}]}
    (output,) = (await http.post("/v1/responses", json=body)).json()["output"]
    assert output["type"] == "message"
    body["tools"].append(TOOL["function"] | {"type": "function"})
    (output,) = (await http.post("/v1/responses", json=body)).json()["output"]
    assert output["name"] == "look"


@story
async def test_a_reply_has_the_form_that_the_request_demands(sim, http):
    schema = {"type": "object", "properties": {"degrees": {"type": "integer", "minimum": 3}}}
    demands = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema}}
    body = ask("hello", response_format=demands, max_tokens=99)
    choice = (await http.post(CHAT, json=body)).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert json.loads(choice["message"]["content"]) == {"degrees": 3}
    chunks = data_of((await http.post(CHAT, json=body | {"stream": True})).text)
    deltas = [each["choices"][0]["delta"] for each in chunks[:-1] if each["choices"]]
    assert json.loads("".join(each.get("content", "") for each in deltas)) == {"degrees": 3}
    cut = (await http.post(CHAT, json=body | {"max_tokens": 1})).json()["choices"][0]
    assert (cut["finish_reason"], cut["message"]["content"]) == ("length", '{"de')
    refused = await http.post(CHAT, json=ask(structured_outputs={"json": "{"}))
    assert refused.status_code == 400


@story
async def test_responses_are_events_in_sequence(sim, http):
    body = {"model": "m", "input": "hello", "stream": True, "max_output_tokens": 2}
    text = (await http.post("/v1/responses", json=body)).text
    kinds = events_of(text)
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds.count("response.output_text.delta") == 2
    assert kinds[-1] == "response.completed"
    data = data_of(text)
    assert [d["sequence_number"] for d in data] == list(range(len(data)))
    last = data[-1]["response"]
    assert (last["status"], last["usage"]["output_tokens"]) == ("incomplete", 2)
    tools = [{"type": "function", "name": "look", "parameters": {}}]
    called = await http.post(
        "/v1/responses", json=body | {"tools": tools, "tool_choice": "required"}
    )
    assert "response.function_call_arguments.delta" in events_of(called.text)


@story
async def test_a_response_says_again_what_was_asked(sim, http):
    """LangChain reads from it that the text is JSON to be parsed."""
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}}
    told = {
        "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}},
        "metadata": {"a": "b"},
        "reasoning": {"effort": "low"},
        "user": "u",
        "parallel_tool_calls": False,
    }
    body = {"model": "m", "input": "hello"} | told
    reply = (await http.post("/v1/responses", json=body)).json()
    assert {name: reply[name] for name in told} == told
    events = data_of((await http.post("/v1/responses", json=body | {"stream": True})).text)
    assert {name: events[-1]["response"][name] for name in told} == told
    plain = (await http.post("/v1/responses", json={"model": "m", "input": "hello"})).json()
    assert plain["text"] is None
    assert plain["parallel_tool_calls"] is True


@story
async def test_messages_are_anthropic_events(sim, http):
    text = (await http.post("/v1/messages", json=ask(stream=True, max_tokens=2))).text
    assert events_of(text) == [
        "message_start", "content_block_start", "content_block_delta", "content_block_delta",
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert data_of(text)[-2]["delta"]["stop_reason"] == "max_tokens"
    tools = [{"name": "look", "input_schema": {}}]
    called = (await http.post("/v1/messages", json=ask("tool", tools=tools, max_tokens=99))).json()
    assert called["stop_reason"] == "tool_use"
    assert called["content"][0]["name"] == "look"
    counted = (await http.post("/v1/messages/count_tokens", json=ask("12345678"))).json()
    assert counted["input_tokens"] == 7


@story
async def test_vectors_and_scores_depend_on_the_text_only(sim, http):
    one, two = [
        (await http.post("/v1/embeddings", json={"input": ["x", text]})).json()["data"]
        for text in "xy"
    ]
    assert one[0]["embedding"] == one[1]["embedding"] != two[1]["embedding"]
    packed = await http.post("/v1/embeddings", json={"input": "x", "encoding_format": "base64"})
    assert isinstance(packed.json()["data"][0]["embedding"], str)
    ranked = await http.post(
        "/v1/rerank", json={"query": "q", "documents": ["a", "b", "c"], "top_n": 2}
    )
    scores = [r["relevance_score"] for r in ranked.json()["results"]]
    assert len(scores) == 2
    assert scores == sorted(scores, reverse=True)
    scored = await http.post("/v1/score", json={"text_1": "q", "text_2": ["a", "b"]})
    assert len(scored.json()["data"]) == 2


@story
async def test_audio_is_a_form(sim, http):
    form = {"files": {"file": ("a.wav", b"\x00\r\n" * 20_000)}, "data": {"model": "m"}}
    body = (await http.post("/v1/audio/transcriptions", **form)).json()
    assert body["usage"] == {"type": "duration", "seconds": 2}
    form["data"]["response_format"] = "text"
    assert (await http.post("/v1/audio/translations", **form)).json() == {"text": body["text"]}
    assert (await http.post("/v1/audio/translations", json={})).status_code == 400


def sound(**fields):
    data = {"model": "m"} | {name: str(value) for name, value in fields.items()}
    return {"files": {"file": ("a.wav", b"\x00\r\n" * 20_000)}, "data": data}


@story
async def test_audio_has_segments_where_they_are_asked_for(sim, http):
    whole = (await http.post("/v1/audio/transcriptions", **sound())).json()
    asked = sound(response_format="verbose_json", language="de")
    told = (await http.post("/v1/audio/transcriptions", **asked)).json()
    assert [*told] == ["duration", "language", "text", "segments", "words"]
    assert (told["duration"], told["language"], told["text"]) == (1.875, "de", whole["text"])
    assert [each["text"] for each in told["segments"]] == [whole["text"]]


@pytest.mark.parametrize("task", ["transcription", "translation"])
@story
async def test_audio_comes_as_a_stream_that_tells_its_usage_if_asked(sim, http, task):
    path = f"/v1/audio/{task}s"
    whole = (await http.post(path, **sound())).json()
    *said, done = data_of((await http.post(path, **sound(stream="true"))).text)
    assert done == "[DONE]"
    choices = [each["choices"][0] for each in said]
    assert "".join(each["delta"]["content"] for each in choices) == whole["text"]
    assert {each["object"] for each in said} == {f"{task}.chunk"}
    assert [each.get("finish_reason") for each in choices] == [None] * 4 + ["stop"]
    counted = (await http.post(path, **sound(stream=True, stream_include_usage=True))).text
    *_, last, done = data_of(counted)
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 192, "total_tokens": 197, "completion_tokens": 5}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": "srt"}, "Currently only support response_format"),
        ({"response_format": "diarized_json"}, "Currently do not support diarized_json for m"),
        ({"response_format": "xml"}, "literal_error"),
        ({"response_format": "verbose_json", "stream": True}, "doesn't support streaming case"),
        ({"stream": "perhaps"}, "bool_parsing"),
        ({"stream_include_usage": True}, "Stream options can only be defined"),
    ],
)
@story
async def test_what_vllm_does_not_do_with_audio_is_refused(sim, http, fields, words):
    reply = await http.post("/v1/audio/transcriptions", **sound(**fields))
    assert reply.status_code == 400
    assert words in reply.json()["error"]["message"]


@story
async def test_adapters_come_and_go(sim, http):
    new = {"lora_name": "new", "lora_path": "/x"}
    assert (await http.post("/v1/load_lora_adapter", json=new)).status_code == 200
    assert (await http.post("/v1/load_lora_adapter", json=new)).status_code == 400
    assert (await http.post(CHAT, json=ask() | {"model": "new"})).status_code == 200
    assert (await http.post("/v1/unload_lora_adapter", json=new)).status_code == 200
    assert (await http.post(CHAT, json=ask() | {"model": "new"})).status_code == 404
    missing = {"lora_name": "x", "lora_path": "/missing"}
    assert (await http.post("/v1/load_lora_adapter", json=missing)).status_code == 404


@story
async def test_a_load_fails_where_the_engine_dies_meanwhile(sim, http):
    async with SimServer(SimConfig(adapter_load_s=0.1)) as slow, client(slow) as to_slow:
        new = {"lora_name": "new", "lora_path": "/x"}
        asked = to_slow.post("/v1/load_lora_adapter", json=new)
        loading = asyncio.get_running_loop().create_task(asked)
        while not slow.received("/v1/load_lora_adapter"):
            await asyncio.sleep(0)
        slow.state.die()
        assert (await loading).status_code == 500
        assert "new" not in slow.state.loaded


@story
async def test_it_wants_its_key_where_vllm_wants_it(sim, http):
    async with SimServer(SimConfig(api_key="k")) as locked, client(locked) as out:
        refused = await out.get("/v1/models")
        assert (refused.status_code, refused.json()) == (401, {"error": "Unauthorized"})
        assert (
            await out.get("/v1/models", headers={"authorization": "bearer k"})
        ).status_code == 200
        for path in ("/health", "/metrics", "/version"):
            assert (await out.get(path)).status_code == 200


@story
async def test_it_refuses_above_its_admission_limit_and_counts_it(sim, http):
    config = SimConfig(max_num_queued_reqs=1, reply_tokens=1000)
    async with SimServer(config) as small, client(small) as to_small:
        holding = asyncio.create_task(to_small.post(CHAT, json=ask() | {"model": ""}))  # noqa: TID251
        await until(lambda: small.engine.running == 1)
        refused = await to_small.post(CHAT, json=ask() | {"model": ""})
        assert refused.status_code == 503
        assert refused.json()["error"]["type"] == "Service Unavailable"
        assert "retry-after" not in refused.headers
        page = (await to_small.get("/metrics")).text
        assert (
            'admission_rejections_total{model_name="sim",reason="max_num_queued_reqs"} 1.0' in page
        )
        holding.cancel()


@story
async def test_a_client_that_leaves_is_aborted_at_once_and_remembered(sim, http):
    async with SimServer(SimConfig(reply_tokens=100_000, max_model_len=200_000)) as slow:
        for leave in ("close", "half_close"):
            reader, writer = await asyncio.open_connection("127.0.0.1", slow.port)
            body = json.dumps(ask(stream=True) | {"model": ""}).encode()
            writer.write(POST % (CHAT.encode(), len(body), body))
            await reader.readuntil(b"assistant")
            assert slow.engine.running == 1
            if leave == "half_close":
                writer.write_eof()
            else:
                writer.close()
            await until(lambda: slow.engine.running == 0)
            request = slow.requests[-1]
            assert request.client_disconnected_at is not None
            assert slow.engine.kv_usage_ratio == 0
            writer.close()
        assert slow.engine.totals.finished["abort"] == 2


@story
async def test_requests_are_recorded_as_they_came(sim, http):
    await http.post(CHAT, json=ask(), headers={"X-Some-Header": "1"})
    seen = sim.received(CHAT)[0]
    assert (b"X-Some-Header", b"1") in seen.headers or (b"x-some-header", b"1") in seen.headers
    assert json.loads(seen.body) == ask()
    assert seen.status == 200
    shown = (await http.get("/sim/requests")).json()
    assert shown[-1]["path"] == CHAT
    assert [r.path for r in sim.requests] == [CHAT]


@story
async def test_metrics_follow_the_engine(sim, http):
    await http.post(CHAT, json=ask(max_tokens=5))
    page = (await http.get("/metrics")).text
    labels = '{engine="0",model_name="m"}'
    assert f"vllm:generation_tokens_total{labels} 5.0" in page
    assert f"vllm:num_requests_running{labels} 0.0" in page
    assert 'kv_cache_size_tokens="65536"' in page
    async with SimServer(SimConfig(old_metrics=True)) as old, client(old) as to_old:
        page = (await to_old.get("/metrics")).text
        assert 'vllm:gpu_cache_usage_perc{model_name="sim"} 0.0' in page
        assert "vllm:kv_cache_usage_perc" not in page
    async with SimServer(SimConfig(dp=2)) as two, client(two) as to_two:
        page = (await to_two.get("/metrics")).text
        assert 'vllm:num_requests_running{engine="1",model_name="sim"} 0.0' in page
        assert (
            page.count('kv_cache_size_tokens="65536"') == page.count('num_gpu_blocks="8192"') == 2
        )


@story
async def test_idle_connections_are_closed_after_the_keep_alive_time(sim, http):
    async with SimServer(SimConfig(keep_alive_s=0.05)) as short:
        reader, writer = await asyncio.open_connection("127.0.0.1", short.port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200 OK" in await reader.read()  # until the server closes
        writer.close()


@story
async def test_pipelined_requests_are_answered_in_order(sim, http):
    reader, writer = await asyncio.open_connection("127.0.0.1", sim.port)
    get = b"GET %b HTTP/1.1\r\nhost: x\r\n%b\r\n"
    writer.write(get % (b"/version", b"") + get % (b"/nope", b"connection: close\r\n"))
    answer = await reader.read()
    assert answer.index(b"200 OK") < answer.index(b"404 Not Found")
    writer.write(b"garbage\r\n\r\n")
    writer.close()


@story
async def test_nonsense_is_a_400_and_a_closed_connection(sim, http):
    reader, writer = await asyncio.open_connection("127.0.0.1", sim.port)
    writer.write(b"what is this\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 400")
    writer.close()


# --- how it breaks --------------------------------------------------------------------------------


@story
async def test_refuse_closes_the_port_until_it_is_cleared(sim, http):
    assert (await http.get("/health")).status_code == 200
    sim.inject("refuse")
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", sim.port)
    await asyncio.sleep(0.01)  # the client notices that its idle connection was closed
    sim.clear()
    assert (await http.get("/health")).status_code == 200


@story
async def test_hang_before_headers(sim, http):
    sim.inject("hang_before_headers@1")
    assert await raw(sim, ask(), stays_open=True) == (b"", "open")
    sim.inject("hang_before_headers:50ms")
    assert (await http.post(CHAT, json=ask())).status_code == 200


@story
async def test_reset_before_headers(sim, http):
    sim.inject("reset_before_headers")
    assert await raw(sim, ask()) == (b"", "reset")


BREAKS = {
    "stall_after:3": "open",
    "reset_after:3": "reset",
    "truncate_after:3": "closed",
    "truncate_chunk:3": "closed",
    "clean_end_without_done:3": "open",
}


@pytest.mark.parametrize("fault", BREAKS)
@story
async def test_a_stream_breaks_after_its_tokens(sim, http, fault):
    sim.inject(fault)
    got, end = await raw(sim, ask(stream=True), stays_open=BREAKS[fault] == "open")
    assert end == BREAKS[fault]
    assert got.count(b'"content":"') == 1 + 3
    assert b"[DONE]" not in got
    assert got.endswith(b"0\r\n\r\n") == fault.startswith("clean_end")
    assert got.endswith(b'{"id":"chat') == fault.startswith("truncate_chunk")
    await until(lambda: sim.engine.running == 0)


@pytest.mark.parametrize("fault", BREAKS)
@story
async def test_a_whole_reply_breaks_in_its_body(sim, http, fault):
    sim.inject(fault)
    got, end = await raw(sim, ask(), stays_open=BREAKS[fault] == "open")
    if fault.startswith("truncate"):
        head, _, body = got.partition(b"\r\n\r\n")
        assert end == "closed"
        assert 0 < len(body) < int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
    elif fault.startswith("clean_end"):
        assert got.startswith(b"HTTP/1.1 200")
    else:
        assert (got, end) == (b"", BREAKS[fault])


@pytest.mark.parametrize(
    ("path", "ending"),
    [(CHAT, "[DONE]"), ("/v1/messages", "message_stop"), ("/v1/responses", "response.completed")],
)
@story
async def test_a_clean_end_lacks_only_the_last_event(sim, http, path, ending):
    body = ask(stream=True, max_tokens=4, input="hello")
    complete = (await http.post(path, json=body)).text
    assert ending in complete
    sim.inject("clean_end_without_done")
    cut = (await http.post(path, json=body)).text
    assert ending not in cut
    assert cut.count("\n\n") == complete.count("\n\n") - 1


@story
async def test_an_error_frame_is_followed_by_done(sim, http):
    sim.inject("error_frame_after:2")
    data = data_of((await http.post(CHAT, json=ask(stream=True))).text)
    assert data[-2]["error"]["code"] == 500
    assert data[-1] == "[DONE]"
    assert (await http.post(CHAT, json=ask())).status_code == 500
    text = (await http.post("/v1/messages", json=ask(stream=True, max_tokens=9))).text
    assert events_of(text)[-1] == "error"
    got, end = await raw(sim, {"input": "x", "stream": True}, "/v1/responses")
    assert end == "closed"
    assert not got.endswith(b"0\r\n\r\n")


@story
async def test_an_aborted_reply_ends_in_order(sim, http):
    sim.inject("abort_finish:2")
    data = data_of((await http.post(CHAT, json=ask(stream=True))).text)
    assert data[-2]["choices"][0]["finish_reason"] == "abort"
    whole = (await http.post(CHAT, json=ask())).json()
    assert whole["choices"][0]["finish_reason"] == "abort"
    assert whole["usage"]["completion_tokens"] == 2
    sim.clear()
    sim.inject("abort_finish:0")
    data = data_of((await http.post(CHAT, json=ask(stream=True))).text)
    assert len(data) == 2  # the role, [DONE], and no reason anywhere
    assert data[0]["choices"][0]["finish_reason"] is None
    completion = {"prompt": "x", "stream": True}
    assert data_of((await http.post("/v1/completions", json=completion)).text) == ["[DONE]"]


@story
async def test_only_comments_come_for_ever(sim, http):
    sim.inject("only_comments")
    got, end = await raw(sim, ask(stream=True), stays_open=True)
    assert got.count(b": keep-alive\n\n") >= 2
    assert (b"data" not in got, end) == (True, "open")


@story
async def test_a_frozen_engine_answers_health_and_shows_the_load_of_its_last_step(sim, http):
    writes = asyncio.create_task(http.post(CHAT, json=ask("[[sim:tokens=400]]")))  # noqa: TID251
    while sim.engine.gauges.running != 1:  # each of its 400 steps takes a turn of the loop
        await asyncio.sleep(0)
    sim.inject("frozen")
    got, end = await raw(sim, ask(stream=True), stays_open=True)
    assert got.startswith(b"HTTP/1.1 200")
    assert (b"data" not in got, end) == (True, "open")
    assert (await http.get("/health")).status_code == 200
    page = (await http.get("/metrics")).text
    assert sim.engine.running + sim.engine.waiting == 2
    assert 'vllm:num_requests_running{engine="0",model_name="m"} 1.0' in page
    assert 'vllm:num_requests_waiting{engine="0",model_name="m"} 0.0' in page
    sim.clear()
    assert (await writes).status_code == 200
    await until(lambda: sim.engine.waiting + sim.engine.running == 0)


@pytest.mark.parametrize(
    "body", [{"messages": 5}, ask("[[sim:tokens=x]]"), ask("[[sim:itl=soon]]")], ids=str
)
@story
async def test_what_cannot_be_read_is_refused(sim, http, body):
    assert (await http.post(CHAT, json={"model": "m", **body})).status_code == 400


# What is malformed, where it stands, and what is wrong with it.
MALFORMED = [
    (CHAT, {"messages": None}, "body.messages", "list_type"),
    (CHAT, {"messages": [[]]}, "body.messages.0", "dict_type"),
    (CHAT, ask(tools=5), "body.tools", "list_type"),
    (CHAT, ask(tools=["x"]), "body.tools.0", "dict_type"),
    (CHAT, ask(tools=[{"function": 5}]), "body.tools.0.function", "dict_type"),
    (CHAT, ask(stop=[5]), "body.stop.0", "string_type"),
    (CHAT, ask(stream=True, stream_options=5), "body.stream_options", "dict_type"),
    (CHAT, ask(model="\ud800"), "body.model", "string_unicode"),
    (CHAT, ask(max_tokens=float("inf")), "body.max_tokens", "int_type"),
    (f"{CHAT}/batch", {"messages": None}, "body.messages", "list_type"),
    (f"{CHAT}/batch", {"messages": []}, "body.messages", "too_short"),
    (f"{CHAT}/batch", {"messages": [5]}, "body.messages.0", "list_type"),
    ("/v1/completions", {"prompt": 5}, "body.prompt", "list_type"),
    ("/v1/completions", {"prompt": [1, "x"]}, "body.prompt.1", "int_type"),
    ("/v1/responses", {"input": ["x"]}, "body.input.0", "dict_type"),
    ("/v1/responses", {"input": "x", "instructions": 5}, "body.instructions", "string_type"),
    ("/v1/responses", {"input": "x", "metadata": {"a": "\ud800"}}, "body.metadata", "string_unicode"),
    ("/v1/responses", {"input": "x", "text": 5}, "body.text", "dict_type"),
    ("/v1/messages", ask(max_tokens=3, system=[{"type": "text", "text": 5}]), "body.system.0.text", "string_type"),
    ("/v1/messages", ask(max_tokens=3, thinking=5), "body.thinking", "dict_type"),
    ("/v1/messages/count_tokens", {"messages": [5]}, "body.messages.0", "dict_type"),
    ("/v1/embeddings", {"input": [None]}, "body.input.0", "list_type"),
    ("/pooling", {"messages": [[]]}, "body.messages.0", "too_short"),
    ("/v2/embed", {"texts": [5]}, "body.texts.0", "string_type"),
    ("/v1/rerank", {"query": "q", "documents": [5]}, "body.documents.0", "string_type"),
    ("/v1/score", {"text_1": 5, "text_2": "x"}, "body.text_1", "list_type"),
    ("/generative_scoring", {"query": "q", "items": 5, "label_token_ids": [1]}, "body.items", "list_type"),
    ("/v1/systemone", {"state": "s", "questions": {"q": {}}}, "body.questions.q.type", "missing"),
    ("/tokenize", {"messages": "x"}, "body.messages", "list_type"),
    ("/detokenize", {"tokens": ["x"]}, "body.tokens.0", "int_type"),
    ("/v1/load_lora_adapter", {"lora_name": 5, "lora_path": "/a"}, "body.lora_name", "string_type"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "place", "wrong"), MALFORMED)
@story
async def test_a_malformed_body_is_refused_as_vllm_does(sim, http, path, body, place, wrong):
    sent = json.dumps({"model": "m", **body})
    refused = await http.post(path, content=sent, headers={"content-type": "application/json"})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("Bad Request", place, 400)
    assert error["message"].startswith(
        f"1 validation error:\n  {{'type': '{wrong}', 'loc': '{place}', "
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, b"[" * 100_000),
        (CHAT, json.dumps(ask(n=100_000)).encode()),
        ("/v1/score", b'{"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}'),
    ],
    ids=["depth", "choices", "pairs"],
)
@story
async def test_what_is_too_much_or_does_not_fit_is_refused(sim, http, path, body):
    sent = await http.post(path, content=body, headers={"content-type": "application/json"})
    assert sent.status_code == 400


@story
async def test_scores_come_for_one_text_with_each_or_for_pairs(sim, http):
    async def scores(first):
        asked = {"text_1": first, "text_2": ["x", "y"]}
        return [each["score"] for each in (await http.post("/v1/score", json=asked)).json()["data"]]

    of_a, of_b = await scores("a"), await scores("b")
    assert await scores(["a"]) == of_a
    assert await scores(["a", "b"]) == [of_a[0], of_b[1]]


@story
async def test_a_poisonous_prompt_kills_the_engine_and_then_the_server(sim, http):
    sim.inject("die_on_prompt:poison")
    assert (await http.post(CHAT, json=ask("fine"))).status_code == 200
    data = data_of((await http.post(CHAT, json=ask("some poison", stream=True))).text)
    assert "EngineCore" in data[0]["error"]["message"]
    assert data[-1] == "[DONE]"
    assert (await http.get("/health")).status_code == 503
    assert (await http.post(CHAT, json=ask("fine"))).status_code == 500
    await asyncio.sleep(sim.config.death_linger_s + 0.05)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", sim.port)
    sim.clear()
    assert (await http.get("/health")).status_code == 200
    assert (await http.post(CHAT, json=ask("fine"))).status_code == 200


@pytest.mark.parametrize(
    ("fault", "status", "kind"),
    [
        ("admission_503", 503, "application/json"),
        ("http_500", 500, "application/json"),
        ("http_500:503", 503, "application/json"),
        ("stopping", 500, "application/json"),
        ("html_error", 502, "text/html"),
    ],
)
@story
async def test_errors_before_the_stream(sim, http, fault, status, kind):
    sim.inject(f"{fault}@1")
    reply = await http.post(CHAT, json=ask(stream=True))
    assert (reply.status_code, reply.headers["content-type"]) == (status, kind)
    assert (await http.post(CHAT, json=ask())).status_code == 200


@story
async def test_a_used_connection_closes_as_the_next_request_arrives(sim, http):
    await http.post(CHAT, json=ask())
    sim.inject("keepalive_close@1")
    with pytest.raises(httpx2.RemoteProtocolError):
        await http.post(CHAT, json=ask())
    assert sim.requests[-1].reused
    assert (await http.post(CHAT, json=ask())).status_code == 200
    assert not sim.requests[-1].reused


@story
async def test_metrics_and_health_break(sim, http):
    for fault, path, status in [
        ("no_metrics@1", "/metrics", 404),
        ("garbage_metrics@1", "/metrics", 200),
        ("slow_metrics:50ms@1", "/metrics", 200),
        ("health_500@1", "/health", 500),
        ("unhealthy_then_ok:1", "/health", 503),
    ]:
        sim.inject(fault)
        assert (await http.get(path)).status_code == status, fault
        assert (await http.get(path)).status_code == 200, fault
    assert sim.state.faults.active == []


@story
async def test_adapters_are_lost(sim, http):
    sim.inject("lost_adapter:a")
    assert [m["id"] for m in (await http.get("/v1/models")).json()["data"]] == ["m", "b"]
    assert (await http.post(CHAT, json=ask() | {"model": "a"})).status_code == 404
    sim.clear()
    assert (await http.post(CHAT, json=ask() | {"model": "a"})).status_code == 200


@story
async def test_faults_are_set_over_http(sim, http):
    posted = await http.post("/sim/faults", json={"fault": "http_500@2"})
    assert posted.json() == ["http_500:500@2"]
    assert (await http.post(CHAT, json=ask())).status_code == 500
    assert (await http.get("/sim/faults")).json() == ["http_500:500@1"]
    assert (await http.delete("/sim/faults")).json() == []
    assert (await http.post("/sim/faults", json={"fault": "nope"})).status_code == 400


def test_every_fault_has_a_story():
    text = pathlib.Path(__file__).read_text(encoding="utf-8")
    assert [name for name in NAMES if f'"{name}' not in text] == []


@story
async def test_a_slow_reader_holds_back_only_itself(sim, http):
    reader, writer = await asyncio.open_connection("127.0.0.1", sim.port, limit=1024)
    body = json.dumps(ask("x", stream=True, max_tokens=8000)).encode()
    writer.write(POST % (CHAT.encode(), len(body), body))
    assert (await http.post(CHAT, json=ask())).status_code == 200
    got = b""
    while not got.endswith(b"0\r\n\r\n"):
        got += await reader.read(65536)
    assert got.count(b'"content":"') == 8001
    writer.close()


@pytest.mark.parametrize("turns", range(6))
@story
async def test_who_refuses_leaves_no_connection_open_that_comes_in_at_that_moment(sim, http, turns):
    loop = asyncio.get_running_loop()
    with socket.create_connection(("127.0.0.1", sim.port)) as late:
        late.setblocking(False)
        for _ in range(turns):
            await asyncio.sleep(0)
        sim.inject("refuse")
        with contextlib.suppress(ConnectionResetError):
            async with asyncio.timeout(2):
                assert await loop.sock_recv(late, 1) == b""


@pytest.mark.parametrize("turns", range(6))
@story
async def test_a_stop_leaves_no_connection_open_that_comes_in_at_that_moment(sim, http, turns):
    sim.inject("frozen")
    loop = asyncio.get_running_loop()
    with socket.create_connection(("127.0.0.1", sim.port)) as late:
        body = json.dumps(ask()).encode()
        late.sendall(POST % (CHAT.encode(), len(body), body))
        late.setblocking(False)
        for _ in range(turns):
            await asyncio.sleep(0)
        await sim.stop()
        with contextlib.suppress(ConnectionResetError):
            async with asyncio.timeout(2):
                assert await loop.sock_recv(late, 1) == b""
