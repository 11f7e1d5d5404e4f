"""However the network cuts a stream: the same bytes reach the client, with the same verdict."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.types import Dialect, Usage
from gateway.wire.replies import Fault
from gateway.wire.sse import StreamWatch


def _frame(body: object) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


_TEXTS = st.sampled_from(
    ["", "a", "[DONE]", "data: x\n\n", '"finish_reason":"stop"', "\r\n\r\n", "é"]
)
_REASONS = st.sampled_from([None, None, None, None, "stop", "length", "abort"])
_USAGE = st.sampled_from([None, {"prompt_tokens": 3, "completion_tokens": 2}])


@st.composite
def _chunks(draw: st.DrawFn) -> bytes:
    choices = [
        {"index": index, "delta": {"content": draw(_TEXTS)}, "finish_reason": draw(_REASONS)}
        for index in draw(st.lists(st.integers(0, 2), max_size=2))
    ]
    body = {"id": "x", "choices": choices}
    if draw(st.booleans()):
        body["usage"] = draw(_USAGE)
    return _frame(body)


_OPENAI = st.one_of(
    _chunks(),
    _chunks(),
    st.sampled_from(
        [
            b"data: [DONE]\n\n",
            b'data: {"error": {"message": "m", "type": "t", "param": null, "code": 500}}\n\n',
            b": keep-alive\n\n",
            b"retry: 5\n\n",
            b"id: 7\ndata: {}\n\n",
            b"data: nonsense\n\n",
            b"\n\n",
            b"event: ping\n\n",
        ]
    ),
)


def _event(kind: str, **fields: object) -> bytes:
    return f"event: {kind}\n".encode() + _frame({"type": kind, **fields})


_RESPONSES = st.one_of(
    st.builds(
        lambda text, n: _event("response.output_text.delta", delta=text, sequence_number=n),
        _TEXTS,
        st.integers(0, 99),
    ),
    st.sampled_from(
        [
            _event("response.created", sequence_number=0),
            _event("response.completed", response={"status": "completed"}, sequence_number=99),
            _event("response.failed", response={}),
            _event("error", message="m"),
        ]
    ),
)
_MESSAGES = st.one_of(
    st.builds(lambda text: _event("content_block_delta", delta={"text": text}), _TEXTS),
    st.sampled_from(
        [
            _event("message_start", message={"usage": {"input_tokens": 4}}),
            _event("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 5}),
            _event("message_delta", delta={"stop_reason": None}),
            _event("message_stop"),
            _event("ping"),
            _event("error", error={"type": "x", "message": "m"}),
        ]
    ),
)
_STREAMS = st.one_of(
    st.tuples(st.just(Dialect.CHAT), st.lists(_OPENAI, max_size=8)),
    st.tuples(st.just(Dialect.COMPLETIONS), st.lists(_OPENAI, max_size=8)),
    st.tuples(st.just(Dialect.PLAIN), st.lists(_OPENAI, max_size=8)),
    st.tuples(st.just(Dialect.RESPONSES), st.lists(_RESPONSES, max_size=8)),
    st.tuples(st.just(Dialect.MESSAGES), st.lists(_MESSAGES, max_size=8)),
)

Verdict = tuple[bytes, bool, str | None, int | None, int, Usage | None]


def _run(dialect: Dialect, pieces: list[bytes], choices: int, hide: bool, cut: bool) -> Verdict:
    watch = StreamWatch(dialect, choices=choices, hide_usage=hide, request_id="r")
    out = b"".join([watch.feed(piece) for piece in pieces])
    out += (
        watch.broken(Fault(502, "server_error", "backend_error", "cut")) if cut else watch.close()
    )
    return (
        out,
        watch.complete,
        watch.failed,
        watch.fault and watch.fault.status,
        watch.events,
        watch.usage,
    )


def _cut(whole: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted({place % (len(whole) + 1) for place in places}), len(whole)]
    return [whole[a:b] for a, b in zip(edges, edges[1:], strict=False)]


@given(
    stream=_STREAMS,
    tail=st.integers(0, 30),
    crlf=st.booleans(),
    places=st.lists(st.integers(0, 10_000), max_size=12),
    choices=st.integers(1, 3),
    hide=st.booleans(),
    cut=st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_any_cutting_gives_the_same_bytes_and_verdict(
    stream, tail, crlf, places, choices, hide, cut
):
    dialect, parts = stream
    whole = b"".join(parts)
    whole = whole[: len(whole) - tail]  # the last frame may be missing its end
    if crlf:
        whole = whole.replace(b"\n", b"\r\n")
    expected = _run(dialect, [whole], choices, hide, cut)
    assert _run(dialect, _cut(whole, places), choices, hide, cut) == expected
    assert (
        _run(dialect, [whole[i : i + 1] for i in range(len(whole))], choices, hide, cut) == expected
    )


@given(stream=_STREAMS, choices=st.integers(1, 3), cut=st.booleans())
@settings(max_examples=300, deadline=None)
def test_every_stream_ends_once_and_tells_of_a_failure_once(stream, choices, cut):
    dialect, parts = stream
    out, complete, failed, _, _, _ = _run(dialect, parts, choices, hide=False, cut=cut)
    assert complete == (not failed)
    if dialect in (Dialect.CHAT, Dialect.COMPLETIONS, Dialect.PLAIN):
        assert out.endswith(b"data: [DONE]\n\n")
        assert out.count(b"\ndata: [DONE]\n") + out.startswith(b"data: [DONE]\n") == 1
        assert out.count(b'data: {"error"') == failed
    else:
        told = out.count(b"event: error\n") + out.count(b"event: response.failed\n")
        assert told == failed or b"event: response.failed\n" in out


@given(data=st.binary(max_size=400), dialect=st.sampled_from(Dialect), at=st.integers(0, 400))
@settings(max_examples=300, deadline=None)
def test_no_bytes_make_it_fail(data, dialect, at):
    watch = StreamWatch(dialect, choices=1, hide_usage=True, request_id="r")
    watch.feed(data[:at])
    watch.feed(data[at:])
    watch.close()
