"""What the simulator tells of its prefix cache is what a vLLM 0.32 told of the same prompts.

That one ran with `--enable-prompt-tokens-details`, in blocks of 128 tokens. The prompts were 506 tokens
as a chat and 492 as a completion, so three blocks of each are full.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace

import pytest

from gateway.sim.server import SimConfig, SimServer
from tests.contracts.test_sim_like_vllm import exchange

CONFIG = SimConfig(
    model="tiny",
    adapters=("a",),
    max_model_len=2048,
    speed=0,
    block_size=128,
    num_blocks=64,
    prompt_tokens_details=True,
    dev_mode=True,
)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
TEXT = "the " * 501  # of 4 bytes each; the template adds 5 tokens
SAID = {"model": "tiny", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}
PROMPT = {"model": "tiny", "prompt": TEXT[: 4 * 491], "max_tokens": 2}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
RESET = ("POST", "/reset_prefix_cache", None)
COUNTS = {"prompt_tokens": 506, "total_tokens": 508, "completion_tokens": 2}


def talk(*requests, config=CONFIG) -> list[bytes]:
    async def main():
        async with asyncio.timeout(10), SimServer(config) as sim:
            return [(await exchange(sim, *each)).partition(b"\r\n\r\n")[2] for each in requests]

    return asyncio.run(main())


def chat(**more):
    return ("POST", CHAT, SAID | more)


def last_usage(stream: bytes):
    return json.loads(re.findall(rb'"usage":(\{(?:[^{}]|\{[^{}]*\})*\})', stream)[-1])


def cached(answer: bytes) -> int:
    return json.loads(answer)["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_chat_tells_what_was_found_and_what_was_stored():
    first, again, streamed = talk(chat(), chat(), chat(**STREAM))
    rest = {"multimodal_tokens": None}
    missed = {"cached_tokens": 0, "created_cache_tokens": 384}
    found = {"cached_tokens": 384, "created_cache_tokens": 0}
    none = {"completion_tokens_details": None}
    usages = [json.loads(each)["usage"] for each in (first, again)]
    assert usages == [
        COUNTS | {"prompt_tokens_details": each | rest} | none for each in (missed, found)
    ]
    assert last_usage(streamed) == COUNTS | {"prompt_tokens_details": found}


def test_a_completion_tells_less():
    asked = ("POST", COMPLETIONS, PROMPT)
    first, again, streamed = talk(asked, asked, ("POST", COMPLETIONS, PROMPT | STREAM))
    unset = {"created_cache_tokens": None, "multimodal_tokens": None}
    details = [json.loads(each)["usage"]["prompt_tokens_details"] for each in (first, again)]
    assert details == [{"cached_tokens": 0} | unset, {"cached_tokens": 384} | unset]
    assert last_usage(streamed)["prompt_tokens_details"] == {"cached_tokens": 384}


def test_messages_take_what_was_cached_off_the_input():
    asked = ("POST", MESSAGES, SAID)
    _, again, streamed = talk(asked, asked, ("POST", MESSAGES, SAID | {"stream": True}))
    expected = {
        "input_tokens": 122,
        "output_tokens": 2,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 384,
    }
    assert json.loads(again)["usage"] == expected
    assert last_usage(streamed) == expected
    assert b'"usage":{"input_tokens":506,"output_tokens":0}' in streamed  # message_start


@pytest.mark.parametrize("told", [True, False])
def test_responses_tell_it_whether_asked_to_or_not(told):
    asked = ("POST", RESPONSES, {"model": "tiny", "input": TEXT, "max_output_tokens": 2})
    config = SimConfig(model="tiny", speed=0, block_size=128, prompt_tokens_details=told)
    usage = json.loads(talk(asked, asked, config=config)[1])["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == 384
    assert usage["input_tokens_details"]["cache_write_tokens"] == 0


def test_nothing_is_told_without_the_flag():
    answer = talk(chat(), chat(), config=SimConfig(model="tiny", speed=0, block_size=128))[1]
    assert json.loads(answer)["usage"]["prompt_tokens_details"] is None


@pytest.mark.parametrize(
    "other", [{"cache_salt": "s"}, {"model": "a"}, {"model": "a", "cache_salt": "s"}]
)
def test_salts_and_adapters_share_nothing(other):
    first, second, again = talk(chat(), chat(**other), chat(**other))
    assert [cached(each) for each in (first, second, again)] == [0, 0, 384]


def test_an_adapter_of_another_path_shares_nothing():
    reload = {"lora_name": "a", "lora_path": "/other", "load_inplace": True}
    before, _, after = talk(
        chat(model="a"), ("POST", "/v1/load_lora_adapter", reload), chat(model="a")
    )
    assert [cached(before), cached(after)] == [0, 0]


def test_two_pictures_share_only_what_stands_before_them():
    def shown(picture):
        part = {"type": "image_url", "image_url": {"url": picture}}
        text = {"type": "text", "text": TEXT[: 4 * 254]}  # one block and nearly another
        return chat(messages=[{"role": "user", "content": [text, part, text]}])

    answers = talk(shown("a"), shown("b"), shown("a"))
    assert [cached(each) for each in answers] == [0, 256, 512]


@pytest.mark.parametrize(
    ("salt", "says"),
    [
        ("", "must be a non-empty string if provided"),
        (5, "must be a non-empty string if provided"),
        ("a/b", r"must be at most 128 characters and must not contain '@', '/', '\\', or NUL"),
        ("a" * 129, r"must be at most 128 characters and must not contain '@', '/', '\\', or NUL"),
    ],
)
def test_a_bad_salt_is_refused_in_vllms_words(salt, says):
    error = json.loads(talk(chat(cache_salt=salt))[0])["error"]
    assert error == {
        "message": f"Parameter 'cache_salt' {says}. (parameter=cache_salt)",
        "type": "BadRequestError",
        "param": "cache_salt",
        "code": 400,
    }


def test_a_reset_empties_the_cache_and_no_counter_falls():
    _, reset, after, page = talk(chat(), RESET, chat(), ("GET", "/metrics", None))
    assert reset == b'{"success":true}'
    assert cached(after) == 0
    assert b'vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 1012.0\n' in page
    assert b'vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 0.0\n' in page


def test_the_reset_is_for_developers_only():
    answer = talk(RESET, config=SimConfig(model="tiny"))[0]
    assert json.loads(answer) == {"detail": "Not Found"}


@pytest.mark.parametrize(
    ("query", "success"), [("", False), ("?reset_running_requests=true", True)]
)
def test_a_reset_fails_while_a_request_runs_unless_that_is_preempted(query, success):
    async def main():
        slow = chat(messages=[{"role": "user", "content": "[[sim:tokens=2;ttft=300ms]]"}])
        async with (
            asyncio.timeout(10),
            SimServer(replace(CONFIG, speed=1.0)) as sim,
            asyncio.TaskGroup() as group,
        ):
            task = group.create_task(exchange(sim, *slow))
            while not sim.engine.running:
                await asyncio.sleep(0.01)
            reset = await exchange(sim, "POST", f"/reset_prefix_cache{query}", None)
            return reset, await task, sim.engine.totals

    reset, answer, totals = asyncio.run(main())
    assert json.loads(reset.partition(b"\r\n\r\n")[2]) == {"success": success}
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 2
    assert totals.preemptions == success
