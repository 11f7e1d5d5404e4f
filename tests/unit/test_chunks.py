"""One whole chunk, told by sight, as strictly as the parser would."""

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.wire.chunks import whole_chunk


@given(st.binary(min_size=1, max_size=5000))
def test_a_chunk_gives_its_payload(data):
    assert whole_chunk(b"%x\r\n%b\r\n" % (len(data), data)) == data
    assert whole_chunk(b"%X\r\n%b\r\n" % (len(data), data)) == data


@pytest.mark.parametrize(
    "data",
    [
        b"", b"3", b"3\r\n", b"3\r\nab\r\n", b"3\r\nabcd\r\n", b"3\r\nabc", b"3\r\nabc\r\n3\r\nabc\r\n",
        b"0\r\n\r\n", b"0x3\r\nabc\r\n", b"0_3\r\nabc\r\n", b"+3\r\nabc\r\n", b" 3\r\nabc\r\n", b"-3\r\nabc\r\n",
        b"3;x=y\r\nabc\r\n", b"3\nabc\r\n", b"3\r\nabc\n\n", b"zz\r\nabc\r\n",
    ],
)  # fmt: skip
def test_anything_else_is_left_to_the_parser(data):
    assert whole_chunk(data) is None


class Body:
    def __init__(self):
        self.data = b""

    def on_body(self, data):
        self.data += data


def parsed(chunk):
    body = Body()
    httptools.HttpResponseParser(body).feed_data(
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunk
    )
    return body.data


@given(st.binary(max_size=40))
def test_what_is_taken_is_what_the_parser_takes(data):
    for candidate in (data, b"5\r\n" + data, data[:2] + b"\r\n" + data[2:]):
        payload = whole_chunk(candidate)
        if payload is not None:
            assert parsed(candidate) == payload
