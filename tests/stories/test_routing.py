"""Names lead to pools and to the backends that hold them."""

import asyncio
import json
import time
from dataclasses import replace

from gateway.core.types import Phase
from gateway.process import reload
from gateway.sim.server import SimConfig
from tests import keyfiles as keys
from tests.stories.support import FAST, gateway, story

WITH_LORA = SimConfig(model="m", adapters=("sql", "legal"), speed=0)
OTHER = SimConfig(model="other", speed=0)
TWO_POOLS = "pools: {m: {aliases: [gpt-4o], backends: [<0>, <1>]}, other: {backends: [<2>]}}"


def served(sim):
    return [
        json.loads(each.body)["model"]
        for each in sim.requests
        if each.path == "/v1/chat/completions"
    ]


@story
async def test_models_adapters_and_aliases_reach_the_right_backend_under_the_name_it_knows():
    async with gateway(WITH_LORA, FAST, OTHER, pools=TWO_POOLS) as world:
        for name in ("m", "gpt-4o", "sql", "legal", "other"):
            reply = await world.chat(model=name, max_tokens=1)
            assert reply.status_code == 200, reply.text
        assert served(world.sims[2]) == ["other"]
        assert set(served(world.sims[0])) >= {"sql", "legal"}
        assert set(served(world.sims[1])) <= {"m"}
        assert "gpt-4o" not in served(world.sims[0]) + served(world.sims[1])


@story
async def test_the_model_list_comes_from_memory_with_windows_and_parents():
    async with gateway(WITH_LORA, FAST, OTHER, pools=TWO_POOLS) as world:
        reply = await world.http.get("/v1/models")
        models = {each["id"]: each for each in reply.json()["data"]}
        # Clients take the first: a pool, as the file lists them; then aliases, then adapters.
        assert list(models) == ["m", "other", "gpt-4o", "sql", "legal"]
        assert all(abs(each["created"] - time.time()) < 60 for each in models.values())
        assert models["sql"]["parent"] == "m"
        assert models["m"]["parent"] is None
        for name in ("max_model_len", "context_length", "context_window", "max_context_length"):
            assert models["m"][name] == WITH_LORA.max_model_len
        one = await world.http.get("/v1/models/sql")
        assert one.json() == models["sql"]
        missing = await world.http.get("/v1/models/org%2Fnone")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "model_not_found"
        assert (
            await world.http.get("/v1/models", headers={"authorization": ""})
        ).status_code == 401


@story
async def test_a_body_without_a_model_means_the_only_pool_and_stays_as_it_is():
    async with gateway(WITH_LORA) as world:
        said = [{"role": "user", "content": "hi"}]
        for path, body in (
            ("/v1/chat/completions", {"messages": said, "max_tokens": 1}),
            ("/v1/chat/completions", {"messages": said, "max_tokens": "1", "stream": 1}),
            ("/v1/completions", {"prompt": "hi", "max_tokens": 1, "model": None}),
            ("/v1/responses", {"input": "hi", "max_output_tokens": 1}),
            ("/v1/embeddings", {"input": "hi"}),
            ("/score", {"text_1": "a", "text_2": "b"}),
            ("/tokenize", {"prompt": "hi"}),
        ):
            reply = await world.http.post(path, json=body)
            assert reply.status_code == 200, (path, reply.text)
            sent = world.sims[0].received(path)[-1].body
            if "stream" not in body:  # else usage is asked for
                assert sent == reply.request.content
            assert json.loads(sent).get("model") is None
        file = world.path.parent / "keys.yaml"
        lora = keys.create(file, name="lora", models=("legal",))
        assert (await reload(world.process)).done
        headers = {"authorization": f"Bearer {lora.key}"}
        reply = await world.http.post("/v1/completions", json={"prompt": "hi"}, headers=headers)
        assert reply.status_code == 200
        assert json.loads(world.sims[0].received("/v1/completions")[-1].body)["model"] == "legal"
    async with gateway(WITH_LORA, FAST, OTHER, pools=TWO_POOLS) as world:
        reply = await world.http.post("/v1/chat/completions", json={"messages": said})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "model")
        assert "GET /v1/models" in reply.json()["error"]["message"]


@story
async def test_a_key_is_shown_its_own_window_and_when_a_model_came_into_use():
    async with gateway(WITH_LORA) as world:
        first = (await world.http.get("/v1/models")).json()["data"]
        file = world.path.parent / "keys.yaml"
        small = keys.create(file, name="small", max_context_tokens=100)
        large = keys.create(file, name="large", max_context_tokens=1_000_000)
        assert (await reload(world.process)).done
        for key, window in ((small.key, 100), (large.key, WITH_LORA.max_model_len)):
            headers = {"authorization": f"Bearer {key}"}
            told = (await world.http.get("/v1/models", headers=headers)).json()["data"]
            assert {each["max_model_len"] for each in told} == {window}
            one = (await world.http.get("/v1/models/m", headers=headers)).json()
            assert one["context_length"] == window
            assert [each["created"] for each in told] == [each["created"] for each in first]


@story
async def test_an_adapter_that_is_gone_is_an_error_never_the_base_model():
    async with gateway(WITH_LORA) as world:
        assert (await world.chat(model="sql", max_tokens=1)).status_code == 200
        world.sims[0].inject("lost_adapter:sql")
        before = len(served(world.sims[0]))
        reply = await world.chat(model="sql", max_tokens=1)
        assert reply.status_code in (404, 503)
        await world.until(lambda: "sql" not in world.process.handler.catalog().entries)
        reply = await world.chat(model="sql", max_tokens=1)
        assert reply.status_code == 404
        assert set(served(world.sims[0])[before:]) <= {"sql"}


@story
async def test_load_spreads_over_equal_backends():
    slow = SimConfig(model="m", decode_step_s=0.01)
    async with gateway(slow, slow) as world:
        async with asyncio.TaskGroup() as group:
            for _ in range(20):
                group.create_task(world.chat(max_tokens=20))
        counts = [len(served(sim)) for sim in world.sims]
        assert min(counts) >= 8, counts


@story
async def test_a_pool_whose_caches_are_full_sheds_with_retry_after_where_nothing_may_wait():
    async with gateway(
        SimConfig(model="m", num_blocks=40, block_size=16, decode_step_s=0.05, max_model_len=640),
        pool={"queue": {"max_requests": 0}},
    ) as world:
        backend = world.process.table.backends("m")[0]
        await world.until(lambda: backend.room.capacity_tokens == 640)
        async with asyncio.TaskGroup() as group:
            holder = group.create_task(world.chat("fill " * 130, max_tokens=300))
            # The next scrape is taken to show it. One that was under way does not.
            await world.until(lambda: backend.sample.running == 1)
            reply = await world.chat("fill " * 130, max_tokens=300)
            assert reply.status_code == 503
            assert reply.json()["error"]["code"] == "server_is_overloaded"
            assert "too little free KV cache" in reply.json()["error"]["message"]
            assert 1 <= int(reply.headers["retry-after"]) <= 30
            assert reply.headers["x-gateway-shed-reason"] == "no_room"
            assert (await world.chat(max_tokens=1)).status_code == 200  # there is room for this one
            holder.cancel()


@story
async def test_what_fits_no_cache_but_that_of_a_backend_that_is_away_is_to_be_sent_again():
    small = SimConfig(model="m", speed=0, num_blocks=40, block_size=16, max_model_len=640)
    large = replace(small, num_blocks=400, max_model_len=6400)
    async with gateway(small, large) as world:
        one, other = world.process.table.backends("m")
        await world.until(lambda: one.room.capacity_tokens == 640)
        await world.until(lambda: other.room.capacity_tokens == 6400)
        # Only an engine knows how long an image is, so no window excludes a backend.
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
        long = [image, {"type": "text", "text": "word " * 700}]
        assert (await world.chat(long, max_tokens=5)).status_code == 200
        await world.sims[1].stop()
        reply = await world.chat(long, max_tokens=5)
        assert reply.status_code in {502, 503}  # it was tried, or is known to be down by then
        await world.until(lambda: other.phase is Phase.DOWN)
        reply = await world.chat(long, max_tokens=5)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "model_unavailable")
        assert "1 is down and 1 is too small" in reply.json()["error"]["message"]
        assert 1 <= int(reply.headers["retry-after"]) <= 30
        assert (await world.chat(max_tokens=5)).status_code == 200
        longer = await world.chat("word " * 9000, max_tokens=5)  # the other one never held that
        assert longer.json()["error"]["code"] == "context_length_exceeded"


@story
async def test_an_endpoint_the_backends_do_not_serve_is_a_clear_404():
    async with gateway(FAST, pool={"endpoints": ["chat"]}) as world:
        reply = await world.http.post("/v1/embeddings", json={"model": "m", "input": "x"})
        assert reply.status_code == 404
        assert reply.json()["error"]["code"] == "endpoint_not_supported"
        assert "chat" in reply.json()["error"]["message"]
