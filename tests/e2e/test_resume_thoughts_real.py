"""Messages and responses of a real vLLM that thinks: thoughts go on as thoughts when their server is killed."""

import asyncio
import json
import signal

import pytest

from tests.e2e.resuming import access_lines, behind_a_gateway, client, in_flight, to, unresumed
from tests.e2e.support import wait_until
from tests.e2e.test_resume_reasoning_real import CLOSES, thinking_model
from tests.e2e.vllms import in_vllm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

COUNT, MOST_TOKENS, HELD_AFTER = 80, 120, 9
LEAST_BUDGET = 1024  # that vLLM takes
LIKED = 1.6  # so that some close their thought soon, and others late or never


@pytest.fixture
def servers(tmp_path, shared_engines):
    model, closes = thinking_model(tmp_path)
    assert in_vllm("whole_words.py", [str(model), {closes: LIKED}]) > 500
    flags = ["--model", str(model), "--reasoning-parser", "qwen3"]
    yield shared_engines.serving(2, *flags)
    shared_engines.stop(*flags)


def asked_for(number):
    """Return a message of even, a response of odd number; some have a budget for their thinking, and use it up."""
    body = {"model": "tiny", "stream": True, "temperature": 0}
    text = f"think of {number // 2}"
    if number % 2:
        return "/v1/responses", body | {"input": text, "max_output_tokens": MOST_TOKENS}
    body |= {"messages": [{"role": "user", "content": text}], "max_tokens": MOST_TOKENS}
    if number % 16 == 0:
        thinking = {"type": "enabled", "budget_tokens": LEAST_BUDGET}
        body |= {"max_tokens": LEAST_BUDGET + MOST_TOKENS, "thinking": thinking}
    return "/v1/messages", body


class Told:
    """What a stream told."""

    def __init__(self):
        self.parts, self.end, self.failed = [], None, False

    def take(self, event):
        """Take one event."""
        match event["type"]:
            case "content_block_start":
                self.parts.append([event["content_block"]["type"], ""])
            case "content_block_delta":
                delta = event["delta"]
                self.parts[event["index"]][1] += delta.get("text", "") + delta.get("thinking", "")
            case "response.content_part.added":
                self.parts.append([event["part"]["type"], ""])
            case "response.reasoning_text.delta" | "response.output_text.delta":
                self.parts[event["output_index"]][1] += event["delta"]
            case "message_delta":
                self.end = event["delta"]["stop_reason"], event["usage"]
            case "response.completed" | "response.incomplete":
                self._ended(event["response"])
            case "error":
                self.failed = True

    def _ended(self, response):
        """The last event says all of it again."""
        said = [[part["type"], part["text"]] for item in response["output"] for part in item["content"]]  # fmt: skip
        assert said == self.parts
        usage = response["usage"]
        counts = usage["output_tokens_details"]["reasoning_tokens"], usage["total_tokens"]
        self.end = response["status"], counts

    @property
    def said(self):
        """What it told, without the marks that come again and again: a parser takes some of them for text."""
        return [[kind, text.replace(CLOSES, "")] for kind, text in self.parts], self.end


async def read(http, number):
    told, held = Told(), b""
    path, body = asked_for(number)
    async with http.stream("POST", path, json=body) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for data in reply.aiter_bytes():
            *frames, held = (held + data).split(b"\n\n")
            for each in frames:
                if b"data: {" in each:
                    told.take(json.loads(each.partition(b"data: ")[2]))
    return told


async def read_all(http):
    async with http, asyncio.TaskGroup() as group:
        tasks = [group.create_task(read(http, number)) for number in range(COUNT)]
    return [task.result() for task in tasks]


async def killed_meanwhile(gate, first, server):
    def all_held():
        at_first, others = in_flight(gate)
        held = at_first == first.streams_held > 4 and not first.streams_passing
        return held and at_first + others + len(access_lines(gate)) >= COUNT

    async with asyncio.TaskGroup() as group:
        reading = group.create_task(read_all(client(gate)))
        await asyncio.to_thread(wait_until, all_held, 120, "the first server's are held")
        server.signal(signal.SIGKILL)
    return reading.result()


def test_thoughts_go_on_as_thoughts(tmp_path, servers):
    expected = asyncio.run(read_all(to(servers[1].url)))
    assert {len(each.parts) for each in expected} == {1, 2}  # some only think
    with behind_a_gateway(tmp_path / "gateway", servers) as (gate, first):
        first.hold_after(HELD_AFTER)
        told = asyncio.run(killed_meanwhile(gate, first, servers[0]))
        wait_until(lambda: len(access_lines(gate)) >= COUNT, 30, "the access log tells of all")
        lines, why = access_lines(gate), unresumed(gate)
    resumed = [line for line in lines if line["resumed"] and line["outcome"] == "ok"]
    assert len(resumed) >= 10
    assert {line["endpoint"] for line in resumed} == {"messages", "responses"}
    # Behind its mark nobody goes on: what white space the model wrote before that is shown nowhere.
    assert set(why) <= {"reply"}, why
    assert sum(each.failed for each in told) == why["reply"]
    found = {number: each.said for number, each in enumerate(told) if not each.failed}
    assert found == {number: expected[number].said for number in found}
