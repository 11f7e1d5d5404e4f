"""Every endpoint of vLLM that is inference is served: its own path, its own words, charged and counted."""

import json

from gateway.core.types import Phase
from gateway.sim.server import SimConfig
from tests.stories.support import gateway, story

HI = [{"role": "user", "content": "hi"}]
SCORED = {"query": "a", "documents": ["b", "c"]}
PAIRS = {"text_1": "a", "text_2": ["b", "c"]}
TEAMS = {"type": "choice", "criteria": {"billing": None, "shipping": "parcels"}}
ASKED = {
    "/v1/chat/completions/batch": {"messages": [HI, HI, HI], "max_tokens": 2},
    "/v1/embeddings": {"input": ["a", "b"]},
    "/v2/embed": {"texts": ["a", "b"], "input_type": "search_query"},
    "/pooling": {"input": "a"},
    "/classify": {"input": ["a", "b"]},
    "/rerank": SCORED,
    "/v1/rerank": SCORED,
    "/v2/rerank": SCORED,
    "/score": PAIRS,
    "/v1/score": PAIRS,
    "/generative_scoring": {"query": "a", "items": ["b", "c"], "label_token_ids": [5, 6]},
    "/v1/systemone": {"state": {"text": "where is my parcel"}, "questions": {"team": TEAMS}},
}


def without_ids(answer):
    return {key: value for key, value in answer.items() if key not in ("id", "created")}


def prompt_tokens(answer):
    if "meta" in answer:
        return answer["meta"]["billed_units"]["input_tokens"]
    usage = answer["usage"]
    return usage.get("prompt_tokens", usage.get("input_tokens"))


async def counted(world):
    prompt = 'gateway_tokens_total{kind="prompt"'
    lines = [each for each in (await world.metrics()).splitlines() if each.startswith(prompt)]
    return float(lines[0].split()[-1]) if lines else 0.0


@story
async def test_each_endpoint_answers_as_the_backend_does_and_its_tokens_are_counted():
    async with gateway() as world:
        before = 0.0
        for path, fields in ASKED.items():
            body = {"model": "m", **fields}
            direct = await world.http.post(world.sims[0].url + path, json=body)
            reply = await world.http.post(path, json=body)
            assert reply.status_code == direct.status_code == 200, (path, reply.text)
            assert without_ids(reply.json()) == without_ids(direct.json())
            assert world.sims[0].received(path)[-1].body == reply.request.content
            after = await counted(world)
            assert after - before == prompt_tokens(direct.json()) > 0, path
            before = after
        await world.settled()


@story
async def test_each_endpoint_wants_a_key_and_a_model_that_serves_it():
    async with gateway(SimConfig(model="m", speed=0, paths=())) as world:
        for path, fields in ASKED.items():
            body = {"model": "m", **fields}
            stranger = await world.http.post(path, json=body, headers={"authorization": "Bearer x"})
            assert stranger.status_code == 401, path
            reply = await world.http.post(path, json=body)
            told = (reply.status_code, reply.json()["error"]["code"])
            assert told == (404, "endpoint_not_supported"), path
            assert world.sims[0].received(path) == []


@story
async def test_a_batch_does_not_stream_whatever_it_asks_for():
    async with gateway() as world:
        body = {"model": "m", "stream": True, **ASKED["/v1/chat/completions/batch"]}
        reply = await world.http.post("/v1/chat/completions/batch", json=body)
        assert reply.headers["content-type"] == "application/json"
        assert [each["index"] for each in reply.json()["choices"]] == [0, 1, 2]


@story
async def test_only_vllms_own_paths_exist():
    async with gateway() as world:
        for path in ("/v1/pooling", "/v1/classify", "/v3/rerank", "/v1/embed"):
            assert (await world.http.post(path, json={"model": "m"})).status_code == 404


@story
async def test_clients_that_wait_for_vllms_health_wait_for_the_gateway():
    async with gateway() as world:
        assert (await world.http.get("/health")).status_code == 200
        assert (await world.http.post("/health")).status_code == 405


@story
async def test_raw_vectors_come_with_the_header_that_says_what_they_are():
    async with gateway() as world:
        body = {"model": "m", "input": ["a", "b"], "encoding_format": "bytes"}
        for path in ("/v1/embeddings", "/pooling"):
            direct = await world.http.post(world.sims[0].url + path, json=body)
            before = await counted(world)
            reply = await world.http.post(path, json=body)
            assert reply.content == direct.content
            told, real = (json.loads(each.headers["metadata"]) for each in (reply, direct))
            assert without_ids(told) == without_ids(real)
            assert await counted(world) - before == told["usage"]["prompt_tokens"]
            reply = await world.http.post(path, json=body | {"encoding_format": "bytes_only"})
            assert reply.content == direct.content
            assert "metadata" not in reply.headers
        await world.settled()


@story
async def test_the_tokenizer_is_told_without_the_path_of_its_folder():
    async with gateway() as world:
        direct = (await world.http.get(world.sims[0].url + "/tokenizer_info")).json()
        for query in ("", "?model=m"):
            reply = await world.http.get("/tokenizer_info" + query)
            assert reply.status_code == 200, reply.text
            assert reply.json() == direct | {"name_or_path": "m"}
        headers = {"authorization": "Bearer x"}
        assert (await world.http.get("/tokenizer_info", headers=headers)).status_code == 401
        assert (await world.http.get("/tokenizer_info?model=none")).status_code == 404
        assert (await world.http.post("/tokenizer_info", json={})).status_code == 405
    async with gateway(SimConfig(model="m", speed=0, paths=())) as world:
        reply = await world.http.get("/tokenizer_info")
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "endpoint_not_supported")


@story
async def test_while_nobody_serves_the_tokenizer_is_unavailable_and_not_unknown():
    async with gateway() as world:
        world.sims[0].inject("refuse")
        await world.until(lambda: world.process.table.backends("m")[0].phase is Phase.DOWN)
        reply = await world.http.get("/tokenizer_info")
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "model_unavailable")
        assert 1 <= int(reply.headers["retry-after"]) <= 30


@story
async def test_a_backend_that_does_not_answer_is_not_said_to_lack_the_endpoint():
    async with gateway() as world:
        world.sims[0].inject("refuse")  # from the next moment on, as its health does not show yet
        reply = await world.http.get("/tokenizer_info")
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "model_unavailable")
