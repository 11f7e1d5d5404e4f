"""Backends that answer what nobody asked, too much, or what is no reply at all."""

import asyncio
import gzip
import json
import re

import httpx2
import pytest

from tests.abuse.support import front_of, head, ledger, page, raw, scripted, story

CHAT = "/v1/chat/completions"


def ask(world, text="x", *lines, **more):
    body = json.dumps(
        {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": text}], **more}
    ).encode()
    return head("POST", CHAT, *lines, key=world.key, length=len(body)) + body


def says(text):
    """Return a whole answer with this text."""
    return json.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "model": "m",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": text},
                    "finish_reason": "stop",
                }
            ],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
    ).encode()


def text_of(asked):
    return json.loads(asked.body)["messages"][0]["content"]


def reply(status, content_type, body, *lines):
    return (
        f"HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\n"
        + "".join(f"{line}\r\n" for line in lines)
        + f"content-length: {len(body)}\r\n\r\n"
    ).encode() + body


# --- a second reply ---------------------------------------------------------------------------------


@pytest.mark.parametrize("later_s", [0.0, 0.0005, 0.003])
def test_a_second_reply_in_flight_never_reaches_another_client(later_s):
    """Each of 300 requests is answered twice; the second reply comes as the next request is on its way."""

    @story
    async def check():
        loop = asyncio.get_running_loop()

        def again(asked):
            if not asked.writer.is_closing():
                asked.writer.write(page(says(text_of(asked))))

        def answer(asked):
            loop.call_later(later_s, again, asked)
            return page(says(text_of(asked)))

        async with scripted(answer) as backend, front_of(backend) as world, ledger(world):
            async with raw(world) as one, raw(world) as other:
                crossed = 0
                for number in range(300):
                    client = (one, other)[number % 2]
                    await client.send(ask(world, f"secret-{number}"))
                    got = await client.reply()
                    texts = re.findall(rb"secret-\d+", got.body)
                    crossed += any(each != b"secret-%d" % number for each in texts)
                assert crossed == 0

    check()


@story
async def test_a_backend_that_spoke_unasked_keeps_no_connection_any_more():
    once = [True]

    def answer(asked):
        extra = page(says("nobody asked")) if once.pop() else b""
        once.append(False)
        if extra:
            asyncio.get_running_loop().call_later(0.05, asked.writer.write, extra)
        return page(says(text_of(asked)))

    async with scripted(answer) as backend, front_of(backend) as world, raw(world) as client:
        for number in range(4):
            await client.send(ask(world, f"t{number}"))
            assert f"t{number}".encode() in (await client.reply()).body
            await world.until(lambda: world.process.client.open_connections() == (0, 0))
        assert backend.connections == 4


@story
async def test_a_proxy_that_says_408_as_it_closes_an_idle_connection_is_still_trusted():
    def answer(asked):
        late = page(b"", "408 Request Time-out")
        if len(backend.asked) == 1:
            asyncio.get_running_loop().call_later(0.05, asked.writer.write, late)
        return page(says(text_of(asked)))

    async with scripted(answer) as backend, front_of(backend) as world, raw(world) as client:
        await client.send(ask(world))
        assert (await client.reply()).status == 200
        await world.until(lambda: world.process.client.open_connections() == (0, 0))
        for _ in range(2):
            await client.send(ask(world))
            assert (await client.reply()).status == 200
            await world.rested()
        assert backend.connections == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_names_another_request_is_given_to_nobody(stream):
    """vLLM begins each reply with the id it was given: what names an earlier one is a mix-up, proven."""

    @story
    async def check():
        ids = []

        def answer(asked):
            ids.append(re.search(rb"x-request-id: (\S+)", asked.head)[1].decode())
            told = json.loads(says("secret"))
            told["id"] = "chatcmpl-" + ids[0]
            if not stream:
                return page(json.dumps(told).encode().replace(b'{"id": ', b'{"id":'))
            chunk = {"id": told["id"], "choices": [{"index": 0, "delta": {"content": "secret"}}]}
            data = "data: " + json.dumps(chunk, separators=(",", ":")) + "\n\n"
            chunk["choices"][0] |= {"delta": {}, "finish_reason": "stop"}
            data += "data: " + json.dumps(chunk, separators=(",", ":")) + "\n\ndata: [DONE]\n\n"
            return reply("200 OK", "text/event-stream", data.encode())

        async with scripted(answer) as backend, front_of(backend) as world, raw(world) as client:
            await client.send(ask(world, stream=stream))
            first = await client.reply()
            assert first.status == 200
            assert b"secret" in first.body
            await client.send(ask(world, stream=stream))
            second = await client.reply()
            assert second.status == 502
            assert b"secret" not in second.body
            assert len(set(ids)) == 2
            await world.settled()
            assert world.process.client.open_connections() == (0, 0)

    check()


@story
async def test_a_stream_that_begins_with_a_refusal_for_too_many_requests_is_no_fault_of_its_client():
    error = {"error": {"type": "rate_limit_error", "message": "Too many requests."}}
    refusal = reply("200 OK", "text/event-stream", f"data: {json.dumps(error)}\n\n".encode())
    async with scripted(lambda _: refusal) as backend, front_of(backend) as world:
        async with raw(world) as client:
            await client.send(ask(world, stream=True))
            assert (await client.reply()).status == 503


# --- ids --------------------------------------------------------------------------------------------


@story
async def test_two_requests_with_one_id_have_two_at_the_engine():
    async with scripted(lambda asked: page(says("x"))) as backend, front_of(backend) as world:
        async with raw(world) as client:
            for _ in range(2):
                await client.send(ask(world, "x", "x-request-id: mine"))
                assert (await client.reply()).headers["x-request-id"] == "mine"
        ids = [re.search(rb"x-request-id: (\S+)", each.head)[1] for each in backend.asked]
        assert len(set(ids)) == 2
        assert all(re.fullmatch(rb"[0-9a-f]{40}", each) for each in ids)


# --- what is no reply -------------------------------------------------------------------------------

INSIDE = "Traceback: http://10.0.0.7:8000/internal refused"
LARGE = json.dumps({"error": {"message": INSIDE + "x" * 600_000}}).encode()
ODD = {
    "a large error": reply("500 Oops", "application/json", LARGE),
    "a large page": reply("200 OK", "text/html", INSIDE.encode() * 12_000),
    "a large redirect": reply(
        "302 Found", "text/html", INSIDE.encode() * 12_000, "location: http://10.0.0.7/"
    ),
    "a large compressed answer": reply(
        "200 OK",
        "application/json",
        gzip.compress(says("x"), 0) + b"\0" * 600_000,
        "content-encoding: gzip",
    ),
    "a compressed stream": reply(
        "200 OK", "text/event-stream", gzip.compress(b"data: x\n\n"), "content-encoding: gzip"
    ),
    "an error stream": reply("500 Oops", "text/event-stream", INSIDE.encode()),
    "status 204": b"HTTP/1.1 204 No Content\r\n\r\n",
    "status 600": reply("600 Odd", "application/json", b"{}"),
    "status 999": reply("999 Odd", "text/event-stream", b"data: x\n\n"),
    "more than is judged": b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
    b"content-length: 70000000\r\n\r\n" + b" " * 300_000,
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_no_reply_of_a_model_is_a_502_that_tells_nothing_of_the_inside(odd, stream):
    @story
    async def check():
        async with scripted(lambda asked: ODD[odd]) as backend, front_of(backend) as world:
            async with ledger(world), raw(world) as client:
                await client.send(ask(world, stream=stream))
                got = await client.reply()
                assert got.status == (500 if odd.startswith(("a large error", "an error")) else 502)
                assert set(json.loads(got.body)["error"]) == {"message", "type", "param", "code"}
                assert b"10.0.0.7" not in got.body
                assert "location" not in got.headers

    check()


async def endless(asked, start, piece, most=4096):
    """Write a beginning, then a piece again and again until the other side has closed."""
    writer = asked.writer
    writer.write(start)
    for _ in range(most):
        if writer.is_closing():
            return None
        writer.write(piece)
        await writer.drain()
    return None


CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
PIECE = b"y" * 16_384
ENDLESS = {
    "header value": (b"HTTP/1.1 200 OK\r\nx: ", PIECE),
    "header lines": (b"HTTP/1.1 200 OK\r\n", b"x: y\r\n" * 2_000),
    "reason": (b"HTTP/1.1 200 ", PIECE),
    "chunk extension": (CHUNKED + b"1;", PIECE),
    "chunk size": (CHUNKED, b"0" * 16_384),
    "trailer": (CHUNKED + b"2\r\n{}\r\n0\r\nx: ", PIECE),
    "trailers of a stream": (STREAM + b"0\r\n", b"x: y\r\n" * 2_000),
    "error": (
        b"HTTP/1.1 500 Oops\r\ntransfer-encoding: chunked\r\n\r\n",
        b"4000\r\n%b\r\n" % PIECE,
    ),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_what_never_ends_is_given_up_before_it_fills_the_memory(what):
    @story
    async def check():
        start, piece = ENDLESS[what]
        async with (
            scripted(lambda asked: endless(asked, start, piece)) as backend,
            front_of(backend) as world,
            ledger(world, most_mib=30),
            raw(world) as client,
        ):
            await client.send(ask(world))
            got = await client.reply()
            assert got.status == (500 if what == "error" else 502)

    check()


# --- a body that does not end -----------------------------------------------------------------------

TOKEN = (
    b'data: {"id":"c","object":"chat.completion.chunk","model":"m","choices":[{"index":0,%b}]}\n\n'
)
TOKENS = TOKEN % b'"delta":{"role":"assistant","content":"hi"},"finish_reason":null'
LAST = TOKEN % b'"delta":{},"finish_reason":"stop"'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("frames", "outcome", "status"),
    [(TOKENS + LAST + DONE, "ok", 200), (TOKENS, "client_gone", 499)],
    ids=["all was said", "in the middle"],
)
def test_a_client_that_leaves_at_the_last_frame_had_its_whole_reply(frames, outcome, status):
    @story
    async def check():
        opening = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

        def answer(asked):
            return opening + b"%x\r\n%b\r\n" % (len(frames), frames)  # and no last chunk

        async with scripted(answer) as backend, front_of(backend) as world, ledger(world):
            settled = []
            world.process.ledger.on_posted.append(settled.extend)
            async with raw(world) as client:
                await client.send(ask(world, stream=True))
                got = b""
                while not got.endswith((DONE, b"null}]}\n\n\r\n", DONE + b"\r\n")):
                    got += await client.reader.read(65536)
            await world.until(lambda: settled)
            assert (settled[0].outcome.value, settled[0].status) == (outcome, status)

    check()


@story
async def test_replies_that_are_too_large_are_no_fault_of_their_backend():
    vectors = b'{"object":"list","data":[' + b"1" * 3_000_000 + b"]}"

    def answer(asked):
        return page(vectors)

    async with scripted(answer) as one, scripted(answer) as two:
        async with front_of(one, two, extra="limits: {max_reply: 1MiB}") as world:
            for _ in range(12):
                reply = await world.http.post("/v1/embeddings", json={"model": "m", "input": "x"})
                assert reply.status_code == 502
                assert reply.json()["error"]["code"] == "reply_too_large"
            backends = world.process.table.backends("m")
            assert not any(each.health.traffic_failures for each in backends)
            assert len(one.asked) + len(two.asked) == 12


@story
async def test_replies_that_grow_too_large_are_cut_and_are_no_fault_of_their_backend():
    opening = page(b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
    part = b"%x\r\n%b\r\n" % (1_000_000, b"1" * 1_000_000)

    async def answer(asked):
        asked.writer.write(opening)
        while True:  # it never ends its reply
            asked.writer.write(part)
            await asked.writer.drain()

    async with scripted(answer) as one, scripted(answer) as two:
        async with front_of(one, two, extra="limits: {max_reply: 16MiB}") as world:
            settled = []
            world.process.ledger.on_posted.append(settled.extend)
            for _ in range(6):
                with pytest.raises(httpx2.RemoteProtocolError):
                    await world.http.post("/v1/embeddings", json={"model": "m", "input": "x"})
            await world.until(lambda: len(settled) == 6)
            told = {(each.outcome.value, each.error_code) for each in settled}
            assert told == {("rejected", "reply_too_large")}
            assert len(one.asked) + len(two.asked) == 6
            backends = world.process.table.backends("m")
            assert not any(each.health.traffic_failures for each in backends)
