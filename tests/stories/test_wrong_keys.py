"""Floods of wrong keys are slowed, by address; a right key never notices."""

import asyncio
import json

from tests.stories.support import FAST, gateway, story
from tests.stories.wire import CHAT, Wire, chat_body, connected, request

FEW = "limits: {failed_keys: 3}"


async def from_address(address: str, port: int, data: bytes):
    """Return the reply to a request that another client address sends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    try:
        return await Wire(reader, writer).ask(data)
    finally:
        writer.transport.abort()


@story
async def test_a_flood_of_wrong_keys_is_slowed_and_right_keys_pass():
    async with gateway(FAST, extra=FEW) as world, connected(world.process.public_port) as wire:
        wrong = (
            request("POST", CHAT, chat_body(), key="gw_wrong"),
            request(target="/v1/models", key=f"{world.key}x"),
            request(target="/v1/models"),
        )
        assert [(await wire.ask(data)).status for data in wrong] == [401] * 3
        limited = [await wire.ask(data) for data in wrong]
        assert [each.status for each in limited] == [429] * 3
        for each in limited:
            assert each.code == "too_many_failed_keys"
            assert 1 <= int(each.headers["retry-after"]) <= 20
            assert each.headers["x-should-retry"] == "false"
            assert "www-authenticate" not in each.headers
        assert len({each.message for each in limited}) == 1
        assert "a valid key" in limited[0].message
        right = (
            request("POST", CHAT, chat_body(), key=world.key),
            request(target="/v1/models", key=world.key),
            request(target="/livez"),
        )
        assert [(await wire.ask(data)).status for data in right] == [200] * 3
        other = await from_address("127.0.0.2", world.process.public_port, wrong[1])
        assert other.status == 401
        text = await world.metrics()
        assert 'gateway_failed_keys_total{listener="public",result="told"} 4.0' in text
        assert 'gateway_failed_keys_total{listener="public",result="limited"} 3.0' in text
        assert 'outcome="unauthenticated",pool="_unknown"' in text
        await world.settled()


@story
async def test_behind_a_trusted_proxy_each_client_has_its_own_limit():
    async def ask(wire, target, line):
        body = chat_body() if target == CHAT else b""
        method = "POST" if target == CHAT else "GET"
        return (await wire.ask(request(method, target, body, key="gw_wrong", lines=(line,)))).status

    trusted = "\ntrusted_proxies: [127.0.0.1]"
    async with gateway(FAST, extra=FEW + trusted) as world:
        async with connected(world.process.public_port) as wire:
            for target in (CHAT, "/v1/models"):
                client = f"x-forwarded-for: 198.51.100.{len(target)}"
                told = [await ask(wire, target, client) for _ in range(4)]
                assert told == [401, 401, 401, 429]
            assert await ask(wire, CHAT, "x-forwarded-for: 198.51.100.200") == 401
        # Nobody else can say who it is.
        made_up = [
            request(key="gw_wrong", lines=(f"x-forwarded-for: 192.0.2.{number}",))
            for number in range(4)
        ]
        port = world.process.public_port
        told = [(await from_address("127.0.0.2", port, each)).status for each in made_up]
        assert told == [401, 401, 401, 429]


@story
async def test_anthropics_form_has_its_own_word_for_it():
    async with gateway(FAST, extra=FEW) as world, connected(world.process.public_port) as wire:
        wrong = request("POST", "/v1/messages", b"{}", key="gw_wrong")
        for _ in range(3):
            assert (await wire.ask(wrong)).status == 401
        limited = await wire.ask(wrong)
        assert (limited.status, json.loads(limited.body)["error"]["type"]) == (
            429,
            "rate_limit_error",
        )


@story
async def test_a_key_that_is_sent_twice_is_one_key_on_every_route():
    """Some proxies add the header of a client that has it already."""
    async with gateway(FAST) as world, connected(world.process.public_port) as wire:
        for method, target, body in (("POST", CHAT, chat_body()), ("GET", "/v1/models", b"")):
            again = (f"Authorization: Bearer {world.key}",)
            other = (f"Authorization: Bearer {world.key}x",)
            sent = [
                request(method, target, body, key=world.key, lines=each) for each in (again, other)
            ]
            assert [(await wire.ask(data)).status for data in sent] == [200, 401]
