"""Usage, as operators read it: one settlement for each request."""

import asyncio

import pytest

from gateway.process import reload
from gateway.sim.config import SimConfig
from gateway.usage.journal import every_entry
from tests.stories.stubs import free_url
from tests.stories.support import gateway, story

SIM = SimConfig(model="m", speed=0)


@story
async def test_each_request_is_counted_once_and_told():
    async with gateway(SIM) as world:
        for _ in range(3):
            assert (await world.chat(max_tokens=5)).status_code == 200
        assert (await world.chat(model="nope")).status_code == 404
        await world.until(lambda: not world.process.ingress.live)
        world.process.ledger.post()
        await world.process.accounts.turn()
        told = await world.http.get(f"{world.admin_url}/admin/v1/usage?by=model")
        (row,) = told.json()["data"]
        assert (row["model"], row["requests"], row["output_tokens"]) == ("m", 3, 15)
        assert row["day"] is None
        wrong = await world.http.get(f"{world.admin_url}/admin/v1/usage?by=colour")
        assert wrong.status_code == 422
        metrics = (await world.http.get(f"{world.admin_url}/metrics")).text
        assert 'kind="output",tenant="' in metrics or 'kind="output"} 15.0' in metrics
        folder = world.process.config.state / "usage"
        assert len([each.id for each in every_entry(folder)]) == 3


@story
async def test_a_message_is_charged_for_what_the_cache_had_of_its_prompt():
    sim = SimConfig(model="m", speed=0, block_size=16, prompt_tokens_details=True)
    said = {"role": "user", "content": "the same long prompt " * 20}
    body = {"model": "m", "max_tokens": 2, "messages": [said]}
    async with gateway(sim) as world:
        for more in ({}, {}, {"stream": True}):
            reply = await world.http.post("/v1/messages", json=body | more)
            assert reply.status_code == 200
        await world.until(lambda: not world.process.ingress.live)
        world.process.ledger.post()
        await world.process.accounts.turn()
        lines = [*every_entry(world.process.config.state / "usage")]
        first, again, streamed = [(each.input, each.output) for each in lines]
        assert first == again == streamed
        assert [each.cached > 0 for each in lines] == [False, True, True]


@story
async def test_a_request_costs_what_its_model_did_as_it_came():
    """A reload that gives a pool another name, and its price too, makes no stream cheaper that outlives it."""
    prices = "prices: {models: {m: {output: 1000000}}}"
    sim = SimConfig(model="m", decode_step_s=0.02)
    async with gateway(sim, extra=prices) as world:
        chat = world.chat(max_tokens=20, stream=True)
        running = asyncio.get_running_loop().create_task(chat)
        await world.until(lambda: world.in_flight() == 1)
        settings = world.path.read_text()
        for name in ("{m: {output", '{"m": {"backends'):
            assert name in settings
            settings = settings.replace(name, name.replace("m", "new", 1))
        world.path.write_text(settings)
        assert (await reload(world.process)).done
        assert not running.done()
        assert (await running).status_code == 200
        await world.until(lambda: not world.process.ingress.live)
        world.process.ledger.post()
        await world.process.accounts.turn()
        (line,) = every_entry(world.process.config.state / "usage")
        assert (line.model, line.output, line.money) == ("m", 20, 20.0)


@story
async def test_a_large_reply_costs_what_its_beginning_tells():
    documents = ["word " * 400] * 200
    async with gateway(SIM) as world:
        for count in (2, 200):
            body = {"model": "m", "query": "q", "documents": documents[:count]}
            reply = await world.http.post("/v1/rerank", json=body)
            assert reply.status_code == 200
            told = reply.json()["usage"]["prompt_tokens"]
            await world.until(lambda: not world.process.ingress.live)
            world.process.ledger.post()
            await world.process.accounts.turn()
            *_, line = every_entry(world.process.config.state / "usage")
            assert (line.input, line.output, line.source) == (told, 0, "upstream")
        assert len(reply.content) > 256 * 1024


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@story
async def test_a_client_that_leaves_pays_for_all_that_an_event_held(path):
    """Else one event of a thousand tokens, all that its client wants to have, would cost as one token."""
    said = "[[sim:itl=2ms]] hello"
    body = {"model": "m", "stream": True, "stream_interval": 60, "max_tokens": 100}
    body["prompt" if path == "/v1/completions" else "messages"] = (
        said if path == "/v1/completions" else [{"role": "user", "content": said}]
    )
    async with gateway(SIM) as world:
        async with world.http.stream("POST", path, json=body) as reply:
            async for line in reply.aiter_lines():
                if len(line) > 400:  # 60 tokens
                    break
        await world.settled()
        world.process.ledger.post()
        await world.process.accounts.turn()
        (line,) = every_entry(world.process.config.state / "usage")
        (seen,) = world.sims[0].received(path)
        assert seen.tokens_emitted >= 61
        assert 61 <= line.output <= 62  # of a chat the event with the role counts, too


@story
async def test_without_redis_what_is_told_is_not_all_and_nothing_at_all_is_an_error():
    extra = f"redis: redis://{free_url().removeprefix('http://')}/0"
    async with gateway(SIM, extra=extra) as world:
        path = f"{world.admin_url}/admin/v1/usage?by=model"
        told = await world.http.get(path)
        assert told.status_code == 503
        assert told.json()["code"] == "store_unavailable"
        assert (await world.chat(max_tokens=5)).status_code == 200
        await world.until(lambda: not world.process.ingress.live)
        world.process.ledger.post()
        (row,) = (await world.http.get(path)).json()["data"]
        assert (row["requests"], row["complete"]) == (1, False)
