"""A window that is smaller than the engine's own is held by the gateway alone, whatever is asked how."""

import contextlib
import json
import re
from dataclasses import replace

import pytest

from gateway.core.aio import start
from gateway.core.endings import Ending
from gateway.core.types import Phase, TrafficFailed
from gateway.counting.tokens import BackendCounter
from gateway.pools.facts import Tending
from gateway.process import reload
from gateway.sim.server import SimConfig
from tests import keyfiles as keys
from tests.stories.support import gateway, story

LONG = "word " * 1500  # about 1,876 tokens
SHORT = "word " * 40
ENGINE = SimConfig(model="m", speed=0, max_model_len=4096)
UNTOLD = SimConfig(
    model="m",
    speed=0,
    max_model_len=4096,
    paths=tuple(each for each in SimConfig().paths if "token" not in each),
)
CAP = 512
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 9000}}


def user(content):
    return [{"role": "user", "content": content}]


def asked(instructions):
    return {"type": "noul", "instructions": instructions}


TOO_LONG = {
    "a list of one": ("/v1/completions", {"prompt": [LONG], "max_tokens": 5}),
    "a list of two": ("/v1/completions", {"prompt": ["a", LONG], "max_tokens": 5}),
    "token ids": ("/v1/completions", {"prompt": [[5], [5] * 600], "max_tokens": 5}),
    "embeddings": ("/v1/embeddings", {"input": ["a", LONG]}),
    "responses": ("/v1/responses", {"input": LONG}),
    "responses of items": (
        "/v1/responses",
        {"input": user([{"type": "input_text", "text": LONG}])},
    ),
    "instructions": ("/v1/responses", {"input": "hi", "instructions": LONG}),
    "a long response": ("/v1/responses", {"input": "hi", "max_output_tokens": 900}),
    "messages": ("/v1/messages", {"messages": user(LONG), "max_tokens": 5}),
    "beside an image": (
        "/v1/chat/completions",
        {"messages": user([{"type": "text", "text": LONG}, IMAGE]), "max_tokens": 5},
    ),
    "cut to the engine's window": (
        "/v1/chat/completions",
        {"messages": user(LONG), "max_tokens": 5, "truncate_prompt_tokens": -1},
    ),
    "cut to more than the window": (
        "/v1/completions",
        {"prompt": LONG, "max_tokens": 5, "truncate_prompt_tokens": 1000},
    ),
    "cut to no more than the window": (
        "/v1/completions",
        {"prompt": LONG, "max_tokens": 13, "truncate_prompt_tokens": 500},
    ),
    "truncated by the engine": ("/v1/responses", {"input": LONG, "truncation": "auto"}),
    "documents": ("/v1/rerank", {"query": "a", "documents": ["b", LONG]}),
    "pairs": ("/v1/score", {"text_1": "a", "text_2": ["b", LONG]}),
    "one conversation of a batch": (
        "/v1/chat/completions/batch",
        {"messages": [user("hi"), user(LONG)], "max_tokens": 5},
    ),
    "embeddings of messages": ("/v1/embeddings", {"messages": user(LONG)}),
    "embeddings of conversations": ("/v1/embeddings", {"input": [user("hi"), user(LONG)]}),
    "texts": ("/v2/embed", {"texts": ["a", LONG], "truncate": "NONE"}),
    "texts cut to the engine's window": ("/v2/embed", {"texts": ["a", LONG]}),
    "pooling": ("/pooling", {"input": ["a", LONG]}),
    "classes": ("/classify", {"input": ["a", LONG]}),
    "items": (
        "/generative_scoring",
        {"query": "a", "items": ["b", LONG], "label_token_ids": [5]},
    ),
    "a question": (
        "/v1/systemone",
        {"state": "a", "questions": {"b": asked("c"), "d": asked(LONG)}},
    ),
    "a state": ("/v1/systemone", {"state": LONG, "questions": {"b": asked("c")}}),
    "a state in JSON": ("/v1/systemone", {"state": {"d": LONG}, "questions": {"b": asked("c")}}),
}
FITTING = {
    "a list of one": ("/v1/completions", {"prompt": [SHORT], "max_tokens": 5}),
    "a list of two": ("/v1/completions", {"prompt": ["a", SHORT], "max_tokens": 5}),
    "embeddings": ("/v1/embeddings", {"input": ["a", SHORT]}),
    "documents": ("/v1/rerank", {"query": "a", "documents": [SHORT] * 20}),
    "pairs": ("/v1/score", {"text_1": "a", "text_2": [SHORT] * 20}),
    "cut": (
        "/v1/completions",
        {"prompt": LONG, "max_tokens": 12, "truncate_prompt_tokens": 500},
    ),
    "cut, as vLLM reads numbers": (
        "/v1/completions",
        {"prompt": LONG, "max_tokens": "12", "truncate_prompt_tokens": 500.0},
    ),
    "texts": ("/v2/embed", {"texts": [SHORT] * 20, "truncate": "NONE"}),
    "texts that are cut": ("/v2/embed", {"texts": [SHORT, LONG], "max_tokens": 500}),
    "pooling": ("/pooling", {"input": ["a", SHORT]}),
    "classes": ("/classify", {"input": [SHORT] * 20}),
    "items": (
        "/generative_scoring",
        {"query": "a", "items": [SHORT] * 20, "label_token_ids": [5]},
    ),
    "questions": (
        "/v1/systemone",
        {"state": "a", "questions": dict.fromkeys("bcdefgh", asked("b" * 40))},
    ),
}
COUNTED = {
    "responses": ("/v1/responses", {"input": "word " * 300, "max_output_tokens": 5}),
    "responses of items": ("/v1/responses", {"input": user("hi"), "instructions": SHORT}),
    "a response to an image": (
        "/v1/responses",
        {
            "input": user(
                [
                    {"type": "input_text", "text": SHORT},
                    {"type": "input_image", "image_url": IMAGE["image_url"]["url"]},
                ]
            ),
            "max_output_tokens": 5,
        },
    ),
    "a batch": (
        "/v1/chat/completions/batch",
        {"messages": [user(SHORT)] * 20, "max_tokens": 5},
    ),
    "an image": (
        "/v1/chat/completions",
        {"messages": user([{"type": "text", "text": SHORT}, IMAGE]), "max_tokens": 5},
    ),
}


@contextlib.asynccontextmanager
async def limited(by, engine, **pool):
    """Run a gateway whose pool, or whose client's key, holds the window at `CAP`."""
    capped = {"max_context": CAP, **pool} if by == "pool" else pool
    async with gateway(engine, pool=capped) as world:
        if by == "key":
            file = world.path.parent / "keys.yaml"
            made = keys.create(file, name="small", max_context_tokens=CAP)
            assert (await reload(world.process)).done
            world.http.headers["authorization"] = f"Bearer {made.key}"
        yield world


def sent_on(world, path):
    return [each for each in world.sims[0].requests if each.path == path]


def holds(reply):
    assert reply.status_code == 400, reply.text
    told = reply.json()["error"]
    assert told.get("code", "context_length_exceeded") == "context_length_exceeded", told
    assert str(CAP) in told["message"], told
    return told


@pytest.mark.parametrize("engine", [ENGINE, UNTOLD], ids=["counts", "cannot count"])
@pytest.mark.parametrize("by", ["pool", "key"])
def test_a_smaller_window_is_held_for_every_form_of_prompt(by, engine):
    @story
    async def check():
        async with limited(by, engine) as world:
            for name, (path, body) in TOO_LONG.items():
                told = holds(await world.http.post(path, json={"model": "m", **body}))
                assert ("your API key" in told["message"]) == (by == "key"), name
                assert sent_on(world, path) == [], name
            for name, (path, body) in (FITTING | (COUNTED if engine is ENGINE else {})).items():
                reply = await world.http.post(path, json={"model": "m", **body})
                assert reply.status_code == 200, (name, reply.text)

    check()


PIXELS = IMAGE["image_url"]["url"]
RESULT = {
    "type": "tool_result",
    "tool_use_id": "c1",
    "content": [{"type": "image", "source": {"type": "base64", "data": PIXELS}}],
}
SEEN = {
    "a chat": ("/v1/chat/completions", {"messages": user([IMAGE])}),
    "a message": ("/v1/messages", {"messages": user(RESULT["content"])}),
    "a result of a tool": ("/v1/messages", {"messages": user([RESULT])}),
    "the output of a function": (
        "/v1/responses",
        {
            "input": [
                {
                    "type": "function_call_output",
                    "call_id": "c1",
                    "output": [{"type": "input_image", "image_url": PIXELS}],
                }
            ]
        },
    ),
    "a screenshot": (
        "/v1/responses",
        {
            "input": [
                {
                    "type": "computer_call_output",
                    "call_id": "c1",
                    "output": {"type": "computer_screenshot", "image_url": PIXELS},
                }
            ]
        },
    ),
}


@pytest.mark.parametrize(("path", "body"), SEEN.values(), ids=SEEN)
@pytest.mark.parametrize("by", ["pool", "key"])
def test_where_nobody_counts_the_bytes_of_an_image_are_no_text(by, path, body):
    @story
    async def check():
        async with limited(by, UNTOLD) as world:
            limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
            reply = await world.http.post(path, json={"model": "m", limit: 5, **body})
            assert reply.status_code == 200, reply.text

    check()


def told_by(monkeypatch, silent):
    """Have backends not be there as they are asked to count, at the `silent` times; return the times."""
    count, asked = BackendCounter.count, []

    async def told(counter, call, served_model):
        asked.append(call)
        if len(asked) in silent:
            raise ConnectionRefusedError
        return await count(counter, call, served_model)

    monkeypatch.setattr(BackendCounter, "count", told)
    return asked


@pytest.mark.parametrize("by", ["pool", "key"])
def test_a_count_that_is_not_told_in_time_proves_nothing(by, monkeypatch):
    @story
    async def check():
        async with limited(by, ENGINE) as world:
            with monkeypatch.context() as patched:
                told_by(patched, silent={1})
                reply = await world.chat("word " * 200, max_tokens=5)
                told = reply.json()["error"]
                assert (reply.status_code, told["code"]) == (503, "server_is_overloaded"), told
                assert str(CAP) in told["message"]
                assert int(reply.headers["retry-after"]) >= 1
                assert sent_on(world, "/v1/chat/completions") == []
                assert (await world.chat("word " * 200, max_tokens=5)).status_code == 200
            with monkeypatch.context() as patched:
                told_by(patched, silent={1})
                holds(await world.chat("word " * 3000, max_tokens=5))  # it would be late again

    check()


@story
async def test_another_backend_counts_where_one_is_not_there(monkeypatch):
    async with gateway(ENGINE, ENGINE, pool={"max_context": CAP}) as world:
        asked = told_by(monkeypatch, silent={1})
        assert (await world.chat("word " * 200, max_tokens=5)).status_code == 200
        assert len(asked) == 2


@story
async def test_the_engine_decides_on_its_own_window_where_a_count_is_not_told_in_time(monkeypatch):
    async with gateway(ENGINE) as world:
        told_by(monkeypatch, silent={1})
        assert (await world.chat("word " * 800, max_tokens=5)).status_code == 200


@story
async def test_the_engines_own_window_is_left_to_the_engine_where_nobody_counts():
    async with gateway(UNTOLD) as world:
        for path, body in TOO_LONG.values():
            reply = await world.http.post(path, json={"model": "m", **body})
            assert reply.status_code == 200, (path, reply.text)


@pytest.mark.parametrize("prompt", [LONG, [5] * 1500])
def test_an_engine_that_embeds_in_chunks_gets_prompts_that_are_longer_than_its_window(prompt):
    @story
    async def check():
        body = {"model": "m", "input": prompt}
        async with gateway(replace(ENGINE, max_model_len=512, max_embed_len=4096)) as world:
            reply = await world.http.post("/v1/embeddings", json=body)
            assert reply.status_code == 200, reply.text
        async with gateway(replace(ENGINE, max_model_len=512)) as world:
            told = holds(await world.http.post("/v1/embeddings", json=body))
            assert "maximum context length" in told["message"]

    check()


@story
async def test_a_prompt_that_the_engine_may_cut_goes_to_one_whose_cache_holds_one_window():
    """So vLLM sizes the window by itself: 512 blocks of 16 tokens hold 8192."""
    sim = SimConfig(model="m", speed=0, max_model_len=8192, num_blocks=512)
    async with gateway(sim) as world:
        (backend,) = world.process.table
        await world.until(lambda: backend.room.capacity_tokens)
        body = {"prompt": "word " * 9000, "truncate_prompt_tokens": 100, "max_tokens": 5}
        await world.http.post("/v1/completions", json={"model": "m", **body})
        assert len(world.sims[0].received("/v1/completions")) == 1  # it judges


@story
async def test_what_nobody_could_count_says_so_and_by_how_much_it_may_be_too_long():
    async with limited("pool", UNTOLD) as world:
        told = holds(await world.chat(LONG, max_tokens=5))
        assert "could not be counted exactly" in told["message"]
        assert "up to 7" in told["message"]


@story
async def test_a_pool_without_backends_says_so_and_not_that_the_prompt_is_too_long():
    async with gateway(
        pools="pools: {m: {max_context: 512, backends: ['http://127.0.0.1:9']}}", wait=False
    ) as world:
        assert (await world.chat(LONG, max_tokens=5)).status_code == 503


async def asked_while_it_starts(world, body):
    """Return the reply to a request that waits for the only backend, which starts anew."""
    table, clock = world.process.table, world.process.clock
    (backend,) = table.backends("m")
    starts = Tending(Phase.STARTING, "restart", "it starts", ready_at=clock.now() + 1)
    table.tend(backend.id, starts)
    asked = start(world.http.post("/v1/chat/completions", json=body), name="asked")
    await world.until(lambda: world.process.handler.gate.queued("m") or asked.done())
    table.tend(backend.id, None)
    return await asked


@pytest.mark.parametrize("engine", [ENGINE, UNTOLD], ids=["counts", "cannot count"])
@pytest.mark.parametrize("by", ["pool", "key"])
def test_a_smaller_window_is_held_for_what_waits_until_somebody_can_count(by, engine):
    @story
    async def check():
        async with limited(by, engine) as world:
            body = {"model": "m", "messages": user(LONG), "max_tokens": 5}
            told = holds(await asked_while_it_starts(world, body))
            assert ("your API key" in told["message"]) == (by == "key")
            assert sent_on(world, "/v1/chat/completions") == []
            if engine is ENGINE:
                fits = {"model": "m", "messages": user("word " * 300), "max_tokens": 5}
                assert (await asked_while_it_starts(world, fits)).status_code == 200
            await world.settled()

    check()


@story
async def test_a_keys_most_output_is_held_for_what_waits_until_somebody_can_count():
    async with gateway(ENGINE) as world:
        file = world.path.parent / "keys.yaml"
        made = keys.create(file, name="small", max_output_tokens=7)
        assert (await reload(world.process)).done
        world.http.headers["authorization"] = f"Bearer {made.key}"
        body = {"model": "m", "messages": user(LONG + "[[sim:tokens=900]]")}
        reply = await asked_while_it_starts(world, body)
        assert reply.json()["usage"]["completion_tokens"] == 7
        reply = await asked_while_it_starts(world, {**body, "max_tokens": 900})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "max_tokens")


@story
async def test_a_degraded_backend_counts_where_no_other_serves():
    async with limited("pool", ENGINE) as world:
        (backend,) = world.process.table.backends("m")
        for _ in range(5):
            failed = TrafficFailed(world.process.clock.now(), Ending.BROKE)
            world.process.table.observe(backend.id, failed)
        assert backend.phase is Phase.DEGRADED
        assert (await world.chat("word " * 300, max_tokens=5)).status_code == 200
        assert len(sent_on(world, "/tokenize")) == 1


@story
async def test_output_that_does_not_fit_beside_a_response_is_clamped_where_the_pool_says_so():
    async with limited("pool", ENGINE, on_overflow="clamp") as world:
        body = {"model": "m", "input": SHORT + "[[sim:tokens=900]]", "max_output_tokens": 900}
        reply = await world.http.post("/v1/responses", json=body)
        assert reply.status_code == 200
        assert reply.json()["usage"]["total_tokens"] == CAP


@pytest.mark.parametrize("engine", [ENGINE, UNTOLD], ids=["counts", "cannot count"])
@pytest.mark.parametrize("by", ["pool", "key"])
def test_an_output_that_is_not_stated_gets_no_more_than_a_smaller_window_leaves(by, engine):
    @story
    async def check():
        async with limited(by, engine) as world:
            reply = await world.chat("hi [[sim:tokens=1000]]")
            assert reply.status_code == 200
            total = reply.json()["usage"]["total_tokens"]
            assert total == CAP if engine is ENGINE else CAP / 2 < total <= CAP
            (sent,) = sent_on(world, "/v1/chat/completions")
            assert json.loads(sent.body)["max_completion_tokens"] <= CAP

    check()


@story
async def test_where_the_window_is_the_engines_own_the_body_is_the_clients():
    async with gateway(ENGINE, pool={"max_context": 4096}) as world:
        reply = await world.chat("hi [[sim:tokens=1000]]")
        assert reply.json()["usage"]["completion_tokens"] == 1000
        (sent,) = sent_on(world, "/v1/chat/completions")
        assert sent.body == reply.request.content


@story
async def test_an_answer_has_half_of_a_smaller_window_before_anybody_counts():
    async with gateway(ENGINE, pool={"max_context": "4000"}) as world:
        await world.chat("hi")
        assert sent_on(world, "/tokenize") == []
        await world.chat("word " * 300)
        assert len(sent_on(world, "/tokenize")) == 1


@pytest.mark.parametrize("policy", ["clamp", "reject"])
def test_more_output_than_a_key_may_have_is_lowered_where_the_pool_clamps(policy):
    @story
    async def check():
        async with gateway(ENGINE, pool={"on_overflow": policy}) as world:
            file = world.path.parent / "keys.yaml"
            made = keys.create(file, name="small", max_output_tokens=7)
            assert (await reload(world.process)).done
            world.http.headers["authorization"] = f"Bearer {made.key}"
            for field, stream in (("max_tokens", False), ("max_completion_tokens", True)):
                reply = await world.chat("hi", stream=stream, **{field: 32_000})
                if policy == "clamp":
                    assert reply.status_code == 200
                    sent = json.loads(sent_on(world, "/v1/chat/completions")[-1].body)
                    assert sent[field] == 7
                else:
                    told = reply.json()["error"]
                    assert (reply.status_code, told["param"]) == (400, field)
                    assert "on_overflow: clamp" in told["message"]

    check()


@story
async def test_messages_longer_than_the_engines_window_are_refused_here_with_the_true_number():
    async with gateway(ENGINE) as world:
        body = {
            "model": "m",
            "max_tokens": 5,
            "system": LONG,
            "messages": user(LONG),
            "tools": [{"name": "look", "description": LONG, "input_schema": {"type": "object"}}],
        }
        reply = await world.http.post("/v1/messages", json=body)
        told = reply.json()["error"]
        assert (reply.status_code, told["type"]) == (400, "invalid_request_error")
        tokens = re.match(r"prompt is too long: (\d+) tokens > 4096 maximum", told["message"])
        assert int(tokens[1]) > 3 * 1800  # system, tools and message; vLLM says "at least 4097"
        assert sent_on(world, "/v1/messages") == []
        del body["tools"], body["system"]
        assert (await world.http.post("/v1/messages", json=body)).status_code == 200


TOOL = {"name": "look", "description": LONG * 2}
OFFERED = {
    "/v1/chat/completions": ("messages", {"tools": [{"type": "function", "function": TOOL}]}),
    "/v1/responses": ("input", {"tools": [{"type": "function", **TOOL}]}),
    "/v1/messages": ("messages", {"tools": [{**TOOL, "input_schema": {"type": "object"}}]}),
}


@pytest.mark.parametrize("path", OFFERED)
@pytest.mark.parametrize("hides", [True, False])
def test_tools_that_may_not_be_called_refuse_nothing_that_the_engine_may_serve(path, hides):
    """Whether it shows them to the model is a flag of the server, and its counter counts them anyway."""

    @story
    async def check():
        field, offered = OFFERED[path]
        none = "none" if path != "/v1/messages" else {"type": "none"}
        limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        body = {"model": "m", limit: 5, "tool_choice": none, **offered}
        async with gateway(replace(ENGINE, hides_tools=hides)) as world:
            fitting = await world.http.post(path, json={**body, field: user(LONG)})
            assert (fitting.status_code == 200) == hides, fitting.text
            assert len(sent_on(world, path)) == 1
            refused = await world.http.post(path, json={**body, field: user(LONG * 3)})
            assert refused.status_code == 400
            assert len(sent_on(world, path)) == 1  # too long without its tools, too
            callable_ = {**body, "tool_choice": {"type": "auto"} if none != "none" else "auto"}
            assert (
                await world.http.post(path, json={**callable_, field: user(LONG)})
            ).status_code == 400
            assert len(sent_on(world, path)) == 1

    check()


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize(
    ("path", "field", "text"),
    [
        ("/v1/embeddings", "input", LONG),
        ("/v2/embed", "texts", [LONG]),
        ("/rerank", "documents", [LONG]),
        ("/classify", "input", LONG),
    ],
)
def test_an_encoder_without_kv_cache_serves_what_fills_its_window(path, field, text, dp):
    @story
    async def check():
        async with gateway(replace(ENGINE, encoder_only=True, dp=dp)) as world:
            backend = world.process.table.backends("m")[0]
            await world.until(lambda: backend.sample is not None)
            body = {"model": "m", "query": "q", field: text}
            reply = await world.http.post(path, json=body)
            assert reply.status_code == 200, reply.text
            assert backend.in_flight == 0

    check()
