"""How many of a stream's last tokens were shown: a backend is asked for their text, and nobody guesses."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gateway.core.endings import Barrier
from gateway.core.types import Phase
from gateway.counting.tokens import BackendCounter
from gateway.ingress.measuring import Measuring
from gateway.resume.seam import Reached
from gateway.wire.chunks import inside
from tests.unit.test_resume import (
    FAULT,
    call,
    chunk,
    frame,
    role,
    shown_by,
    stream,
    thought,
    unsure_stream,
)


class Asker:
    """A backend whose /detokenize knows these texts."""

    def __init__(self, texts, status=200):
        self.texts, self.status, self.asked = texts, status, []

    async def post(self, path, body, *, timeout_s):
        told = json.loads(body)
        self.asked.append((path, told["model"], told["tokens"]))
        text = self.texts[len(told["tokens"])]
        return self.status, json.dumps({"prompt": text}).encode()


def seek(asker, watch):
    """Have a stream that broke off ask for its seam."""
    counter = BackendCounter(asker, deadline_s=1.0)
    health = SimpleNamespace(since=0.0)
    failed, other = (
        SimpleNamespace(id=name, phase=Phase.READY, revision="", health=health) for name in "ab"
    )
    asked_of = []

    async def text_of(tokens, route, backends):
        asked_of.append([each.id for each in backends])
        return await counter.text_of(tokens, "served")

    settings = SimpleNamespace(counters=SimpleNamespace(text_of=text_of))
    table = SimpleNamespace(backends=lambda pool: [failed, other])
    ask = SimpleNamespace(route=SimpleNamespace(pool="m"), tried={"a": 1.0}, leaves=None)
    asyncio.run(Measuring(table, SimpleNamespace()).find_seam(settings, ask, watch))
    assert all(each == ["b"] for each in asked_of)


def found(asker):
    watch = unsure_stream()
    watch.broken(FAULT)
    seek(asker, watch)
    return watch.trail.reached() if watch.rest() is not None else None


@pytest.mark.parametrize(
    ("texts", "reply"),
    [
        ({3: "ab"}, [6, 70, 8, 9]),
        ({3: "ab\ufffd", 2: "ab"}, [6, 70, 8]),
        ({3: "ab\ufffd", 2: "ab\ufffd", 1: "ab"}, [6, 70]),
        ({3: "abc", 2: "a"}, None),
        ({3: "xyz"}, None),
    ],
)
def test_the_seam_lies_where_the_text_of_the_tokens_is_what_was_shown(texts, reply):
    asker = Asker(texts)
    reached = found(asker)
    assert reached == (None if reply is None else Reached([1, 2, 3], reply))
    assert asker.asked == [("/detokenize", "served", [70, 8, 9][:count]) for count in list(texts)]


def test_nobody_goes_on_within_a_character():
    watch = stream(call(temperature=1))
    for each in (role([1, 2, 3]), frame("x", [6]), frame("\ufffd", [70, 8])):  # 8 is a mark
        watch.feed(each)
    watch.broken(FAULT)
    seek(Asker({2: "\ufffd</think>", 1: "\ufffd"}), watch)
    assert watch.rest() is None


def test_a_backend_that_does_not_tell_ends_the_search():
    asker = Asker({3: "ab"}, status=404)
    assert found(asker) is None
    assert len(asker.asked) == 1


# --- where tools are offered, a parser holds back what may become a call ------------------------------

TOOLS = [{"type": "function", "function": {"name": "f"}}]
MARK = "<tool>"


class Speller:
    """A backend whose tokens have these texts, by their ids."""

    def __init__(self, texts):
        self.texts = texts

    async def post(self, path, body, *, timeout_s):
        told = "".join(self.texts[each] for each in json.loads(body)["tokens"])
        return 200, json.dumps({"prompt": told}).encode()


def parsed(texts, sizes, at=0):
    """Return the frames of tokens, of so many each, with a parser that holds back the beginning of a mark."""
    said, shown = "", 0
    while at < len(texts):
        ids = list(range(at, min(len(texts), at + sizes[at % len(sizes)])))
        at += len(ids)
        said += "".join(texts[each] for each in ids)
        held_back = max(chars for chars in range(len(MARK)) if said.endswith(MARK[:chars]))
        end = len(said) if at == len(texts) else len(said) - held_back
        yield frame(said[shown:end] or None, ids, finish="length" if at == len(texts) else None)
        shown = end


def gone_on(texts, sizes, cut, temperature):
    """Return the bytes that a client gets of a stream that breaks off after so many frames."""
    watch = stream(call(temperature=temperature, tools=TOOLS))
    out = watch.feed(role([100]))
    for each in list(parsed(texts, sizes))[:cut]:
        told = watch.by_sight(chunk(each))
        out += watch.feed(each) if told is None else inside(told)
    out += watch.broken(FAULT)
    if watch.cut is None:
        return out
    if watch.unsure:
        seek(Speller(texts), watch)
    if (rest := watch.rest()) is None:
        return None
    given = json.loads(rest[0].body)["kv_transfer_params"]["prompt_token_ids"]
    out += watch.feed(role(given))
    return out + b"".join(map(watch.feed, parsed(texts, [1], len(given) - 1))) + watch.close()


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("texts", [
    ["a", "b", "x", "<", "y", "z"],
    ["a", "b", "<to", "ols", "y", "z"],
    ["a", "b", "<", "<", "too", "y", "z"],
    ["a", "b", "x\"", "é", "<tool", "y"],
])  # fmt: skip
def test_what_a_parser_holds_back_is_not_lost(texts, temperature):
    for cut in range(1, len(texts)):
        assert shown_by(gone_on(texts, [1], cut, temperature))[0] == "".join(texts)


@pytest.mark.parametrize(("temperature", "goes_on"), [(0, True), (1, False)])
def test_a_token_of_which_a_part_is_held_back_is_said_again_by_greedy_choices_only(
    temperature, goes_on
):
    texts = ["a", "b", "x<", "y", "z"]
    said = gone_on(texts, [1], 3, temperature)
    assert (said is not None) is goes_on
    assert said is None or shown_by(said)[0] == "abx<yz"


@given(
    st.lists(st.text(alphabet="<tol>é ", min_size=1, max_size=3), min_size=2, max_size=12),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.data(),
)
def test_wherever_a_parsed_stream_breaks_off_nothing_is_lost_or_doubled(texts, sizes, data):
    whole = "".join(texts)
    assume(MARK not in whole)
    frames = len(list(parsed(texts, sizes)))
    cut = data.draw(st.integers(1, frames - 1)) if frames > 1 else 0
    assert shown_by(gone_on(texts, sizes, cut, 0))[0] == whole
    drawn = gone_on(texts, sizes, cut, 1)
    assert drawn is None or shown_by(drawn)[0] == whole


@pytest.mark.parametrize(
    ("text", "shown", "reply"),
    [
        ("d</think>\n\nhello", ["\n\n", "hello"], 5),
        ("d</think>\n\nhello<", ["\n\n", "hello"], None),
        ("</think>l<tool", ["l"], None),  # either `l` may be the one that was shown
    ],
)
def test_behind_reasoning_the_seam_lies_where_what_was_shown_is_said_once(text, shown, reply):
    watch = stream(call(temperature=1, tools=TOOLS))
    for each in (role([1]), thought("c", [0]), thought("d", [1]), frame(None, [2])):
        watch.feed(each)
    for number, each in enumerate(shown):
        watch.feed(frame(each, [3 + number]))
    assert watch.broken(FAULT) == b""
    (*_, last) = watch.unsure
    seek(Speller(["", "", *([""] * (last - 2)), text]), watch)
    assert (watch.rest() is not None) is (reply is not None)
    if reply is not None:
        assert len(watch.trail.reached().reply) == reply


def broken_reasoning(temperature, *frames):
    watch = stream(call(temperature=temperature))
    for each in (role([1]), thought("c", [0]), *frames):
        watch.feed(each)
    assert watch.broken(FAULT) == b""
    return watch


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(
    ("texts", "frames", "reply"),
    [
        (["d", "e"], [thought("de", [1, 2])], 3),
        (["d", "e\ufffd"], [thought("de", [1, 2])], None),  # of the last token, a part was shown
        (["d", "\ufffd"], [thought("d", [1, 2])], 2),
        (["d", "</think>"], [thought("d", [1, 2])], 2),
        (["d", "e", "f"], [thought("de", [1, 2]), thought("f", [3])], 4),
        (["d", "e", "</think>"], [thought("de", [1, 2]), frame(None, [3])], 3),
        (["</think>", "x", "x"], [frame("xx", [1, 2, 3])], 4),
        (["d", "</think>", "x"], [frame("x", [1, 2, 3], reasoning="d")], 4),
        (["d", "</think>", "x"], [frame("d", [1, 2, 3], reasoning="d")], None),  # it was not said
        (["d", "</think>", "d"], [frame("d", [1, 2, 3], reasoning="d")], 4),
        (["d", "</think>", "\n\nx"], [frame("x", [1, 2, 3], reasoning="d")], 4),
        (
            ["d", "e", "f", "</think>", "d", "e", "x\ufffd"],
            [thought("de", [1, 2]), frame("d", [3, 4, 5], reasoning="f"), frame("ex", [6, 7])],
            None,
        ),
        (
            ["d", "e", "f", "</think>", "d", "e", "\ufffd"],
            [thought("de", [1, 2]), frame("d", [3, 4, 5], reasoning="f"), frame("e", [6, 7])],
            7,
        ),
        (["d", "</think>", "x", "<tool"], [frame("x", [1, 2, 3, 4], reasoning="d")], 4),
        (["d", "</think>", "l", "<tool"], [frame("l", [1, 2, 3, 4], reasoning="d")], None),
    ],
)
def test_reasoning_goes_on_behind_a_frame_of_several_tokens(texts, frames, reply, temperature):
    watch = broken_reasoning(temperature, *frames)
    seek(Speller(["", *texts]), watch)
    rest = watch.rest()
    assert (rest and len(watch.trail.reached().reply)) == reply


KINDS = "reasoning", "content"
OPENS, CLOSES = "<think>", "</think>"
HALVES = "\x01", "\x02"  # tokens that are an emoji together


def spelt(tokens):
    """Return the text of tokens, as a backend tells it."""
    return "".join(tokens).replace("".join(HALVES), "\U0001f600").replace(HALVES[0], "\ufffd")


def told_apart(tokens):
    """Return the reasoning and the answer that tokens show by now."""
    said = spelt(tokens).removesuffix("\ufffd").removeprefix(OPENS)
    reasoning, _, answer = said.partition(CLOSES)
    return reasoning, answer


def apart(tokens, sizes, at=0):
    """Return the frames of tokens, of so many each, with a parser of reasoning."""
    shown = told_apart(tokens[:at])
    while at < len(tokens):
        ids = list(range(at, min(len(tokens), at + sizes[at % len(sizes)])))
        at += len(ids)
        now = told_apart(tokens[:at])
        new = [each[len(before) :] for each, before in zip(now, shown, strict=True)]
        end = {"finish": "length"} if at == len(tokens) else {}
        yield frame(new[1] or None, ids, **end, **({"reasoning": new[0]} if new[0] else {}))
        shown = now


class SpellerOfHalves(Speller):
    async def post(self, path, body, *, timeout_s):
        told = spelt([self.texts[each] for each in json.loads(body)["tokens"]])
        return 200, json.dumps({"prompt": told}).encode()


WORDS = st.lists(
    st.one_of(st.text(alphabet="ab<> é", min_size=1, max_size=3).map(list), st.just(list(HALVES))),
    max_size=6,
).map(lambda words: [token for word in words for token in word])


@given(
    st.booleans(), WORDS, WORDS, st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.booleans(), st.data(),
)  # fmt: skip
def test_wherever_reasoning_breaks_off_nothing_is_lost_or_doubled(
    opens, reasoning, answer, sizes, tools, data
):
    tokens = [*([OPENS] if opens else []), *reasoning, CLOSES, *answer]
    frames = list(apart(tokens, sizes))
    asked = {"tools": TOOLS} if tools else {}
    watch = stream(call(temperature=data.draw(st.integers(0, 1)), **asked))
    out = watch.feed(role([100]))
    for each in frames[: data.draw(st.integers(0, len(frames) - 1))]:
        told = watch.by_sight(chunk(each))
        out += watch.feed(each) if told is None else inside(told)
    out += watch.broken(FAULT)
    if watch.unsure:
        seek(SpellerOfHalves(tokens), watch)
    if watch.cut is None or (rest := watch.rest()) is None:
        return
    given = json.loads(rest[0].body)["kv_transfer_params"]["prompt_token_ids"]
    out += watch.feed(role(given))
    out += b"".join(map(watch.feed, apart(tokens, [1], len(given) - 1))) + watch.close()
    choices = [
        json.loads(each[6:])["choices"][0]["delta"]
        for each in out.split(b"\n\n")
        if each.startswith(b'data: {"id"')
    ]
    told = tuple("".join(each.get(kind) or "" for each in choices) for kind in KINDS)
    expected = told_apart(tokens)
    if b'"error"' in out:  # it strayed, for all that one can see
        expected = tuple(each[: len(shown)] for each, shown in zip(expected, told, strict=True))
    assert told == expected


def test_where_nobody_tells_the_text_of_tokens_reasoning_does_not_go_on():
    """Greedy choices could be said again, but nobody knows where a parser lets them begin."""
    watch = broken_reasoning(0, thought("de", [1, 2]))
    seek(Asker({2: "de"}, status=404), watch)
    assert watch.rest() is None
    assert watch.barrier is Barrier.SEAM


def test_where_nobody_tells_the_text_of_tokens_what_was_drawn_by_chance_does_not_go_on():
    watch = stream(call(temperature=1, tools=TOOLS))
    for each in (role([1]), frame("a", [0]), frame("b", [1])):
        watch.feed(each)
    assert watch.may_leave is False
    assert watch.broken(FAULT) == b""
    seek(Asker({2: "ab"}, status=404), watch)
    assert watch.rest() is None


def test_without_a_choice_of_tools_nobody_is_asked():
    watch = stream(call(temperature=1, tools=TOOLS, tool_choice="none"))
    for each in (role([1]), frame("a", [0]), frame("b", [1])):
        watch.feed(each)
    assert watch.broken(FAULT) == b""
    assert watch.unsure == []
    assert watch.rest() is not None
