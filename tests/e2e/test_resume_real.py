"""Streams of real vLLM servers go on, token for token, when the one that writes them is killed or frozen."""

import asyncio
import json
import signal

import pytest

from tests.e2e.resuming import (
    FROZEN,
    behind_a_gateway,
    check_ends,
    check_greedy,
    disturbed,
    lora_flags,
    resumed,
    stayed,
    undisturbed,
    unresumed,
)
from tests.e2e.support import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TOKENS = 150
HELD_AFTER = 12  # frames: what follows them of the first server's streams comes from the second one
WITHIN_A_FRAME = 60  # bytes of the next frame, its chunk's size among them: the JSON has begun
NEVER_SAID = "\U0010fffd"  # one character: the engine holds nothing back for it
WORDS = ("hi there", "zz top 9", "λ µ é 漢字", "日本 emoji 😀", "a b c")


def requests(model, stops=None):
    """Return 40 requests, half of them greedy: chats and completions, with these stop strings by number.

    All for one model: 0.32 on a CPU mixes adapters up that are in one batch (vllm-project/vllm#47724).
    """
    found = {}
    for number in range(40):
        text = f"{WORDS[number % len(WORDS)]} {number}"
        body = {
            "model": model,
            "stream": True, "max_tokens": TOKENS, "ignore_eos": True,
            "stream_options": {"include_usage": True},
            "temperature": 0 if number % 2 else 0.8,
        }  # fmt: skip
        if stops is not None:
            body |= {"stop": stops.get(number, NEVER_SAID)}
        if number % 4 == 1:
            found[number] = "/v1/completions", body | {"prompt": text}
        else:
            messages = [{"role": "user", "content": text}]
            found[number] = "/v1/chat/completions", body | {"messages": messages}
    return found


@pytest.fixture
def servers(shared_engines):
    return shared_engines.serving(2, *lora_flags())


def go_on(folder, servers, asked, number, more_bytes=0, holds=None, **pools):
    """Return what 40 streams tell of which those of the first server break off.

    A signal disturbs the server itself. Without one its connections end, so many bytes after the last whole frame.
    `holds` is true of what that may be.
    """
    stall = FROZEN if number is signal.SIGSTOP else "100s"
    with behind_a_gateway(folder, servers, stall=stall, **pools) as (gate, first):
        first.hold_after(HELD_AFTER, more_bytes, holds)
        disturb = first.cut if number is None else lambda: servers[0].signal(number)
        answers = asyncio.run(disturbed(gate, first, asked, disturb))
        assert first.streams_held >= 10
        wait_until(
            lambda: resumed(gate) + unresumed(gate).total() + stayed(gate) >= first.streams_held,
            30,
            "all are counted",
        )
        check_ends(gate, answers)
    return answers


def is_within_a_character(frame):
    """Whether the token of a frame shows no text: that comes with the rest of its character."""
    data = frame.partition(b"data: ")[2].partition(b"\n")[0]
    choices = () if data == b"[DONE]" else json.loads(data)["choices"]
    return any(
        choice.get("token_ids")
        and not (choice.get("text") or choice.get("delta", {}).get("content"))
        for choice in choices
    )


@pytest.mark.parametrize(
    ("model", "number"),
    [
        ("tiny", signal.SIGSTOP),
        ("lora-a", signal.SIGSTOP),
        ("tiny", signal.SIGKILL),
        ("lora-a", signal.SIGKILL),
    ],
)
def test_streams_go_on_token_for_token(tmp_path, servers, model, number):
    asked = requests(model)
    expected = asyncio.run(undisturbed(servers[1], asked))
    answers = go_on(tmp_path, servers, asked, number)
    whole = [told for told in answers.values() if told.whole]
    assert {(told.finish, told.usage["completion_tokens"]) for told in whole} == {
        ("length", TOKENS)
    }
    check_greedy(answers, expected)


@pytest.mark.parametrize(
    "where",
    [{"more_bytes": WITHIN_A_FRAME}, {"holds": is_within_a_character}],
    ids=["frame", "character"],
)
def test_streams_that_end_within_something_go_on_token_for_token(tmp_path, servers, where):
    """The half frame, or the character's tokens, were not told, and are written again elsewhere."""
    asked = requests("tiny")
    expected = asyncio.run(undisturbed(servers[1], asked))
    answers = go_on(tmp_path, servers, asked, None, **where)
    whole = [told for told in answers.values() if told.whole]
    assert {(told.finish, told.usage["completion_tokens"]) for told in whole} == {
        ("length", TOKENS)
    }
    check_greedy(answers, expected)


def test_streams_go_on_by_their_text(tmp_path, servers):
    """What follows the seam may differ: the text of a random model is tokenised otherwise than it was made."""
    answers = go_on(
        tmp_path, servers, requests("tiny"), signal.SIGSTOP, tiny={"resume": "text", "adapters": []}
    )
    assert {told.finish for told in answers.values() if told.whole} == {"length"}


def test_streams_that_go_on_end_at_a_stop_string(tmp_path, servers):
    """The engine holds back text in which it looks for them: none is lost or doubled at the seam."""
    expected = asyncio.run(undisturbed(servers[1], requests("tiny")))
    # A stop string that is said nowhere but near the end, so not before the seam.
    certain = {
        number: told
        for number, told in expected.items()
        if told.decided is None and told.text.find(told.text[-20:-12]) == len(told.text) - 20
    }
    stops = {number: told.text[-20:-12] for number, told in certain.items()}
    answers = go_on(tmp_path, servers, requests("tiny", stops), signal.SIGSTOP)
    ended = {number: told for number, told in answers.items() if told.whole and number in stops}
    assert ended
    assert {told.finish for told in ended.values()} == {"stop"}
    assert {number: told.text for number, told in ended.items()} == {
        number: certain[number].text.partition(stops[number])[0] for number in ended
    }
