"""Header lines and extensions inside a chunked body: as bounded as the head's own."""

import pytest

from tests.abuse.support import FAST, front_of, gateway, head, ledger, raw, scripted, story

LINES = b"".join(b"x-%d: %b\r\n" % (n, b"v" * 1000) for n in range(8))
MANY = b"a: b\r\n" * 500
LONG = b"v" * 8192
ENDLESS = 4 << 30
SOON = "timeouts: {body: 100ms}"
ROUTES = [
    ("POST", "/nope"),
    ("GET", "/livez"),
    ("POST", "/v1/chat/completions"),  # 401: nobody's key
]


@pytest.mark.parametrize("tail", [LINES, MANY, LONG], ids=["lines", "many", "one-long-value"])
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_trailers_without_end_are_cut_and_never_kept(method, path, tail):
    @story
    async def check():
        async with gateway(FAST, extra=SOON) as world, ledger(world, most_mib=8):
            async with raw(world) as client:
                await client.send(head(method, path, chunked=True) + b"0\r\nx: ")
                assert await client.flood(tail, ENDLESS) < ENDLESS

    check()


@pytest.mark.parametrize("start", [b"5;", b"0;"])
def test_a_chunk_extension_without_end_is_cut(start):
    @story
    async def check():
        async with gateway(FAST, extra=SOON) as world, ledger(world, most_mib=8):
            async with raw(world) as client:
                await client.send(head("POST", "/nope", chunked=True) + start)
                assert await client.flood(LONG, ENDLESS) < ENDLESS

    check()


@pytest.mark.parametrize(
    "start",
    [b"GET /", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nhost: ", None],
    ids=["target", "name", "value", "extension"],
)
def test_a_line_without_end_is_refused_by_its_length_before_any_deadline(start):
    @story
    async def check():
        extra = "timeouts: {header: 5s, body: 5s}"
        async with gateway(FAST, extra=extra) as world, ledger(world, most_mib=8):
            async with raw(world) as client:
                await client.send(start or head(key=world.key, chunked=True) + b"5;")
                await client.flood(LONG, 1 << 20)
                assert (await client.reply()).status == 431

    check()


def chat(world, text="hi"):
    return (
        b'{"model":"m","max_tokens":4,"messages":[{"role":"user","content":"%b"}]}' % text.encode()
    )


@pytest.mark.parametrize("trailer", [b"v" * 40_000, MANY.removeprefix(b"a: ").strip()])
def test_a_request_whose_trailers_are_too_large_is_refused_and_never_forwarded(trailer):
    @story
    async def check():
        async with gateway(FAST) as world, ledger(world):
            async with raw(world) as client:
                body = chat(world)
                await client.send(
                    head(key=world.key, chunked=True) + b"%x\r\n%b\r\n0\r\na: " % (len(body), body)
                )
                await client.send(trailer + b"\r\n\r\n")
                assert (await client.reply()).status == 431
                assert await client.closed()
            assert world.sims[0].received("/v1/chat/completions") == []

    check()


@story
async def test_a_trailer_within_the_limits_is_dropped_and_the_connection_lives_on():
    async with gateway(FAST) as world, ledger(world):
        async with raw(world) as client:
            body = chat(world)
            for _ in range(2):
                await client.send(
                    head(key=world.key, chunked=True)
                    + b"%x;ext=1\r\n%b\r\n0\r\nx-checksum: abc\r\nauthorization: Bearer no\r\n\r\n"
                    % (len(body), body)
                )
                assert (await client.reply()).status == 200


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
def test_a_backends_trailers_without_end_are_cut(kind):
    written = 0

    async def endless(asked):
        nonlocal written
        asked.writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"
            % kind.encode()
        )
        while written < ENDLESS:
            asked.writer.write(LINES)
            await asked.writer.drain()
            written += len(LINES)

    @story
    async def check():
        async with scripted(endless) as backend, front_of(backend) as world:
            async with ledger(world, most_mib=12), raw(world) as client:
                body = chat(world)
                await client.send(head(key=world.key, length=len(body)) + body)
                reply = await client.reply()
                assert b"error" in reply.body
                assert reply.status == 502
        assert written < 32 << 20

    check()
