"""A pool of vLLM and of another engine: a stream of vLLM's, which the other one could only begin anew."""

from __future__ import annotations

import asyncio
import contextlib
import json
from functools import partial

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from gateway.pools.health import Order
from tests.stories.fakes import serving
from tests.stories.support import frames, gateway, story
from tests.stories.test_resume import SIM

# How engines write a chunk: llama.cpp its choices first, llama-cpp-python with spaces.
FORMS = {"choices first": (True, (",", ":")), "spaces": (False, (", ", ": ")), "compact": (False, (",", ":"))}  # fmt: skip


def other_engine(form):
    first, separators = FORMS[form]

    def chunk(delta, end=None):
        choices = {"choices": [{"index": 0, "finish_reason": end, "delta": delta}]}
        named = {"id": "x", "created": 1, "model": "m", "object": "chat.completion.chunk"}
        told = choices | named if first else named | choices
        return f"data: {json.dumps(told, separators=separators)}\n\n"

    async def chat(request):
        async def said():
            for word in ("FROM ", "THE ", "BEGINNING"):
                yield chunk({"content": word})
            yield chunk({}, "stop") + "data: [DONE]\n\n"

        return StreamingResponse(said(), media_type="text/event-stream")

    async def models(request):
        return JSONResponse({"data": [{"id": "m"}]})

    return Starlette(
        routes=[
            Route("/health", models),
            Route("/v1/models", models),
            Route("/v1/chat/completions", chat, methods=["POST"]),
        ]
    )


@contextlib.asynccontextmanager
async def mixed(form, engine="openai"):
    """A pool whose requests begin at vLLM, which is slow."""
    async with serving(other_engine(form), port=0) as server:
        port = server.servers[0].sockets[0].getsockname()[1]
        other = f"{{url: 'http://127.0.0.1:{port}', engine: {engine}, weight: 0.000000001}}"
        pools = f"pools: {{m: {{move_after: 100ms, backends: [{{url: <0>}}, {other}]}}}}"
        async with gateway(SIM, pools=pools, wait=False, access=True) as world:
            await world.ready(2)
            yield world


async def told_by(world, *, drains=False):
    """Return what a stream says, and whether it ends with an error; its backend may be drained once it has begun."""
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(world.chat("x", max_tokens=120, stream=True))
        chats = partial(world.sims[0].received, "/v1/chat/completions")
        await world.until(lambda: any(each.tokens_emitted > 3 for each in chats()))
        if drains:
            world.process.table.order("m/b1", Order.DRAIN)
    chunks = [json.loads(each) for each in frames(asked.result().text)[:-1]]
    said = [each["choices"][0]["delta"].get("content") for each in chunks if each.get("choices")]
    return "".join(filter(None, said)), "error" in chunks[-1]


@pytest.mark.parametrize("form", FORMS)
def test_it_does_not_begin_anew_in_the_middle(form):
    @story
    async def check():
        async with mixed(form) as world:
            world.sims[0].inject("reset_after:20")
            said, failed = await told_by(world)
            assert (len(said.split()), failed) == (20, True)

    check()


@pytest.mark.parametrize("form", FORMS)
def test_a_stream_stays_at_its_drained_backend(form):
    @story
    async def check():
        async with mixed(form) as world:
            said, failed = await told_by(world, drains=True)
            assert (len(said.split()), failed) == (120, False)

    check()


@pytest.mark.parametrize("form", FORMS)
def test_one_that_is_thought_to_be_vllm_does_not_either(form):
    @story
    async def check():
        async with mixed(form, "vllm") as world:
            world.sims[0].inject("reset_after:20")
            said, failed = await told_by(world)
            assert ("BEGINNING" not in said, failed) == (True, True)

    check()
