"""A Redis that is late, trickles its replies, or resets within one: calls end in time, and nothing stays behind."""

import asyncio

import pytest

from gateway.core.aio import SystemClock
from gateway.store.address import client_of
from gateway.store.link import Link
from gateway.store.onredis import redis_store
from gateway.store.scripts import HOLDS
from gateway.store.shared import StoreUnavailable
from tests.stories.support import story


class Server:
    """Answers PING, and everything else in its own way."""

    def __init__(self, resets):
        self.resets, self.open, self.most = resets, 0, 0

    async def serve(self, reader, writer):
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            while data := await reader.read(65536):
                if b"PING" in data:
                    writer.write(b"+PONG\r\n")
                elif self.resets:
                    writer.write(b"*2\r\n$5\r\nhe")
                    await writer.drain()
                    writer.transport.abort()
                    return
                else:
                    writer.write(b"*2\r\n$1000000\r\n")
                    while not writer.transport.is_closing():  # a byte at a time, without an end
                        writer.write(b"h")
                        await asyncio.sleep(0.01)
        except OSError:
            pass
        finally:
            self.open -= 1
            writer.transport.abort()


@pytest.mark.parametrize("resets", [False, True])
@story
async def test_a_store_that_answers_slowly_or_breaks_off_leaves_nothing_behind(resets):
    served = Server(resets)
    server = await asyncio.start_server(served.serve, "127.0.0.1", 0)
    store = redis_store(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", SystemClock())
    async with server:
        for _ in range(6):
            async with asyncio.TaskGroup() as group:  # the story's deadline is theirs
                for _ in range(20):
                    group.create_task(fails(store))
        assert served.most <= 2  # the one that is dropped, and the one in its place
        await store.close()
    while served.open:
        await asyncio.sleep(0.02)
    while any("shared store" in each.get_name() for each in asyncio.all_tasks()):
        await asyncio.sleep(0.02)


async def fails(store):
    with pytest.raises(StoreUnavailable):
        await store.holds()


class Late:
    """Answers what it is asked to run once it is told to."""

    def __init__(self):
        self.answers, self.connections = asyncio.Event(), 0

    async def serve(self, reader, writer):
        self.connections += 1
        while data := await reader.read(65536):
            if b"EVALSHA" in data:
                await self.answers.wait()
                writer.write(b"*0\r\n" * data.count(b"EVALSHA"))
            else:  # several may come in one read
                writer.write(b"+OK\r\n" * (data.count(b"SETINFO") + data.count(b"PING")))
        writer.close()


LONG_S = 600.0


@story
async def test_a_late_reply_is_heard_by_the_patient_and_of_those_who_left_and_nobody_else_waits():
    late, heard = Late(), asyncio.Event()
    server = await asyncio.start_server(late.serve, "127.0.0.1", 0)
    url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    link = Link(client_of(url, connect_s=LONG_S, reply_s=LONG_S), SystemClock(), listens_s=LONG_S)
    async with server, asyncio.TaskGroup() as group:
        patient = group.create_task(link.ask(HOLDS, ["gw1:x"], [], LONG_S))
        leaves = group.create_task(
            link.ask(HOLDS, ["gw1:x"], [], LONG_S, lambda reply: heard.set())
        )
        while not link.trouble:
            await asyncio.sleep(0.01)
        leaves.cancel()
        with pytest.raises(StoreUnavailable, match="within 200 ms"):
            link.ask(HOLDS, ["gw1:x"], []).send(None)  # at once
        late.answers.set()
        assert await patient == []
        await heard.wait()
        while link.trouble:  # the machine may be busy
            assert await link.ask(HOLDS, ["gw1:x"], [], LONG_S) == []
        assert late.connections == 1
        await link.close()
