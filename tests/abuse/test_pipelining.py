"""Requests sent ahead on one connection: answered in order, read no further than one read."""

import asyncio
import contextlib

from tests.abuse.support import FAST, front_of, gateway, head, ledger, page, raw, scripted, story

LIMIT = "limits: {max_body: 1KiB}\ntimeouts: {body: 400ms, header: 400ms}"
REPLY = page(b'{"id":"x","object":"chat.completion","choices":[],"usage":null}').replace(
    b"content-length", b"content-type: application/json\r\ncontent-length"
)


def chat(world, text="hi", **more):
    body = (
        b'{"model":"m","max_tokens":4,"messages":[{"role":"user","content":"%b"}]}' % text.encode()
    )
    return head(key=world.key, length=len(body)) + body


@story
async def test_a_body_behind_two_requests_waits_for_its_turn_and_its_limit():
    """A is short, B is long, and C's head comes with them: C's body is read when it is C's turn."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def answer(asked):
        if b"long" in asked.body:
            begun.set()
            await go_on.wait()
        return REPLY

    async with scripted(answer) as backend, front_of(backend, extra=LIMIT) as world:
        async with ledger(world, most_mib=12), raw(world) as client:
            c = head(key=world.key, chunked=True)
            await client.send(chat(world) + chat(world, "long") + c)
            assert (await client.reply()).status == 200
            await begun.wait()
            taken = 0
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    while taken < 64 << 20 and await client.send(
                        b"8000\r\n" + b"x" * 32768 + b"\r\n"
                    ):
                        taken += 32768
            assert taken < 12 << 20  # the kernel's buffers of both sides
            go_on.set()
            assert (await client.reply()).status == 200
            assert (await client.reply()).status == 413
        assert len(backend.asked) == 2


@story
async def test_requests_sent_ahead_are_answered_in_order_and_a_late_one_gets_its_whole_time():
    """C's head is half sent while A and B take longer than a head may: no time of C's runs."""
    order, go_on = [], asyncio.Event()

    async def answer(asked):
        order.append(asked.body)
        await go_on.wait()
        return REPLY

    async with scripted(answer) as backend, front_of(backend, extra=LIMIT) as world:
        async with ledger(world), raw(world) as client:
            c = chat(world, "c")
            await client.send(chat(world, "a") + chat(world, "b") + c[:20])
            await world.until(lambda: len(order) == 1)
            await asyncio.sleep(1.2)  # three times what a head may take, and more than a tick
            go_on.set()
            assert (await client.reply()).status == 200
            assert (await client.reply()).status == 200
            await client.send(c[20:])
            assert (await client.reply()).status == 200
            assert [b'"a"' in order[0], b'"b"' in order[1], b'"c"' in order[2]] == [True] * 3


@story
async def test_a_client_that_leaves_while_its_next_request_waits_ends_the_work():
    gone = asyncio.Event()

    async def answer(asked):
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()

    async with scripted(answer) as backend, front_of(backend) as world:
        async with ledger(world), raw(world) as client:
            await client.send(chat(world) + chat(world))
            await world.until(lambda: len(backend.asked) == 1)
            client.writer.close()
            await world.until(lambda: not world.process.ingress.live)
        assert len(backend.asked) == 1


@story
async def test_thousands_of_requests_in_one_read_are_not_kept():
    async with gateway(FAST) as world, ledger(world, most_mib=12):
        async with raw(world) as client:
            await client.send(head("GET", "/livez") * 5000)
            got = await client.rest()
            assert 1 <= got.count(b"HTTP/1.1 200 OK") <= 65
            assert got.count(b"connection: close") == 1


@story
async def test_garbage_behind_a_request_does_not_harm_it():
    async with gateway(FAST) as world, ledger(world):
        for pieces in (
            [chat(world) + b"\x00GARBAGE\r\n\r\n"],
            [chat(world), b"\x00GARBAGE\r\n\r\n"],
        ):
            async with raw(world) as client:
                for piece in pieces:
                    await client.send(piece)
                got = await client.rest()
                assert got.startswith(b"HTTP/1.1 200 OK")
