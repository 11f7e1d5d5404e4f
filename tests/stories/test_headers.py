"""Headers that go through: the ids of requests and the context of traces."""

import pytest

from tests.stories.support import FAST, gateway, story
from tests.stories.wire import CHAT, chat_body, connected, request

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
STATE = "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"


def went_on(world, path=CHAT):
    """Return the trace headers of the last request that reached the backend."""
    seen = [each for each in world.sims[0].requests if each.path == path][-1]
    return {
        name.decode().lower(): value.decode()
        for name, value in seen.headers
        if name.lower().startswith(b"trace")
    }


# --- traces ---------------------------------------------------------------------------------------


@story
async def test_the_context_of_a_trace_goes_on_to_the_backend():
    async with gateway(FAST) as world:
        await world.chat(headers={"Traceparent": PARENT, "tracestate": STATE})
        assert went_on(world) == {"traceparent": PARENT, "tracestate": STATE}
        await world.chat(headers={"traceparent": PARENT})
        assert went_on(world) == {"traceparent": PARENT}
        await world.chat(
            headers=[("traceparent", PARENT), ("tracestate", "a=1"), ("tracestate", "b=2")]
        )
        assert went_on(world) == {"traceparent": PARENT, "tracestate": "a=1,b=2"}
        await world.chat()
        assert went_on(world) == {}


@pytest.mark.parametrize(
    "lines",
    [
        [("traceparent", PARENT.upper())],
        [("traceparent", PARENT + "-00")],
        [("traceparent", PARENT[:-1])],
        [("traceparent", "ff" + PARENT[2:])],
        [("traceparent", f"00-{'0' * 32}-00f067aa0ba902b7-01")],
        [("traceparent", f"00-4bf92f3577b34da6a3ce929d0e0e4736-{'0' * 16}-01")],
        [("traceparent", PARENT), ("traceparent", PARENT)],
        [("tracestate", STATE)],
        [("traceparent", "x"), ("tracestate", STATE)],
    ],
)
def test_what_is_no_context_of_a_trace_is_dropped(lines):
    @story
    async def check():
        async with gateway(FAST) as world:
            assert (await world.chat(headers=lines)).status_code == 200
            assert went_on(world) == {}

    check()


@pytest.mark.parametrize(
    "state",
    [
        "no equals sign",
        "UPPER=1",
        "a=" + "x" * 511,
        ",".join(f"k{n}=1" for n in range(33)),
        "a=\u00e9",
    ],
)
def test_a_state_out_of_bounds_is_dropped_and_the_parent_goes_on(state):
    @story
    async def check():
        async with gateway(FAST) as world:
            headers = [("traceparent", PARENT), (b"tracestate", state.encode("latin-1"))]
            assert (await world.chat(headers=headers)).status_code == 200
            assert went_on(world) == {"traceparent": PARENT}

    check()


# --- ids ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_anthropics_header_of_the_request_id_is_sent(path):
    @story
    async def check():
        async with gateway(FAST) as world:
            body = {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
            for stream in (False, True):
                reply = await world.http.post(path, json={**body, "stream": stream})
                assert reply.status_code == 200, reply.text
                assert reply.headers["request-id"] == reply.headers["x-request-id"]
            reply = await world.http.post(path, json={**body, "model": "none"})
            assert reply.status_code == 404
            assert reply.headers["request-id"] == reply.json()["request_id"]
            reply = await world.http.post(path, json=body, headers={"authorization": "Bearer x"})
            assert reply.headers["request-id"] == reply.headers["x-request-id"]

    check()


@story
async def test_other_endpoints_have_one_header_of_the_request_id():
    async with gateway(FAST) as world:
        assert "request-id" not in (await world.chat()).headers


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("GET", "/v1/models"),
        ("HEAD", "/v1/models"),
        ("GET", "/v1/models/m"),
        ("GET", "/v1/models/none"),
        ("GET", "/livez"),
        ("GET", "/readyz"),
        ("GET", "/nowhere"),
        ("PUT", "/v1/models"),
    ],
)
def test_every_reply_has_a_request_id(method, target):
    @story
    async def check():
        async with gateway(FAST) as world, connected(world.process.public_port) as wire:
            ids = []
            for _ in range(2):
                wire.send(request(method, target, key=world.key))
                reply = await wire.answer(head_only=method == "HEAD")
                ids.append(reply.headers["x-request-id"])
            assert ids[0] != ids[1]
            assert all(each.startswith("req_") for each in ids)
            wire.send(request(method, target, lines=("X-Request-Id: mine-1",)))
            reply = await wire.answer(head_only=method == "HEAD")
            assert reply.headers["x-request-id"] == "mine-1"
            wire.send(request(method, target, lines=("X-Request-Id: not mine",)))
            reply = await wire.answer(head_only=method == "HEAD")
            assert reply.headers["x-request-id"].startswith("req_")

    check()


@story
async def test_a_chat_that_is_refused_before_it_is_read_has_a_request_id():
    async with gateway(FAST) as world, connected(world.process.public_port) as wire:
        reply = await wire.ask(request("POST", CHAT, chat_body()))
        assert (reply.status, reply.headers["x-request-id"][:4]) == (401, "req_")
