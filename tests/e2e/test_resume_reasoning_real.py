"""Reasoning of real vLLM servers, as a real parser tells it, goes on when the one that writes it freezes."""

import asyncio
import json
import pathlib
import shutil
import signal

import pytest

from tests.e2e.resuming import (
    FROZEN,
    behind_a_gateway,
    chat,
    check_ends,
    disturbed,
    resumed,
    undisturbed,
)
from tests.e2e.support import MODELS, need

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TOKENS = 60  # of most replies of 150 the model is undecided somewhere
HELD_AFTER = 12  # frames
OPENS, CLOSES = "<think>", "</think>"


def thinking_model(folder: pathlib.Path) -> tuple[pathlib.Path, int]:
    """Return the tiny model with marks of reasoning, and the token id of the closing one."""
    model = folder / "thinking"
    shutil.copytree(need(MODELS / "tiny", "the tiny model"), model)
    path = model / "tokenizer.json"
    told = json.loads(path.read_text())
    vocab = told["model"]["vocab"]
    for mark in (CLOSES, OPENS):  # in place of the longest words, which no other is made of
        number = vocab.pop("".join(told["model"]["merges"].pop()))
        vocab[mark] = number
        ways = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        told["added_tokens"].append({"id": number, "content": mark, **ways})
    path.write_text(json.dumps(told))
    template = model / "chat_template.jinja"
    template.write_text(template.read_text() + "{% if add_generation_prompt %}<think>{% endif %}")
    return model, vocab[CLOSES]


@pytest.fixture
def world(tmp_path, shared_engines):
    """Two real servers that tell reasoning apart, and the mark's token id."""
    model, closes = thinking_model(tmp_path)
    # Without the bias in them, the logarithms would not tell where the model is undecided.
    flags = [
        "--model",
        str(model),
        "--reasoning-parser",
        "qwen3",
        "--logprobs-mode",
        "processed_logprobs",
    ]
    yield shared_engines.serving(2, *flags), closes
    shared_engines.stop(*flags)


def requests(closes, interval):
    """Return 40 chats, of which the later ones close their reasoning sooner; `interval`: so many tokens a frame."""
    return {
        number: chat(
            f"think of {number}",
            TOKENS,
            temperature=0 if number % 4 else 0.8,  # enough of which all tokens are decided
            logit_bias={str(closes): number / 50},
            stream_interval=interval,
        )
        for number in range(40)
    }


def said(told):
    """Return reasoning and answer of a stream, and how many tokens it told.

    The bias makes it close again and again. How many of these marks a parser takes for text depends on which of
    them come in one frame, with a seam and without.
    """
    return told.reasoning, told.text.replace(CLOSES, ""), told.usage["completion_tokens"]


@pytest.mark.parametrize("interval", [1, 4])  # a busy server puts tokens together, too
def test_reasoning_goes_on_as_reasoning_and_the_answer_as_the_answer(tmp_path, world, interval):
    servers, closes = world
    asked = requests(closes, interval)
    expected = asyncio.run(undisturbed(servers[1], asked))
    assert sum(bool(told.reasoning and told.text) for told in expected.values()) >= 2
    assert sum(bool(told.reasoning and not told.text) for told in expected.values()) >= 2
    with behind_a_gateway(tmp_path / "gateway", servers, stall=FROZEN) as (gate, first):
        first.hold_after(HELD_AFTER // interval)
        answers = asyncio.run(
            disturbed(gate, first, asked, lambda: servers[0].signal(signal.SIGSTOP))
        )
        assert first.streams_held >= 10
        check_ends(gate, answers, expected=expected)
        assert resumed(gate) >= 5  # the others are behind a frame in which reasoning ends
    certain = {
        number
        for number, told in expected.items()
        if told.decided is None and answers[number].whole
    }
    assert certain
    assert {number: said(answers[number]) for number in certain} == {
        number: said(expected[number]) for number in certain
    }
