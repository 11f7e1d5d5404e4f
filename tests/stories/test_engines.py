"""Servers with OpenAI's API that are no vLLM: what they do not tell is learnt, or stays unknown."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter

import pytest

from gateway.pools.limit import UNSEEN
from gateway.sim.server import SimConfig
from tests import loopback
from tests.stories.fakes import serving
from tests.stories.plainservers import Plain
from tests.stories.support import frames, gateway, story
from tests.stories.test_explain import route


@contextlib.asynccontextmanager
async def plain_gateway(plain, *, pool="", name="m", more="", **settings):
    """Run a gateway in front of a fake."""
    async with serving(plain.app(), port=0) as server:
        port = server.servers[0].sockets[0].getsockname()[1]
        pools = (
            f"pools:\n  {name}:\n    engine: openai\n{pool}"
            f"    backends: [http://127.0.0.1:{port}]\n{more}"
        )
        async with gateway(pools=pools, wait=False, **settings) as world:
            await world.ready(1)
            yield world


@pytest.mark.parametrize("health", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_chat_and_completions_are_served_by_a_server_that_only_has_openais_api(health, stream):
    @story
    async def served():
        plain = Plain(health=health)
        async with plain_gateway(plain, access=True) as world:
            chat = await world.chat(max_tokens=3, stream=stream)
            asked = {"model": "m", "prompt": "hi", "max_tokens": 3, "stream": stream}
            text = await world.http.post("/v1/completions", json=asked)
            for reply in (chat, text):
                assert reply.status_code == 200, reply.text
                if stream:
                    assert frames(reply.text)[-1] == "[DONE]"
                    assert "usage" not in reply.text  # nobody asked for it
            for line in world.access_lines():
                assert (line["prompt_tokens"], line["completion_tokens"]) == (7, 3)
                assert line["outcome"] == "ok"
            known = {"model", "messages", "prompt", "max_tokens", "stream", "stream_options"}
            assert all(body.keys() <= known for body in plain.bodies)
            assert not {"/metrics", "/version", "/tokenize"} & set(plain.asked)
            assert ("/health" in plain.asked[-3:]) is health
            await world.settled()

    served()


@story
async def test_without_a_usage_chunk_a_stream_is_counted_by_its_events():
    async with plain_gateway(Plain(usage_in_streams=False), access=True) as world:
        assert (await world.chat(stream=True)).status_code == 200
        (line,) = world.access_lines()
        assert (line["completion_tokens"], line["usage_source"]) == (4, "estimated")


@story
async def test_ollamas_names_have_a_tag_and_a_body_without_a_model_gets_one():
    plain = Plain(models=("qwen3:latest", "llama3.2:3b"))
    async with plain_gateway(plain, name="qwen3") as world:
        assert (await world.chat(model="qwen3")).status_code == 200
        body = {"messages": [{"role": "user", "content": "hi"}]}
        assert (await world.http.post("/v1/chat/completions", json=body)).status_code == 200
        assert [each["model"] for each in plain.bodies] == ["qwen3:latest"] * 2


@story
async def test_of_several_models_none_is_guessed():
    async with serving(Plain(models=("a", "b")).app(), port=0) as server:
        port = server.servers[0].sockets[0].getsockname()[1]
        pools = f"pools: {{m: {{engine: openai, backends: ['http://127.0.0.1:{port}']}}}}"
        async with gateway(pools=pools, wait=False) as world:
            await world.until(lambda: world.process.table.get("m/b1").models)
            reply = await world.chat()
            assert reply.status_code == 503
            assert "has not loaded it" in reply.json()["error"]["message"]


@story
async def test_of_several_models_the_window_is_that_of_the_pools_own():
    plain = Plain(models=("m", "embedder"), windows={"m": 32_000, "embedder": 50})
    async with plain_gateway(plain) as world:
        asked = {"model": "m", "prompt": list(range(100)), "max_tokens": 3}
        reply = await world.http.post("/v1/completions", json=asked)
        assert reply.status_code == 200, reply.text
        (listed,) = (await world.http.get("/v1/models")).json()["data"]
        assert listed["max_model_len"] == 32_000


@story
async def test_its_load_is_its_concurrency_limit():
    plain = Plain(holds=True)
    pool = "    queue: {max_requests: 0}\n"
    async with plain_gateway(plain, pool=pool) as world:
        backend = world.process.table.get("m/b1")
        assert backend.sample is None
        async with loopback.client() as http:
            told = (await http.get(world.admin_url + "/admin/v1/overview")).json()
        shown = told["pools"][0]["backends"][0]
        assert (shown["engine"], shown["running"], shown["window_tokens"]) == ("openai", None, None)
        assert (await route(world, tokens=1_000_000))["verdict"] == "now"  # its window is not known
        await world.until(lambda: backend.limit.value == UNSEEN)
        async with asyncio.TaskGroup() as group:
            chats = [group.create_task(world.chat(max_tokens=3)) for _ in range(UNSEEN + 4)]
            await world.until(lambda: sum(each.done() for each in chats) == 4)
            plain.held.set()
        assert Counter(each.result().status_code for each in chats) == {200: UNSEEN, 503: 4}


@story
async def test_what_it_refuses_lowers_its_limit():
    plain = Plain(refuse=(429, {"error": {"message": "busy"}}))
    async with plain_gateway(plain) as world:
        limit = world.process.table.get("m/b1").limit
        cuts = []
        world.process.table.on_cut.append(lambda _, sign: cuts.append(sign))
        assert (await world.chat(max_tokens=3)).status_code == 503
        await world.until(lambda: cuts == ["refused"])
        assert limit.value <= UNSEEN


@pytest.mark.parametrize(
    ("status", "told", "code"),
    [
        (400, {"error": {"code": 400, "message": "the request exceeds the available context size (512 tokens)", "type": "exceed_context_size_error"}}, "context_length_exceeded"),
        (400, {"error": {"code": 400, "message": "request (900 tokens) exceeds the available context size (512 tokens), try increasing it", "type": "exceed_context_size_error"}}, "context_length_exceeded"),
        (422, {"error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 512. Given: 900 `inputs` tokens and 10 `max_new_tokens`", "error_type": "validation"}, "context_length_exceeded"),
        (400, {"object": "error", "message": "The input (900 tokens) is longer than the model's context length (512 tokens).", "type": "BadRequestError", "code": 400}, "context_length_exceeded"),
        (404, {"error": {"message": "model \"m\" not found, try pulling it first", "type": "not_found_error", "param": None, "code": None}}, "model_not_found"),
        (429, {"error": "Model is overloaded", "error_type": "overloaded"}, "server_is_overloaded"),
        (503, {"error": {"message": "server busy, please try again.  maximum pending requests exceeded", "type": "api_error"}}, "server_is_overloaded"),
        (500, {"error": {"message": "llama runner process has terminated", "type": "api_error"}}, "backend_error"),
    ],
    ids=lambda value: str(value)[:24],
)  # fmt: skip
def test_errors_of_other_engines_are_told_in_openais_form(status, told, code):
    @story
    async def normalised():
        plain = Plain(refuse=(status, told))
        async with plain_gateway(plain) as world:
            reply = await world.chat()
            error = reply.json()["error"]
            assert error["code"] == code, error
            assert error.keys() == {"message", "type", "param", "code"}
            if code == "server_is_overloaded":
                assert reply.status_code == 503
                assert world.process.table.get("m/b1").health.traffic_failures == 0

    normalised()


@story
async def test_an_output_limit_of_the_gateways_own_is_written_by_its_oldest_name():
    plain = Plain()
    async with plain_gateway(plain, pool="    max_context: 100\n") as world:
        assert (await world.chat("hi")).status_code == 200
        (body,) = plain.bodies
        assert body["max_tokens"] > 0
        assert "max_completion_tokens" not in body


@story
async def test_nobody_is_asked_to_count_so_a_window_of_ones_own_is_held_by_bytes():
    plain = Plain()
    async with plain_gateway(plain, pool="    max_context: 2000\n") as world:
        assert (await world.chat("word " * 300)).status_code == 200  # 1,500 bytes
        reply = await world.chat("word " * 500)
        assert reply.json()["error"]["code"] == "context_length_exceeded"
        assert "could not be counted exactly" in reply.json()["error"]["message"]
        assert "/tokenize" not in plain.asked


@story
async def test_what_an_engine_finds_too_long_may_go_to_another_pool():
    told = "request (900 tokens) exceeds the available context size (512 tokens), try increasing it"
    plain = Plain(refuse=(400, {"error": {"code": 400, "message": told}}))
    big = SimConfig(model="big", speed=0)
    pool, more = "    fallback: {context: big}\n", "  big: {backends: [<0>]}\n"
    async with serving(plain.app(), port=0) as server:
        port = server.servers[0].sockets[0].getsockname()[1]
        head = (
            f"pools:\n  m:\n    engine: openai\n{pool}    backends: ['http://127.0.0.1:{port}']\n"
        )
        async with gateway(big, pools=head + more, wait=False) as world:
            await world.ready(2)
            for stream in (False, True):
                reply = await world.chat(max_tokens=2, stream=stream)
                assert reply.status_code == 200, reply.text
                assert reply.headers["x-gateway-model"] == "big"
                said = frames(reply.text)[0] if stream else reply.text
                assert json.loads(said)["model"] == "big"
            await world.settled()


@story
async def test_a_server_that_dies_and_comes_back_without_a_health_page_is_found_by_its_models():
    plain = Plain()
    async with plain_gateway(plain) as world:
        backend = world.process.table.get("m/b1")
        assert backend.phase.value == "ready"
        before = len(plain.asked)
        await world.until(lambda: len(plain.asked) > before + 3)
        assert set(plain.asked[before:]) == {"/v1/models"}
