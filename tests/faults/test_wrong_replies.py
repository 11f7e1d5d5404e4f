"""Backends that answer what is no reply of a model: a 502 that tells nothing of the inside, and no trace of it later."""

import asyncio
import contextlib
import json

import pytest

from tests.abuse.support import front_of, ledger, raw, scripted
from tests.abuse.test_backends import LAST, TOKENS, ask, reply, says, text_of
from tests.stories.support import story

WRONG = b"\x98"  # no UTF-8
WHOLE = json.loads(says("x"))
FORM = {"message", "type", "param", "code"}
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

BODIES = {
    "no UTF-8 at all": WRONG,
    "no UTF-8 in a name": b'{"\x98":1}',
    "no UTF-8 in the text": says("x").replace(b'"x"', b'"\x98"'),
    "no UTF-8 in the finish reason": says("x").replace(b'"stop"', b'"\x98"'),
    "no UTF-8 in the usage": says("x").replace(b'"total_tokens"', b'"\x98"'),
    "no UTF-8 in a message": b'{"error":{"message":"\x98","code":"x"}}',
    "a byte order mark": b"\xef\xbb\xbf" + says("x"),
    "UTF-16": says("x").decode().encode("utf-16"),
    "a list": b"[1,2]",
    "nothing": b"",
    "a number": b"7",
    "deep": b"[" * 100_000,
}
STATUSES = ["200 OK", "400 Bad Request", "404 Not Found", "429 Too Many", "503 Busy", "500 Oops"]


@pytest.mark.parametrize("what", BODIES)
def test_a_body_that_cannot_be_read_is_never_a_bug_of_the_gateway(what):
    @story
    async def check():
        status = ""

        def answer(asked):
            return reply(status, "application/json", BODIES[what])

        async with scripted(answer) as backend, front_of(backend) as world:
            for status in STATUSES:
                for path, more in (
                    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
                    ("/v1/embeddings", {"input": "x"}),
                ):
                    got = await world.http.post(path, json={"model": "m", **more})
                    assert b"Internal error in the gateway" not in got.content
                    if status != "200 OK":
                        assert got.status_code >= 400
                        assert set(got.json()["error"]) == FORM
            assert len(backend.asked) == 2 * len(STATUSES)
            await world.settled()
            assert 'outcome="bug"' not in await world.metrics()

    check()


FRAMES = {
    "no UTF-8": TOKENS.replace(b"hi", WRONG),
    "no UTF-8 in the finish reason": LAST.replace(b"stop", WRONG),
    "no JSON": b"data: {\n\n",
    "a list": b"data: [1]\n\n",
    "an error with no UTF-8": b'data: {"error":{"message":"\x98","code":400}}\n\n',
    "a usage with no UTF-8": b'data: {"id":"c","choices":[],"usage":{"\x98":1}}\n\n',
}


@pytest.mark.parametrize("what", FRAMES)
def test_a_frame_that_cannot_be_read_is_never_a_bug_of_the_gateway(what, caplog):
    @story
    async def check():
        body = reply("200 OK", "text/event-stream", TOKENS + FRAMES[what])
        async with scripted(lambda asked: body) as backend, front_of(backend) as world:
            got = await world.chat(stream=True)
            # What came in one read is judged as a whole, before a stream has begun.
            assert got.status_code == 502 or got.text.endswith("data: [DONE]\n\n")
            await world.settled()
            assert 'outcome="bug"' not in await world.metrics()

    check()
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


@pytest.mark.parametrize("pieces", [1, 1000])
def test_a_line_of_64_mib_is_passed_on_and_never_held(pieces, measured):
    async def endless(asked):
        writer = asked.writer
        writer.write(STREAM)
        piece = b"y" * ((64 << 20) // (1024 * pieces))
        with contextlib.suppress(ConnectionError):
            for number in range(1024 * pieces):
                start = b'data: {"x":"' if not number else b""
                writer.write(b"%x\r\n%b\r\n" % (len(start + piece), start + piece))
                await writer.drain()
                if writer.is_closing():
                    break

    async def check():
        async with scripted(endless) as backend, front_of(backend) as world:
            async with ledger(world, most_mib=64) as book, raw(world) as client:
                await client.send(ask(world, stream=True))
                last = b""
                while not last.endswith(b"0\r\n\r\n"):
                    last = last[-8:] + await client.reader.read(1 << 20)
            measured(f"memory grew by {book.growth_mib:.0f} MiB")

    story(check, seconds=55)()


def test_a_hundred_thousand_tiny_events_are_passed_on_in_bounded_memory(measured):
    many = b"".join(b"%x\r\n%b\r\n" % (len(TOKENS), TOKENS) for _ in range(1000))

    async def tiny(asked):
        asked.writer.write(STREAM)
        for _ in range(100):
            asked.writer.write(many)
            await asked.writer.drain()
        end = LAST + b"data: [DONE]\n\n"
        return b"%x\r\n%b\r\n0\r\n\r\n" % (len(end), end)

    async def check():
        async with scripted(tiny) as backend, front_of(backend) as world:
            async with ledger(world, most_mib=64) as book, raw(world) as client:
                await client.send(ask(world, stream=True))
                got = 0
                last = b""
                while b"[DONE]" not in last:
                    data = await client.reader.read(1 << 20)
                    got += (last[-5:] + data).count(b'"hi"') - last[-5:].count(b'"hi"')
                    last = last[-20:] + data
                assert got == 100_000
            measured(f"memory grew by {book.growth_mib:.0f} MiB")

    story(check, seconds=55)()


@pytest.mark.parametrize("interim", [b"100 Continue", b"102 Processing", b"103 Early Hints"])
def test_interim_replies_without_end_are_given_up(interim):
    @story
    async def check():
        async def storm(asked):
            with contextlib.suppress(ConnectionError):
                for _ in range(10_000):
                    asked.writer.write(b"HTTP/1.1 %b\r\n\r\n" % interim)
                    await asked.writer.drain()
            return page_of(asked)

        def page_of(asked):
            return reply("200 OK", "application/json", says(text_of(asked)))

        async with scripted(storm) as backend, front_of(backend) as world:
            async with ledger(world, most_mib=32), raw(world) as client:
                await client.send(ask(world))
                got = await client.reply()
                assert got.status in (200, 502)
                await client.send(ask(world, "again"))
                assert (await client.reply()).status in (200, 502)

    check()


@pytest.mark.parametrize("stream", [False, True])
def test_what_belongs_to_the_hop_or_tells_of_the_inside_is_not_passed_on(stream):
    lines = [
        "server: uvicorn-inside", "set-cookie: a=b", "connection: keep-alive, x-private", "x-private: 1",
        "keep-alive: timeout=5", "proxy-authenticate: Basic", "upgrade: h2c", "te: trailers",
        "x-powered-by: something", "location: http://10.0.0.7/", "x-request-id: other",
    ]  # fmt: skip

    @story
    async def check():
        def answer(asked):
            if stream:
                data = TOKENS + LAST + b"data: [DONE]\n\n"
                return reply("200 OK", "text/event-stream", data, *lines)
            return reply("200 OK", "application/json", says(text_of(asked)), *lines)

        async with scripted(answer) as backend, front_of(backend) as world, raw(world) as client:
            await client.send(ask(world, "x", "x-request-id: mine", stream=stream))
            got = await client.reply()
            assert got.status == 200
            told = {line.partition(":")[0] for line in lines} - {"x-request-id", "connection"}
            assert not told & got.headers.keys() - {"server", "keep-alive"}
            assert "uvicorn-inside" not in str(got.headers)
            assert got.headers["x-request-id"] == "mine"
            assert "x-private" not in got.headers.get("connection", "")

    check()


@pytest.mark.parametrize(
    "line", ["x: a\rx-evil: 1", "x: a\nx-evil: 1", "x: a\0b", "x evil: 1", ": 1", "x\r\n y: 1"]
)
def test_a_head_with_control_characters_is_refused_or_says_one_thing_only(line):
    @story
    async def check():
        body = reply("200 OK", "application/json", says("x"), line)
        async with scripted(lambda asked: body) as backend, front_of(backend) as world:
            async with raw(world) as client:
                await client.send(ask(world))
                got = await client.reply()
                assert got.status in (200, 502)
                assert "x-evil" not in got.headers

    check()


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "307 Temporary", "308 Permanent"])
def test_a_redirect_is_never_followed_nor_told(status):
    @story
    async def check():
        async with scripted(lambda asked: reply("200 OK", "text/plain", b"inside")) as inside:
            to = f"location: {inside.url}/internal"
            moved = reply(status, "text/plain", b"", to)
            async with scripted(lambda asked: moved) as backend, front_of(backend) as world:
                got = await world.chat()
                assert got.status_code == 502
                assert "location" not in got.headers
                assert inside.url not in got.text
                await asyncio.sleep(0.05)
                assert not inside.asked

    check()
