"""What a real parser of tool calls holds back is neither lost nor doubled when its server freezes."""

import asyncio
import signal

import pytest

from tests.e2e.resuming import (
    FROZEN,
    behind_a_gateway,
    chat,
    check_ends,
    check_greedy,
    disturbed,
    resumed,
    undisturbed,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

# So many that a stream has enough frames, though a slow engine puts ten tokens into each.
TOKENS = 150
HELD_AFTER = 12  # frames
BEGINS_A_CALL = 31  # the token `<`: the parser holds it back, until the next one makes it no mark
# Without the bias in them, the logarithms would not tell where the model is undecided.
FLAGS = (
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--logprobs-mode", "processed_logprobs"),
)
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]


@pytest.fixture
def servers(shared_engines):
    yield shared_engines.serving(2, *FLAGS)
    shared_engines.stop(*FLAGS)


def requests():
    """Return 24 chats with tools, of which the later ones write `<` more often."""
    return {
        number: chat(
            f"look for {number}",
            TOKENS,
            tools=TOOLS,
            temperature=0 if number % 2 else 0.8,
            logit_bias={str(BEGINS_A_CALL): number / 30},
        )
        for number in range(24)
    }


def test_what_could_have_begun_a_call_is_said_once(tmp_path, servers):
    asked = requests()
    expected = asyncio.run(undisturbed(servers[1], asked))
    assert sum("<" in told.text for told in expected.values()) >= 3
    with behind_a_gateway(tmp_path, servers, stall=FROZEN) as (gate, first):
        first.hold_after(HELD_AFTER)
        answers = asyncio.run(
            disturbed(gate, first, asked, lambda: servers[0].signal(signal.SIGSTOP))
        )
        assert first.streams_held >= 5
        check_ends(gate, answers)
        assert resumed(gate) >= 5
    check_greedy(answers, expected)
