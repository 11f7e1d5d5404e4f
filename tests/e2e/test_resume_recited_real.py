"""Streams of Messages and Responses whose real vLLM is killed, as the SDKs of Anthropic and OpenAI see them."""

import asyncio
import json
import pathlib
import signal
import subprocess

import pytest

from tests.e2e.resuming import (
    Told,
    access_lines,
    as_expected,
    behind_a_gateway,
    in_flight,
    lora_flags,
    to,
    undisturbed,
    unresumed,
)
from tests.e2e.support import CACHE, need, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

HELD_AFTER = 7  # frames: a busy engine puts many tokens into one
MOST_TOKENS = 60
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
CLIENT = pathlib.Path(__file__).parent / "clients" / "resumed_python.py"


@pytest.fixture
def servers(shared_engines):
    return shared_engines.serving(2, *lora_flags())


def as_chat(number):
    """Return the chat whose answer is that to the message or response of this number."""
    return CHAT, {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"tell {number // 2}"}],
        "max_tokens": MOST_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def asked_for(number):
    """Return a message of even, a response of odd number."""
    text = f"tell {number // 2}"
    body = {"model": "tiny", "temperature": 0, "stream": True}
    if number % 2:
        return RESPONSES, body | {"input": text, "max_output_tokens": MOST_TOKENS}
    said = [{"role": "user", "content": text}]
    return MESSAGES, body | {"messages": said, "max_tokens": MOST_TOKENS}


async def as_tokenized(engine, numbers):
    """Return those of these chats whose answer an engine writes in the tokens that it reads the answer as.

    A random model seldom does. If it does not, and a frame held several tokens, nobody can tell which they were:
    the stream goes on after the same text in other tokens (decision 040), and that is another answer.
    """

    async def is_one(http, number):
        path, chat = as_chat(number)
        chat = {name: each for name, each in chat.items() if not name.startswith("stream")}
        reply = (await http.post(path, json=chat | {"return_token_ids": True})).json()
        (answer,) = reply["choices"]
        text = {"prompt": answer["message"]["content"], "add_special_tokens": False}
        read = (await http.post("/tokenize", json={"model": "tiny"} | text)).json()
        return answer["token_ids"] == read["tokens"]

    async with to(engine.url) as http, asyncio.TaskGroup() as group:
        tasks = {each: group.create_task(is_one(http, each)) for each in numbers}
    return {number for number, task in tasks.items() if task.result()}


def all_held(gate, first, sent):
    at_first, *others = in_flight(gate)
    at_least = at_first == first.streams_held >= 4
    return at_least and at_first + sum(others) + len(access_lines(gate)) >= sent


def test_sdks_see_one_stream_over_a_kill(tmp_path, servers):
    """Greedy answers whose tokens their text tells are those of an undisturbed server.

    One whose ids nobody could tell ends with an error.
    """
    python = need(CACHE / "openai3" / "bin/python", "openai3")
    found = asyncio.run(undisturbed(servers[1], {each: as_chat(each) for each in range(160)}))
    # A random model writes bytes that are no characters, too: nobody can tell what they were.
    chosen = [number for number, told in found.items() if "\ufffd" not in told.text]
    asked = {number: asked_for(number) for number in chosen}
    sure = asyncio.run(as_tokenized(servers[1], chosen))
    with behind_a_gateway(tmp_path, servers) as (gate, first):
        first.hold_after(HELD_AFTER)
        command = [python, str(CLIENT), gate.url, gate.key]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as client:
            client.stdin.write(json.dumps([*asked.values()]))
            client.stdin.close()
            wait_until(
                lambda: all_held(gate, first, len(asked)), 120, "the first server's are held"
            )
            servers[0].signal(signal.SIGKILL)
            seen = json.loads(client.stdout.read())
        assert client.returncode == 0
        wait_until(lambda: len(access_lines(gate)) >= len(asked), 30, "the access log tells of all")
        lines, why = access_lines(gate), unresumed(gate)
    told = {
        number: Told(text, usage, finish, done=error is None, error=error)
        for number, (text, finish, usage, error) in zip(asked, seen, strict=True)
    }
    ended = {number: each for number, each in told.items() if each.whole}
    wrong = {
        number: (each, found[number])
        for number, each in ended.items()
        if number in sure and not as_expected(each, found[number])
    }
    assert len(sure & ended.keys()) >= 10
    assert not wrong, wrong
    assert set(why) <= {"ids"}, why
    assert len(told) - len(ended) == why["ids"]
    resumed = {line["endpoint"] for line in lines if line["resumed"] and line["outcome"] == "ok"}
    assert resumed == {"messages", "responses"}
