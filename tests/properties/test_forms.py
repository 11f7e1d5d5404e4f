"""A form is read the same in whatever pieces it comes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.errors import RequestError
from gateway.wire.calls import ENDPOINTS, form_call, upstream_body
from gateway.wire.forms import FormReader

FORM = b"multipart/form-data; boundary=XX"
SPEECH = ENDPOINTS[b"/v1/audio/transcriptions"]

_NAMES = st.sampled_from([b"a", b"model", b"file", b"stream", b"chat_template", b"\xff", b'x"; y'])
_VALUES = st.one_of(
    st.binary(max_size=20),
    st.sampled_from([b"", b"true", b"maybe", b"w" * 65_537, b"\r\n--X", b"\r\n\r\n", b"\r\n--XY"]),
)
_PARTS = st.lists(st.tuples(_NAMES, _VALUES, st.booleans()), max_size=5)
_ENDS = st.sampled_from([b"--XX--\r\n", b"--XX--", b"--XX-", b"--XX\r\n", b"--XXnot", b""])


def written(parts, end):
    body = b""
    for name, value, is_file in parts:
        extra = b'; filename="f"' if is_file else b""
        body += b'--XX\r\nContent-Disposition: form-data; name="' + name + b'"' + extra
        body += b"\r\n\r\n" + value + b"\r\n"
    return body + end


def read(pieces):
    """Return all that a reader found, or why it refused."""
    reader = FormReader(FORM)
    try:
        for piece in pieces:
            reader.feed(piece)
        reader.end()
    except RequestError as error:
        return (error.message, error.code, error.param)
    return (reader.fields, reader.model_at, reader.stream, reader.has_file)


def split(data, body):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=6)))
    return [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]


@given(parts=_PARTS, end=_ENDS, data=st.data())
@settings(max_examples=500, deadline=None)
def test_any_split_of_the_bytes_gives_the_same_result(parts, end, data):
    body = written(parts, end)
    expected = read([body])
    assert read(split(data, body)) == expected
    if len(body) < 2000:
        assert read([body[i : i + 1] for i in range(len(body))]) == expected


@given(body=st.binary(max_size=200), data=st.data())
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_read_or_refused(body, data):
    body = b"--XX" + body
    assert read(split(data, body)) == read([body])


@given(parts=_PARTS, served=st.text(max_size=5))
@settings(max_examples=300, deadline=None)
def test_a_rename_changes_the_model_and_nothing_else(parts, served):
    body = written(parts, b"--XX--\r\n")
    reader = FormReader(FORM)
    try:
        reader.feed(body)
        call = form_call(SPEECH, reader, body, FORM)
    except RequestError:
        return
    start, end = reader.model_at
    assert body[start:end].decode() == call.model
    out = upstream_body(call, served_model=served, inject_usage=False)
    assert out == body[:start] + served.encode() + body[end:]


@given(size=st.integers(1, 50_000), piece=st.integers(1, 5_000))
@settings(max_examples=50, deadline=None)
def test_a_file_is_never_held(size, piece):
    body = written([(b"model", b"w", False), (b"file", b"\r\n--X" * size, True)], b"--XX--\r\n")
    reader = FormReader(FORM)
    most = 0
    for at in range(0, len(body), piece):
        reader.feed(body[at : at + piece])
        most = max(most, len(reader._buffer))
    assert reader.whole
    assert most < 100
