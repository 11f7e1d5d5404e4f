"""The bound of a reply holds however its bytes come: a read at a time, or a chunk at a time."""

import asyncio

import pytest

from gateway.core.aio import start
from gateway.core.errors import ReplyTooLarge
from gateway.core.types import Dialect
from gateway.upstream.relay import Relay
from gateway.upstream.reply import Reply
from gateway.upstream.silence import ENDLESS, Silence
from gateway.upstream.watch import PlainWatch
from gateway.wire.chunks import framed


class Backend:
    """A connection to a backend that writes on until it is cut."""

    aborted = False

    def __init__(self):
        self.loop = asyncio.get_running_loop()
        self.silence = Silence(ENDLESS, 0.0)

    def abort(self):
        self.aborted = True

    def attach(self, sink):
        pass

    pause = resume = lambda self: None


class Client:
    """A client that takes everything."""

    bytes_out = 0
    started = answering = writing_paused = takes_chunks = False

    def begin(self, reply, data=b""):
        self.started = self.answering = self.takes_chunks = True

    def write(self, data):
        pass

    write_chunk = end = beat = cut = lambda self, *told: None


@pytest.mark.parametrize("by_chunk", [False, True])
def test_a_reply_that_is_too_large_ends(by_chunk):
    async def reads():
        backend, client = Backend(), Client()
        watch = PlainWatch(Dialect.PLAIN, most_bytes=300 * 1024)
        relay = Relay(
            Reply(200, {b"content-type": b"application/json"}, None, backend), watch, client, 0.0
        )
        running = start(relay.run(), name="relay")
        await asyncio.sleep(0)
        relay.on_data(b"x" * 260 * 1024)
        part, count = b"y" * 3000, 0
        while not backend.aborted and count < 100:
            count += 1
            if not (by_chunk and relay.on_chunk(framed(part))):
                relay.on_data(part)
        await asyncio.wait([running], timeout=5)
        return count, running.done()

    assert asyncio.run(reads()) == (14, True)


def test_a_reply_that_is_too_large_in_one_read_is_no_failure_of_its_backend():
    async def read():
        backend = Backend()
        head = {b"content-type": b"application/json", b"content-length": b"300000"}
        watch = PlainWatch(Dialect.PLAIN, most_bytes=200_000)
        relay = Relay(Reply(200, head, None, backend), watch, Client(), 0.0)
        running = start(relay.run(), name="relay")
        await asyncio.sleep(0)
        relay.on_end(b"x" * 300_000)
        return await running

    assert isinstance(asyncio.run(read()), ReplyTooLarge)
