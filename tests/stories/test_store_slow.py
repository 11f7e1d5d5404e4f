"""A Redis that is late or full, trickles its replies, or resets within one: calls end, and nothing stays behind."""

import asyncio
import contextlib
import logging

import pytest

from gateway.core.aio import SystemClock
from gateway.store.address import client_of
from gateway.store.link import Link
from gateway.store.onredis import redis_store
from gateway.store.scripts import HOLD, HOLDS
from gateway.store.shared import StoreUnavailable
from tests.storecases import HeldClock
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
    """Answers what it is asked to run once it is told to. While it is full it refuses to write."""

    def __init__(self, refusal=b"-OOM command not allowed\r\n"):
        self.answers, self.connections, self.full = asyncio.Event(), 0, False
        self.refusal = refusal

    async def serve(self, reader, writer):
        self.connections += 1
        while data := await reader.read(65536):
            if b"EVAL" in data:
                await self.answers.wait()
                reads = any(each.encode() in data for each in (HOLDS.text, HOLDS.sha))
                reply = self.refusal if self.full and not reads else b"*0\r\n"
                writer.write(reply * data.count(b"EVAL"))
            else:  # several may come in one read
                writer.write(b"+OK\r\n" * (data.count(b"SETINFO") + data.count(b"PING")))
        writer.close()


LONG_S = 600.0


@contextlib.asynccontextmanager
async def linked(redis, clock, **more):
    """The way to such a Redis, which drops no connection because the machine is busy."""
    async with await asyncio.start_server(redis.serve, "127.0.0.1", 0) as server:
        url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = client_of(url, connect_s=LONG_S, reply_s=LONG_S)
        link = Link(client, clock, listens_s=LONG_S, **more)
        try:
            yield link
        finally:
            await link.close()


def asked(link, script, **more):
    return link.ask(script, ["gw1:x"], [], LONG_S, **more)


@story
async def test_a_late_reply_is_heard_by_the_patient_and_of_those_who_left_and_nobody_else_waits():
    late, heard = Late(), asyncio.Event()
    async with linked(late, SystemClock()) as link, asyncio.TaskGroup() as group:
        patient = group.create_task(asked(link, HOLDS))
        leaves = group.create_task(asked(link, HOLDS, late=lambda reply: heard.set()))
        while not link.trouble:
            await asyncio.sleep(0.01)
        leaves.cancel()
        with pytest.raises(StoreUnavailable, match="within 200 ms"):
            link.ask(HOLDS, ["gw1:x"], []).send(None)  # at once
        late.answers.set()
        assert await patient == []
        await heard.wait()
        while link.trouble:  # the machine may be busy
            assert await asked(link, HOLDS) == []
        assert late.connections == 1


@pytest.mark.parametrize("writes", [1, 3])  # that are refused, between two that only read
@story
async def test_of_a_store_that_is_full_and_can_be_read_the_log_tells_once(writes, caplog):
    caplog.set_level(logging.INFO, "gateway.store")
    full, clock = Late(), HeldClock()
    full.answers.set()
    full.full = True
    async with linked(full, clock, budget_s=LONG_S / 2) as link:
        for _ in range(6):
            for _ in range(writes):
                with pytest.raises(StoreUnavailable, match="its memory is full"):
                    await asked(link, HOLD)
                clock.at += 0.4
            assert await asked(link, HOLDS) == []
            assert link.trouble
        full.full = False
        clock.at += 3.0
        await asked(link, HOLD)
        assert not link.trouble
    assert [each.event for each in caplog.records] == ["store_lost", "store_found"]


@story
async def test_one_refusal_of_another_kind_is_no_trouble_once_it_answers_again():
    """Such as of a key that holds something else: it concerns who asked, not the store."""
    wrong, clock = Late(b"-WRONGTYPE\r\n"), HeldClock()
    wrong.answers.set()
    wrong.full = True
    async with linked(wrong, clock, budget_s=LONG_S / 2) as link:
        for _ in range(4):
            with pytest.raises(StoreUnavailable, match="WRONGTYPE"):
                await asked(link, HOLD)
        assert await asked(link, HOLDS) == []
        assert not link.trouble


@story
async def test_a_reply_that_comes_as_who_asked_leaves_is_told_as_late():
    redis, heard = Late(), []
    redis.answers.set()
    async with linked(redis, SystemClock(), budget_s=LONG_S / 2) as link:
        asking = asked(link, HOLDS, late=heard.append)
        reply = asking.send(None)
        while not reply.done():
            await asyncio.sleep(0.01)
        with pytest.raises(asyncio.CancelledError):
            asking.throw(asyncio.CancelledError())
        assert heard == [[]]
