"""The ids of a message or response whose backend failed: other backends are asked, and nobody guesses."""

import asyncio
from types import SimpleNamespace

import pytest

from gateway.core.endings import Barrier
from gateway.core.types import Phase
from gateway.counting.ids import Prompt, Tokens
from gateway.ingress.measuring import Measuring
from tests.unit.test_recited import ASKED, MESSAGES, broken, byte_level

TOOLS = {
    "/v1/messages": [{"name": "look", "input_schema": {"type": "object"}}],
    "/v1/responses": [{"type": "function", "name": "look", "parameters": {"type": "object"}}],
}


class Tokenizer:
    """Cuts a text into the longest of these tokens, else into characters."""

    def __init__(self, *tokens):
        self._tokens = sorted(tokens, key=len, reverse=True)
        self.asked = []

    async def tokens_of(self, text, route, backends):
        self.asked.append(text)
        found, left = [], text
        while left:
            token = next((each for each in self._tokens if left.startswith(each)), left[0])
            found.append(token)
            left = left[len(token) :]
        ids = [hash(each) & 0xFFFF for each in found]
        return Tokens(ids, [byte_level(each) for each in found])


def asked_by(watch, prompt, tokenizer, *, prompt_end=None, came_back=0.0, other=Phase.READY):
    """Have a stream that broke off ask for its ids; the last tokens of its prompt may be asked for as text."""
    backends = [
        SimpleNamespace(
            id=name,
            phase=phase,
            plain=False,
            in_flight=0,
            revision="",
            health=SimpleNamespace(since=since),
        )
        for name, phase, since in zip("ab", (Phase.READY, other), (came_back, 0.0), strict=True)
    ]

    async def prompt_ids(call, prompt_tokens, route, backends):
        return Prompt(prompt, {})

    async def read_ids(call, route, backend, salt):
        return prompt

    async def text_of(tokens, route, backends):
        assert list(tokens) == prompt[-8:]
        return prompt_end

    counters = SimpleNamespace(
        tokens_of=tokenizer.tokens_of, prompt_ids=prompt_ids, read_ids=read_ids, text_of=text_of
    )
    settings = SimpleNamespace(counters=counters)
    table = SimpleNamespace(backends=lambda pool: backends)
    route = SimpleNamespace(pool="m", tenants_apart=False)
    ask = SimpleNamespace(route=route, tried={"a": 1.0}, leaves=None)
    measuring = Measuring(table, SimpleNamespace())
    assert asyncio.run(measuring.find_way(settings, ask, watch)) is None


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("merged", ["ce<", "ce["])
def test_nobody_goes_on_where_the_last_token_may_have_begun_a_call(path, merged):
    """The model may have written `ce<` in one token, of which a parser held back the end."""
    watch, _, prompt = broken(path, tools=TOOLS[path])
    asked_by(watch, prompt, Tokenizer("On", "ce", merged))
    assert watch.rest() is None
    assert watch.barrier is Barrier.IDS


@pytest.mark.parametrize("path", ASKED)
def test_else_somebody_does(path):
    watch, _, prompt = broken(path, tools=TOOLS[path])
    tokenizer = Tokenizer("On", "ce", "<tool")
    asked_by(watch, prompt, tokenizer)
    assert watch.rest() is not None
    assert tokenizer.asked == ["Once", "Once<", "Once["]


@pytest.mark.parametrize("path", ASKED)
def test_without_tools_nothing_is_held_back(path):
    watch, _, prompt = broken(path)
    tokenizer = Tokenizer("On", "ce", "ce<")
    asked_by(watch, prompt, tokenizer)
    assert watch.rest() is not None
    assert tokenizer.asked == ["Once"]


@pytest.mark.parametrize("path", [MESSAGES])
def test_tools_that_nobody_knows_bar_a_stream_before_anybody_is_asked(path):
    watch, _, prompt = broken(path, tools=[{"type": "web_search_20250305", "name": "web_search"}])
    tokenizer = Tokenizer()
    asked_by(watch, prompt, tokenizer)
    assert watch.rest() is None
    assert watch.barrier is Barrier.REQUEST
    assert tokenizer.asked == []


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize(("came_back", "tells"), [(0.0, False), (2.0, True)])
def test_a_backend_that_came_back_since_tells_ids(path, came_back, tells):
    """It failed at 1.0, and nobody else serves."""
    watch, _, prompt = broken(path)
    asked_by(watch, prompt, Tokenizer("On", "ce"), came_back=came_back, other=Phase.DOWN)
    assert (watch.rest() is not None) is tells
