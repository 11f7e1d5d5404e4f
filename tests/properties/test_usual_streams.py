"""A stream that is read by sight is what the parser makes of it, however it is cut, and whatever differs in it.

One whose first byte comes alone is parsed from its beginning, for only a read that begins with a whole
head is known by sight.
"""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.errors import UpstreamError
from gateway.upstream.connection import Connection
from gateway.upstream.reading import usual_stream
from gateway.upstream.silence import ENDLESS, Silence
from tests.stories.test_relay import Wire

HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Mon, 23 Nov 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\n"
)
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


BODY = chunk(b"data: a\n\n") + chunk(b"data: bcd\n\n" * 9) + chunk(b"data: [DONE]\n\n")
END = b"0\r\n\r\n"
PLAIN = HEAD + CHUNKED + BODY + END
NAMED = HEAD + b"x-request-id: a-1\r\nvary: Origin\r\n" + CHUNKED + BODY + END
ODD = [
    PLAIN,
    NAMED,
    HEAD + CHUNKED,
    HEAD + CHUNKED + END,
    HEAD + CHUNKED + BODY,
    HEAD + b"\r\n" + b"data: a\n\n",
    HEAD + b"connection: close\r\n" + CHUNKED + BODY + END,
    HEAD + b"content-length: 5\r\n" + CHUNKED + BODY + END,
    HEAD + b"content-encoding: gzip\r\n" + CHUNKED + BODY + END,
    HEAD + b"x-request-id: a b\r\n" + CHUNKED + BODY + END,
    HEAD + CHUNKED + BODY + b"0\r\nx: y\r\n\r\n",
    HEAD + CHUNKED + BODY + b"00\r\n\r\n",
    HEAD + CHUNKED + b"3;x=y\r\nabc\r\n" + END,
    HEAD + CHUNKED + b"03\r\nabc\r\n" + END,
    HEAD + CHUNKED + b"A\r\n0123456789\r\n" + END,
    HEAD + CHUNKED + b"+3\r\nabc\r\n" + END,
    HEAD + CHUNKED + b"3\r\nabcd\r\n" + END,
    HEAD + CHUNKED + chunk(b"x" * 5000) + END,
    HEAD.replace(b"1.1", b"1.0") + CHUNKED + BODY + END,
    HEAD.replace(b"200 OK", b"500 Internal Server Error") + CHUNKED + BODY + END,
    PLAIN + END,
    PLAIN + b"x",
    PLAIN + PLAIN,
]


class Sink:
    """Takes what a relay would take, and leaves every read to the connection."""

    def __init__(self):
        self.data, self.ended, self.lost = b"", False, None

    def on_chunk(self, chunk):
        return False

    def on_data(self, data):
        self.data += data

    def on_end(self, data):
        self.data, self.ended = self.data + data, True

    def on_lost(self, error):
        self.lost = error.message


async def told(*reads, attach_after):
    """Return what a connection makes of a reply in these reads; its sink takes it after so many of them."""
    wire, freed, sink = Wire(), [], Sink()
    connection = Connection(freed.append, lambda _: None)
    connection.connection_made(wire)
    asked = asyncio.get_running_loop().create_task(
        connection.request(b"", b"", Silence(ENDLESS, 0.0))
    )
    await asyncio.sleep(0)
    reply = None
    for number, data in enumerate([each for each in reads if each] + [b""]):
        await asyncio.sleep(0)
        if asked.done() and asked.exception() is None and number >= attach_after and reply is None:
            reply = asked.result()
            if reply.connection is not None:
                connection.attach(sink)
        if data and not wire.aborted:
            connection.data_received(data)
    await asyncio.sleep(0)
    state = connection.state, connection.spoke_unasked, wire.aborted, len(freed)
    if not asked.done():
        asked.cancel()
        return (*state, "nothing")
    try:
        got = asked.result()
    except UpstreamError as error:
        return (*state, error.message)
    head = got.status, got.passed_lines(), got.is_event_stream, got.body
    return (*state, *head, sink.data, sink.ended, sink.lost)


def check(*reads, attach_after=1):
    """Compare what is read by sight with what is parsed; that has one read more."""

    async def compare():
        first, *more = reads
        known = await told(*reads, attach_after=attach_after)
        later = attach_after + (len(first) > 1)
        parsed = await told(first[:1], first[1:], *more, attach_after=later)
        assert known == parsed

    asyncio.run(compare())


@pytest.mark.parametrize("stream", [PLAIN, NAMED])
def test_a_usual_stream_is_known_by_its_head(stream):
    head = usual_stream(stream)
    assert stream.startswith(head)
    assert head.endswith(CHUNKED)
    assert usual_stream(head[:-1]) == b""


@pytest.mark.parametrize("stream", [PLAIN, NAMED])
def test_it_needs_no_parser_from_its_first_byte_to_its_last(stream):
    async def main():
        connection = Connection(lambda _: None, lambda _: None)
        connection.connection_made(Wire())
        connection._parser = object()  # whose methods cannot be called
        for _ in range(2):
            asked = asyncio.get_running_loop().create_task(
                connection.request(b"", b"", Silence(ENDLESS, 0.0))
            )
            await asyncio.sleep(0)
            head = usual_stream(stream)
            connection.data_received(head)
            (await asked).connection.attach(sink := Sink())
            connection.data_received(stream[len(head) : -len(END)])
            connection.data_received(END)
            assert (sink.ended, sink.lost) == (True, None)
            assert sink.data.endswith(b"data: [DONE]\n\n")
            assert connection.usable

    asyncio.run(main())


@pytest.mark.parametrize("attach_after", [0, 9])
@pytest.mark.parametrize("stream", ODD, ids=repr)
def test_in_one_read_it_is_what_the_parser_makes_of_it(stream, attach_after):
    check(stream, attach_after=attach_after)


@pytest.mark.parametrize("new", [b"", b"\r", b"\n", b"\r\n", b" ", b"0", b"9", b"x", b"\xff"])
def test_so_is_one_with_a_byte_more_or_less_or_another_anywhere(new):
    for at in range(len(PLAIN)):
        check(PLAIN[:at] + new + PLAIN[at:])
        check(PLAIN[:at] + new + PLAIN[at + 1 :])


@settings(max_examples=300)
@given(
    st.sampled_from(ODD), st.lists(st.integers(1, 400), max_size=4), st.integers(0, 6), st.data()
)
def test_so_is_one_that_is_cut_and_mutated(stream, places, attach_after, draw):
    if draw.draw(st.booleans()):
        at = draw.draw(st.integers(0, len(stream)))
        new, gone = draw.draw(st.binary(max_size=2)), draw.draw(st.integers(0, 3))
        stream = stream[:at] + new + stream[at + gone :]
    edges = [0, *sorted({min(each, len(stream)) for each in places}), len(stream)]
    reads = [stream[a:b] for a, b in zip(edges, edges[1:], strict=False) if a < b]
    check(*(reads or [b"x"]), attach_after=attach_after)


@given(st.lists(st.sampled_from([1, 2, 3, 4]), max_size=5), st.integers(0, 6))
def test_so_is_one_that_comes_chunk_by_chunk(groups, attach_after):
    parts = [chunk(b"data: %d\n\n" % number) for number in range(12)] + [END]
    reads = [HEAD + CHUNKED]
    for group in groups:
        reads.append(b"".join(parts[:group]))
        parts = parts[group:]
    check(*(each for each in [*reads, *parts] if each), attach_after=attach_after)
