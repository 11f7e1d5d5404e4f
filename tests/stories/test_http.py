"""HTTP as clients speak it: offers to upgrade, whole URLs, methods nobody expects."""

import json

import pytest

from tests.stories.support import FAST, gateway, story
from tests.stories.wire import CHAT, chat_body, connected, request

# As Java's HttpClient and `curl --http2` send it.
H2C = (
    "Connection: Upgrade, HTTP2-Settings",
    "Upgrade: h2c",
    "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
)
WEBSOCKET = (
    "Connection: keep-alive, Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
)


def chats(world):
    """Return the bodies of the chats that reached the backend."""
    return [each.body for each in world.sims[0].requests if each.path == CHAT]


def chunked(body: bytes) -> bytes:
    half = len(body) // 2
    parts = (body[:half], body[half:])
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


# --- offers to upgrade ----------------------------------------------------------------------------


@story
async def test_an_offer_of_http2_is_passed_over_and_the_body_arrives_whole():
    async with gateway(FAST) as world, connected(world.process.public_port) as wire:
        body = chat_body("an offer")
        reply = await wire.ask(request("POST", CHAT, body, key=world.key, lines=H2C))
        assert reply.status == 200
        assert "upgrade" not in reply.headers
        reply = await wire.ask(request("POST", CHAT, body, key=world.key))  # and keeps alive
        assert reply.status == 200
        assert chats(world) == [body, body]
        await world.settled()


@story
async def test_a_stream_is_answered_to_an_offer_of_http2():
    async with gateway(FAST) as world, connected(world.process.public_port) as wire:
        body = chat_body(stream=True)
        reply = await wire.ask(request("POST", CHAT, body, key=world.key, lines=H2C))
        assert reply.body.endswith(b"data: [DONE]\n\n")


@story
async def test_an_offer_split_anywhere_is_passed_over():
    async with gateway(FAST) as world:
        body = chat_body("split")
        whole = request("POST", CHAT, body, key=world.key, lines=H2C)
        head = whole.index(b"\r\n\r\n") + 4
        cuts = [whole.index(b"Upgrade:") + 3, whole.index(b"h2c") + 1, head - 2, head, head + 5]
        for cut in cuts:
            async with connected(world.process.public_port) as wire:
                wire.send(whole[:cut])
                await wire.writer.drain()
                reply = await wire.ask(whole[cut:])
                assert reply.status == 200, cut
        async with connected(world.process.public_port) as wire:
            for place in range(len(whole)):
                wire.send(whole[place : place + 1])
                await wire.writer.drain()
            assert (await wire.answer()).status == 200
        assert chats(world) == [body] * (len(cuts) + 1)


@story
async def test_a_chunked_body_after_an_offer_is_read_by_its_chunks():
    async with gateway(FAST) as world, connected(world.process.public_port) as wire:
        body = chat_body("in chunks")
        lines = (*H2C, "Transfer-Encoding: chunked", "Content-Type: application/json")
        reply = await wire.ask(request("POST", CHAT, key=world.key, lines=lines) + chunked(body))
        assert reply.status == 200
        assert chats(world) == [body]


@story
async def test_offers_in_one_read_are_answered_in_order():
    async with gateway(FAST) as world, connected(world.process.public_port) as wire:
        texts = [f"text {number}" for number in range(20)]
        wire.send(
            b"".join(
                request("POST", CHAT, chat_body(text), key=world.key, lines=H2C) for text in texts
            )
        )
        for _ in texts:
            assert (await wire.answer()).status == 200
        assert chats(world) == [chat_body(text) for text in texts]


@pytest.mark.parametrize(
    "lines",
    [
        ("Transfer-Encoding: chunked",),  # beside the length
        ("Content-Length: 3",),  # another length
        ("Transfer-Encoding: chunked, identity",),
    ],
)
def test_an_offer_does_not_soften_the_framing(lines):
    @story
    async def check():
        async with gateway(FAST) as world, connected(world.process.public_port) as wire:
            data = request("POST", CHAT, chat_body(), key=world.key, lines=(*H2C, *lines))
            reply = await wire.ask(
                data + request("POST", CHAT, chat_body("smuggled"), key=world.key)
            )
            assert reply.status == 400
            assert await wire.closed()
            assert chats(world) == []

    check()


@story
async def test_an_offer_in_a_head_that_is_too_large_is_refused_once():
    async with gateway(FAST) as world, connected(world.process.public_port) as wire:
        lines = tuple(f"x-{number}: y" for number in range(100))
        reply = await wire.ask(request("POST", CHAT, b"{}", key=world.key, lines=(*H2C, *lines)))
        assert reply.status == 431
        assert await wire.closed()


@story
async def test_an_offer_to_close_afterwards_closes():
    async with gateway(FAST) as world, connected(world.process.public_port) as wire:
        lines = ("Connection: close, Upgrade", "Upgrade: h2c")
        reply = await wire.ask(request("POST", CHAT, chat_body(), key=world.key, lines=lines))
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        assert await wire.closed()


@pytest.mark.parametrize("target", [CHAT, "/v1/responses"])
def test_a_websocket_where_post_is_served_is_told_so_by_a_426(target):
    @story
    async def check():
        async with gateway(FAST) as world, connected(world.process.public_port) as wire:
            reply = await wire.ask(request(target=target, key=world.key, lines=WEBSOCKET))
            assert (reply.status, reply.code) == (426, "websocket_not_served")
            assert reply.headers["upgrade"] == "HTTP/1.1"
            reply = await wire.ask(request("POST", CHAT, chat_body(), key=world.key))
            assert reply.status == 200  # on the same connection

    check()


@pytest.mark.parametrize(("target", "status"), [("/v1/realtime", 404), ("/livez", 200)])
def test_a_websocket_gets_what_a_plain_get_gets(target, status):
    @story
    async def check():
        async with gateway(FAST) as world, connected(world.process.public_port) as wire:
            reply = await wire.ask(request(target=target, key=world.key, lines=WEBSOCKET))
            assert reply.status == status
            plain = await wire.ask(request(target=target, key=world.key))
            assert (plain.status, plain.body) == (reply.status, reply.body)

    check()


# --- the request target ---------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["http://gateway", "HTTPS://other:8080", "http://u@[::1]:80"])
def test_a_whole_url_is_served_like_its_path(prefix):
    @story
    async def check():
        async with gateway(FAST) as world, connected(world.process.public_port) as wire:
            reply = await wire.ask(request("POST", prefix + CHAT, chat_body(), key=world.key))
            assert reply.status == 200
            reply = await wire.ask(request(target=f"{prefix}/v1/models?x=1", key=world.key))
            assert json.loads(reply.body)["data"][0]["id"] == "m"
            reply = await wire.ask(request(target=f"{prefix}/readyz?verbose"))
            assert b"accepting" in reply.body
            reply = await wire.ask(request(target=prefix))
            assert (reply.status, reply.code) == (404, "unknown_url")
            reply = await wire.ask(request("POST", f"{prefix}/v1/nowhere", b"{}"))
            assert (reply.status, reply.code) == (404, "unknown_url")

    check()


@pytest.mark.parametrize("prefix", ["", "http://gateway"])
def test_a_fragment_which_clients_should_keep_to_themselves_changes_nothing(prefix):
    @story
    async def check():
        async with gateway(FAST) as world, connected(world.process.public_port) as wire:
            ask = request("POST", f"{prefix}{CHAT}#part", chat_body(), key=world.key)
            assert (await wire.ask(ask)).status == 200
            reply = await wire.ask(request(target=f"{prefix}/v1/models#part", key=world.key))
            assert json.loads(reply.body)["data"][0]["id"] == "m"

    check()


@pytest.mark.parametrize(
    "target", ["ftp://gateway/v1/chat/completions", "gateway:80", "http:///v1"]
)
def test_another_kind_of_target_is_refused(target):
    @story
    async def check():
        async with gateway(FAST) as world, connected(world.process.public_port) as wire:
            reply = await wire.ask(request("POST", target, chat_body(), key=world.key))
            assert reply.status in (400, 404)
            assert isinstance(reply.code, str)
            assert chats(world) == []

    check()


# --- methods --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "target", "status", "code"),
    [
        ("PURGE", "/v1/models", 405, "method_not_allowed"),
        ("PURGE", CHAT, 405, "method_not_allowed"),
        ("PROPFIND", "/nowhere", 404, "unknown_url"),
        ("GET", "/v1/models/", 404, "unknown_url"),
        ("OPTIONS", "*", 404, "unknown_url"),
        ("OPTIONS", CHAT, 405, "method_not_allowed"),
        ("CONNECT", "gateway:443", 405, "method_not_allowed"),
        ("CONNECT", "/v1/models", 405, "method_not_allowed"),
        ("TRACE", "/v1/models", 405, "method_not_allowed"),
        ("PUT", "/v1/models/m", 405, "method_not_allowed"),
        ("NONSENSE", "/v1/models", 400, "invalid_http"),
    ],
)
def test_odd_methods_are_refused_in_the_form_of_every_error(method, target, status, code):
    @story
    async def check():
        async with gateway(FAST) as world, connected(world.process.public_port) as wire:
            reply = await wire.ask(request(method, target, key=world.key))
            assert (reply.status, reply.code) == (status, code)
            assert reply.headers["content-type"] == "application/json"
            assert reply.headers["x-request-id"]
            if status == 405:
                assert reply.headers["allow"] in ("GET, HEAD", "POST")

    check()


# --- media types ----------------------------------------------------------------------------------


@story
async def test_media_types_have_no_case_and_may_have_parameters():
    async with gateway(FAST) as world:
        for content_type in (
            "Application/JSON",
            "application/json ; Charset=UTF-8",
            "APPLICATION/JSON",
        ):
            for accept in ("Text/Event-Stream", "text/event-stream;q=0.5, */*;q=0.1", "text/plain"):
                headers = {"content-type": content_type, "accept": accept}
                for stream in (False, True):
                    content = chat_body(stream=stream)
                    reply = await world.http.post(CHAT, content=content, headers=headers)
                    assert reply.status_code == 200, headers
                    assert reply.text.endswith("data: [DONE]\n\n") is stream
        async with connected(world.process.admin_port) as wire:
            line = "Accept: Application/OpenMetrics-Text; version=1.0.0"
            metrics = request(target="/metrics", lines=(line,)).replace(
                b"gateway\r", b"localhost\r"
            )
            reply = await wire.ask(metrics)
            assert reply.headers["content-type"].startswith("application/openmetrics-text")
