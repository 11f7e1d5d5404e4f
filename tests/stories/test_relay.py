"""A relay between a scripted backend connection and a client that only takes notes."""

import asyncio

import pytest

from gateway.core.errors import BackendBroke, BackendTimeout, StaleConnection, TookTooLong
from gateway.core.types import Dialect
from gateway.upstream.connection import Connection
from gateway.upstream.relay import Relay
from gateway.upstream.silence import ENDLESS, Patience, Silence
from gateway.wire.sse import StreamWatch
from tests.gatehouse import held

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'


REQUEST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n"


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


class NoSocket:
    family = None

    def fileno(self):
        return 0


class Wire:
    """A transport of which only the end matters."""

    aborted = paused = False

    def write(self, data):
        pass

    def is_closing(self):
        return self.aborted

    def get_extra_info(self, name):
        return NoSocket() if name == "socket" else None

    def abort(self):
        self.aborted = True

    close = abort

    def pause_reading(self):
        self.paused = True

    def get_write_buffer_size(self):
        return 0

    def resume_reading(self):
        self.paused = False


class Client:
    """Takes notes of what a relay does to its client."""

    def __init__(self):
        self.started = self.writing_paused = self.takes_chunks = False
        self.bytes_out = 0
        self.written, self.writes, self.ends, self.cuts = b"", 0, 0, 0

    def begin(self, reply, data=b""):
        self.started = True
        self.written += data

    def write(self, data):
        self.written += data
        self.writes += 1

    @property
    def answering(self):
        return self.started and self.written.strip(b": keep-alive\n\n") != b""

    def beat(self, reply, comment):
        self.started = True
        self.write(comment)

    def write_chunk(self, data):
        raise AssertionError("takes_chunks is false")

    def end(self, data=b""):
        self.written += data
        self.ends += 1

    def cut(self):
        self.cuts += 1


async def start(patience, works=lambda since, now: False):
    wire, client = Wire(), Client()
    connection = Connection(lambda _: None, lambda _: None)
    connection.connection_made(wire)
    asked = asyncio.get_running_loop().create_task(
        connection.request(b"", b"", Silence(patience, 0.0, works))
    )
    await asyncio.sleep(0)
    connection.data_received(HEAD)
    reply = await asked
    watch = StreamWatch(Dialect.CHAT, choices=1, hide_usage=True, request_id="r")
    relay = Relay(reply, watch, client, 0.0)
    client.relay = relay
    running = asyncio.get_running_loop().create_task(relay.run())
    await asyncio.sleep(0)
    return wire, client, connection, running


def patience(**seconds):
    return Patience(
        **{
            "first_byte_s": 9,
            "stall_s": 9,
            "heartbeat_s": 99,
            "client_write_s": 9,
            **seconds,
        }
    )


def test_a_stream_that_said_all_but_never_ends_is_ended_once_and_let_go():
    async def main():
        wire, client, connection, running = await start(patience(stall_s=5))
        connection.data_received(chunk(TOKEN) + chunk(LAST))
        for now in range(1, 40):
            connection.tick(float(now))
        assert await running is None
        assert (client.ends, client.cuts) == (1, 0)
        assert wire.aborted

    asyncio.run(main())


def test_after_the_last_frame_nothing_is_written_and_the_client_is_let_go_within_seconds():
    async def main():
        wire, client, connection, running = await start(patience(heartbeat_s=1, stall_s=99))
        connection.data_received(chunk(TOKEN) + chunk(LAST))
        for now in range(1, 5):
            connection.tick(float(now))
        await asyncio.sleep(0)
        assert running.done()
        assert running.result() is None
        assert client.written.endswith(b"data: [DONE]\n\n")
        assert (client.ends, client.cuts) == (1, 0)
        assert wire.aborted

    asyncio.run(main())


def test_a_stream_that_is_ended_early_says_why_in_its_own_protocol():
    async def main():
        wire, client, connection, running = await start(patience())
        connection.data_received(chunk(TOKEN))
        client.relay.end_early(TookTooLong("took too long"))
        assert isinstance(await running, TookTooLong)
        assert client.ends == 1
        assert b"took too long" in client.written
        assert client.written.endswith(b"data: [DONE]\n\n")
        assert wire.aborted

    asyncio.run(main())


def test_a_silent_stream_goes_on_as_long_as_its_engine_works_and_is_cut_when_that_stops():
    async def main():
        asked = []

        def works(since, now):
            asked.append(since)
            return since < 100

        wire, client, connection, running = await start(
            patience(stall_s=45, first_byte_s=20), works
        )
        for now in range(1, 60):
            connection.tick(float(now))  # a long prompt is read: nothing has come yet
        assert asked == [0.0, 20.0]
        connection.data_received(chunk(TOKEN))
        for now in range(60, 300):
            if not wire.aborted:
                connection.tick(float(now))  # a tool's arguments are withheld
        assert asked[2:] == [60.0, 105.0]
        assert isinstance(await running, BackendTimeout)
        assert b"sent nothing for 45 s" in client.written

    asyncio.run(main())


def test_no_comment_is_written_into_a_frame_that_is_too_long_to_hold():
    async def main():
        _, client, connection, running = await start(
            patience(heartbeat_s=1, stall_s=99, first_byte_s=99)
        )
        connection.data_received(chunk(TOKEN) + chunk(b'data: {"choices":[{"x":"' + b"y" * 70_000))
        for now in range(1, 9):
            connection.tick(float(now))
        assert b"keep-alive" not in client.written
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(main())


def test_a_connection_that_is_free_again_is_left_alone_by_who_is_cancelled_late():
    async def main():
        wire, _, connection, running = await start(patience())
        connection.data_received(chunk(TOKEN))
        running.cancel()
        connection.data_received(chunk(LAST) + b"0\r\n\r\n")  # before the task wakes
        assert connection.usable
        await asyncio.wait([running])
        assert running.cancelled()
        assert connection.usable
        assert not wire.aborted

    asyncio.run(main())


def test_a_client_that_reads_on_after_the_end_moves_no_other_stream():
    async def main():
        wire, client, connection, running = await start(patience())
        connection.data_received(chunk(TOKEN))
        client.relay.pause()
        connection.data_received(chunk(LAST) + b"0\r\n\r\n")
        await running
        other = asyncio.get_running_loop().create_task(
            connection.request(b"", b"", Silence(ENDLESS, 0.0))
        )
        await asyncio.sleep(0)
        connection.data_received(HEAD)
        await other
        connection.pause()
        assert wire.paused
        client.relay.resume()
        assert wire.paused

    asyncio.run(main())


def test_the_first_frame_goes_with_the_head_and_the_last_with_the_end():
    async def main():
        _, client, connection, running = await start(patience())
        connection.data_received(chunk(TOKEN))
        assert client.started
        connection.data_received(chunk(LAST) + b"0\r\n\r\n")
        assert await running is None
        assert client.written == TOKEN + LAST
        assert (client.writes, client.ends, client.cuts) == (0, 1, 0)

    asyncio.run(main())


def test_a_stream_that_comes_in_one_read_has_a_first_token_too():
    async def main():
        wire, client = Wire(), Client()
        connection = Connection(lambda _: None, lambda _: None)
        connection.connection_made(wire)
        asked = asyncio.get_running_loop().create_task(
            connection.request(b"", b"", Silence(ENDLESS, 0.0))
        )
        await asyncio.sleep(0)
        connection.data_received(HEAD + chunk(TOKEN) + chunk(LAST) + b"0\r\n\r\n")
        watch = StreamWatch(Dialect.CHAT, choices=1, hide_usage=True, request_id="r")
        seen = []
        reply = await asked
        relay = Relay(
            reply,
            watch,
            client,
            0.0,
            on_first_token=lambda: seen.append(client.started),
        )
        assert await relay.run() is None
        assert len(seen) == 1

    asyncio.run(main())


@pytest.mark.parametrize(("after_s", "error"), [(0.2, StaleConnection), (0.3, BackendBroke)])
def test_a_reused_connection_that_dies_after_more_than_a_round_trip_may_have_worked(after_s, error):
    @held
    async def main():
        loop, connection = asyncio.get_running_loop(), Connection(lambda _: None, lambda _: None)
        connection.connection_made(Wire())
        for dies in (False, True):
            asked = loop.create_task(connection.request(REQUEST, b"{}", Silence(ENDLESS, 0.0)))
            await asyncio.sleep(0)
            if dies:
                loop.at += after_s
                connection.connection_lost(ConnectionResetError())
                with pytest.raises(error):
                    await asked
            else:
                connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
                await asked

    main()


# Cut behind its first digit and its sixth byte, the first chunk looks like another one.
BODY = (
    chunk(b":abcd\r\n:efghijklmno\n\n")
    + b"".join(chunk(TOKEN.replace(b"x", text)) for text in (b"1", b"2", b"\\n"))
    + chunk(b": a comment\n")
    + chunk(b"\n")
    + chunk(LAST)
    + b"0\r\n\r\n"
)


@pytest.mark.parametrize("first", range(1, len(BODY) - 1))
def test_reads_that_end_anywhere_in_a_chunk_make_no_difference(first):
    async def relayed(*reads):
        _, client, connection, running = await start(patience())
        client.takes_chunks = True
        client.write_chunk = lambda chunk: client.write(chunk.split(b"\r\n")[1])
        for read in reads:
            connection.data_received(read)
        assert await running is None
        return client.written

    async def main():
        whole = await relayed(BODY)
        for second in range(first + 1, min(first + 16, len(BODY))):
            assert await relayed(BODY[:first], BODY[first:second], BODY[second:]) == whole

    asyncio.run(main())


def test_tokens_that_pass_as_they_are_framed_are_counted():
    async def main():
        _, client, connection, running = await start(patience())
        client.takes_chunks, passed = True, []
        client.write_chunk = passed.append
        tokens = [chunk(TOKEN)] * 5
        for read in (tokens[0], tokens[1], tokens[2], tokens[3] + tokens[4]):
            connection.data_received(read)
        assert passed[-1] == tokens[3] + tokens[4]
        assert client.bytes_out == sum(map(len, passed))
        assert client.relay.watch.events == len(tokens)
        connection.data_received(chunk(LAST) + b"0\r\n\r\n")
        assert await running is None

    asyncio.run(main())
