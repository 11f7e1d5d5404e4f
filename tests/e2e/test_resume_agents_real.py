"""What agents ask for: messages and responses with tools, whose real vLLM is killed or drained before one is called."""

import asyncio
import itertools
import json
import pathlib
import signal
import time
from dataclasses import dataclass

import httpx2
import pytest

from tests.e2e.resuming import (
    access_lines,
    behind_a_gateway,
    client,
    in_flight,
    read,
    resumed,
    to,
    unresumed,
)
from tests.e2e.support import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

HELD_AFTER = 7  # frames
MOST_TOKENS = 60
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
SCHEMA = {"type": "object"}
ABOUT = {"name": "look_up"}
PARSER = pathlib.Path(__file__).parent / "calls_by_letter.py"
FLAGS = (
    *("--enable-auto-tool-choice", "--tool-call-parser", "by_letter"),
    *("--tool-parser-plugin", str(PARSER)),
)
PADDED = {"metadata": {"notes": "x" * 100_000}}  # a large body of few tokens


# What Claude Code and Codex say besides. The template knows of no effort, and of system messages anywhere.
MORE_OF_MESSAGES = (
    {"thinking": {"type": "disabled"}},
    {
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    },
)
MORE_OF_RESPONSES = (
    {"reasoning": {"effort": "low", "summary": "auto"}, "client_metadata": {"session": "s"}},
    {"chat_template_kwargs": {"enable_thinking": False}},
)


@pytest.fixture(scope="module")
def flags(shared_engines):
    yield FLAGS
    shared_engines.stop(*FLAGS)


@pytest.fixture
def servers(shared_engines, flags):
    return shared_engines.serving(2, *flags)


def chat_of(number):
    """Return the messages of a chat; every fourth conversation has called a tool before, or was reminded of something."""
    said = {"role": "user", "content": f"tell {number // 2}"}
    if number // 2 % 4 == 1:
        system, reminder = (
            {"role": "system", "content": text} for text in ("be kind", "keep to the point")
        )
        return [system, said, reminder, {"role": "user", "content": "go on"}]
    if number // 2 % 4:
        return [said]
    function = {"name": "look_up", "arguments": '{"what": "a"}'}
    calls = [{"id": "c1", "type": "function", "function": function}]
    called = {"role": "assistant", "content": "well", "tool_calls": calls}
    return [said, called, {"role": "tool", "tool_call_id": "c1", "content": "found"}]


def asked_for(number):
    """Return a message of even, a response of odd number; every third one in a large body."""
    said, *before = chat_of(number)
    system = said["content"] if said["role"] == "system" else ""
    if system:
        said, *before = before
    called = bool(before) and "tool_calls" in before[0]
    body = {"model": "tiny", "temperature": 0, "stream": True} | (PADDED if number % 3 == 0 else {})
    if number % 2:
        tools = [{"type": "function", **ABOUT, "parameters": SCHEMA, "strict": None}]
        call = (
            {"type": "function_call", "call_id": "c1", **before[0]["tool_calls"][0]["function"]}
            if called
            else {}
        )
        found = {"type": "function_call_output", "call_id": "c1", "output": "found"}
        more = [{"role": "assistant", "content": "well"}, call, found] if called else before
        body |= {"instructions": system, "prompt_cache_key": f"k{number}"} if system else {}
        return RESPONSES, body | MORE_OF_RESPONSES[number // 4 % 2] | {
            "input": [said, *more], "max_output_tokens": MOST_TOKENS, "tools": tools
        }  # fmt: skip
    tools = [{**ABOUT, "input_schema": SCHEMA}]
    use = {"type": "tool_use", "id": "c1", "name": "look_up", "input": {"what": "a"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "found"}
    text = {"type": "text", "text": "well"}
    more = [{"role": "assistant", "content": [text, use]}, {"role": "user", "content": [result]}]
    body |= {"system": system, "metadata": {"user_id": f"u{number}"}} if system else {}
    body |= MORE_OF_MESSAGES[number // 4 % 2]
    messages = [said, *(more if called else before)]
    return MESSAGES, body | {"messages": messages, "max_tokens": MOST_TOKENS, "tools": tools}


@dataclass
class Seen:
    """What the events of a stream told."""

    text: str = ""
    calls: str = ""  # the arguments
    end: tuple[str, int, int] | None = None  # its reason, and the tokens of prompt and reply
    failed: bool = False

    def take(self, event):
        """Take one event."""
        delta = event.get("delta")
        match event["type"]:
            case "content_block_delta":
                self.text += delta.get("text", "")
                self.calls += delta.get("partial_json", "")
            case "message_delta":
                used = event["usage"]
                self.end = delta["stop_reason"], used["input_tokens"], used["output_tokens"]
            case "response.output_text.delta":
                self.text += delta
            case "response.function_call_arguments.delta":
                self.calls += delta
            case "response.completed" | "response.incomplete":
                self._ended(event["response"])
            case "error":
                self.failed = True

    def _ended(self, response):
        """The last event says all of it again."""
        said = {"message": "", "function_call": ""}
        for item in response["output"]:
            said[item["type"]] += (
                item["arguments"] if "arguments" in item else item["content"][0]["text"]
            )
        assert (said["message"], said["function_call"]) == (self.text, self.calls)
        used = response["usage"]
        self.end = response["status"], used["input_tokens"], used["output_tokens"]


async def seen(http, number):
    """Return what a stream tells."""
    path, body = asked_for(number)
    found, held = Seen(), b""
    async with http.stream("POST", path, json=body) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for data in reply.aiter_bytes():
            *frames, held = (held + data).split(b"\n\n")
            for frame in frames:
                if b"data: " in frame:
                    found.take(json.loads(frame.partition(b"data: ")[2]))
    return found


async def undisturbed(engine, numbers):
    async with to(engine.url) as http, asyncio.TaskGroup() as group:
        tasks = {each: group.create_task(seen(http, each)) for each in numbers}
    return {number: task.result() for number, task in tasks.items()}


async def certain(engine, numbers):
    """Return those whose text is read as the tokens that it was written in, and where the model is never undecided.

    A random model writes other tokens, too, and is undecided at times: then nobody can tell what follows.
    """

    async def is_one(http, number):
        chat = {"messages": chat_of(number)}
        tool = {"type": "function", "function": ABOUT | {"parameters": SCHEMA}}
        prompt = await ids_of(http, chat | {"tools": [tool]})
        body = {"model": "tiny", "prompt": prompt, "max_tokens": MOST_TOKENS, "temperature": 0}
        told = await read(http, "/v1/completions", body | {"stream": True, "logprobs": 2})
        more = {"return_token_ids": True, "logprobs": 0}
        (answer,) = (await http.post("/v1/completions", json=body | more)).json()["choices"]
        texts = [*itertools.takewhile(lambda each: "s" not in each, answer["logprobs"]["tokens"])]
        read_as = await ids_of(http, {"prompt": "".join(texts), "add_special_tokens": False})
        return told.decided is None and read_as == answer["token_ids"][: len(texts)]

    async with to(engine.url) as http, asyncio.TaskGroup() as group:
        tasks = {each: group.create_task(is_one(http, each)) for each in numbers}
    return {number for number, task in tasks.items() if task.result()}


async def ids_of(http, asked):
    return (await http.post("/tokenize", json={"model": "tiny"} | asked)).json()["tokens"]


def all_held(gate, first, sent):
    """Whether all streams were sent, and all of the first server's are held: one that has not begun could not go on."""
    at_first, *others = in_flight(gate)
    all_sent = at_first + sum(others) + len(access_lines(gate)) >= sent
    return all_sent and at_first == first.streams_held >= 4


async def disturbed(gate, first, numbers, disturb):
    async with client(gate) as http, asyncio.TaskGroup() as group:
        tasks = {each: group.create_task(seen(http, each)) for each in numbers}
        async with asyncio.timeout(120):
            while not await asyncio.to_thread(all_held, gate, first, len(numbers)):
                await asyncio.sleep(0.1)
        await asyncio.to_thread(disturb)
    return {number: task.result() for number, task in tasks.items()}


@pytest.fixture(scope="module")
def expected(shared_engines, flags):
    """What streams tell, and of which of them it is certain what they have to."""
    *_, engine = shared_engines.serving(2, *flags)
    found = asyncio.run(undisturbed(engine, range(160)))
    assert any(each.calls for each in found.values())
    found = {number: each for number, each in found.items() if "\ufffd" not in each.text}
    return found, asyncio.run(certain(engine, found))


def check(gate, told, expected):
    """What came to an end has to be right; return the access log, and how many ended of which it is certain."""
    found, sure = expected
    wait_until(lambda: len(access_lines(gate)) >= len(found), 30, "the access log tells of all")
    ended = {number for number, each in told.items() if each.end is not None}
    wrong = {each: (told[each], found[each]) for each in ended & sure if told[each] != found[each]}
    assert not wrong, wrong
    assert all(told[each].failed for each in told.keys() - ended)
    assert set(unresumed(gate)) <= {"ids", "reply"}, unresumed(gate)
    assert len(sure & ended) >= 10
    lines = [line for line in access_lines(gate) if line["resumed"] and line["outcome"] == "ok"]
    assert {line["endpoint"] for line in lines} == {"messages", "responses"}
    assert len(lines) >= 20


def test_agents_streams_outlive_their_server_and_call_tools_from_the_next_one(
    tmp_path, servers, expected
):
    with behind_a_gateway(tmp_path, servers) as (gate, first):
        first.hold_after(HELD_AFTER)
        told = asyncio.run(
            disturbed(gate, first, expected[0], lambda: servers[0].signal(signal.SIGKILL))
        )
        check(gate, told, expected)


def test_they_leave_a_server_that_is_drained(tmp_path, servers, expected):
    """What cannot leave stays where the valve holds it, until that is closed."""
    moves = {"tiny": {"move_after": "0s"}}
    with behind_a_gateway(tmp_path, servers, **moves) as (gate, first):
        first.hold_after(HELD_AFTER)

        def drain():
            with httpx2.Client(base_url=gate.admin_url, trust_env=False, timeout=60) as admin:
                admin.post("/admin/v1/backends/tiny/b1:drain", json={}).raise_for_status()
            until = time.monotonic() + 5
            while in_flight(gate)[0] and time.monotonic() < until:
                time.sleep(0.1)
            first.cut()

        told = asyncio.run(disturbed(gate, first, expected[0], drain))
        check(gate, told, expected)
        assert resumed(gate, 'cause="drain"') > 0
