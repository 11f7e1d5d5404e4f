"""The counts of cached tokens: hidden however the bytes come, and nothing else is touched."""

import json

import pytest

from gateway.core.types import Dialect
from gateway.wire.sse import CUT_SHORT, StreamWatch
from gateway.wire.veil import Veil, VeiledStream, veiled

REPLIES = [
    b'{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":8}}}',
    b'{"usage": {"input_tokens_details": {"cached_tokens" : 1234567}, "output_tokens": 5}}',
    b'{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"created_cache_tokens":8,"cached_tokens":0}}}',
    b'{"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":8,"cache_write_tokens":8,'
    b'"input_tokens_per_turn":[4, 5],"cached_tokens_per_turn":[8, 8]},"output_tokens":5}}',
]


@pytest.mark.parametrize("reply", REPLIES)
def test_the_counts_are_0_and_all_else_stays(reply):
    told = json.loads(veiled(reply))
    text = json.dumps(told)
    assert "8" not in text.replace("18", "")
    assert "1234567" not in text
    for name in ("prompt_tokens", "input_tokens", "output_tokens"):
        assert told["usage"].get(name) == json.loads(reply)["usage"].get(name)


@pytest.mark.parametrize("reply", REPLIES)
def test_pieces_of_any_size_say_the_same(reply):
    for size in range(1, len(reply)):
        veil = Veil()
        pieces = [veil.feed(reply[at : at + size]) for at in range(0, len(reply), size)]
        assert b"".join([*pieces, veil.end()]) == veiled(reply)


def test_what_messages_take_off_their_input_is_put_back():
    counts = b'"output_tokens":2,"cache_creation_input_tokens":%d,"cache_read_input_tokens": %d}}'
    reply = b'{"usage":{"input_tokens": 122,' + counts % (30, 384)
    expected = b'{"usage":{"input_tokens": 536,' + counts % (0, 0)
    assert veiled(reply) == expected
    for size in range(1, len(reply)):
        veil = Veil()
        pieces = [veil.feed(reply[at : at + size]) for at in range(0, len(reply), size)]
        assert b"".join([*pieces, veil.end()]) == expected


def test_text_that_speaks_of_them_is_the_clients():
    reply = json.dumps({"content": '{"cached_tokens": 5}', "usage": None}).encode()
    assert veiled(reply) == reply


def test_frames_are_not_held_back():
    frame = b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n'
    assert Veil().feed(frame) == frame


def watch(kind, dialect=Dialect.CHAT):
    return kind(dialect, choices=1, hide_usage=False, request_id="r")


def test_a_stream_says_nothing_of_the_cache_and_we_still_count_it():
    frames = [
        b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n',
        b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":8}}}\n\n',
        b"data: [DONE]\n\n",
    ]
    stream = b"".join(frames)
    plain, hidden = watch(StreamWatch), watch(VeiledStream)
    assert b'"cached_tokens":8' in plain.feed(stream)
    out = b"".join(hidden.feed(bytes([byte])) for byte in stream) + hidden.close()
    assert out == stream.replace(b'"cached_tokens":8', b'"cached_tokens":0')
    assert hidden.complete
    assert hidden.usage.cached_tokens == 8


def test_a_usage_that_waits_for_the_end_is_veiled_where_the_stream_breaks_off():
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":8}}}\n\n'
    plain, hidden = watch(StreamWatch), watch(VeiledStream)
    assert plain.feed(usage) + hidden.feed(usage) == b""
    assert plain.broken(CUT_SHORT).startswith(usage)
    assert hidden.broken(CUT_SHORT).startswith(usage.replace(b"8", b"0"))


def test_a_frame_too_long_to_be_held_is_veiled_too():
    text = "x" * 200_000
    frame = b'event: response.completed\ndata: {"type":"response.completed","response":{"status":"completed","output":"%b","usage":{"input_tokens":9,"output_tokens":1,"input_tokens_details":{"cached_tokens":8}}}}\n\n' % text.encode()  # fmt: skip
    hidden = watch(VeiledStream, Dialect.RESPONSES)
    out = b"".join(hidden.feed(frame[at : at + 999]) for at in range(0, len(frame), 999))
    assert out + hidden.close() == frame.replace(b'"cached_tokens":8', b'"cached_tokens":0')
