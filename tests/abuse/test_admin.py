"""The admin listener against strangers: its bounds hold before its token is looked at."""

import json

from tests.abuse.support import FAST, gateway, head, ledger, raw, story

ENDLESS = 512 * 1024 * 1024
TOKEN = "an-admin-token-for-tests"
SHORT = "timeouts: {header: 300ms, body: 300ms}\nlimits: {failed_keys: 3, max_headers: 30}"
ORDER = b'{"for_s": 60, "reason": "a test"}'


def admin(world) -> int:
    return world.process.admin_port


def order(*lines: str, token: str = TOKEN, length: int | None = len(ORDER), **more) -> bytes:
    return head(
        "POST", "/admin/v1/restarts:hold", *lines, key=token, length=length, **more
    ).replace(b"host: x", b"host: localhost")


def get(path: str, token: str = "") -> bytes:
    return head("GET", path, key=token).replace(b"host: x", b"host: localhost")


@story
async def test_a_head_has_its_bounds_before_the_token_is_looked_at():
    many = tuple(f"x-{number}: y" for number in range(40))
    large = (f"cookie: {'z' * 40_000}",)
    async with gateway(FAST, extra=SHORT, admin_token=TOKEN) as world, ledger(world):
        for lines, status in ((many, 431), (large, 431)):
            async with raw(admin(world)) as client:
                await client.send(head("GET", "/metrics", *lines))
                assert (await client.reply()).status == status
                assert await client.closed()
        async with raw(admin(world)) as client:
            await client.send(b"GET /metrics HTTP/1.1\r\nhost: local")
            assert (await client.reply()).status == 408
            assert await client.closed()


@story
async def test_trailers_without_end_are_cut_and_never_kept():
    async with gateway(FAST, extra=SHORT, admin_token=TOKEN) as world, ledger(world, most_mib=8):
        for token in ("wrong", TOKEN):
            async with raw(admin(world)) as client:
                await client.send(order(token=token, length=None, chunked=True) + b"0\r\n")
                assert await client.flood(b"x-a: %b\r\n" % (b"b" * 4000), ENDLESS) < ENDLESS


@story
async def test_connections_that_say_nothing_are_closed_and_others_are_served():
    async with gateway(FAST, extra=SHORT, admin_token=TOKEN) as world, ledger(world):
        async with raw(admin(world)) as one, raw(admin(world)) as other:
            assert await one.closed()
            assert await other.closed()
        async with raw(admin(world)) as client:
            await client.send(get("/livez"))
            assert (await client.reply()).status == 200


@story
async def test_an_order_comes_with_its_body_however_that_is_framed():
    async with gateway(FAST, admin_token=TOKEN) as world, ledger(world):
        chunks = (
            b"8\r\n" + ORDER[:8] + b"\r\n%x\r\n" % len(ORDER[8:]) + ORDER[8:] + b"\r\n0\r\n\r\n"
        )
        async with raw(admin(world)) as client:
            for sent, later in (
                (order() + ORDER, b""),
                (order(), ORDER),
                (order("expect: 100-continue"), ORDER),
                (order(length=None, chunked=True) + chunks, b""),
                (order("connection: upgrade", "upgrade: h2c") + ORDER, b""),
            ):
                await client.send(sent)
                if later:
                    if b"100-continue" in sent:
                        assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(
                            b"HTTP/1.1 100"
                        )
                    await client.send(later)
                reply = await client.reply()
                assert reply.status == 200, reply.body
                assert json.loads(reply.body)["for_s"] == 60


@story
async def test_an_order_in_http_1_0_gets_no_interim_reply():
    async with gateway(FAST, admin_token=TOKEN) as world, ledger(world):
        async with raw(admin(world)) as client:
            await client.send(order("expect: 100-continue").replace(b"HTTP/1.1", b"HTTP/1.0"))
            await world.metrics()  # by now it has read the head, and waits for the body
            await client.send(ORDER)
            assert (await client.reader.readline()).startswith(b"HTTP/1.1 200")


@story
async def test_an_order_without_end_is_refused():
    async with gateway(FAST, extra=SHORT, admin_token=TOKEN) as world, ledger(world):
        async with raw(admin(world)) as client:
            await client.send(order(length=1_000_000))
            await client.flood(b"x" * 10_000, 1_000_000)
            reply = await client.reply()
            assert (reply.status, json.loads(reply.body)["code"]) == (400, "bad_parameter")
        async with raw(admin(world)) as client:
            await client.send(order() + ORDER[:5])
            reply = await client.reply()
            assert (reply.status, json.loads(reply.body)["code"]) == (408, "request_timeout")
            assert await client.closed()
        async with raw(admin(world)) as client:
            await client.send(order() + ORDER[:5])
        await world.settled()


@story
async def test_wrong_tokens_are_limited_and_the_right_one_passes():
    async with gateway(FAST, extra=SHORT, admin_token=TOKEN) as world, ledger(world):
        async with raw(admin(world)) as client:
            for token, status in (("wrong", 401), ("", 401), (f"{TOKEN}x", 401), ("wrong", 429)):
                await client.send(get("/metrics", token))
                reply = await client.reply()
                assert reply.status == status, token
                assert reply.headers["content-type"] == "application/problem+json"
            assert 1 <= int(reply.headers["retry-after"]) <= 20
            assert json.loads(reply.body)["code"] == "too_many_failed_tokens"
            for path in ("/livez", "/readyz"):
                await client.send(get(path, "wrong"))
                assert (await client.reply()).status == 200
            await client.send(get("/metrics", TOKEN))
            text = (await client.reply()).body.decode()
        assert 'gateway_failed_keys_total{listener="admin",result="told"} 3.0' in text
        assert 'gateway_failed_keys_total{listener="admin",result="limited"} 1.0' in text
