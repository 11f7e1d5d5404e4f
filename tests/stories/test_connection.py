"""One upstream connection against scripted bytes on a real socket."""

import asyncio
import contextlib
import math
import socket
import time

import pytest
import uvloop

from gateway.core.errors import (
    BackendBroke,
    BackendTimeout,
    ConnectFailed,
    StaleConnection,
    UpstreamError,
)
from gateway.pools import table
from gateway.upstream.client import BackendConnections, Outgoing
from gateway.upstream.connection import Connection
from gateway.upstream.silence import Patience, Silence
from tests.stories.stubs import page, stub

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n"

LARGE = 32 << 20  # more than any socket holds


class Backend:
    """Answers each request on each connection with the next script: bytes, or None to close."""

    def __init__(self, *replies: bytes | None) -> None:
        self.replies = list(replies)
        self.closed = asyncio.Event()

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc):
        self.server.close()

    async def _serve(self, reader, writer):
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                assert b"content-length: 2" in head
                await reader.readexactly(2)
                reply = self.replies.pop(0)
                if reply is None:
                    break
                writer.write(reply)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            self.closed.set()
            writer.close()

    async def connect(self) -> tuple[Connection, list[Connection]]:
        free: list[Connection] = []
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(free.append, lambda _: None), "127.0.0.1", self.port
        )
        return connection, free


class Sink:
    def __init__(self):
        self.data, self.ended, self.error, self.done = b"", False, None, asyncio.Event()

    def on_data(self, data):
        self.data += data

    def on_end(self, data):
        self.data += data
        self.ended = True
        self.done.set()

    def on_lost(self, error):
        self.error = error
        self.done.set()

    def on_tick(self, now):
        pass


def later(seconds=5.0, works=lambda since, now: False):
    """Return the silence of a backend that may last so long."""
    patience = Patience(seconds, seconds, math.inf, math.inf)
    return Silence(patience, asyncio.get_running_loop().time(), works)


def run(main):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def exchange(*replies, after=None):
    async def main():
        async with Backend(*replies) as backend:
            connection, free = await backend.connect()
            reply = await connection.request(HEAD, b"{}", later())
            return (
                (await after(backend, connection, free, reply))
                if after
                else (reply, connection, free)
            )

    return run(main())


def test_a_whole_json_reply_comes_with_its_body_and_frees_the_connection():
    reply, connection, free = exchange(
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
    )
    assert (reply.status, reply.body, reply.content_type) == (200, b"{}", b"application/json")
    assert free == [connection]


def test_a_trailer_of_one_reply_is_no_header_of_the_next():
    first = (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        b"2\r\n{}\r\n0\r\nmetadata: of the first\r\nContent-Type: text/event-stream\r\n\r\n"
    )
    second = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

    async def after(backend, connection, free, reply):
        assert reply.headers.keys() == {b"content-type", b"transfer-encoding"}
        return await connection.request(HEAD, b"{}", later())

    reply = exchange(first, second, after=after)
    assert (reply.body, reply.headers) == (b"ok", {b"content-length": b"2"})


def test_a_chunked_error_is_collected_too():
    reply, _, free = exchange(
        b"HTTP/1.1 503 Busy\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    )
    assert (reply.status, reply.body) == (503, b"abcde")
    assert len(free) == 1


def test_a_backend_that_answers_before_it_has_read_the_request_gets_no_more_of_it():
    async def main():
        ended = asyncio.Event()

        async def serve(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno")
            unread = 0
            try:
                while data := await reader.read(1 << 16):
                    unread += len(data)
            except ConnectionResetError:
                pass
            assert unread < LARGE
            ended.set()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        free = []
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(free.append, lambda _: None), "127.0.0.1", port
        )
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % LARGE
        )
        try:
            reply = await connection.request(head, bytes(LARGE), later())
            assert (reply.status, free, connection.usable) == (413, [], False)
            await ended.wait()
        finally:
            connection.abort()
            server.close()

    run(main())


def test_interim_replies_are_passed_over():
    reply, _, _ = exchange(
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    )
    assert (reply.status, reply.body) == (200, b"ok")
    assert b"link" not in reply.headers


def test_an_event_stream_goes_to_the_sink_without_its_chunk_framing():
    async def after(backend, connection, free, reply):
        assert reply.body is None
        sink = Sink()
        connection.attach(sink)
        await sink.done.wait()
        return sink, connection, free

    sink, connection, free = exchange(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        b"9\r\ndata: a\n\n\r\n9\r\ndata: b\n\n\r\n0\r\n\r\n",
        after=after,
    )
    assert sink.data == b"data: a\n\ndata: b\n\n"
    assert sink.ended
    assert free == [connection]


def test_a_stream_that_is_cut_tells_the_sink():
    async def after(backend, connection, free, reply):
        sink = Sink()
        connection.attach(sink)
        backend.server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await sink.done.wait()
        return sink

    sink = exchange(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n9\r\ndata: a\n\n\r\n",
        after=after,
    )
    assert sink.data == b"data: a\n\n"
    assert isinstance(sink.error, BackendBroke)


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0_2\r\nab\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nabHTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nabHTTP/1.1 207 Evil\r\nx-e: ",
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000 + b"\r\ncontent-length: 2\r\n\r\nab",
        b"HTTP/1.1 103 Early Hints\r\n\r\n" * 20,
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
    ],
)
def test_what_is_not_one_clean_reply_is_refused_and_the_connection_never_reused(reply):
    async def main():
        async with Backend(reply) as backend:
            connection, free = await backend.connect()
            with pytest.raises(BackendBroke):
                await connection.request(HEAD, b"{}", later())
            return connection, free

    connection, free = run(main())
    assert not connection.usable
    assert free == []


def test_bytes_nobody_asked_for_close_an_idle_connection():
    async def after(backend, connection, free, reply):
        connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        return connection

    connection = exchange(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", after=after)
    assert not connection.usable


def test_a_reused_connection_that_dies_unanswered_is_stale_not_broken():
    async def main():
        async with Backend(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", None) as backend:
            connection, _ = await backend.connect()
            await connection.request(HEAD, b"{}", later())
            with pytest.raises(StaleConnection):
                await connection.request(HEAD, b"{}", later())

    run(main())


def test_a_fresh_connection_that_dies_unanswered_is_broken():
    async def main():
        async with Backend(None) as backend:
            connection, _ = await backend.connect()
            with pytest.raises(BackendBroke):
                await connection.request(HEAD, b"{}", later())

    run(main())


def test_the_deadline_for_the_head_is_kept_by_ticks():
    async def main():
        async with Backend(b"") as backend:
            connection, _ = await backend.connect()
            now = asyncio.get_running_loop().time()
            waiting = asyncio.get_running_loop().create_task(
                connection.request(HEAD, b"{}", later(10))
            )
            await asyncio.sleep(0)
            connection.tick(now + 9)
            assert not waiting.done()
            connection.tick(now + 10)
            with pytest.raises(BackendTimeout):
                await waiting

    run(main())


def test_cancelling_a_request_closes_the_connection_so_that_the_backend_stops():
    async def main():
        async with Backend(b"") as backend:
            connection, free = await backend.connect()
            waiting = asyncio.get_running_loop().create_task(
                connection.request(HEAD, b"{}", later())
            )
            await asyncio.sleep(0.02)
            waiting.cancel()
            await asyncio.wait([waiting])
            await asyncio.wait_for(backend.closed.wait(), 2)  # noqa: TID251 - a test's own deadline
            return connection, free

    connection, free = run(main())
    assert not connection.usable
    assert free == []


def test_cancelling_when_the_whole_reply_is_there_leaves_the_connection_to_the_next():
    """Its task has not run yet, but the connection is free already and may carry another request."""

    async def main():
        async with Backend(b"") as backend:
            connection, free = await backend.connect()
            waiting = asyncio.get_running_loop().create_task(
                connection.request(HEAD, b"{}", later())
            )
            await asyncio.sleep(0.02)
            connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            assert free == [connection]
            waiting.cancel()
            await asyncio.wait([waiting])
            assert waiting.cancelled()
            return connection.usable

    assert run(main())


def test_connection_close_is_obeyed():
    reply, connection, free = exchange(
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok"
    )
    assert reply.body == b"ok"
    assert free == []
    assert not connection.usable


def test_a_reply_ended_by_the_connection_is_whole():
    async def main():
        async with Backend(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{}", None
        ) as backend:
            connection, free = await backend.connect()
            waiting = asyncio.get_running_loop().create_task(
                connection.request(HEAD, b"{}", later())
            )
            await asyncio.sleep(0.05)
            for task in asyncio.all_tasks() - {asyncio.current_task(), waiting}:
                task.cancel()
            return (await waiting), free

    reply, free = run(main())
    assert reply.body == b"{}"
    assert free == []


def test_every_failure_is_ours():
    assert all(
        issubclass(error, UpstreamError)
        for error in (BackendBroke, BackendTimeout, StaleConnection)
    )


@pytest.mark.parametrize(("turn_s", "turns"), [(0.06, 1), (0.5, 1), (0.06, 8)])
def test_a_stop_of_this_process_is_not_taken_for_a_backend_that_does_not_answer(turn_s, turns):
    async def main():
        loop = asyncio.get_running_loop()

        def stand_still(turns):
            time.sleep(turn_s)
            if turns > 1:
                loop.call_soon(stand_still, turns - 1)

        async with stub(lambda path: page()) as (url, _):
            connections = BackendConnections(
                table.Backend("m", "b1", url, None), connect_s=0.05, keep_alive_s=3
            )
            loop.call_soon(stand_still, turns)  # once it has begun to connect
            connection = await connections.connect(Connection)
            assert connection.usable
            connection.abort()

    run(main())


def test_who_really_does_not_answer_is_waited_for_no_longer_than_that():
    async def main():
        with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
            address = full.getsockname()
            with contextlib.ExitStack() as stack:
                for _ in range(3):  # its backlog is full then: nobody else is answered
                    waiting = stack.enter_context(socket.socket())
                    waiting.setblocking(False)
                    waiting.connect_ex(address)
                connections = BackendConnections(
                    table.Backend("m", "b1", f"http://127.0.0.1:{address[1]}", None),
                    connect_s=0.05, keep_alive_s=3,
                )  # fmt: skip
                with pytest.raises(ConnectFailed):
                    await connections.connect(Connection)

    run(main())


@pytest.mark.parametrize(
    ("said", "unasked"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", True),
        (b"HTTP/1.1 408 Request Timeout\r\n\r\n", False),
        (None, False),
    ],
)
def test_what_the_loop_has_not_read_yet_keeps_a_connection_from_being_used(said, unasked, caplog):
    async def main():
        with socket.create_server(("127.0.0.1", 0)) as listener:
            connections = BackendConnections(
                table.Backend("m", "b1", f"http://127.0.0.1:{listener.getsockname()[1]}", None),
                keep_alive_s=3,
            )
            out = Outgoing(b"/v1/chat/completions", b"application/json", "an id", b"{}")
            loop = asyncio.get_running_loop()
            asked = loop.create_task(connections.send(out, later(), fresh=False))
            listener.setblocking(False)
            peer, _ = await loop.sock_accept(listener)
            with peer:
                while not (await loop.sock_recv(peer, 4096)).endswith(b"{}"):
                    pass
                peer.send(page(b"{}"))
                await asked
                assert connections.idle == 1
                if said is None:
                    peer.close()
                else:
                    peer.send(said)
                assert connections.take_idle() is None  # the loop has not run since
                connections.close()

    run(main())
    assert bool(caplog.records) is unasked  # its backend is not trusted any more


@pytest.mark.parametrize("has_the_request", [False, True])
def test_what_comes_before_the_backend_has_any_of_the_request_is_not_its_reply(has_the_request):
    """A second reply crosses a request on its way, as far as the system can tell.

    The backend has read nothing yet, and its buffer is full of the first request: so the system
    keeps the second one here, and nothing of it is acknowledged. No time passes for the loop.
    """
    second, said = b"a" * 100, page(b'"a reply"')

    async def main():
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # the least there is
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(lambda _: None, lambda _: None), *listener.getsockname()
            )
            peer, _ = listener.accept()
            with peer:
                peer.send(page(b"{}"))
                body = b"b" * 16384
                assert (await connection.request(b"", body, later())).body == b"{}"
                asking = connection.request(b"", second, later())
                asking.send(None)  # the request is written
                if has_the_request:
                    read = b""
                    while not read.endswith(second):
                        read += peer.recv(65536)
                peer.send(said)  # with it goes what its system has received
                connection.data_received(said)
                assert connection.spoke_unasked is not has_the_request
                assert connection.usable is has_the_request
                connection.abort()
                return await_of(asking)

    answer = run(main())
    if has_the_request:
        assert answer.body == b'"a reply"'
    else:
        assert isinstance(answer, BackendBroke)


def await_of(coroutine):
    """Return what a coroutine returns or raises that waits for nothing any more."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    except UpstreamError as error:
        return error
    raise AssertionError("it still waits")


@pytest.mark.parametrize("closes", [False, True])
def test_a_whole_answer_is_a_sign_of_life_also_where_the_connection_closes_after_it(closes):
    said = page(b"{}").replace(b"\r\n", b"\r\nconnection: close\r\n", 1) if closes else page(b"{}")

    async def main():
        async with Backend(said) as backend:
            connections = BackendConnections(
                table.Backend("m", "b1", f"http://127.0.0.1:{backend.port}", None), keep_alive_s=3
            )
            out = Outgoing(b"/v1/chat/completions", b"application/json", "an id", b"{}")
            assert connections.waits().heard_at == -math.inf
            asked_at = asyncio.get_running_loop().time()  # in whole milliseconds
            await connections.send(out, later(), fresh=True)
            assert connections.idle == (not closes)
            assert asked_at <= connections.waits().heard_at <= time.monotonic()
            connections.close()

    run(main())
