"""What agents ask for: messages and responses with tools, whose real vLLM is killed before one is called."""

import asyncio
import itertools
import json
import pathlib
import signal
from dataclasses import dataclass

import pytest

from tests.e2e.resuming import (
    access_lines,
    behind_a_gateway,
    client,
    in_flight,
    read,
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


@pytest.fixture
def servers(shared_engines):
    yield shared_engines.serving(2, *FLAGS)
    shared_engines.stop(*FLAGS)


def chat_of(number):
    """Return the messages of a chat; every fourth conversation has called a tool before."""
    said = {"role": "user", "content": f"tell {number // 2}"}
    if number // 2 % 4:
        return [said]
    function = {"name": "look_up", "arguments": '{"what": "a"}'}
    calls = [{"id": "c1", "type": "function", "function": function}]
    called = {"role": "assistant", "content": "well", "tool_calls": calls}
    return [said, called, {"role": "tool", "tool_call_id": "c1", "content": "found"}]


def asked_for(number):
    """Return a message of even, a response of odd number; every third one in a large body."""
    said, *before = chat_of(number)
    body = {"model": "tiny", "temperature": 0, "stream": True} | (PADDED if number % 3 == 0 else {})
    if number % 2:
        tools = [{"type": "function", **ABOUT, "parameters": SCHEMA, "strict": None}]
        call = (
            {"type": "function_call", "call_id": "c1", **before[0]["tool_calls"][0]["function"]}
            if before
            else {}
        )
        found = {"type": "function_call_output", "call_id": "c1", "output": "found"}
        more = [{"role": "assistant", "content": "well"}, call, found] if before else []
        return RESPONSES, body | {
            "input": [said, *more], "max_output_tokens": MOST_TOKENS, "tools": tools
        }  # fmt: skip
    tools = [{**ABOUT, "input_schema": SCHEMA}]
    use = {"type": "tool_use", "id": "c1", "name": "look_up", "input": {"what": "a"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "found"}
    text = {"type": "text", "text": "well"}
    more = [{"role": "assistant", "content": [text, use]}, {"role": "user", "content": [result]}]
    messages = [said, *(more if before else [])]
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
            case "response.completed":
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
    """Whether all streams were sent, and none of the first server's is on its way to the point where it is held."""
    all_sent = sum(in_flight(gate)) + len(access_lines(gate)) >= sent
    return all_sent and first.streams_held >= 4 and not first.streams_passing


async def disturbed(gate, first, numbers, kill):
    async with client(gate) as http, asyncio.TaskGroup() as group:
        tasks = {each: group.create_task(seen(http, each)) for each in numbers}
        async with asyncio.timeout(120):
            while not await asyncio.to_thread(all_held, gate, first, len(numbers)):
                await asyncio.sleep(0.1)
        kill()
    return {number: task.result() for number, task in tasks.items()}


def test_agents_streams_outlive_their_server_and_call_tools_from_the_next_one(tmp_path, servers):
    found = asyncio.run(undisturbed(servers[1], range(160)))
    assert any(each.calls for each in found.values())
    numbers = [number for number, each in found.items() if "\ufffd" not in each.text]
    sure = asyncio.run(certain(servers[1], numbers))
    with behind_a_gateway(tmp_path, servers, stall="100s") as (gate, first):
        first.hold_after(HELD_AFTER)
        told = asyncio.run(
            disturbed(gate, first, numbers, lambda: servers[0].signal(signal.SIGKILL))
        )
        wait_until(
            lambda: len(access_lines(gate)) >= len(numbers), 30, "the access log tells of all"
        )
        lines, why = access_lines(gate), unresumed(gate)
    ended = {number for number, each in told.items() if each.end is not None}
    wrong = {each: (told[each], found[each]) for each in ended & sure if told[each] != found[each]}
    assert not wrong, wrong
    assert all(told[each].failed for each in told.keys() - ended)
    assert set(why) <= {"ids", "reply"}, why
    resumed = [line for line in lines if line["resumed"] and line["outcome"] == "ok"]
    assert {line["endpoint"] for line in resumed} == {"messages", "responses"}
    assert len(resumed) >= 20
    assert len(sure & ended) >= 10
