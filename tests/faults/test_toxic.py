"""The proxy that spoils what passes does what its toxics say, and nothing else."""

import asyncio
import contextlib
import time

import pytest

from tests.faults.toxic import BLACKHOLE, Ending, Toxic, toxic
from tests.stories.support import story


@contextlib.asynccontextmanager
async def pair(**directions):
    """A server's and a client's streams with a proxy between them."""
    arrived = asyncio.get_running_loop().create_future()
    server = await asyncio.start_server(lambda *both: arrived.set_result(both), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with toxic(url, **directions) as proxy:
        host, _, port = proxy.url.removeprefix("http://").rpartition(":")
        client = await asyncio.open_connection(host, int(port))
        served = await arrived
        try:
            yield proxy, client, served
        finally:
            for _, writer in (client, served):
                writer.transport.abort()
            server.close()


@story
async def test_without_a_toxic_everything_passes_and_ends_as_it_was_sent():
    async with pair() as (proxy, client, served):
        client[1].write(b"question" * 10_000)
        assert await served[0].readexactly(80_000) == b"question" * 10_000
        client[1].write_eof()
        assert await served[0].read() == b""
        served[1].write(b"answer")
        served[1].close()
        assert await client[0].read() == b"answer"
        assert proxy.accepted == 1


@story
async def test_latency_delays_and_keeps_the_order():
    async with pair(down=Toxic(latency_s=0.1, jitter_s=0.05)) as (_, client, served):
        begun = time.monotonic()
        for number in range(5):
            served[1].write(b"%d" % number)
            await asyncio.sleep(0.005)
        assert await client[0].readexactly(5) == b"01234"
        assert time.monotonic() - begun >= 0.09  # a loop may round to milliseconds


@story
async def test_bandwidth_is_bounded():
    async with pair(down=Toxic(bytes_per_s=1000, slice_bytes=10)) as (_, client, served):
        begun = time.monotonic()
        served[1].write(b"x" * 200)
        assert await client[0].readexactly(200) == b"x" * 200
        assert time.monotonic() - begun >= 0.18


@story
async def test_slices_come_one_by_one():
    async with pair(down=Toxic(slice_bytes=1, bytes_per_s=500)) as (_, client, served):
        served[1].write(b"abc")
        assert [await client[0].read(100) for _ in range(3)] == [b"a", b"b", b"c"]


@pytest.mark.parametrize("ending", [Ending.CLOSE, Ending.HALF_CLOSE])
def test_a_limit_ends_in_order_after_that_many_bytes(ending):
    @story
    async def check():
        async with pair(down=Toxic(limit_bytes=7, ending=ending)) as (_, client, served):
            served[1].write(b"0123456789")
            assert await client[0].read() == b"0123456"
            client[1].write(b"still there?")
            heard = await served[0].read(100)
            assert heard == (b"still there?" if ending is Ending.HALF_CLOSE else b"")

    check()


@story
async def test_a_limit_may_end_with_a_reset_for_both():
    async with pair(down=Toxic(limit_bytes=3, ending=Ending.RESET)) as (_, client, served):
        served[1].write(b"0123456789")
        for reader, _ in (client, served):
            with pytest.raises(ConnectionResetError):
                await reader.readexactly(10)


@story
async def test_a_blackhole_lets_nothing_pass_and_stays_open():
    async with pair(up=BLACKHOLE) as (proxy, client, served):
        client[1].write(b"is anybody there?")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await served[0].read(1)
        served[1].write(b"the other way is open")
        assert await client[0].read(100) == b"the other way is open"
        assert proxy.open == 1


@story
async def test_one_byte_is_wrong():
    async with pair(down=Toxic(corrupt_at=4, slice_bytes=3)) as (_, client, served):
        served[1].write(b"0123456")
        assert await client[0].readexactly(7) == b"0123" + bytes([ord("4") ^ 0xFF]) + b"56"


@story
async def test_an_end_is_told_late():
    async with pair(down=Toxic(close_delay_s=0.1)) as (_, client, served):
        begun = time.monotonic()
        served[1].write(b"all")
        served[1].close()
        assert await client[0].readexactly(3) == b"all"
        assert await client[0].read() == b""
        assert time.monotonic() - begun >= 0.09  # a loop may round to milliseconds


@story
async def test_a_toxic_holds_from_the_moment_it_is_set():
    async with pair() as (proxy, client, served):
        served[1].write(b"well")
        assert await client[0].readexactly(4) == b"well"
        proxy.down = Toxic(limit_bytes=6)
        served[1].write(b"not so")
        assert await client[0].read() == b"no"


@story
async def test_a_reset_of_one_side_is_one_for_the_other():
    async with pair() as (_, client, served):
        served[1].write(b"x")
        await client[0].readexactly(1)
        client[1].write(b"unread")  # a close with unread bytes is a reset
        await asyncio.sleep(0.05)
        served[1].transport.abort()
        with contextlib.suppress(ConnectionResetError):
            assert await client[0].read() == b""


@story
async def test_a_deaf_one_neither_takes_nor_refuses_connections_until_it_hears_again():
    async with pair() as (proxy, _, _):
        proxy.deafen()
        host, _, port = proxy.url.removeprefix("http://").rpartition(":")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await asyncio.open_connection(host, int(port))
        assert proxy.accepted == 1
        proxy.hear()
        async with asyncio.timeout(5):
            _, writer = await asyncio.open_connection(host, int(port))
        writer.transport.abort()
