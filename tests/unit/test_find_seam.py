"""How many of a stream's last tokens were shown: a backend is asked for their text, and nobody guesses."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from gateway.core.types import Phase
from gateway.counting.tokens import BackendCounter
from gateway.ingress.measuring import Measuring
from gateway.resume.trail import Reached
from tests.unit.test_resume import FAULT, unsure_stream


class Asker:
    """A backend whose /detokenize knows these texts."""

    def __init__(self, texts, status=200):
        self.texts, self.status, self.asked = texts, status, []

    async def post(self, path, body, *, timeout_s):
        told = json.loads(body)
        self.asked.append((path, told["model"], told["tokens"]))
        text = self.texts[len(told["tokens"])]
        return self.status, json.dumps({"prompt": text}).encode()


def found(asker):
    counter = BackendCounter(asker, deadline_s=1.0)
    failed, other = (SimpleNamespace(id=name, phase=Phase.READY) for name in "ab")
    asked_of = []

    async def text_of(tokens, route, backends):
        asked_of.append([each.id for each in backends])
        return await counter.text_of(tokens, "served")

    settings = SimpleNamespace(counters=SimpleNamespace(text_of=text_of))
    table = SimpleNamespace(backends=lambda pool: [failed, other])
    ask = SimpleNamespace(route=SimpleNamespace(pool="m"), tried={"a": 1.0})
    watch = unsure_stream()
    watch.broken(FAULT)
    asyncio.run(Measuring(table, SimpleNamespace()).find_seam(settings, ask, watch))
    assert all(each == ["b"] for each in asked_of)
    return watch.trail.reached() if watch.rest() is not None else None


@pytest.mark.parametrize(
    ("texts", "reply"),
    [
        ({3: "ab"}, [6, 70, 8, 9]),
        ({3: "ab\ufffd", 2: "ab"}, [6, 70, 8]),
        ({3: "ab\ufffd", 2: "ab\ufffd", 1: "ab"}, [6, 70]),
        ({3: "abc", 2: "a", 1: ""}, None),
    ],
)
def test_the_seam_lies_where_the_text_of_the_tokens_is_what_was_shown(texts, reply):
    asker = Asker(texts)
    reached = found(asker)
    assert reached == (None if reply is None else Reached([1, 2, 3], reply))
    assert asker.asked == [("/detokenize", "served", [70, 8, 9][:count]) for count in list(texts)]


def test_a_backend_that_does_not_tell_ends_the_search():
    asker = Asker({3: "ab"}, status=404)
    assert found(asker) is None
    assert len(asker.asked) == 1
