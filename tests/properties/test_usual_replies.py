"""A reply that is known by sight is what the parser makes of it, whatever differs in it.

A reply whose first byte comes alone is parsed, for only a read that is a whole one is known by sight.
"""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.errors import UpstreamError
from gateway.upstream.connection import Connection
from gateway.upstream.reading import usual_head
from gateway.upstream.silence import ENDLESS, Silence
from tests.stories.test_relay import Wire

HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Mon, 23 Nov 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-length: @\r\ncontent-type: application/json\r\n"
)


def reply(body, *lines, head=HEAD, length=None):
    told = b"%d" % len(body) if length is None else length
    return head.replace(b"@", told) + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + body


PLAIN = reply(b'{"a":1}', b"vary: Origin")
NAMED = reply(b"{}", b"x-request-id: abc-1", b"vary: Origin")
ODD = [
    NAMED,
    reply(b"{}"),
    reply(b""),
    reply(b"{}", b"x-request-id: "),
    reply(b"{}", b"x-request-id: a b"),
    reply(b"{}", b"x-request-id: a", b"x-request-id: b"),
    reply(b"{}", b"connection: close"),
    reply(b"{}", b"content-encoding: gzip"),
    reply(b"2\r\n{}\r\n0\r\n\r\n", b"transfer-encoding: chunked"),
    reply(b"{}", head=HEAD.replace(b"1.1", b"1.0")),
    reply(b"{}", head=HEAD.replace(b"200 OK", b"404 Not Found")),
    reply(b"{}", head=HEAD.replace(b"200 OK", b"100 Continue")) + PLAIN,
    reply(b"{}", head=HEAD.replace(b"application/json", b"text/event-stream")),
    b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN,
    PLAIN + PLAIN,
    PLAIN + b"x",
    PLAIN[:-1],
    *(reply(b"abc", length=told) for told in (b"+3", b"-3", b" 3", b"3 ", b"03", b"", b"0x3", b"3,3", b"2", b"4")),
]  # fmt: skip


async def answered(*reads, before=b""):
    """Return what a connection makes of a reply, and whether it may be used again.

    The reply `before` came in one piece.
    """
    wire, freed = Wire(), []
    connection = Connection(freed.append, lambda _: None)
    connection.connection_made(wire)
    asked = asyncio.get_running_loop().create_task(
        connection.request(b"", b"", Silence(ENDLESS, 0.0))
    )
    await asyncio.sleep(0)
    if before:
        connection.data_received(before)
        await asked
        asked = asyncio.get_running_loop().create_task(
            connection.request(b"", b"", Silence(ENDLESS, 0.0))
        )
        await asyncio.sleep(0)
    for data in reads:
        if data and not wire.aborted:
            connection.data_received(data)
    await asyncio.sleep(0)
    state = connection.state, connection.spoke_unasked, wire.aborted
    if not asked.done():
        asked.cancel()
        return (*state, "nothing")
    try:
        got = asked.result()
    except UpstreamError as error:
        return (*state, error.message)
    return (*state, got.status, got.passed_lines(), got.body)


def check(*replies):
    async def compare():
        for data in replies:
            for before in (b"", PLAIN):
                known = await answered(data, before=before)
                assert known == await answered(data[:1], data[1:], before=before), data

    asyncio.run(compare())


@pytest.mark.parametrize("data", [PLAIN, NAMED, reply(b"{}")])
def test_usual_replies_are_known_by_sight(data):
    head = usual_head(data)
    assert head is not None
    known = head.reply(data)
    assert known is not None
    assert known.body == data.rpartition(b"\r\n\r\n")[2]
    assert head.reply(data + b"x") is None
    assert usual_head(data + b"x") is None


@pytest.mark.parametrize("head", [PLAIN, NAMED])
def test_a_head_that_comes_again_may_have_another_length(head):
    known = usual_head(head)
    assert known is not None
    for body in (b"", b"{}", b"x" * 1000):
        place, end = known.before + b"%d" % len(body) + b"\r" + known.behind, known.behind
        got = known.reply(place + body)
        assert got is not None
        assert got.body == body
        assert known.reply(known.before + b"%d" % (len(body) + 1) + b"\r" + end + body) is None


def test_one_connection_takes_replies_of_either_kind_in_turn():
    other = reply(b"{}", b"other: 1")

    async def main():
        connection = Connection(lambda _: None, lambda _: None)
        connection.connection_made(Wire())
        for data in (PLAIN, other, PLAIN, other, other, NAMED):
            asked = asyncio.get_running_loop().create_task(
                connection.request(b"", b"", Silence(ENDLESS, 0.0))
            )
            await asyncio.sleep(0)
            for piece in (data[:9], data[9:]) if data is other else (data,):
                connection.data_received(piece)
            got = await asked
            assert (got.status, got.body) == (200, data.rpartition(b"\r\n\r\n")[2])

    asyncio.run(main())


@pytest.mark.parametrize("data", ODD, ids=repr)
def test_any_other_is_what_the_parser_makes_of_it(data):
    check(data)


@pytest.mark.parametrize(
    "new", [b"", b"\r", b"\n", b"\r\n", b" ", b":", b"0", b"9", b"x", b"\x00", b"\xff"]
)
def test_so_is_one_with_a_byte_more_or_less_or_another_anywhere(new):
    for data in (PLAIN, NAMED):
        check(*(data[:at] + new + data[at:] for at in range(len(data))))
        check(*(data[:at] + new + data[at + 1 :] for at in range(len(data))))


@settings(max_examples=200)
@given(st.sampled_from(ODD), st.data())
def test_so_is_one_that_is_mutated_twice(data, draw):
    for _ in range(2):
        at = draw.draw(st.integers(0, len(data)))
        data = (
            data[:at] + draw.draw(st.binary(max_size=2)) + data[at + draw.draw(st.integers(0, 3)) :]
        )
    check(data)
