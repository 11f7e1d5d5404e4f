"""A connection that sends a body as it comes, against scripted bytes on a real socket."""

import asyncio
import math

import pytest
import uvloop

from gateway.core.errors import BackendBroke, BackendTimeout, BodyTooLarge
from gateway.upstream.reading import State
from gateway.upstream.silence import Patience, Silence
from gateway.upstream.upload import UploadConnection

HEAD = b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: x\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Backend:
    """Keeps what it gets; a test answers on `writer`."""

    def __init__(self):
        self.got = b""
        self.came = asyncio.Event()
        self.closed = asyncio.Event()
        self.writer = None

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *exc):
        self.server.close()

    async def _serve(self, reader, writer):
        self.writer = writer
        try:
            while data := await reader.read(64 * 1024):
                self.got += data
                self.came.set()
        except ConnectionError:
            pass
        finally:
            self.closed.set()
            writer.close()

    async def until(self, got):
        async with asyncio.timeout(5):
            while got not in self.got:
                self.came.clear()
                await self.came.wait()

    async def connect(self):
        free = []
        port = self.server.sockets[0].getsockname()[1]
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: UploadConnection(free.append, lambda _: None), "127.0.0.1", port
        )
        return connection, free


class Rest:
    """What a client still has to send, as a test says."""

    def __init__(self, left_bytes, held=b"", error=None):
        self.left_bytes = left_bytes
        self.held = held
        self.error = error
        self.paused = False

    def flow_into(self, connection):
        if self.error is not None:
            raise self.error
        return self.held

    def pause(self):
        self.paused = True

    def resume(self):
        self.paused = False


def run(test):
    async def main():
        async with asyncio.timeout(10), Backend() as backend:
            connection, free = await backend.connect()
            await test(backend, connection, free)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def start(connection, rest, seconds=5.0):
    patience = Patience(seconds, seconds, math.inf, math.inf)
    silence = Silence(patience, asyncio.get_running_loop().time())
    sent = connection.upload(HEAD, b"first", rest, silence)
    return asyncio.get_running_loop().create_task(sent)


def test_what_was_held_goes_along_and_the_length_counts_all():
    async def test(backend, connection, free):
        answer = start(connection, Rest(4, held=b"held"))
        await backend.until(b"firstheld")
        assert b"\r\ncontent-length: 13\r\n\r\n" in backend.got
        connection.send(b"last")
        connection.finish()
        await backend.until(b"\r\n\r\nfirstheldlast")
        backend.writer.write(OK)
        assert (await answer).body == b"ok"
        assert free == [connection]
        assert connection.usable

    run(test)


def test_an_unknown_length_is_sent_in_chunks():
    async def test(backend, connection, free):
        answer = start(connection, Rest(None))
        await backend.until(b"first")
        connection.send(b"more")
        connection.finish()
        await backend.until(
            b"\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n4\r\nmore\r\n0\r\n\r\n"
        )
        backend.writer.write(OK)
        assert (await answer).body == b"ok"
        assert free == [connection]

    run(test)


def test_the_backends_time_runs_from_the_end_of_the_body():
    async def test(backend, connection, free):
        answer = start(connection, Rest(4), seconds=5.0)
        await backend.until(b"first")
        now = asyncio.get_running_loop().time()
        connection.tick(now + 1000)
        assert connection.state is State.HEAD
        connection.send(b"last")
        connection.finish()
        connection.tick(now + 4)
        assert connection.state is State.HEAD
        connection.tick(now + 6)
        with pytest.raises(BackendTimeout):
            await answer

    run(test)


def test_a_full_buffer_stops_the_client_and_starts_the_backends_time():
    async def test(backend, connection, free):
        rest = Rest(50_000_000)
        answer = start(connection, rest, seconds=5.0)
        await backend.until(b"first")
        connection.send(b"x" * 10_000_000)
        assert rest.paused
        now = asyncio.get_running_loop().time()
        connection.tick(now + 4)
        assert connection.state is State.HEAD
        await backend.until(b"x" * 10_000_000)
        assert not rest.paused
        connection.tick(now + 1000)
        assert connection.state is State.HEAD
        connection.send(b"x" * 10_000_000)
        connection.tick(now + 1000)
        with pytest.raises(BackendTimeout):
            await answer

    run(test)


def test_an_early_answer_is_taken_and_the_connection_never_reused():
    async def test(backend, connection, free):
        answer = start(connection, Rest(4))
        await backend.until(b"first")
        backend.writer.write(OK)
        assert (await answer).body == b"ok"
        assert free == []
        connection.send(b"last")
        connection.finish()
        await backend.closed.wait()
        assert backend.got.endswith(b"first")
        assert not connection.usable

    run(test)


def test_a_backend_that_has_refused_gets_no_more_and_is_closed_after_its_answer():
    async def test(backend, connection, free):
        answer = start(connection, Rest(4))
        await backend.until(b"first")
        backend.writer.write(b"HTTP/1.1 413 No\r\ncontent-length: 2\r\n\r\n")
        while connection.state is not State.COLLECT:
            await asyncio.sleep(0)
        connection.send(b"last")
        connection.finish()
        backend.writer.write(b"no")
        reply = await answer
        assert (reply.status, reply.body) == (413, b"no")
        await backend.closed.wait()
        assert backend.got.endswith(b"first")
        assert free == []

    run(test)


def test_a_failed_upload_ends_the_request_with_its_own_error():
    async def test(backend, connection, free):
        answer = start(connection, Rest(4))
        await backend.until(b"first")
        assert connection.refuse(BodyTooLarge("too large"))
        with pytest.raises(BodyTooLarge):
            await answer
        await backend.closed.wait()
        assert connection.refuse(BodyTooLarge("again"))

    run(test)


def test_an_upload_that_failed_before_it_was_sent_sends_nothing():
    async def test(backend, connection, free):
        with pytest.raises(BodyTooLarge):
            await start(connection, Rest(4, error=BodyTooLarge("too large")))
        await backend.closed.wait()
        assert backend.got == b""

    run(test)


def test_a_backend_that_dies_in_mid_upload_is_broken():
    async def test(backend, connection, free):
        answer = start(connection, Rest(4))
        await backend.until(b"first")
        backend.writer.transport.abort()
        with pytest.raises(BackendBroke):
            await answer
        connection.send(b"last")
        connection.finish()

    run(test)


def test_cancelling_closes_the_connection():
    async def test(backend, connection, free):
        answer = start(connection, Rest(4))
        await backend.until(b"first")
        answer.cancel()
        await asyncio.wait([answer])
        await backend.closed.wait()
        assert not connection.usable

    run(test)
