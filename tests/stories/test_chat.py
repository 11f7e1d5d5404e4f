"""The main job: an OpenAI client talks to a pool through the gateway."""

import asyncio
import json
import re

import pytest

from tests.stories.support import FAST, frames, gateway, story


@story
async def test_a_chat_is_answered_and_says_who_answered():
    async with gateway(FAST) as world:
        reply = await world.chat(max_tokens=5)
        assert reply.status_code == 200
        body = reply.json()
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == 5
        assert reply.headers["x-gateway-backend"] == "m/b1"
        assert reply.headers["x-gateway-attempts"] == "1"
        assert reply.headers["x-request-id"].startswith("req_")
        assert "backend;dur=" in reply.headers["server-timing"]
        await world.settled()


@story
async def test_a_stream_comes_frame_by_frame_and_ends_well():
    async with gateway(FAST) as world:
        reply = await world.chat(stream=True, max_tokens=5)
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.headers["x-accel-buffering"] == "no"
        data = frames(reply.text)
        assert data[-1] == "[DONE]"
        assert json.loads(data[-2])["choices"][0]["finish_reason"] == "length"
        await world.settled()


@story
async def test_the_usage_chunk_is_hidden_unless_asked_for_and_counted_either_way():
    async with gateway(FAST) as world:
        plain = frames((await world.chat(stream=True, max_tokens=3)).text)
        asked = frames(
            (
                await world.chat(stream=True, max_tokens=3, stream_options={"include_usage": True})
            ).text
        )
        assert not any('"choices":[]' in each for each in plain)
        assert json.loads(asked[-2])["usage"]["completion_tokens"] == 3
        await world.settled()
        text = await world.metrics()
        assert 'gateway_tokens_total{kind="completion",model="m",pool="m"} 6.0' in text


@pytest.mark.parametrize(
    "asks", [{}, {"stream_options": {"include_usage": True}}], ids=["", "usage"]
)
def test_a_stream_is_what_the_backend_sends_to_who_asks_it_directly(asks):
    def alike(text):
        return re.sub(r'"id":"[^"]+"|"created":\d+', "", text)

    @story
    async def check():
        async with gateway(FAST) as world:
            for path, body in (
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
                ("/v1/completions", {"prompt": "hi"}),
            ):
                body |= {"model": "m", "stream": True, "max_tokens": 3, **asks}
                direct = await world.http.post(world.sims[0].url + path, json=body)
                reply = await world.http.post(path, json=body)
                assert alike(reply.text) == alike(direct.text)
                assert reply.text.count('"system_fingerprint":"vllm-') == 1

    check()


@story
async def test_the_body_reaches_the_backend_byte_for_byte():
    async with gateway(FAST) as world:
        body = b'{ "model" : "m",  "messages":[{"role":"user","content":"h\\u00e9"}] ,"max_tokens":2, "x_unknown":{"b":[1,2.50]}}'
        reply = await world.http.post(
            "/v1/chat/completions",
            content=body,
            headers={"content-type": "application/json", "cookie": "a=b"},
        )
        assert reply.status_code == 200
        seen = [each for each in world.sims[0].requests if each.path == "/v1/chat/completions"][-1]
        assert seen.body == body
        names = {name.lower() for name, _ in seen.headers}
        assert names == {b"host", b"content-type", b"accept", b"content-length", b"x-request-id"}


@story
async def test_the_clients_own_request_id_comes_back():
    async with gateway(FAST) as world:
        reply = await world.chat(max_tokens=1, headers={"x-request-id": "mine-1"})
        assert reply.headers["x-request-id"] == "mine-1"
        reply = await world.chat(
            max_tokens=1, headers={"x-request-id": "not ok\u00e9".encode("latin-1")}
        )
        assert reply.headers["x-request-id"].startswith("req_")


@story
async def test_pipelined_requests_are_answered_in_order():
    async with gateway(FAST) as world:
        body = json.dumps(
            {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}
        ).encode()
        request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\nx-request-id: r%d\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", world.process.public_port)
        writer.write(
            b"".join(
                request % (world.key.encode(), number, len(body), body) for number in range(20)
            )
        )
        for number in range(20):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert b"x-request-id: r%d\r\n" % number in head
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            json.loads(await reader.readexactly(length))
        writer.close()
        await world.settled()


@story
async def test_an_http_1_0_client_gets_a_stream_that_ends_with_the_connection():
    async with gateway(FAST) as world:
        body = json.dumps(
            {
                "model": "m",
                "max_tokens": 2,
                "stream": True,
                "messages": [{"role": "user", "content": "x"}],
            }
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", world.process.public_port)
        writer.write(
            f"POST /v1/chat/completions HTTP/1.0\r\nauthorization: Bearer {world.key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
        )
        text = (await reader.read()).decode()
        assert "chunked" not in text
        assert text.endswith("data: [DONE]\n\n")
        writer.close()


@story
async def test_expect_100_continue_is_answered_after_the_key_and_before_the_body():
    async with gateway(FAST) as world:
        body = json.dumps(
            {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
        ).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", world.process.public_port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\nexpect: 100-continue\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
            % (world.key.encode(), len(body))
        )
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()


@story
async def test_an_http_1_0_client_that_expects_to_be_told_gets_no_interim_reply():
    async with gateway(FAST) as world:
        body = json.dumps(
            {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
        ).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", world.process.public_port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.0\r\nauthorization: Bearer %b\r\nexpect: 100-continue\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
            % (world.key.encode(), len(body))
        )
        await world.metrics()  # by now it has read the head, and waits for the body
        writer.write(body)
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()
