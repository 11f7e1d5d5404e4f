"""What shows that a prompt was read, and what does not: neither a stream's head nor a client that is slow counts."""

import asyncio
import contextlib

import pytest

from gateway.core.aio import start
from gateway.sim.server import SimConfig
from tests.stories.support import gateway, story
from tests.stories.test_uploads import MIB, MODEL, Client, file, form, wired

# A prompt of 8,000 tokens is read in 0.8 s, and a token takes 10 ms.
ENGINE = SimConfig(model="m", prefill_tokens_per_s=10_000, decode_step_s=0.01, max_model_len=32_768)
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


def asked(path, text, tokens, **more):
    says = [{"role": "user", "content": text}]
    return {"model": "m", "stream": True, **more} | {
        CHAT: {"messages": says, "max_completion_tokens": tokens},
        RESPONSES: {"input": text, "max_output_tokens": tokens},
        MESSAGES: {"messages": says, "max_tokens": tokens},
    }[path]


@contextlib.asynccontextmanager
async def before_an_engine():
    """A gateway before one engine, and its backend."""
    async with gateway(ENGINE, pool={"prefix": "off"}) as world:
        (backend,) = world.process.table.backends("m")
        yield world, backend


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_the_events_with_which_a_response_begins_are_no_tokens_of_its_engine(path):
    @story
    async def read():
        async with before_an_engine() as (world, _):
            records = []
            world.process.ledger.on_posted.insert(0, records.extend)
            for number in range(6):  # every other prompt is long, and in no cache
                text = f"{number:08d}" + "word" * (8000 if number % 2 else 20)
                reply = await world.http.post(path, json=asked(path, text, 6))
                assert reply.status_code == 200
            await world.until(lambda: len(records) == 6)
            long = sorted(records, key=lambda each: each.sent_at)[1::2]
            waited = [each.first_byte_at - each.sent_at > each.token_gap_s for each in long]
            assert waited == [True] * 3, "who wrote slowly, it seems, read for long"

    read()


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_message_whose_parser_holds_back_its_text_has_begun(path):
    """Its server holds back what may become a stop string; `message_start` shows that the engine has begun."""
    stop = "stop" if path == CHAT else "stop_sequences"

    @story
    async def begins():
        async with before_an_engine() as (world, backend):
            held = asked(path, "held" + "word" * 3000, 220, **{stop: ["z" * 800]})
            running = start(world.http.post(path, json=held), name="held")
            await world.until(lambda: backend.in_flight)
            assert backend.room.unread_tokens
            await world.until(lambda: not backend.room.unread_tokens)
            written = world.sims[0].received(path)[-1].tokens_emitted
            assert written < 150, "its text is held back until 200 tokens are written"
            assert (await running).status_code == 200

    begins()


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_sends_its_upload_slowly_keeps_out_nobody(streams):
    body = form(MODEL, *([(b'name="stream"', b"true")] if streams else []), file(MIB))

    async def status(client):
        return (await client.reader.readuntil(b"\r\n\r\n")).split()[1]

    @story
    async def keeps_out_nobody():
        async with wired() as (world, _), contextlib.AsyncExitStack() as clients:
            (backend,) = world.process.table.backends("m")
            slow, *others = [
                await clients.enter_async_context(Client.open(world, len(body))) for _ in range(4)
            ]
            await slow.send(body[:300_000])
            await world.until(lambda: backend.in_flight == 1)
            assert not backend.room.unread_tokens
            for each in others:
                await each.send(body)
            async with asyncio.timeout(10):
                assert [await status(each) for each in others] == [b"200"] * 3
            await slow.send(body[300_000:])
            assert await status(slow) == b"200"

    keeps_out_nobody()
