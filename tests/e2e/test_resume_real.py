"""Streams of real vLLM servers go on, token for token, when the one that writes them is killed or frozen."""

import asyncio
import collections
import contextlib
import json
import os
import signal

import httpx2
import pytest

from tests.e2e.support import (
    MODELS,
    VLLM_ENV,
    free_port,
    gateway,
    get,
    need,
    running,
    vllm_command,
    wait_until,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TOKENS = 300
WORDS = ("hi there", "zz top 9", "λ µ é 漢字", "日本 emoji 😀", "a b c")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Two real servers, their processes, and a gateway in front of them."""
    folder = tmp_path_factory.mktemp("resume")
    adapter = need(MODELS / "lora-a", "the adapter lora-a")
    flags = ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"lora-a={adapter}"]
    ports = [free_port(), free_port()]
    with contextlib.ExitStack() as stack:
        servers = []
        for port in ports:
            command = vllm_command(port, *flags)
            log = folder / f"vllm-{port}.log"
            servers.append(stack.enter_context(running(command, log=log, env=VLLM_ENV)))
        for port in ports:
            url = f"http://127.0.0.1:{port}/health"
            wait_until(lambda url=url: get(url)[0] == 200, 480, "vLLM did not start")
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        pools = f"pools: {{tiny: {{backends: {json.dumps(urls)}, slow_start: 0s}}}}"
        extra = "timeouts: {first_byte: 20s, stall: 5s}\nlog: {access: true}"
        yield stack.enter_context(gateway(folder, pools, extra)), servers


def requests(model):
    """Return 40 requests, half of them greedy: chats and completions.

    All for one model: 0.32 on a CPU mixes adapters up that are in one batch (vllm-project/vllm#47724).
    """
    for number in range(40):
        text = f"{WORDS[number % len(WORDS)]} {number}"
        body = {
            "model": model,
            "stream": True, "max_tokens": TOKENS, "ignore_eos": True,
            "stream_options": {"include_usage": True},
            "temperature": 0 if number % 2 else 0.8,
        }  # fmt: skip
        if number % 4 == 1:
            yield number, "/v1/completions", body | {"prompt": text}
        else:
            messages = [{"role": "user", "content": text}]
            yield number, "/v1/chat/completions", body | {"messages": messages}


async def read(http, path, body, began=None):
    """Return the text of a stream, its usage, its finish reason and whether it ended well."""
    text, usage, finish, done, ids = "", None, None, False, set()
    async with http.stream("POST", path, json=body) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if line == "data: [DONE]":
                done = finish is not None
            elif line.startswith("data: "):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    return text, None, chunk["error"]["message"], False
                ids.add((chunk["id"], chunk["created"]))
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    assert choice.get("token_ids") is None
                    text += (
                        choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                    )
                    finish = choice["finish_reason"] or finish
                if began is not None and text:
                    began.set()
    assert len(ids) == 1
    return text, usage, finish, done


def client(gate):
    headers = {"authorization": f"Bearer {gate.key}"}
    limits = httpx2.Limits(max_connections=100)
    return httpx2.AsyncClient(
        base_url=gate.url, headers=headers, timeout=120, limits=limits, trust_env=False
    )


async def undisturbed(gate, model):
    """Return what each greedy request is answered with, one at a time."""
    async with client(gate) as http:
        return {
            number: await read(http, path, body)
            for number, path, body in requests(model)
            if body["temperature"] == 0
        }


async def disturbed(gate, model, disturb):
    """Return the answers to all requests, of which all had begun when `disturb` was called."""
    async with client(gate) as http, asyncio.TaskGroup() as group:
        begun = {number: asyncio.Event() for number, _, _ in requests(model)}
        tasks = {
            number: group.create_task(read(http, path, body, begun[number]))
            for number, path, body in requests(model)
        }
        for each in begun.values():
            await each.wait()
        disturb()
    return {number: task.result() for number, task in tasks.items()}


def test_streams_go_on_token_for_token(world):
    """One after the other, as what was killed does not come back."""
    goes_on(world, "tiny", signal.SIGSTOP)
    goes_on(world, "lora-a", signal.SIGSTOP)
    goes_on(world, "tiny", signal.SIGKILL)


def goes_on(world, model, number):
    gate, servers = world
    expected = asyncio.run(undisturbed(gate, model))
    before = resumed(gate)
    try:
        answers = asyncio.run(disturbed(gate, model, lambda: os.killpg(servers[0].pid, number)))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(servers[0].pid, signal.SIGCONT)
    ends = collections.Counter((finish, done) for _, _, finish, done in answers.values())
    assert ends[("length", True)] >= 38, ends
    whole = {key: answer for key, answer in answers.items() if answer[3]}
    assert {
        key: usage["completion_tokens"] for key, (_, usage, _, _) in whole.items()
    } == dict.fromkeys(whole, TOKENS)
    # A random model also writes bytes that are no characters. Where many come in a row, vLLM's decoder
    # shows them in other portions after a seam, so those texts are not compared.
    greedy = {
        key: answer
        for key, answer in whole.items()
        if key in expected and "\ufffd" * 3 not in expected[key][0]
    }
    assert greedy
    assert {key: text for key, (text, _, _, _) in greedy.items()} == {
        key: expected[key][0] for key in greedy
    }
    assert {key: usage for key, (_, usage, _, _) in greedy.items()} == {
        key: expected[key][1] for key in greedy
    }
    assert resumed(gate) > before  # those that this server was writing
    if number is signal.SIGSTOP:
        wait_until(lambda: ready(gate) == 2, 60, "both serve again")


def resumed(gate):
    found = [
        float(line.rpartition(" ")[2])
        for line in gate.metrics().splitlines()
        if line.startswith("gateway_streams_resumed_total{")
    ]
    return sum(found)


def ready(gate):
    overview = json.loads(get(gate.admin_url + "/admin/v1/overview")[1])
    return sum(each["phase"] == "ready" for pool in overview["pools"] for each in pool["backends"])
