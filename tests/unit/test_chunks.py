"""One more token, told by sight, as strictly as the parser and the judge would."""

import json

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.wire.chunks import Shape, inside, unframed


def frame(text, **more):
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None} | more
    return b"data: " + json.dumps({"id": "x", "choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"  # fmt: skip


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


def learnt(text="one"):
    shape = Shape()
    shape.learn(frame(text))
    return shape


class Body:
    def __init__(self):
        self.data, self.chunks, self.ended = b"", 0, False

    def on_body(self, data):
        self.data += data

    def on_chunk_complete(self):
        self.chunks += 1

    def on_message_complete(self):
        self.ended = True


def parsed(data):
    body = Body()
    httptools.HttpResponseParser(body).feed_data(
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + data
    )
    return body


def test_nothing_fits_before_a_frame_was_learnt_or_after_it_was_forgotten():
    assert not Shape().fits(chunk(frame("a")))
    shape = learnt()
    shape.forget()
    assert not shape.fits(chunk(frame("one")))


@pytest.mark.parametrize(
    "text", ["", "a", " token", "é", 'a "quoted" word', "line\nbreak", "[DONE]"]
)
def test_another_token_fits(text):
    assert learnt().fits(chunk(frame(text)))


@pytest.mark.parametrize(
    "data",
    [
        chunk(frame("a"))[:-1],
        chunk(frame("a"))[:-2],
        chunk(frame("a")) + b"5",
        chunk(frame("a")) * 2,
        chunk(frame("a") * 2),
        b"0" + chunk(frame("a")),
        chunk(frame("a")).replace(b"\r\n", b";x=y\r\n", 1),
        chunk(frame("a")).replace(b"\r\n", b"\n", 1),
        b"+" + chunk(frame("a"))[1:],
        chunk(b"data: [DONE]\n\n"),
        chunk(frame("a", finish_reason="stop")),
        chunk(frame("a", index=1)),
        chunk(frame("a").replace(b'"x"', b'"y"')),
        chunk(frame("a").replace(b'"a"', b'"a","error":"b"')),
        chunk(frame('back\\slash and "quote"')),
        chunk(frame("long" * 2000)),
        b"",
        b"0\r\n\r\n",
    ],
)
def test_anything_else_is_left_to_the_parser(data):
    assert not learnt().fits(data)


@pytest.mark.parametrize(
    "texts", [["a"], ["a", "b"], [""] * 3, ["é", 'a "quoted" word', "long" * 500]]
)
def test_several_tokens_in_one_read_are_counted(texts):
    assert len(learnt().split(b"".join(chunk(frame(text)) for text in texts))) == len(texts)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        chunk(frame("a")) + chunk(frame("b"))[:-1],
        chunk(frame("a")) + chunk(frame("b", finish_reason="stop")),
        chunk(frame("a")) + b"0\r\n\r\n",
        chunk(frame("a") * 2),
        chunk(frame("a")) + b"\r\n" + chunk(frame("b")),
        chunk(frame("a")) + frame("b"),
    ],
)
def test_several_of_which_one_is_no_token_are_left_to_the_parser(data):
    assert learnt().split(data) == []
    assert Shape().split(data) == []


@given(st.lists(st.text(max_size=20), min_size=1, max_size=4), st.data())
def test_what_is_counted_is_what_the_parser_would_find(texts, data):
    whole = b"".join(chunk(frame(text)) for text in texts)
    at = data.draw(st.integers(0, len(whole)))
    cut = data.draw(st.integers(at, min(len(whole), at + 3)))
    candidate = whole[:at] + data.draw(st.binary(max_size=4)) + whole[cut:]
    if count := len(learnt().split(candidate)):
        body = parsed(candidate)
        assert body.chunks == count == body.data.count(b'"finish_reason":null')


def test_a_frame_without_a_string_value_is_not_learnt():
    shape = Shape()
    shape.learn(b'data: {"choices":[{"index":0,"delta":{},"finish_reason":null}]}\n\n')
    assert not shape.fits(chunk(b'data: {"choices":[{"index":0,"delta":{},"finish_reason":null}]}\n\n'))  # fmt: skip


@given(st.text(max_size=1000), st.text(max_size=1000))
def test_what_fits_is_one_chunk_of_one_frame_that_differs_in_its_text_only(first, second):
    data = chunk(frame(second))
    if learnt(first).fits(data):
        body = parsed(data)
        assert (body.data, body.chunks) == (frame(second), 1)
        seen = json.loads(body.data[6:])
        assert seen == json.loads(frame("")[6:]) | {"choices": seen["choices"]}
        assert [each["finish_reason"] for each in seen["choices"]] == [None]


@given(st.data())
def test_bytes_put_anywhere_into_a_chunk_never_make_the_parser_see_something_else(data):
    whole = chunk(frame("token"))
    at = data.draw(st.integers(0, len(whole)))
    cut = data.draw(st.integers(at, min(len(whole), at + 3)))
    candidate = whole[:at] + data.draw(st.binary(max_size=4)) + whole[cut:]
    if learnt().fits(candidate):
        body = parsed(candidate)
        assert body.chunks == 1
        assert chunk(body.data) == candidate


@pytest.mark.parametrize("data", [b"x", b"ab" * 9, frame("a"), frame("a") + b"data: [DONE]\n\n"])
def test_what_is_exactly_one_chunk_is_taken_out_of_it(data):
    assert inside(chunk(data)) == data


@given(st.binary(min_size=1, max_size=300), st.data())
def test_what_is_taken_out_of_a_chunk_is_what_the_parser_finds_in_it(content, data):
    whole = chunk(content)
    at = data.draw(st.integers(0, len(whole)))
    cut = data.draw(st.integers(at, min(len(whole), at + 3)))
    candidate = whole[:at] + data.draw(st.binary(max_size=4)) + whole[cut:]
    if found := inside(candidate):
        body = parsed(candidate)
        assert (body.data, body.chunks) == (found, 1)


@pytest.mark.parametrize("size", [0, 4090, 4096, 70_000])
def test_the_last_chunk_and_long_ones_are_left_to_the_parser(size):
    assert inside(chunk(b"x" * size)) == b""


LAST = b"0\r\n\r\n"


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize(
    "held", [[b"a"], [b"a", b"bc" * 99], [frame("a"), frame("b"), b"data: [DONE]\n\n"]]
)
def test_what_several_whole_chunks_hold_is_taken_out_of_them(held, ends):
    assert unframed(b"".join(map(chunk, held)) + LAST * ends) == (b"".join(held), ends)


def test_the_last_chunk_may_come_alone():
    assert unframed(LAST) == (b"", True)


@pytest.mark.parametrize(
    "data",
    [
        chunk(b"a")[:-1],
        chunk(b"a") + b"1",
        chunk(b"a") + b"5x",
        chunk(b"a") + LAST + b"x",
        chunk(b"a") + LAST[:-1],
        chunk(b"a") + b"0\r\nx: y\r\n\r\n",
        chunk(b"a") + b"00\r\n\r\n",
        b"1;x=y\r\na\r\n",
        b"01\r\na\r\n",
        b"A\r\n" + b"x" * 10 + b"\r\n",
        b"+1\r\na\r\n",
        b"1\na\r\n",
        b"1\r\na\n\n",
        chunk(b"x" * 5000),
    ],
)
def test_what_is_anything_else_than_whole_chunks_is_left_to_the_parser(data):
    assert unframed(data) is None


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=3), st.booleans(), st.data())
def test_what_is_taken_out_of_chunks_is_what_the_parser_finds_in_them(held, ends, data):
    whole = b"".join(map(chunk, held)) + LAST * ends
    at = data.draw(st.integers(0, len(whole)))
    cut = data.draw(st.integers(at, min(len(whole), at + 3)))
    candidate = whole[:at] + data.draw(st.binary(max_size=4)) + whole[cut:]
    found = unframed(candidate)
    if found is not None:
        body = parsed(candidate)
        assert (body.data, body.ended) == found
