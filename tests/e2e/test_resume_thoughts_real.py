"""Messages of a real vLLM whose model thinks: the thoughts go on as thoughts when their server is killed."""

import asyncio
import json
import signal

import pytest

from tests.e2e.resuming import access_lines, behind_a_gateway, client, in_flight, to, unresumed
from tests.e2e.support import wait_until
from tests.e2e.test_resume_reasoning_real import CLOSES, thinking_model
from tests.e2e.vllms import in_vllm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

COUNT, MOST_TOKENS, HELD_AFTER = 40, 120, 30
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
    """Return a message; some have a budget for their thinking, and use it up."""
    said = [{"role": "user", "content": f"think of {number}"}]
    body = {"model": "tiny", "messages": said, "stream": True, "temperature": 0}
    if number % 5:
        return body | {"max_tokens": MOST_TOKENS}
    thinking = {"type": "enabled", "budget_tokens": LEAST_BUDGET}
    return body | {"max_tokens": LEAST_BUDGET + MOST_TOKENS, "thinking": thinking}


def told_by(events):
    """Return what was shown in the blocks of a message, how it ended, and whether it did."""
    blocks, end, failed = [], None, False
    for event in events:
        match event["type"]:
            case "content_block_start":
                blocks.append([event["content_block"]["type"], ""])
            case "content_block_delta":
                delta = event["delta"]
                blocks[event["index"]][1] += delta.get("text", "") + delta.get("thinking", "")
            case "message_delta":
                end = event["delta"]["stop_reason"], event["usage"]
            case "error":
                failed = True
    return blocks, end, failed


async def read(http, number):
    events, held = [], b""
    async with http.stream("POST", "/v1/messages", json=asked_for(number)) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for data in reply.aiter_bytes():
            *frames, held = (held + data).split(b"\n\n")
            events += [json.loads(each.partition(b"data: ")[2]) for each in frames if b"{" in each]
    return told_by(events)


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
    thinking = [[kind for kind, _ in blocks] for blocks, _, _ in expected]
    assert ["thinking"] in thinking
    assert ["thinking", "text"] in thinking
    with behind_a_gateway(tmp_path / "gateway", servers) as (gate, first):
        first.hold_after(HELD_AFTER)
        told = asyncio.run(killed_meanwhile(gate, first, servers[0]))
        wait_until(lambda: len(access_lines(gate)) >= COUNT, 30, "the access log tells of all")
        resumed = sum(line["resumed"] for line in access_lines(gate) if line["outcome"] == "ok")
        why = unresumed(gate)
    assert resumed >= 5
    # Behind its mark nobody goes on: what white space the model wrote before that is shown nowhere.
    assert set(why) <= {"reply"}, why
    assert sum(failed for _, _, failed in told) == why["reply"]
    for (blocks, end, failed), (whole, its_end, _) in zip(told, expected, strict=True):
        if any(CLOSES in text for _, text in whole):
            continue  # it closes again and again; a parser takes some of these marks for text
        if failed:
            assert blocks[-1][0] == "text" or blocks[-1] == whole[0]
        else:
            assert (blocks, end) == (whole, its_end)
