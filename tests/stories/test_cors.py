"""Web pages of other origins call the gateway if the operator allows their origin, and only then."""

import asyncio

from gateway.process import reload
from tests.stories.support import FAST, gateway, story
from tests.stories.wire import CHAT, chat_body, connected, request

PAGE = "https://app.example"
CORS = f"cors: {{origins: ['{PAGE}', 'http://localhost:5173'], max_age: 5m}}"
FROM_PAGE = (f"Origin: {PAGE}",)
PREFLIGHT = (
    *FROM_PAGE,
    "Access-Control-Request-Method: POST",
    "Access-Control-Request-Headers: authorization,content-type,x-stainless-os",
)


def cors(reply):
    """Return the headers that a browser looks at."""
    return {
        name.removeprefix("access-control-"): value
        for name, value in reply.headers.items()
        if name.startswith("access-control-") or name == "vary"
    }


ALLOWED = {"allow-origin": PAGE, "expose-headers": "*", "vary": "origin"}


@story
async def test_a_preflight_is_answered_without_a_key():
    async with gateway(FAST, extra=CORS) as world, connected(world.process.public_port) as wire:
        for target in (CHAT, "/v1/models", "/v1/messages", "/nowhere"):
            reply = await wire.ask(request("OPTIONS", target, lines=PREFLIGHT))
            assert (reply.status, reply.body) == (204, b"")
            assert cors(reply) == {
                **ALLOWED,
                "allow-methods": "GET, POST",
                "allow-headers": "authorization, *",
                "max-age": "300",
            }
            assert reply.headers["x-request-id"]
        foreign = tuple(line.replace(PAGE, "https://evil.example") for line in PREFLIGHT)
        reply = await wire.ask(request("OPTIONS", CHAT, lines=foreign))
        assert (reply.status, reply.code) == (403, "origin_not_allowed")
        assert "cors.origins" in reply.message
        assert cors(reply) == {"vary": "origin"}


@story
async def test_a_page_reads_chat_stream_models_and_every_error():
    short = f"{CORS}\ntimeouts: {{header: 300ms, body: 300ms}}\nlimits: {{max_body: 1KiB}}"
    async with gateway(FAST, extra=short) as world:
        key = world.key
        cases = (
            (request("POST", CHAT, chat_body(), key=key, lines=FROM_PAGE), 200),
            (request("POST", CHAT, chat_body(stream=True), key=key, lines=FROM_PAGE), 200),
            (request("GET", "/v1/models", key=key, lines=FROM_PAGE), 200),
            (request("GET", "/v1/models/none", key=key, lines=FROM_PAGE), 404),
            (request("POST", CHAT, chat_body(), lines=FROM_PAGE), 401),
            (request("GET", "/v1/models", lines=FROM_PAGE), 401),
            (request("POST", "/v1/nowhere", b"{}", lines=FROM_PAGE), 404),
            (request("POST", CHAT, chat_body("x" * 2000), key=key, lines=FROM_PAGE), 413),
            (request("POST", CHAT, chat_body(), key=key, lines=FROM_PAGE)[:-3], 408),
            (request("GET", "/livez", key=key, lines=FROM_PAGE)[:-2], 408),
            (request(lines=(*FROM_PAGE, *(f"x-{n}: y" for n in range(100)))), 431),
            (request("GET", "*", lines=FROM_PAGE), 404),
        )
        for data, status in cases:
            async with connected(world.process.public_port) as wire:
                reply = await wire.ask(data)
                assert reply.status == status, data
                assert cors(reply) == ALLOWED, data
        await world.settled()


@story
async def test_others_are_answered_as_ever_and_caches_know():
    async with gateway(FAST, extra=CORS) as world, connected(world.process.public_port) as wire:
        for lines in (
            (),
            ("Origin: https://evil.example",),
            ("Origin: null",),
            (f"Origin: {PAGE}.evil.example",),
            (f"Origin: {PAGE}:443",),
            ("Origin: http://app.example",),
            (*FROM_PAGE, "Origin: https://evil.example"),
        ):
            for data in (
                request("POST", CHAT, chat_body(), key=world.key, lines=lines),
                request("GET", "/v1/models", key=world.key, lines=lines),
            ):
                reply = await wire.ask(data)
                assert reply.status == 200
                assert cors(reply) == {"vary": "origin"}, lines


@story
async def test_any_origin_is_a_star_and_never_with_credentials():
    async with gateway(FAST, extra="cors: {origins: ['*']}") as world:
        async with connected(world.process.public_port) as wire:
            for lines in (FROM_PAGE, ("Origin: null",), ()):
                data = request("POST", CHAT, chat_body(), key=world.key, lines=lines)
                reply = await wire.ask(data)
                assert cors(reply) == {"allow-origin": "*", "expose-headers": "*"}
            reply = await wire.ask(request("OPTIONS", CHAT, lines=PREFLIGHT))
            assert (reply.status, cors(reply)["allow-origin"]) == (204, "*")
            assert "access-control-allow-credentials" not in reply.headers


@story
async def test_by_default_there_is_nothing_of_it_and_the_refusal_names_the_setting():
    async with gateway(FAST) as world, connected(world.process.public_port) as wire:
        for data in (
            request("POST", CHAT, chat_body(), key=world.key, lines=FROM_PAGE),
            request("GET", "/v1/models", key=world.key, lines=FROM_PAGE),
        ):
            assert cors(await wire.ask(data)) == {}
        reply = await wire.ask(request("OPTIONS", CHAT, lines=PREFLIGHT))
        assert (reply.status, reply.code) == (405, "method_not_allowed")
        assert "cors.origins" in reply.message
        assert cors(reply) == {}


@story
async def test_a_reload_turns_it_on_and_off():
    async with gateway(FAST) as world, connected(world.process.public_port) as wire:
        off = world.path.read_text()
        for text, allowed in ((f"{off}\n{CORS}\n", ALLOWED), (off, {})):
            await asyncio.to_thread(world.path.write_text, text)
            assert (await reload(world.process)).done
            data = request("GET", "/v1/models", key=world.key, lines=FROM_PAGE)
            assert cors(await wire.ask(data)) == allowed
