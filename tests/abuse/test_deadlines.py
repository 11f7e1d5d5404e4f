"""Connections that are held open: every route gives a client the same, bounded, time."""

import asyncio

import pytest

from gateway.process import reload
from tests.abuse.support import FAST, gateway, head, ledger, raw, story

SOON = "timeouts: {header: 300ms, body: 300ms, keep_alive: 300ms}"
ROUTES = [
    ("GET", "/livez"),
    ("GET", "/v1/models"),  # 401
    ("PUT", "/nope"),
    ("GET", "/v1/chat/completions"),  # 405
    ("POST", "/v1/chat/completions"),  # 401
]


async def drip(client, piece, seconds):
    """Send a piece now and then; return whether the connection closed in time."""
    try:
        async with asyncio.timeout(seconds):
            while await client.send(piece) and not client.reader.at_eof():
                await asyncio.sleep(0.05)
            return True
    except TimeoutError:
        return False


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_body_that_drips_after_the_reply_is_cut(method, path, framing):
    @story
    async def check():
        async with gateway(FAST, extra=SOON) as world, ledger(world):
            async with raw(world) as client:
                if framing == "length":
                    start, piece = head(method, path, length=100_000), b"x"
                else:
                    start, piece = head(method, path, chunked=True), b"1\r\nx\r\n"
                await client.send(start)
                reply = await client.reply()
                assert reply.headers["connection"] == "close"
                assert await drip(client, piece, 5)

    check()


@story
async def test_an_inference_body_that_drips_is_cut():
    async with gateway(FAST, extra=SOON) as world, ledger(world):
        async with raw(world) as client:
            await client.send(head(key=world.key, length=100_000))
            reading = asyncio.get_running_loop().create_task(client.reply())
            while not reading.done():
                await client.send(b" ")
                await asyncio.sleep(0.05)
            assert (await reading).status == 408


@pytest.mark.parametrize("before", [b"", b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"])
@pytest.mark.parametrize("piece", [b"x", b"\r\n", b"X-A: b\r\n"])
def test_a_head_that_drips_is_cut_first_or_second(before, piece):
    @story
    async def check():
        async with gateway(FAST, extra=SOON) as world, ledger(world):
            async with raw(world) as client:
                if before:
                    await client.send(before)
                    assert (await client.reply()).status == 200
                await client.send(b"GET /" if piece != b"\r\n" else b"\r\n")
                assert await drip(client, piece, 5)

    check()


@story
async def test_a_head_that_begins_behind_a_request_gets_its_time_and_no_more():
    async with gateway(FAST, extra=SOON) as world, ledger(world):
        async with raw(world) as client:
            await client.send(head("GET", "/livez") + b"GET /li")
            assert (await client.reply()).status == 200
            assert (await client.reply()).status == 408
            assert await client.closed(5)


@pytest.mark.parametrize("path", ["/livez", "/nope"])
def test_an_idle_connection_is_closed_and_one_in_use_is_not(path):
    @story
    async def check():
        async with gateway(FAST, extra=SOON) as world, ledger(world):
            async with raw(world) as client:
                for _ in range(3):
                    await client.send(head("GET", path))
                    assert "connection" not in (await client.reply()).headers
                assert await client.closed(5)

    check()


@story
async def test_a_body_that_came_with_its_head_keeps_the_connection():
    async with gateway(FAST) as world, ledger(world):
        async with raw(world) as client:
            for _ in range(2):
                await client.send(head("POST", "/nope", length=2) + b"{}")
                reply = await client.reply()
                assert reply.status == 404
                assert "connection" not in reply.headers


@story
async def test_unread_bodies_are_never_kept():
    async with gateway(FAST, extra=SOON) as world, ledger(world, most_mib=12):
        async with raw(world) as client:
            await client.send(head("PUT", "/livez", length=1 << 40))
            assert await client.flood(b"x" * 65536, 8 << 30) < 8 << 30


@story
async def test_a_client_that_asks_before_it_sends_gets_the_refusal_and_no_100():
    async with gateway(FAST) as world, ledger(world):
        async with raw(world) as client:
            await client.send(head("PUT", "/nope", "expect: 100-continue", length=1 << 30))
            got = await client.rest()
            assert got.startswith(b"HTTP/1.1 404 ")


@story
async def test_a_refused_client_that_still_sends_can_read_why():
    async with gateway(FAST) as world, ledger(world):
        async with raw(world) as client:
            await client.send(b"GET / HTTP/1.1\r\nhost: x\r\n" + b"x: " + b"v" * 200_000)
            await client.send(b"v" * 200_000)  # nobody parses this any more
            assert (await client.reply()).status == 431


@story
async def test_a_stranger_who_does_not_read_is_cut():
    async with gateway(FAST, extra="timeouts: {client_write: 300ms, body: 300ms}") as world:
        async with ledger(world):
            async with raw(world) as client:
                client.writer.transport.pause_reading()
                many = head("GET", "/v1/models", key=world.key) * 60
                while await client.send(many):
                    await asyncio.sleep(0)


@pytest.mark.parametrize("what", ["public", "admin"])
def test_connections_that_are_there_wait_as_long_as_a_reload_says(what):
    @story
    async def check():
        async with gateway(FAST, extra="timeouts: {keep_alive: 75s}") as world, ledger(world):
            port = getattr(world.process, f"{what}_port")
            async with raw(port) as client:
                await client.send(head("GET", "/livez"))
                assert (await client.reply()).status == 200
                text = world.path.read_text()
                world.path.write_text(text.replace("keep_alive: 75s", "keep_alive: 300ms"))
                told = await reload(world.process)
                assert told.effect == ("timeouts.keep_alive 1m15s -> 300ms",)
                async with asyncio.timeout(5):
                    assert await client.rest() == b""

    check()


@story
async def test_the_admin_listener_waits_for_a_body_as_long_as_a_reload_says():
    async with gateway(FAST, extra="timeouts: {body: 75s}") as world, ledger(world):
        text = world.path.read_text()
        world.path.write_text(text.replace("body: 75s", "body: 300ms"))
        await reload(world.process)
        async with raw(world.process.admin_port) as client:
            await client.send(head("POST", "/admin/v1/restarts:hold", length=100))
            async with asyncio.timeout(5):
                assert (await client.reply()).status == 408
