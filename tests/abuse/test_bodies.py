"""Bodies that cost more than they weigh, too many of them, and large ones that are well."""

import asyncio
import contextlib
import itertools
import json
import os
import socket

import pytest

from gateway.sim.config import SimConfig
from gateway.wire.tally import MAX_VALUES
from tests import keyfiles as keys
from tests import loopback
from tests.abuse.support import FAST, front_of, gateway, head, ledger, page, raw, scripted, story

MANY = MAX_VALUES * 2
CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, MESSAGES, RERANK = (
    *("/v1/chat/completions", "/v1/completions", "/v1/embeddings"),
    *("/v1/responses", "/v1/messages", "/v1/rerank"),
)


def fields(**raw):
    """Return an object of a model and of values that are written out."""
    return b'{"model":"m",' + b",".join(b'"%b":%b' % (k.encode(), v) for k, v in raw.items()) + b"}"


def many(unit):
    return b"[" + (unit + b",") * MANY + unit + b"]"


KILLERS = {
    "parts": (CHAT, fields(messages=b'[{"role":"user","content":' + many(b"{}") + b"}]")),
    "messages": (CHAT, fields(messages=many(b"{}"))),
    "tools": (CHAT, fields(messages=b"[]", tools=many(b"{}"))),
    "schema": (CHAT, fields(messages=b"[]", response_format=b'{"a":' + many(b"{}") + b"}")),
    "keys": (CHAT, fields(messages=b"[]", **{f"k{n}": b"1" for n in range(MANY)})),
    "same keys": (CHAT, b"{" + b'"a":1,' * MANY + b'"model":"m"}'),
    "id lists": (COMPLETIONS, fields(prompt=many(b"[1]"))),
    "empty texts": (COMPLETIONS, fields(prompt=many(b'""'))),
    "floats": (EMBEDDINGS, fields(input=many(b"1.5"))),
    "ids": (EMBEDDINGS, fields(input=b"[" + b"1," * 4_300_000 + b"1]")),
    "items": (RESPONSES, fields(input=many(b"{}"))),
    "blocks": (MESSAGES, fields(max_tokens=b"1", messages=many(b'{"content":[{}]}'))),
    "documents": (RERANK, fields(query=b'"q"', documents=many(b'""'))),
    "depth": (CHAT, fields(messages=b"[" * MANY)),
    "commas": (CHAT, fields(messages=b"[" + b"," * MANY)),
    "digits": (CHAT, fields(seed=b"1" * MANY)),
}


def padded(size):
    """Return a chat that is large by a field which no engine reads."""
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "x": "y" * size}
    return json.dumps(chat).encode()


async def post(client, path, body, key, *lines):
    await client.send(head("POST", path, *lines, key=key, length=len(body)) + body)
    return await client.reply()


@pytest.mark.parametrize("name", KILLERS)
def test_a_body_of_many_tiny_values_is_refused_and_holds_nobody_up(name):
    path, body = KILLERS[name]

    @story
    async def check():
        async with gateway(FAST) as world, ledger(world, most_mib=8 * len(body) / 2**20 + 30):
            async with raw(world) as client:
                reply = await post(client, path, body, world.key)
                assert reply.status == 400
                assert json.loads(reply.body)["error"]["type"] in ("invalid_request_error", None)
        assert [each for each in world.sims[0].requests if each.path == path] == []
        assert world.process.handler.bodies.held_bytes == 0

    check()


LONG = {
    "an image": "data:image/png;base64," + "QUJD" * 800_000,
    "text": 'Zeile für Zeile \\ "Text" 😀\n' * 80_000,
    "one short of small": "x" * 65_000,
    "beyond small": "x" * 66_000,
    "brackets": "[{" * 50_000,
}


@pytest.mark.parametrize("what", LONG)
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("alias", [False, True])
def test_a_large_body_reaches_the_backend_byte_for_byte(what, chunked, alias):
    content = [{"type": "text", "text": LONG[what]}, {"type": "text", "text": "why?"}]
    asked = {"messages": [{"role": "user", "content": content}], "x": [1.50, 1e9], "seed": 7}
    body = json.dumps({"model": "alias" if alias else "m", **asked}, ensure_ascii=False).encode()

    @story
    async def check():
        answer = page(json.dumps({"choices": [], "usage": None}).encode())
        async with scripted(lambda _: answer) as backend:
            async with front_of(backend, aliases=["alias"]) as world, raw(world) as client:
                lines = head(
                    "POST",
                    CHAT,
                    key=world.key,
                    chunked=chunked,
                    length=None if chunked else len(body),
                )
                await client.send(lines)
                for start in range(0, len(body), 100_000):
                    part = body[start : start + 100_000]
                    await client.send(b"%x\r\n%b\r\n" % (len(part), part) if chunked else part)
                await client.send(b"0\r\n\r\n" if chunked else b"")
                assert (await client.reply()).status == 200
                await world.settled()
                assert world.process.handler.bodies.held_bytes == 0
        sent = backend.asked[-1].body
        wanted = body.replace(b'"alias"', b'"m"')
        small = what == "one short of small"  # encoded anew when a field changes
        assert json.loads(sent) == json.loads(wanted) if small and alias else sent == wanted

    check()


@story
async def test_a_model_that_is_not_there_is_refused_before_the_rest_of_the_body_is_read():
    async with gateway(FAST) as world, ledger(world), raw(world) as client:
        await client.send(head("POST", CHAT, key=world.key, length=30 << 20))
        await client.send(b'{"model": "other", "messages": [{"content": "' + b"x" * 200_000)
        reply = await client.reply()
        assert reply.status == 404
        assert json.loads(reply.body)["error"]["code"] == "model_not_found"


@story
async def test_what_is_no_json_is_refused_before_the_rest_of_it_is_read():
    async with gateway(FAST) as world, ledger(world), raw(world) as client:
        await client.send(head("POST", CHAT, key=world.key, length=30 << 20))
        await client.send(b'{"model": "m", "messages": ]' + b"x" * 200_000)
        assert (await client.reply()).status == 400


SMALL_LIMITS = "limits: {max_body: 1MiB, bodies: 2MiB}\ntimeouts: {body: 400ms}"


async def unfinished(world, stack, key, size=900_000):
    """Announce a body, send half of it, and wait until there is room for it."""
    client = await stack.enter_async_context(raw(world))
    before = world.process.handler.bodies.held_bytes
    await client.send(
        head("POST", CHAT, key=key, length=size) + b'{"model": "m"' + b" " * (size // 2)
    )
    return client, lambda: world.process.handler.bodies.held_bytes > before


@story
async def test_one_key_cannot_hold_what_others_need():
    async with gateway(FAST, extra=SMALL_LIMITS.replace("400ms", "5s")) as world, ledger(world):
        other = keys.create(world.path.parent / "keys.yaml", name="other", wall_now=0).key
        await world.until(lambda: len(world.process.handler.settings.keys) == 2, 10)
        async with contextlib.AsyncExitStack() as stack:
            _, holds = await unfinished(world, stack, world.key)
            await world.until(holds)
            # Waits: it is over the key's share.
            _, holds = await unfinished(world, stack, world.key)
            await asyncio.sleep(0)
            theirs = await stack.enter_async_context(raw(world))
            assert (await post(theirs, CHAT, padded(500_000), other)).status == 200
            assert not holds()
            assert "gateway_request_body_bytes 900000.0" in await world.metrics()
            assert "gateway_request_body_limit_bytes 2.097152e+06" in await world.metrics()
            async with loopback.client(base_url=world.admin_url) as admin:
                totals = (await admin.get("/admin/v1/overview")).json()["totals"]
            assert (totals["body_bytes"], totals["body_bytes_limit"]) == (900_000, 2 * 2**20)
        await world.settled()
        assert world.process.handler.bodies.held_bytes == 0


@story
async def test_a_key_that_holds_its_share_is_told_to_come_again():
    async with gateway(FAST, extra=SMALL_LIMITS) as world, ledger(world):
        async with contextlib.AsyncExitStack() as stack:
            clients = [(await unfinished(world, stack, world.key))[0] for _ in range(6)]
            replies = [await client.reply() for client in clients]
        statuses = sorted(each.status for each in replies)
        assert statuses.count(408) >= 1  # the one that had room never sent the rest
        assert statuses.count(429) >= 1
        assert set(statuses) == {408, 429}
        refused = next(each for each in replies if each.status == 429)
        assert int(refused.headers["retry-after"]) >= 1
        assert json.loads(refused.body)["error"]["code"] == "too_many_body_bytes"
        assert "`limits.bodies`" in json.loads(refused.body)["error"]["message"]
        assert world.process.handler.bodies.held_bytes == 0


@story
async def test_bodies_that_tell_no_length_hold_little_until_they_are_long():
    limits = "limits: {max_body: 8MiB, bodies: 24MiB}"
    async with gateway(FAST, extra=limits) as world, ledger(world):
        bodies = world.process.handler.bodies
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(raw(world)) for _ in range(6)]
            for client in clients:
                await client.send(head("POST", CHAT, key=world.key, chunked=True))
                await client.send(
                    b'd\r\n{"model": "m"\r\n' + b"%x\r\n%b\r\n" % (200_000, b" " * 200_000)
                )
            await world.until(lambda: bodies.held_bytes == 6 << 20)
            long = b" " * (3 << 20)
            await clients[0].send(b"%x\r\n%b\r\n" % (len(long), long))
            await world.until(lambda: bodies.held_bytes == (5 + 8) << 20)
            said = b', "messages": [{"role": "user", "content": "hi"}]}'
            for client in clients:
                await client.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(said), said))
            assert [(await client.reply()).status for client in clients] == [200] * 6
        await world.settled()
        assert bodies.held_bytes == 0


@story
async def test_a_body_that_waits_for_room_is_not_late_and_not_read():
    async with gateway(FAST, extra=SMALL_LIMITS.replace("400ms", "1s")) as world, ledger(world):
        async with contextlib.AsyncExitStack() as stack:
            first, holds = await unfinished(world, stack, world.key)
            await world.until(holds)
            second = await stack.enter_async_context(raw(world))
            body = padded(900_000)
            asked = asyncio.get_running_loop().create_task(post(second, CHAT, body, world.key))
            waiting = [each for each in world.process.ingress.live if each.hold is None]
            while not waiting:
                await asyncio.sleep(0)
                waiting = [each for each in world.process.ingress.live if each.hold is None]
            await asyncio.sleep(0.05)  # more than it takes to send all of it
            assert not waiting[0].body.complete
            first.abort()
            assert (await asked).status == 200


@story
async def test_clients_that_leave_while_they_wait_give_their_place_up():
    async with gateway(FAST, extra=SMALL_LIMITS.replace("400ms", "20s")) as world, ledger(world):
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(5):
                await unfinished(world, stack, world.key)
        await world.settled()
        assert world.process.handler.bodies.held_bytes == 0


@story
async def test_bodies_in_tiny_chunks_need_no_more_memory_than_they_weigh():
    async with gateway(FAST) as world, ledger(world, most_mib=40):
        async with raw(world) as client:
            await client.send(head("POST", CHAT, key=world.key, chunked=True))
            await client.send(b'd\r\n{"model": "m"\r\n')
            await client.flood(b"2\r\n  \r\n" * 8000, 7 << 20)
            await client.send(b"1\r\n}\r\n0\r\n\r\n")
            assert (await client.reply()).status in (200, 400)


@story
async def test_of_a_body_in_tiny_chunks_one_read_is_taken_in_a_turn_of_the_loop():
    """The loop reads a socket up to 32 times in a row, which here are half a million chunks."""
    async with gateway(FAST) as world, ledger(world):
        async with raw(world) as client:
            await client.send(head("POST", CHAT, key=world.key, chunked=True) + b"1\r\n{\r\n")
            await world.until(lambda: world.process.ingress.live)
            (down,) = world.process.ingress.live
            descriptor = os.dup(client.writer.get_extra_info("socket").fileno())
            rest = memoryview(b"1\r\n \r\n" * 2_000_000)
            with socket.socket(fileno=descriptor) as own, contextlib.suppress(BlockingIOError):
                while rest:  # until the buffers of the system are full
                    rest = rest[own.send(rest) :]
            seen = [down.body.came_bytes]
            while len(seen) < 30:
                await asyncio.sleep(0)
                seen.append(down.body.came_bytes)
            assert 0 < max(b - a for a, b in itertools.pairwise(seen)) <= 256 * 1024 // 6 + 1
            assert seen[-1] > 100_000


@story
async def test_a_body_is_dropped_once_the_first_token_has_come():
    """Whoever still refers to it: a stream may go on for an hour."""
    sim = SimConfig(model="m", decode_step_s=0.02)
    async with gateway(sim) as world, ledger(world):
        body = json.dumps(
            {"model": "m", "stream": True, "max_tokens": 500, "x": "y" * (4 << 20),
             "messages": [{"role": "user", "content": "hi"}]}
        ).encode()  # fmt: skip
        async with raw(world) as client:
            await client.send(head("POST", CHAT, key=world.key, length=len(body)))
            seen = []
            for start in range(0, len(body), 1 << 20):
                await client.send(body[start : start + (1 << 20)])
                seen += [
                    each.hold.body for each in world.process.ingress.live if each.hold is not None
                ]
            await world.until(lambda: world.process.ingress.live)
            while not seen or len(seen[-1]) < len(body):
                await asyncio.sleep(0)
                seen += [
                    each.hold.body for each in world.process.ingress.live if each.hold is not None
                ]
                assert world.process.ingress.live
            await client.reader.readuntil(b"data: ")
            await world.until(lambda: len(seen[-1]) == 0)
            assert world.process.handler.bodies.held_bytes == 0
            assert world.in_flight() == 1


@story
async def test_a_body_that_was_dropped_is_never_sent_to_another_backend():
    """The first token waits here for a hidden chunk, so nothing has gone to the client yet."""
    chunk = {
        "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m",
        "choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}],
    }  # fmt: skip
    full = {"error": {"message": "full", "type": "ServiceUnavailableError", "code": 503}}

    def answer(asked):
        if asked.path != CHAT:
            return page(b"{}", "404 Not Found")
        frames = b"".join(b"data: %b\n\n" % json.dumps(each).encode() for each in (chunk, full))
        return page(frames, "200 OK\r\ncontent-type: text/event-stream")

    async with scripted(answer) as one, scripted(answer) as two, front_of(one, two) as world:
        async with raw(world) as client:
            chat = {"model": "m", "stream": True, "max_tokens": 1, "x": "y" * 300_000}
            body = json.dumps({**chat, "messages": [{"role": "user", "content": "hi"}]}).encode()
            reply = await post(client, CHAT, body, world.key)
        assert reply.status == 503
        assert [each.path for each in (*one.asked, *two.asked)].count(CHAT) == 1
        await world.settled()


@story
async def test_a_large_body_is_sent_to_another_backend_when_the_first_cannot_be_reached():
    async with gateway(FAST, FAST) as world:
        world.sims[0].inject("refuse")
        for _ in range(4):
            assert (await world.chat(x="y" * 300_000)).status_code == 200
        await world.settled()
        assert world.process.handler.bodies.held_bytes == 0
