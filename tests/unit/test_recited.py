"""Streams of Messages and Responses: what is kept of them, and how their rest is told."""

import asyncio
import json
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec import Raw, structs

from gateway.core.endings import Barrier
from gateway.core.types import Demand, Dialect, Endpoint
from gateway.counting.ids import prompt_ids, read_ids, tokens_of
from gateway.counting.offers import offers_of
from gateway.resume.pieces import fits
from gateway.resume.recited import RecitedStream
from gateway.resume.rules import may_go_on, may_recite
from gateway.sim.ask import parse_ask
from gateway.sim.config import SimConfig
from gateway.sim.events import MessagesWriter, ResponsesWriter
from gateway.sim.frames import Head
from gateway.sim.newer import NewerWriter
from gateway.sim.plan import Piece, Plan
from gateway.wire.calls import ENDPOINTS, parse_call
from gateway.wire.replies import Fault
from tests.unit.test_resume import frame, role

FAULT = Fault(502, "server_error", "backend_error", "it is gone")
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
ASKED = {
    MESSAGES: {"messages": [{"role": "user", "content": "tell"}], "max_tokens": 100},
    RESPONSES: {"input": "tell"},
}
WRITERS = {MESSAGES: MessagesWriter, RESPONSES: ResponsesWriter}
UNSEEN = [*range(0x21), *range(0x7F, 0xA1), 0xAD]


def byte_level(text):
    """Write a text as a byte-level tokenizer does."""
    return "".join(
        chr(0x100 + UNSEEN.index(each)) if each in UNSEEN else chr(each) for each in text.encode()
    )


def call(path, **more):
    body = {"model": "m", "stream": True, "temperature": 0, **ASKED[path], **more}
    return parse_call(ENDPOINTS[path.encode()], json.dumps(body).encode())


def written(path, pieces, finish="stop", *, newer=False):
    """Return the frames with which vLLM writes such a reply, and those that come before the first text.

    `newer`: as 0.33 does.
    """
    asked = parse_ask(path, json.loads(call(path).body), SimConfig(model="m"), [])
    writer = WRITERS[path](Head(asked, "resp_1", 7, "f"))
    writer = NewerWriter(writer) if newer else writer
    ids = range(70, 70 + len(pieces))
    plan = Plan(0, asked.prompts[0], tuple(pieces), tuple(ids), finish)
    opening = writer.opening()
    frames = []
    for place, (text, token) in enumerate(zip(pieces, ids, strict=True)):
        ends = finish if place + 1 == len(pieces) else None
        frames.append(b"".join(writer.piece(Piece(plan, place, text, token, ends))))
    return b"".join(opening), frames, b"".join(writer.closing()), list(asked.prompts[0])


def written_with_a_call(path, pieces, arguments):
    """Return the frames of a reply that calls a tool behind these pieces: before the call, and all that follows."""
    asked = parse_ask(path, json.loads(call(path).body), SimConfig(model="m"), [])
    writer = WRITERS[path](Head(replace(asked, tool="look"), "resp_1", 7, "f"))
    said = (*pieces, "", *arguments)
    ids = range(70, 70 + len(said))
    plan = Plan(0, asked.prompts[0], said, tuple(ids), "tool_calls", call_at=len(pieces))
    frames = [b"".join(writer.opening())]
    for place, (text, token) in enumerate(zip(said, ids, strict=True)):
        ends = "tool_calls" if place + 1 == len(said) else None
        frames.append(b"".join(writer.piece(Piece(plan, place, text, token, ends))))
    frames.append(b"".join(writer.closing()))
    before = len(pieces) + 1
    return frames[:before], frames[before:], list(asked.prompts[0])


def calls(*parts):
    """Return what a chat's delta tells of tool calls: of each its index, arguments, and name where it begins."""
    found = []
    for index, arguments, name in parts:
        begins = {} if name is None else {"id": f"chatcmpl-tool-{index}", "type": "function"}
        function = {"arguments": arguments} | ({} if name is None else {"name": name})
        found.append({"index": index, "function": function} | begins)
    return {"tool_calls": found}


OFFERED = {"tools": Raw(b"[1]"), "tool_choice": Raw(b'"auto"')}


def gone_on(path, pieces=("On", "ce")):
    """Return a watch of a stream that another backend goes on with, which may call tools."""
    watch, _, prompt = broken(path, pieces)
    watch.offer(OFFERED)
    watch.ids_are(prompt, [8, 9], ["On", "ce"])
    assert watch.rest() is not None
    watch.feed(role([*prompt, 8, 9]))
    return watch


def rest_of_chat(ids, pieces, first_id, finish="stop"):
    """Return the frames of a chat that goes on."""
    last = len(pieces) - 1
    return [
        role(ids),
        *(
            frame(text, [first_id + place], finish=finish if place == last else None)
            for place, text in enumerate(pieces)
        ),
        b'data: {"id":"a","choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}\n\n',
        b"data: [DONE]\n\n",
    ]


def watch_of(path, limit=100, *, veil=False, **more):
    demand = Demand(9, exact=True, max_new_tokens=limit)
    return RecitedStream(call(path, **more), demand, request_id="r", veil=veil)


TEXTS = st.text(min_size=1, max_size=5).filter(lambda text: "\ufffd" not in text)


@given(st.lists(TEXTS, min_size=2, max_size=12), st.data())
def test_several_pieces_in_one_read_are_kept_as_one_by_one(pieces, data):
    opening, frames, closing, _ = written(MESSAGES, pieces)
    one_by_one, several = watch_of(MESSAGES), watch_of(MESSAGES)
    begun = b"".join(frames[:1])
    assert one_by_one.feed(opening + begun) == several.feed(opening + begun)
    left = frames[1:]
    while left:
        count = data.draw(st.integers(1, len(left)))
        now, left = left[:count], left[count:]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in now)
        if several.by_sight(chunks) is None:
            assert several.feed(b"".join(now)) == b"".join(now)
        for each in now:
            one_by_one.feed(each)
    assert several.trail.pieces == one_by_one.trail.pieces == pieces
    assert several.events == one_by_one.events


def test_several_pieces_in_one_read_need_not_be_parsed():
    opening, frames, *_ = written(MESSAGES, ["a", "b", "c", "d"])
    watch = watch_of(MESSAGES)
    watch.feed(opening + frames[0])
    watch.feed(frames[1])
    now = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in frames[2:])
    assert watch.by_sight(now) == now
    assert watch.events == 4


@given(st.lists(TEXTS, min_size=2, max_size=12), st.data(), st.sampled_from([*ASKED]))
def test_a_stream_that_another_goes_on_with_is_as_if_nothing_had_happened(pieces, data, path):
    opening, frames, closing, prompt = written(path, pieces)
    at = data.draw(st.integers(0 if path == RESPONSES else 1, len(pieces) - 1))
    part = data.draw(st.integers(0, len(frames[at]) - 3))
    first = opening + b"".join(frames[:at]) + frames[at][:part]
    watch, out = watch_of(path), b""
    chunk = data.draw(st.integers(1, 400))
    for start in range(0, len(first), chunk):
        out += watch.feed(first[start : start + chunk])
    shown = watch.trail.pieces
    assert watch.broken(FAULT) == b""
    assert watch.wants_ids
    said = list(range(70, 70 + len(shown)))
    watch.ids_are(prompt, said, [byte_level(text) for text in shown])
    rest, demand = watch.rest()
    body = json.loads(rest.body)
    assert (rest.endpoint, rest.dialect, rest.tells_ids) == (Endpoint.CHAT, Dialect.CHAT, True)
    assert body["kv_transfer_params"] == {"prompt_token_ids": [*prompt, *said]}
    assert (demand.prompt_tokens, demand.max_new_tokens) == (
        len(prompt) + len(said),
        100 - len(said),
    )
    more = b"".join(rest_of_chat([*prompt, *said], pieces[len(shown) :], 70 + len(shown)))
    for start in range(0, len(more), chunk):
        out += watch.feed(more[start : start + chunk])
    assert out + watch.close() == opening + b"".join(frames) + closing
    assert watch.complete
    assert watch.usage.prompt_tokens == len(prompt)
    assert watch.usage.completion_tokens == len(pieces)


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("path", ASKED)
def test_a_stream_that_its_limit_ends_tells_that_as_its_first_backend_would(path, newer):
    opening, frames, closing, prompt = written(path, ["a", "b", "c"], "length", newer=newer)
    watch = watch_of(path, limit=3)
    out = watch.feed(opening + b"".join(frames[:2]))
    assert watch.broken(FAULT) == b""
    watch.ids_are(prompt, [70, 71], ["a", "b"])
    assert watch.rest() is not None
    out += b"".join(map(watch.feed, rest_of_chat([*prompt, 70, 71], ["c"], 72, finish="length")))
    assert out + watch.close() == opening + b"".join(frames) + closing
    assert watch.complete


@pytest.mark.parametrize("path", ASKED)
def test_a_long_stream_goes_on_where_it_was(path):
    """Its frames were read several times before."""
    pieces = [f"word{number} " for number in range(600)]
    opening, frames, closing, prompt = written(path, pieces)
    watch = watch_of(path, limit=1000)
    out = b"".join(watch.feed(each) for each in (opening, *frames[:500]) if each)
    assert watch.broken(FAULT) == b""
    assert watch.trail.pieces == pieces[:500]
    said = list(range(70, 570))
    watch.ids_are(prompt, said, [byte_level(text) for text in pieces[:500]])
    assert watch.rest() is not None
    out += b"".join(map(watch.feed, rest_of_chat([*prompt, *said], pieces[500:], 570)))
    assert out == opening + b"".join(frames) + closing


def broken(path, pieces=("On", "ce"), **more):
    """Return a watch whose stream broke off, and its prompt."""
    opening, frames, _, prompt = written(path, [*pieces, "x"])
    watch = watch_of(path, **more)
    watch.feed(opening + b"".join(frames[:-1]))
    return watch, watch.broken(FAULT), prompt


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize(
    ("tokens", "goes_on"),
    [
        (["On", "ce"], True),
        (["O", "n", "ce"], True),
        (["Once"], False),
        (["O", "nce"], False),
        (["On"], False),
        (["On", "c\u0113"], False),
        (["On", "ce", "x"], False),
    ],
)
def test_ids_are_taken_if_each_frame_ends_with_a_token(path, tokens, goes_on):
    watch, ending, prompt = broken(path)
    assert ending == b""
    watch.ids_are(prompt, list(range(len(tokens))), tokens)
    assert (watch.rest() is not None) is goes_on
    assert watch.barrier is (None if goes_on else Barrier.IDS)


def test_a_prompt_that_is_longer_than_the_first_backend_told_is_another_one():
    watch, _, prompt = broken(MESSAGES)
    watch.ids_are([*prompt, 1], [8, 9], ["On", "ce"])
    assert watch.rest() is None
    assert watch.barrier is Barrier.IDS


@pytest.mark.parametrize("path", ASKED)
def test_nobody_tells_the_ids(path):
    watch, _, prompt = broken(path)
    watch.ids_are([], [], [])
    assert watch.rest() is None
    assert watch.barrier is Barrier.IDS


@given(
    st.lists(TEXTS, min_size=1, max_size=6),
    st.lists(TEXTS, min_size=1, max_size=6),
    st.data(),
    st.sampled_from([*ASKED]),
)
def test_a_tool_call_of_who_goes_on_is_as_if_nothing_had_happened(pieces, arguments, data, path):
    before, call_frames, prompt = written_with_a_call(path, pieces, arguments)
    first = b"".join(before[: data.draw(st.integers(2, len(before)))])
    watch = watch_of(path)
    out, shown = watch.feed(first), watch.trail.pieces
    assert watch.broken(FAULT) == b""
    watch.offer(OFFERED)
    said = list(range(70, 70 + len(shown)))
    watch.ids_are(prompt, said, [byte_level(text) for text in shown])
    rest, _ = watch.rest()
    body = json.loads(rest.body)
    assert (body["tools"], body["tool_choice"]) == ([1], "auto")
    token = 70 + len(shown)
    chat = [role([*prompt, *said])]
    for text in pieces[len(shown) :]:
        chat.append(frame(text, [token]))
    begins = {"index": 0, "id": "chatcmpl-tool-resp_1", "type": "function"}
    chat.append(frame(None, [5], tool_calls=[begins | {"function": {"name": "look"}}]))
    for place, part in enumerate(arguments):
        ends = "tool_calls" if place + 1 == len(arguments) else None
        chat.append(frame(None, [5], finish=ends, **calls((0, part, None))))
    more = b"".join([*chat, b"data: [DONE]\n\n"])
    chunk = data.draw(st.integers(1, 400))
    for start in range(0, len(more), chunk):
        out += watch.feed(more[start : start + chunk])
    assert out + watch.close() == b"".join([*before, *call_frames])


@pytest.mark.parametrize("path", ASKED)
def test_several_calls_of_who_goes_on_are_told_one_after_the_other(path):
    watch = gone_on(path)
    out = watch.feed(frame("!", [5], **calls((0, '{"a":', "look"))))
    out += watch.feed(frame(None, [5], **calls((0, "1}", None), (1, "", "run"), (1, "{}", None))))
    out += watch.feed(frame(None, [5], finish="tool_calls")) + watch.close()
    told = [json.loads(each.partition(b"data: ")[2]) for each in out.split(b"\n\n") if each]
    assert watch.complete
    if path == MESSAGES:
        kinds = [(each["type"], each.get("index")) for each in told]
        assert kinds == [
            ("content_block_delta", 0),
            ("content_block_stop", 0),
            ("content_block_start", 1),
            ("content_block_delta", 1),
            ("content_block_delta", 1),
            ("content_block_stop", 1),
            ("content_block_start", 2),
            ("content_block_delta", 2),
            ("content_block_stop", 2),
            ("message_delta", None),
            ("message_stop", None),
        ]
        assert told[-2]["delta"]["stop_reason"] == "tool_use"
    else:
        text, first, second = told[-1]["response"]["output"]
        assert text["content"][0]["text"] == "Once!"
        assert (first["name"], first["arguments"]) == ("look", '{"a":1}')
        assert (second["name"], second["arguments"]) == ("run", "{}")
        assert len({text["id"], first["id"], second["id"]}) == 3
        assert [each["sequence_number"] for each in told] == sorted(
            each["sequence_number"] for each in told
        )


@pytest.mark.parametrize("path", ASKED)
def test_text_behind_a_call_is_told_as_vllm_tells_it(path):
    """In a message it waits until the call ends; in a response it ends the call."""
    watch = gone_on(path)
    out = watch.feed(frame(None, [5], **calls((0, "{}", "look"))))
    out += watch.feed(frame("do", [5])) + watch.feed(frame("ne", [5]))
    out += watch.feed(frame(None, [5], finish="stop")) + watch.close()
    told = [json.loads(each.partition(b"data: ")[2]) for each in out.split(b"\n\n") if each]
    if path == MESSAGES:
        blocks = [each["content_block"]["type"] for each in told if "content_block" in each]
        assert blocks == ["tool_use", "text"]
        assert [each["delta"] for each in told if each["type"] == "content_block_delta"][-1] == {
            "type": "text_delta",
            "text": "done",
        }
        assert told[-2]["delta"]["stop_reason"] == "tool_use"
    else:
        output = told[-1]["response"]["output"]
        assert [each["type"] for each in output] == ["message", "function_call", "message"]
        assert [each["content"][0]["text"] for each in output[::2]] == ["Once", "done"]


@pytest.mark.parametrize("path", ASKED)
def test_a_call_that_the_limit_cut_short_is_told_as_cut(path):
    watch = gone_on(path)
    out = watch.feed(frame(None, [5], **calls((0, '{"a"', "look"))))
    out += watch.feed(frame(None, [5], finish="length")) + watch.close()
    last = json.loads(out.split(b"\n\n")[-3 if path == MESSAGES else -2].partition(b"data: ")[2])
    if path == MESSAGES:
        assert last["delta"]["stop_reason"] == "max_tokens"
    else:
        assert last["response"]["status"] == "incomplete"


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("odd", [(1, "{}", None), (0, "{}", None)])
def test_arguments_of_no_call_end_the_stream(path, odd):
    watch = gone_on(path)
    if odd[0]:
        watch.feed(frame(None, [5], **calls((0, "{}", "look"))))
    assert b"could not be resumed" in watch.feed(frame(None, [5], **calls(odd)))


@pytest.mark.parametrize("path", ASKED)
def test_a_chunk_that_cannot_be_read_ends_the_stream(path):
    watch = gone_on(path)
    assert b"could not be resumed" in watch.feed(b'data: {"choices":[{"delta":5}]}\n\n')


@pytest.mark.parametrize("path", ASKED)
def test_arguments_that_are_too_long_end_the_stream(path):
    watch = gone_on(path)
    out = watch.feed(frame(None, [5], **calls((0, "{", "look"))))
    for _ in range(1100):
        out += watch.feed(frame(None, [5], **calls((0, "x" * 1000, None))))
    assert b"could not be resumed" in out


@pytest.mark.parametrize("path", ASKED)
def test_what_a_parser_may_have_held_back_matters_only_where_one_looks_for_calls(path):
    watch, _, _ = broken(path)
    assert watch.marks == ()
    watch.offer(OFFERED)
    assert "<" in watch.marks
    watch.offer(OFFERED | {"tool_choice": Raw(b'"none"')})
    assert watch.marks == ()
    watch.offer(None)
    assert watch.barrier is Barrier.REQUEST


STOP = {MESSAGES: "stop_sequences", RESPONSES: "stop"}


@given(st.data(), st.sampled_from([*ASKED]), st.sampled_from([0, 1]))
def test_with_stop_strings_a_stream_goes_on_behind_the_last_token_that_is_known(
    data, path, temperature
):
    """An engine shows the text of its tokens but for three characters; they and more are said again."""
    words = st.text("ab", min_size=1, max_size=5)
    tokens = data.draw(st.lists(words, min_size=1, max_size=8))
    text = "".join(tokens)
    ends = [sum(map(len, tokens[: place + 1])) for place in range(len(tokens))]
    shown_to = [max(0, each - 3) for each in ends]
    pieces = [text[start:end] for start, end in zip([0, *shown_to], shown_to, strict=False)]
    pieces, shown = [each for each in pieces if each], text[: shown_to[-1]]
    assume(pieces)
    watch, _, prompt = broken(path, pieces, temperature=temperature, **{STOP[path]: ["xyz!"]})
    known = [each for each in ends if 3 < each <= len(shown)]  # those before showed nothing
    seam = known[-1] if known else 0
    again = shown[seam:]
    if temperature and again:
        assert watch.barrier is Barrier.SEAM
        return
    assert watch.wants_ids
    # A tokenizer cuts the text that was shown, whose last token may be another one.
    cut = [text[i:j] for i, j in zip([0, *known], known, strict=False)]
    cut += [again] if again else []
    watch.ids_are(prompt, [70 + each for each in range(len(cut))], cut)
    rest, _ = watch.rest()
    body = json.loads(rest.body)
    assert body["stop"] == ["xyz!"]
    reply = [70 + each for each in range(len(known))]
    assert body["kv_transfer_params"] == {"prompt_token_ids": [*prompt, *reply]}
    out = watch.feed(role([*prompt, *reply]))
    for char in again + "on":
        out += watch.feed(frame(char, [5]))
    told = [json.loads(each.partition(b"data: ")[2]) for each in out.split(b"\n\n") if each]
    deltas = [each["delta"] for each in told if each["type"].endswith("delta")]
    assert "".join(each if path == RESPONSES else each["text"] for each in deltas) == "on"


@pytest.mark.parametrize("path", ASKED)
def test_a_rest_that_does_not_say_again_what_was_shown_ends_the_stream(path):
    for said, finish in (("x", None), ("c", "stop")):
        watch, _, prompt = broken(path, **{STOP[path]: ["xyz!"]})
        watch.ids_are(prompt, [8, 9], ["On", "ce"])
        assert watch.rest() is not None
        watch.feed(role(prompt))
        assert b"could not be resumed" in watch.feed(frame(said, [5], finish=finish))


@pytest.mark.parametrize("path", ASKED)
def test_while_what_was_shown_is_said_again_nobody_else_goes_on(path):
    watch, _, prompt = broken(path, **{STOP[path]: ["xyz!"]})
    watch.ids_are(prompt, [8, 9], ["On", "ce"])
    assert watch.rest() is not None
    watch.feed(role(prompt) + frame("On", [5]))
    assert watch.broken(FAULT)
    assert watch.barrier is Barrier.SEAM
    assert watch.rest() is None


HELD = 3  # characters, as of the stop string xyz!


def shown_of(tokens):
    """Return what an engine shows after each token, while it looks for a stop string of four characters."""
    text, shown, frames = "", 0, []
    for token in tokens:
        text += token
        frames.append(text[shown : max(shown, len(text) - HELD)])
        shown = max(shown, len(text) - HELD)
    return frames


@given(st.data(), st.sampled_from([*ASKED]))
def test_with_stop_strings_a_stream_goes_on_more_than_once(data, path):
    """Each who goes on begins behind a token, and holds back as many characters as the one before."""
    words = st.lists(st.text("ab", min_size=1, max_size=5), min_size=6, max_size=16)
    tokens, left = data.draw(words), 3
    text = "".join(tokens)
    ends = [sum(map(len, tokens[:count])) for count in range(len(tokens) + 1)]
    pieces = [each for each in shown_of(tokens[: data.draw(st.integers(1, 8))]) if each]
    assume(pieces)
    watch, _, prompt = broken(path, pieces, **{STOP[path]: ["xyz!"]})
    shown = "".join(pieces)
    while left:
        if watch.wants_ids:  # else nothing was said since they were told
            known = [each for each in ends if each <= len(shown)]
            cut = [text[i:j] for i, j in zip(known, known[1:], strict=False)]
            cut += [shown[known[-1] :]] if known[-1] < len(shown) else []
            assert watch.ids_are(prompt, [70 + place for place in range(len(cut))], cut)
        rest, _ = watch.rest()
        given = json.loads(rest.body)["kv_transfer_params"]["prompt_token_ids"]
        begun = len(given) - len(prompt)  # tokens; they end before what was shown
        assert ends[begun] <= len(shown)
        assert not begun or given[-1] == 69 + begun
        told = watch.feed(role(given))
        more = shown_of(tokens[begun : begun + data.draw(st.integers(1, 9))])
        told += b"".join(watch.feed(frame(each or None, [5])) for each in more)
        assume(ends[begun] + len("".join(more)) >= len(shown))  # else it is still said again
        shown = text[: ends[begun] + len("".join(more))]
        assert "".join(watch.trail.pieces) == shown
        left -= 1
        if left:
            assert watch.broken(FAULT) == b""


@pytest.mark.parametrize("path", ASKED)
def test_one_that_reads_another_prompt_is_not_passed_on(path):
    watch, _, prompt = broken(path)
    watch.ids_are(prompt, [8, 9], ["On", "ce"])
    assert watch.rest() is not None
    out = watch.feed(role(prompt) + frame("anew", [5]))
    assert b"could not be resumed" in out
    assert b"anew" not in out


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize(
    "odd",
    [{"reasoning": "hm"}, {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f"}}]}],
)
def test_a_rest_that_is_no_text_ends_the_stream(path, odd):
    watch, _, prompt = broken(path)
    watch.ids_are(prompt, [8, 9], ["On", "ce"])
    watch.rest()
    out = watch.feed(role([*prompt, 8, 9]) + frame(None, [5], **odd))
    assert b"could not be resumed" in out
    assert not watch.complete


@pytest.mark.parametrize("path", ASKED)
def test_a_rest_that_is_aborted_may_go_on_once_more(path):
    watch, _, prompt = broken(path)
    watch.ids_are(prompt, [8, 9], ["On", "ce"])
    watch.rest()
    assert b'"more"' in watch.feed(role([*prompt, 8, 9]) + frame("more", [5]))
    assert watch.feed(frame("", [], finish="abort")) == b""
    assert watch.wants_ids
    watch.ids_are(prompt, [8, 9, 5], ["On", "ce", "more"])
    assert watch.rest() is not None


def test_a_stop_in_the_rest_is_told_with_its_reason():
    for finish, reason in (("stop", "end_turn"), ("length", "max_tokens")):
        watch, _, prompt = broken(MESSAGES)
        watch.ids_are(prompt, [8, 9], ["On", "ce"])
        watch.rest()
        more = rest_of_chat([*prompt, 8, 9], ["x"], 5, finish)
        *_, delta, stop, _ = watch.feed(b"".join(more)).split(b"\n\n")
        told = json.loads(delta.partition(b"data: ")[2])
        assert told["delta"] == {"stop_reason": reason, "stop_sequence": None}
        assert b"message_stop" in stop


FOUND = b'event: content_block_start\ndata: {"type":"content_block_start","content_block":{"type":"web_search_tool_result"},"index":0}\n\n'
SEARCHED = b'event: response.output_item.added\ndata: {"item":{"id":"r","type":"web_search_call"},"output_index":0,"sequence_number":2,"type":"response.output_item.added"}\n\n'


@pytest.mark.parametrize(("path", "other"), [(MESSAGES, FOUND), (RESPONSES, SEARCHED)])
def test_what_is_no_text_ends_with_an_error_as_before(path, other):
    opening, frames, _, _ = written(path, ["On", "ce"])
    start = frames[0].split(b"\n\n")[0] + b"\n\n" if path == MESSAGES else opening
    watch = watch_of(path)
    watch.feed(start + other)
    assert b"it is gone" in watch.broken(FAULT)
    assert watch.barrier is Barrier.REPLY


@pytest.mark.parametrize("path", ASKED)
def test_the_end_of_a_text_is_held_back_until_it_is_known_why_it_ends(path):
    opening, frames, closing, _ = written(path, ["On", "ce"])
    first, between, more = closing.partition(b"\n\n")
    before, watch = opening + b"".join(frames), watch_of(path)
    assert watch.feed(before) + watch.feed(first + between) == before
    assert watch.feed(more) == closing
    assert watch.complete


@pytest.mark.parametrize("path", ASKED)
def test_what_has_no_name_yet_is_not_gone_on_with(path):
    watch = watch_of(path)
    assert watch.feed(b": keep-alive\n\n")
    assert b"it is gone" in watch.broken(FAULT)
    assert watch.barrier is Barrier.REPLY


def test_a_message_whose_end_was_told_is_not_gone_on_with():
    opening, frames, closing, _ = written(MESSAGES, ["On", "ce"])
    watch = watch_of(MESSAGES)
    watch.feed(opening + b"".join(frames) + closing.rpartition(b"event:")[0])
    assert b"it is gone" in watch.broken(FAULT)
    assert watch.barrier is Barrier.REPLY


@pytest.mark.parametrize("path", ASKED)
def test_what_is_too_long_to_be_kept_is_forgotten(path):
    opening, frames, _, _ = written(path, ["a" * 1000, "b"])
    watch = watch_of(path)
    watch.feed(opening + frames[0])
    again = frames[0].split(b"\n\n")[-2] + b"\n\n"
    for _ in range(1100):
        watch.feed(again)
    assert b"it is gone" in watch.broken(FAULT)
    assert watch.barrier is Barrier.REPLY
    assert watch.trail.pieces == []


def with_long_end(chars):
    """Return a response as it is written, in 64 KiB reads; its last event has so many characters of log probabilities."""
    opening, frames, closing, _ = written(RESPONSES, ["On", "ce"])
    at = closing.rfind(b"event: response.completed")
    last = json.loads(closing[at:].partition(b"data: ")[2])
    last["response"]["output"][0]["content"][0]["logprobs"] = ["x" * chars]
    end = b"event: response.completed\ndata: " + json.dumps(last).encode() + b"\n\n"
    data = opening + b"".join(frames) + closing[:at] + end
    return [data[start : start + 65536] for start in range(0, len(data), 65536)]


@pytest.mark.parametrize("chars", [1_000_000, 1_300_000])
@pytest.mark.parametrize("veil", [False, True])
def test_a_last_event_above_1_mib_passes(chars, veil):
    reads, watch = with_long_end(chars), watch_of(RESPONSES, veil=veil)
    assert b"".join(map(watch.feed, reads)) + watch.close() == b"".join(reads)
    assert watch.complete


def test_behind_a_part_of_an_event_nobody_goes_on():
    reads, watch = with_long_end(2_000_000), watch_of(RESPONSES)
    shown = b"".join(map(watch.feed, reads[:-1]))
    assert shown == b"".join(reads[:-1])
    assert watch.broken(FAULT).startswith(b"\n\nevent: error\n")
    assert watch.barrier is Barrier.REPLY


def test_behind_an_event_above_1_mib_the_stream_is_watched_as_any_other():
    opening, frames, closing, _ = written(RESPONSES, ["On", "ce"])
    odd = b'event: response.odd\ndata: {"type":"response.odd","x":"%b"}\n\n' % (b"x" * 2_000_000)
    data = opening + frames[0] + odd + b"".join(frames[1:]) + closing
    watch = watch_of(RESPONSES)
    out = b"".join(watch.feed(data[start : start + 9999]) for start in range(0, len(data), 9999))
    assert out + watch.close() == data
    assert watch.complete


def test_a_frame_of_a_rest_that_is_above_1_mib_is_not_passed_on():
    watch, _, prompt = broken(RESPONSES)
    watch.ids_are(prompt, [8, 9], ["On", "ce"])
    watch.rest()
    watch.feed(role([*prompt, 8, 9]))
    assert watch.feed(b"data: " + b"x" * 2_000_000) == b""
    assert watch.rest() is not None


FAILED = {
    MESSAGES: b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"no"}}\n\n',
    RESPONSES: b'event: error\ndata: {"type":"error","code":"server_error","message":"no","param":null,"sequence_number":6}\n\n',
}
UNNAMED = (
    b'data: {"error":{"message":"no","type":"InternalServerError","param":null,"code":500}}\n\n'
)
BEHIND = {
    MESSAGES: b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    RESPONSES: b'event: response.failed\ndata: {"type":"response.failed","sequence_number":7,"response":{"status":"failed"}}\n\n',
}


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("unnamed", [False, True])
@pytest.mark.parametrize("path", ASKED)
def test_what_follows_an_error_does_not_matter(path, unnamed, together):
    opening, frames, closing, _ = written(path, ["On", "ce"])
    error = UNNAMED if unnamed else FAILED[path]
    for more in (BEHIND[path], b"data: [DONE]\n\n", closing):
        watch = watch_of(path)
        shown = opening + b"".join(frames)
        out = watch.feed(shown)
        for part in [error + more] if together else [error, more]:
            out += watch.feed(part)
        assert out + watch.close() == shown
        assert watch.wants_ids


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("path", ASKED)
def test_an_error_that_nobody_goes_on_behind_is_the_last_event(path, together):
    opening, frames, _, _ = written(path, ["On", "ce"])
    watch = watch_of(path, presence_penalty=1)
    shown = opening + b"".join(frames)
    out = watch.feed(shown)
    parts = [FAILED[path], BEHIND[path]]
    out += b"".join(map(watch.feed, [b"".join(parts)] if together else parts)) + watch.close()
    assert out.startswith(shown + b"event: error\n")
    assert out.count(b"\n\n") == shown.count(b"\n\n") + 1
    assert not watch.complete


def test_the_end_of_a_resumed_response_is_not_told_without_its_text():
    watch, _, prompt = broken(RESPONSES, limit=None)
    watch.ids_are(prompt, [8, 9], ["On", "ce"])
    watch.rest()
    watch.feed(role([*prompt, 8, 9]))
    out = b"".join(watch.feed(frame("a" * 1000, [5])) for _ in range(1100))
    out += watch.feed(frame("", [6], finish="stop")) + watch.close()
    assert b'"text":""' not in out
    assert b"could not be resumed" in out
    assert not watch.complete


def test_the_end_of_a_message_does_not_need_its_text():
    watch, _, prompt = broken(MESSAGES, limit=None)
    watch.ids_are(prompt, [8, 9], ["On", "ce"])
    watch.rest()
    watch.feed(role([*prompt, 8, 9]))
    out = b"".join(watch.feed(frame("a" * 1000, [5])) for _ in range(1100))
    out += watch.feed(frame("", [6], finish="stop")) + watch.close()
    assert out.endswith(BEHIND[MESSAGES])
    assert watch.complete


def test_a_message_delta_without_a_reason_is_no_abort():
    """vLLM writes the reason of each, null for an abort; others tell the usage so in the middle."""
    opening, frames, closing, _ = written(MESSAGES, ["On", "ce"])
    early = b'event: message_delta\ndata: {"type":"message_delta","delta":{},"usage":{"output_tokens":1}}\n\n'
    watch, parts = watch_of(MESSAGES), [opening + frames[0], early, frames[1], closing]
    assert b"".join(map(watch.feed, parts)) + watch.close() == b"".join(parts)
    assert watch.complete


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (MESSAGES, {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "any"}}),
        (MESSAGES, {"tool_choice": {"type": "tool", "name": "f"}}),
        (MESSAGES, {"stop_sequences": ["x"], "tools": []}),
        (MESSAGES, {"stop": ["x"]}),
        (MESSAGES, {"thinking": "x"}),
        (MESSAGES, {"output_format": {"type": "json_schema"}}),
        (MESSAGES, {"mcp_servers": []}),
        (RESPONSES, {"stop_sequences": ["x"]}),
        (RESPONSES, {"stop": [5]}),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": {}}}}),
        (MESSAGES, {"output_config": {"effort": "low", "task_budget": {"total": 5}}}),
        (MESSAGES, {"output_config": "low"}),
        (RESPONSES, {"include_reasoning": False}),
        (MESSAGES, {"vllm_xargs": {"a": 1}}),
        (RESPONSES, {"tool_choice": "required"}),
        (RESPONSES, {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}),
        (RESPONSES, {"text": {"format": {"type": "json_object"}}}),
        (RESPONSES, {"text": "x"}),
        (RESPONSES, {"text": [1]}),
        (RESPONSES, {"text": {"format": 1}}),
        (MESSAGES, {"stop": 5}),
        (MESSAGES, {"stop_sequences": True}),
        (RESPONSES, {"include": ["message.output_text.logprobs"]}),
        (RESPONSES, {"presence_penalty": 1}),
        (RESPONSES, {"truncation": "auto"}),
        (RESPONSES, {"seed": 1, "temperature": 1}),
        (RESPONSES, {"skip_special_tokens": False}),
    ],
)
def test_some_requests_are_not_gone_on_with(path, more):
    assert not may_go_on(call(path, **more))
    watch, ending, _ = broken(path, **more)
    assert b"it is gone" in ending
    assert watch.barrier is Barrier.REQUEST


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (MESSAGES, {"system": "be kind", "top_k": 3, "metadata": {"user_id": "u"}, "tools": []}),
        (MESSAGES, {"stop_sequences": ["x", "long one"]}),
        (MESSAGES, {"thinking": {"type": "adaptive"}, "context_management": {"edits": []}}),
        (MESSAGES, {"thinking": {"type": "disabled"}, "output_config": None}),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 2000}}),
        (MESSAGES, {"output_config": {"effort": "xhigh", "format": None}, "speed": "fast"}),
        (MESSAGES, {"cache_control": {"type": "ephemeral"}, "diagnostics": {}, "betas": ["x"]}),
        (MESSAGES, {"chat_template_kwargs": {"enable_thinking": False}}),
        (RESPONSES, {"chat_template_kwargs": {"enable_thinking": False}}),
        (RESPONSES, {"client_metadata": {"a": "b"}, "session_id": "s", "include_reasoning": True}),
        (RESPONSES, {"include": ["reasoning.encrypted_content"], "text": {"verbosity": "low"}}),
        (RESPONSES, {"stop": "x"}),
        (RESPONSES, {"text": {"format": {"type": "text"}}, "seed": 1, "temperature": 0}),
        (MESSAGES, {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "auto"}}),
        (RESPONSES, {"tools": [{"type": "function", "name": "f"}], "tool_choice": "auto"}),
        (RESPONSES, {"instructions": "be kind", "reasoning": {"effort": "low"}, "store": False}),
    ],
)
def test_others_are(path, more):
    asked = call(path, **more)
    assert may_recite(asked)
    assert may_go_on(asked)


def test_what_asks_for_no_stream_is_not_kept():
    asked = call(MESSAGES)
    assert not may_recite(structs.replace(asked, stream=False))


@given(st.lists(TEXTS, max_size=8), st.data())
def test_tokens_fit_only_where_no_token_lies_across_the_end_of_a_piece(pieces, data):
    text = "".join(pieces)
    cuts = data.draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=8))
    ends = [each for each in sorted(cuts) if each < len(text)]
    tokens = [text[i:j] for i, j in zip([0, *ends], [*ends, len(text)], strict=True) if text[i:j]]
    inside = set()
    place = 0
    for piece in pieces:
        place += len(piece)
        inside.add(place)
    expected = inside - {len(text)} <= set(ends)
    found = fits(pieces, [byte_level(each) for each in tokens])
    assert found == (len(tokens) if expected else None)


def test_tokens_of_other_tokenizers_are_read_too():
    assert fits(["Once", " upon", "\u00e4"], ["Once", "\u2581upon", "<0xC3>", "<0xA4>"])
    assert not fits(["Once"], ["\u2581Once"])
    assert not fits(["a", "\ufffd"], ["a", *map(byte_level, ["\ufffd"])])


@pytest.mark.parametrize("path", ASKED)
def test_nothing_passes_behind_an_abort_or_an_error(path):
    opening, frames, closing, _ = written(path, ["On", "ce", "x"], finish="abort")
    failed = (
        b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"no"}}\n\n'
    )
    for last in (closing, failed):
        watch = watch_of(path)
        shown = opening + b"".join(frames[:2])
        assert watch.feed(shown) + watch.feed(last) == shown
        assert watch.wants_ids
        more = frames[2]
        chunk = b"%x\r\n%b\r\n" % (len(more), more)
        assert watch.by_sight(chunk) is None
        assert watch.feed(more) == b""
        assert watch.trail.pieces == ["On", "ce"]


class Asker:
    """A backend that answers with these bodies, one after the other."""

    def __init__(self, *replies):
        self.replies, self.asked = [*replies], []

    async def post(self, path, body, *, timeout_s):
        self.asked.append((path, json.loads(body)))
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        status, said = reply
        return status, json.dumps(said).encode()


def test_an_engine_tells_the_prompt_of_a_response():
    asked = call(RESPONSES, instructions="be kind", max_output_tokens=50, cache_salt="own")
    asker = Asker((200, {"input_messages": [{"tokens": [4, 5], "message": "x"}]}))
    found = asyncio.run(read_ids(asker, asked, "served", lambda own: f"{own}-t"))
    assert found == [4, 5]
    [(path, body)] = asker.asked
    assert path == RESPONSES
    assert body["model"] == "served"
    assert (body["stream"], body["store"], body["max_output_tokens"]) == (False, False, 1)
    assert body["enable_response_messages"] is True
    assert (body["input"], body["instructions"]) == ("tell", "be kind")
    assert body["cache_salt"] == "own-t"


def asked_for_prompt(asker, asked, served="m", prompt_tokens=2):
    return asyncio.run(prompt_ids(asker, served, call=asked, prompt_tokens=prompt_tokens))


def tokenized(*ids):
    return 200, {"count": len(ids), "max_model_len": 9, "tokens": ids}


INLINE = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
NOT_FIRST = (400, {"error": {"message": "System message must be at the beginning."}})


@pytest.mark.parametrize(
    ("replies", "told"),
    [
        ([tokenized(4, 5), tokenized(4, 5, 6)], [4, 5]),
        ([tokenized(4, 5, 6), tokenized(7, 8)], [7, 8]),
        ([NOT_FIRST, tokenized(7, 8)], [7, 8]),
        ([tokenized(4, 5), tokenized(4, 5)], [4, 5]),
        ([tokenized(4, 5), tokenized(7, 8)], []),  # it may be either
        ([tokenized(4, 5, 6), tokenized(7)], []),
        ([NOT_FIRST, tokenized(7)], []),
        ([(503, {})], None),
        ([tokenized(4, 5), OSError("gone")], None),  # who knows whether it is that one
    ],
)
def test_of_the_chats_that_a_message_may_become_the_one_with_as_many_tokens_counts(replies, told):
    asker = Asker(*replies)
    found = asked_for_prompt(asker, call(MESSAGES, system="s", messages=INLINE))
    assert (None if found is None else found.ids) == told
    shown = [[each["content"] for each in body["messages"]] for _, body in asker.asked]
    assert shown == [["s", "a", "b"], ["sb", "a"]][: len(shown)]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"output_config": {"effort": "max"}}, [("max", True)]),
        ({"thinking": {"type": "disabled"}}, [("low", True), ("none", False)]),
        (
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}},
            [("low", True), ("none", False)],
        ),
        (
            {
                "output_config": {"effort": "low"},
                "chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "high"},
            },
            [("low", False)],
        ),
        ({"chat_template_kwargs": {"enable_thinking": False}}, [(None, False)]),
        ({"thinking": {"type": "adaptive"}}, [(None, None)]),
    ],
)
def test_a_template_is_told_of_efforts_as_vllm_tells_it(more, told):
    asker = Asker(*[tokenized(4, 5)] * len(told))
    found = asked_for_prompt(asker, call(MESSAGES, **more))
    assert found.ids == [4, 5]
    kwargs = [body.get("chat_template_kwargs", {}) for _, body in asker.asked]
    assert [(each.get("reasoning_effort"), each.get("enable_thinking")) for each in kwargs] == told
    first = {name: json.loads(bytes(raw)) for name, raw in found.effort.items()}
    assert first.get("reasoning_effort") == told[0][0]
    assert first.get("chat_template_kwargs") == more.get("chat_template_kwargs")


def test_changes_of_tools_are_left_alone():
    changed = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "look"}}
    messages = [INLINE[0], {"role": "system", "content": [changed]}]
    assert asked_for_prompt(Asker(), call(MESSAGES, messages=messages)).ids == []


def test_whoever_goes_on_tells_its_parser_what_the_template_was_told():
    watch, _, prompt = broken(MESSAGES, thinking={"type": "disabled"})
    watch.offer({})
    watch.render_with({"reasoning_effort": Raw(b'"none"')})
    watch.offer({})  # it may be asked for more than once
    watch.ids_are(prompt, [8, 9], ["On", "ce"])
    body = json.loads(watch.rest()[0].body)
    assert body["reasoning_effort"] == "none"
    assert "chat_template_kwargs" not in body  # servers with Mistral's tokenizer refuse it
    asked = call(RESPONSES, reasoning={"effort": "none"}, chat_template_kwargs={"a": 1}, tools=[])
    offered = asyncio.run(offers_of(asked))
    assert {name: json.loads(bytes(raw)) for name, raw in offered.items()} == {
        "chat_template_kwargs": {"a": 1},
        "reasoning_effort": "none",
    }


def test_what_vllm_takes_no_notice_of_in_a_message_is_not_asked_for_in_its_rest():
    ignored = {"min_p": 0.5, "logit_bias": {"1": 5}, "priority": 3}
    for path in ASKED:
        watch, _, prompt = broken(path, top_k=4, **ignored)
        watch.ids_are(prompt, [8, 9], ["On", "ce"])
        body = json.loads(watch.rest()[0].body)
        assert body["top_k"] == 4
        assert ignored.keys() & body.keys() == (set() if path == MESSAGES else ignored.keys())


def test_a_tokenizer_tells_the_prompt_of_a_message():
    asker = Asker((200, {"count": 2, "max_model_len": 9, "tokens": [4, 5]}))
    asked = call(MESSAGES, system="be kind")
    assert asked_for_prompt(asker, asked, "served") == ([4, 5], {})
    [(path, body)] = asker.asked
    assert (path, body["model"]) == ("/tokenize", "served")
    assert [each["role"] for each in body["messages"]] == ["system", "user"]


@pytest.mark.parametrize(
    "reply",
    [
        (404, {}),
        (200, {"input_messages": None}),
        (200, {"input_messages": [{"role": "system", "content": []}]}),
        (200, []),
    ],
)
def test_who_does_not_tell_ids_tells_none(reply):
    assert asyncio.run(read_ids(Asker(reply), call(RESPONSES), "m", None)) is None
    assert asked_for_prompt(Asker(reply), call(MESSAGES)) is None
    assert asyncio.run(tokens_of(Asker(reply), "m", text="x")) is None


@pytest.mark.parametrize("reply", [(500, {}), OSError("gone")])
def test_whoever_fails_as_it_reads_a_prompt_may_have_died_of_it(reply):
    with pytest.raises(OSError, match="500|gone"):
        asyncio.run(read_ids(Asker(reply), call(RESPONSES), "m", None))
    assert asked_for_prompt(Asker(reply), call(MESSAGES)) is None
    assert asyncio.run(tokens_of(Asker(reply), "m", text="x")) is None


def test_an_image_has_no_ids():
    image = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    asked = call(MESSAGES, messages=[{"role": "user", "content": [image]}])
    assert not may_go_on(asked)
    assert asked_for_prompt(Asker(), asked) == ([], {})


def test_no_text_has_no_tokens():
    assert asyncio.run(tokens_of(Asker(), "m", text="")) == ([], [])


@pytest.mark.parametrize("path", ASKED)
def test_a_stream_that_its_first_backend_aborted_may_leave_the_next_one_too(path):
    opening, frames, closing, prompt = written(path, ["On", "ce"], finish="abort")
    watch = watch_of(path)
    watch.feed(opening + b"".join(frames) + closing)
    watch.offer({})
    assert watch.ids_are(prompt, [8, 9], ["On", "ce"])
    assert watch.rest() is not None
    watch.feed(role([*prompt, 8, 9]))
    watch.feed(frame(" up", [10]))
    assert watch.could_leave


@pytest.mark.parametrize("odd", [b"[1,2]", b'{"a":1}', b"7"])
def test_a_block_of_no_known_type_ends_nothing_but_the_wish_to_go_on(odd):
    path = next(each for each in ASKED if "messages" in str(each))
    opening, frames, _, _ = written(path, ["On", "ce"])
    watch = watch_of(path)
    kind = b'"content_block":{"type":'
    garbled = (opening + b"".join(frames)).replace(kind + b'"text"', kind + odd)
    assert kind + odd in garbled
    watch.feed(garbled)
    watch.broken(FAULT)
    assert watch.rest() is None
