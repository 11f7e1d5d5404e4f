"""What is kept of a stream, what its client sees of that, and what another backend is asked for."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.types import Call, Demand, Dialect, Endpoint
from gateway.resume.rest import rest_of
from gateway.resume.rules import may_go_on, may_trail
from gateway.resume.stream import TrailedStream, add_up
from gateway.resume.trail import Reached
from gateway.wire.replies import Fault
from gateway.wire.sse import StreamWatch

FAULT = Fault(502, "server_error", "backend_error", "it is gone")
ENDPOINTS = {Dialect.CHAT: Endpoint.CHAT, Dialect.COMPLETIONS: Endpoint.COMPLETIONS}


def call(dialect=Dialect.CHAT, **body):
    body = {"model": "m", "stream": True, **body}
    body.setdefault(*(("messages", []) if dialect is Dialect.CHAT else ("prompt", "x")))
    data = json.dumps(body).encode()
    limit = body.get("max_tokens")
    return Call(ENDPOINTS[dialect], dialect, "m", True, data, max_new_tokens=limit, text_bytes=9)


def frame(text, ids, *, dialect=Dialect.CHAT, finish=None, prompt=None, **delta):
    inside = {"index": 0}
    if dialect is Dialect.CHAT:
        inside["delta"] = {"content": text} if text is not None else delta
    else:
        inside["text"] = text
    inside |= {"logprobs": None, "finish_reason": finish}
    if dialect is Dialect.COMPLETIONS:
        inside |= {"stop_reason": None, "prompt_token_ids": prompt}
    whole = {"id": "a-1", "object": "o", "created": 1, "model": "m", "choices": [inside]}
    if ids is not False:
        inside["token_ids"] = ids
    if dialect is Dialect.CHAT and prompt is not None:
        whole["prompt_token_ids"] = prompt
    return (
        b"data: " + json.dumps(whole, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"
    )


def role(prompt):
    return frame(None, False, role="assistant", content="", prompt=prompt)


def stream(asked=None, demand=None):
    return TrailedStream(asked or call(), demand or Demand(3, exact=True), request_id="r")


def begun(*frames, asked=None, prompt=(1, 2, 3)):
    watch = stream(asked)
    watch.feed(role(list(prompt)))
    for each in frames:
        watch.feed(each)
    return watch


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


PIECES = st.lists(
    st.tuples(st.text(max_size=6), st.lists(st.integers(0, 200_000), min_size=1, max_size=3)),
    max_size=12,
)


@given(PIECES, st.data(), st.sampled_from(list(ENDPOINTS)))
def test_the_client_gets_what_it_had_got_without_however_the_bytes_come(pieces, data, dialect):
    plain, told = [], []
    for place, (text, ids) in enumerate(pieces):
        for out, kept in ((told, ids), (plain, None)):
            prompt = [5, 6] if place == 0 and kept and dialect is Dialect.COMPLETIONS else None
            out.append(frame(text, kept, dialect=dialect, prompt=prompt))
    if dialect is Dialect.CHAT:
        told.insert(0, role([5, 6]))
        plain.insert(0, role([5, 6]).replace(b"[5,6]", b"null"))
    whole = b"".join(told)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    watch, out = stream(call(dialect)), b""
    for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        out += watch.feed(whole[begin:end])
    assert out == b"".join(plain)


@given(st.lists(st.tuples(st.text(), st.integers(0, 200_000)), min_size=2))
def test_a_token_told_by_sight_is_what_a_frame_by_frame_reading_gives(pieces):
    seen, read = begun(), begun()
    fits = StreamWatch(Dialect.CHAT, choices=1, hide_usage=False, request_id="r")
    fits.feed(frame("x", None))
    for text, token in pieces:
        one = frame(text, [token])
        told = seen.by_sight(chunk(one))
        stripped = read.feed(one)
        if told is None:
            told = chunk(seen.feed(one))
        assert told == chunk(stripped) == chunk(frame(text, None))
    assert seen.trail.reached() == read.trail.reached()


def test_it_goes_on_after_the_last_token_that_showed_text():
    watch = begun(frame("a", [7]), frame("b", [8]), frame("", [9]), frame("", [10]))
    assert watch.trail.reached() == Reached([1, 2, 3], [7, 8])


def test_before_any_text_it_goes_on_at_the_beginning():
    assert begun(frame("", [9])).trail.reached() == Reached([1, 2, 3], [])


@pytest.mark.parametrize(
    "delta", [{"tool_calls": [{"index": 0}]}, {"reasoning": "hm"}, {"reasoning_content": "hm"}]
)
def test_what_is_no_text_cannot_be_gone_on_with_even_when_text_follows(delta):
    watch = begun(frame(None, [7], **delta), frame("b", [8]), frame("c", [9]))
    assert watch.trail.reached() is None
    assert b"it is gone" in watch.broken(FAULT)


def test_a_backend_that_tells_no_ids_ends_with_an_error():
    watch = stream()
    watch.feed(frame("a", None))
    assert watch.cut is None
    assert b"it is gone" in watch.broken(FAULT)


def test_a_fault_of_the_client_is_told():
    watch = begun(frame("a", [7]))
    refused = Fault(400, "invalid_request_error", "bad", "no")
    assert b'"no ' in watch.broken(refused)


def test_a_stream_goes_on_three_times_at_most():
    watch = begun(frame("a", [7]))
    for _ in range(3):
        assert watch.broken(FAULT) == b""
        assert watch.rest() is not None
    assert b"it is gone" in watch.broken(FAULT)


def test_one_that_had_said_everything_only_lacks_its_end():
    watch = begun(frame("a", [7], finish="stop"))
    ending = watch.broken(FAULT)
    assert ending.endswith(b"data: [DONE]\n\n")
    assert b"it is gone" not in ending
    assert watch.complete


def test_the_rest_is_asked_for_with_what_is_left_of_its_limits():
    reached = Reached([1, 2], [7, 8, 9])
    asked, demand = rest_of(call(max_tokens=10, min_tokens=4), Demand(2, exact=False), reached)
    body = json.loads(asked.body)
    assert body["kv_transfer_params"] == {"prompt_token_ids": [1, 2, 7, 8, 9]}
    assert (body["min_tokens"], demand.max_new_tokens, demand.prompt_tokens) == (1, 7, 5)
    asked, _ = rest_of(call(Dialect.COMPLETIONS), Demand(2, exact=False), reached)
    assert json.loads(asked.body)["prompt"] == [1, 2, 7, 8, 9]


def test_there_is_no_rest_of_what_reached_its_limit():
    assert rest_of(call(max_tokens=3), Demand(2, exact=False), Reached([1], [7, 8, 9])) is None


def test_what_was_said_before_counts_as_output_and_no_more_as_prompt():
    usage = {
        "prompt_tokens": 30, "total_tokens": 40, "completion_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 28},
    }  # fmt: skip
    add_up(usage, 12)
    assert usage == {
        "prompt_tokens": 18, "total_tokens": 40, "completion_tokens": 22,
        "prompt_tokens_details": {"cached_tokens": 18},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("body", "goes_on"),
    [
        ({}, True),
        ({"temperature": 0.7, "top_p": 0.9, "user": "u", "max_tokens": 9}, True),
        ({"seed": 1}, False),
        ({"seed": 1, "temperature": 0}, True),
        ({"presence_penalty": 0}, True),
        ({"presence_penalty": 1}, False),
        ({"response_format": {"type": "text"}}, True),
        ({"response_format": {"type": "json_object"}}, False),
        ({"structured_outputs": {"regex": "a"}}, False),
        ({"tools": [{}], "tool_choice": "auto"}, True),
        ({"tools": [{}], "tool_choice": "required"}, False),
        ({"logprobs": False, "stop": [], "echo": False}, True),
        ({"stop": "x"}, False),
        ({"something_new": 1}, False),
    ],
)
def test_only_what_is_known_to_be_exact_goes_on(body, goes_on):
    assert may_go_on(call(**body)) is goes_on


def test_a_client_that_wants_the_ids_itself_gets_them():
    assert may_trail(call())
    assert not may_trail(call(return_token_ids=True))
