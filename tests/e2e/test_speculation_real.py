"""Streams of real vLLM servers that guess tokens ahead (speculative decoding) go on when their server is killed."""

import asyncio
import json
import signal

import pytest

from tests.e2e.resuming import (
    behind_a_gateway,
    chat,
    check_ends,
    check_greedy,
    disturbed,
    resumed,
    undisturbed,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TOKENS = 120
HELD_AFTER = 9  # frames
AHEAD = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
FLAGS = ("--speculative-config", json.dumps(AHEAD))


@pytest.fixture
def servers(shared_engines):
    yield shared_engines.serving(2, *FLAGS)
    shared_engines.stop(*FLAGS)


def requests():
    """Return 40 greedy chats: in a batch with others, vLLM 0.32 draws the tokens of greedy ones by chance, too."""
    return {
        number: chat(f"say {number} again and again {number}", TOKENS, temperature=0)
        for number in range(40)
    }


def test_streams_go_on_token_for_token(tmp_path, servers):
    asked = requests()
    expected = asyncio.run(undisturbed(servers[1], asked))
    with behind_a_gateway(tmp_path, servers) as (gate, first):
        first.hold_after(HELD_AFTER)
        answers = asyncio.run(
            disturbed(gate, first, asked, lambda: servers[0].signal(signal.SIGKILL))
        )
        assert first.streams_held >= 10
        check_ends(gate, answers)
        assert resumed(gate) >= 10
    check_greedy(answers, expected)
