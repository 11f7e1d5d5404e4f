"""What its own pool cannot take, another pool answers: never silently, never after the first byte."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from gateway.core.aio import start
from gateway.core.limits import KeyLimits
from gateway.core.types import Phase
from gateway.pools.health import Order
from gateway.process import reload
from gateway.sim.server import SimConfig
from gateway.usage.journal import every_entry
from tests import keyfiles as keys
from tests.stories.support import frames, gateway, story
from tests.stories.test_explain import explain, route

BIG = SimConfig(model="big", speed=0)
SMALL = SimConfig(model="small", speed=0)
TWO = """\
pools:
  big:
    fallback: {{ {fallback} }}
    queue: {{max_requests: 0}}
    {more}
    backends: [{{url: <0>, max_in_flight: 1}}]
  small:
    backends: [<1>]
"""


def two(fallback, more=""):
    return TWO.format(fallback=fallback, more=more)


def take_out(world, backend="big/b1"):
    world.process.table.order(backend, Order.CORDON)
    assert world.process.table.get(backend).phase is Phase.CORDONED


@pytest.mark.parametrize("stream", [False, True])
def test_without_a_backend_another_pool_answers_and_says_so(stream):
    @story
    async def told():
        async with gateway(BIG, SMALL, pools=two("no_backend: small"), access=True) as world:
            usual = await world.chat(model="big", max_tokens=3, stream=stream)
            assert "x-gateway-model" not in usual.headers
            take_out(world)
            reply = await world.chat(model="big", max_tokens=3, stream=stream)
            assert reply.status_code == 200, reply.text
            assert reply.headers["x-gateway-model"] == "small"
            assert reply.headers["x-gateway-backend"] == "small/b1"
            said = json.loads(frames(reply.text)[0]) if stream else reply.json()
            assert said["model"] == "small"
            first, line = world.access_lines()
            assert first["fallback"] is None
            assert (line["model"], line["pool"], line["backend"]) == ("big", "small", "b1")
            assert line["fallback"] == {"pool": "big", "cause": "no_backend"}
            assert line["completion_tokens"] == 3
            counted = 'gateway_fallbacks_total{cause="no_backend",pool="big",to="small"} 1.0'
            assert counted in await world.metrics()
            await world.settled()

    told()


NEAR_FIRST = """\
pools:
  big:
    fallback: {no_backend: small}
    backends: [<0>, <1>, <2>]
  small:
    prefer: {labels: {zone: near}}
    backends: [{url: <3>, labels: {zone: near}}, <4>]
"""


@story
async def test_a_wait_counts_in_the_pool_in_whose_queue_it_was():
    pools = two("overload: small").replace("max_requests: 0", "max_wait: 300ms")
    async with gateway(replace(BIG, reply_tokens=4000, speed=1), SMALL, pools=pools) as world:
        body = {"model": "big", "messages": [{"role": "user", "content": "go"}], "stream": True}
        async with world.http.stream("POST", "/v1/chat/completions", json=body) as holding:
            assert holding.status_code == 200
            reply = await world.chat(model="big", max_tokens=1)
            assert reply.headers["x-gateway-model"] == "small"
        told = await world.metrics()
        assert 'gateway_queue_wait_seconds_count{pool="big"} 1.0' in told
        assert 'gateway_queue_wait_seconds_count{pool="small"}' not in told


@story
async def test_attempts_in_the_own_pool_take_none_from_the_other():
    sims = BIG, BIG, BIG, SMALL, SMALL
    async with gateway(*sims, pools=NEAR_FIRST, as_shipped=True, access=True) as world:
        for sim in world.sims[:4]:
            sim.inject("refuse")
        reply = await world.chat(model="big", max_tokens=1)
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-gateway-backend"] == "small/b2"
        assert reply.headers["x-gateway-attempts"] == "5"  # in all
        (line,) = world.access_lines()
        assert line["attempts"] == 5
        told = await world.metrics()
        assert 'gateway_upstream_attempts_total{pool="big"} 3.0' in told
        assert 'gateway_upstream_attempts_total{pool="small"} 2.0' in told


@story
async def test_in_the_other_pool_three_attempts_are_made_at_most_too():
    pools = NEAR_FIRST.replace("[<0>, <1>, <2>]", "[<0>]").replace(
        "[{url: <3>, labels", "[<1>, <2>, {url: <3>, labels"
    )
    async with gateway(BIG, *[SMALL] * 4, pools=pools, as_shipped=True) as world:
        for sim in world.sims:
            sim.inject("refuse")
        reply = await world.chat(model="big", max_tokens=1)
        assert reply.status_code == 502, reply.text
        assert reply.headers["x-gateway-attempts"] == "4"
        told = await world.metrics()
        assert 'gateway_requests_total{code="502",endpoint="chat",model="big",outcome="backend_error",pool="big"} 1.0' in told  # fmt: skip
        assert 'gateway_upstream_attempts_total{pool="big"} 1.0' in told
        assert 'gateway_upstream_attempts_total{pool="small"} 3.0' in told


@story
async def test_the_other_pool_gets_what_was_asked_and_not_what_the_own_one_made_of_it():
    # The own pool asks for whole replies as streams, so that another backend can go on with them (`resume`).
    pools = two("no_backend: small", "resume_replies: 1").replace(
        "backends: [{url: <0>, max_in_flight: 1}]", "backends: [<0>, <1>]"
    )
    async with gateway(BIG, BIG, SMALL, pools=pools.replace("[<1>]", "[<2>]")) as world:
        assert (await world.chat(model="big", max_tokens=30)).status_code == 200
        (own,) = [each for sim in world.sims[:2] for each in sim.received("/v1/chat/completions")]
        assert json.loads(own.body)["stream"]
        for each in ("big/b1", "big/b2"):
            take_out(world, each)
        reply = await world.chat(model="big", max_tokens=30)
        assert (reply.status_code, reply.json()["model"]) == (200, "small")
        (other,) = world.sims[2].received("/v1/chat/completions")
        assert "stream" not in json.loads(other.body)


@story
async def test_an_overloaded_pool_has_another_one_answer_and_explain_and_route_tell_it():
    async with gateway(
        SimConfig(model="big", reply_tokens=4000), SMALL, pools=two("overload: [small]")
    ) as world:
        body = {"model": "big", "messages": [{"role": "user", "content": "go on"}], "stream": True}
        async with world.http.stream("POST", "/v1/chat/completions", json=body) as holding:
            assert holding.status_code == 200
            await world.until(lambda: world.in_flight() == 1)
            foreseen = await route(world, model="big")
            assert (foreseen["verdict"], foreseen["pool"]) == ("now", "small")
            assert foreseen["model"] == "big"
            assert foreseen["fallback"] == {"pool": "big", "cause": "overload"}
            assert "big would refuse it: 503 server_is_overloaded." in foreseen["sentence"]
            reply = await world.chat(model="big", max_tokens=1)
            assert reply.headers["x-gateway-model"] == "small"
            told = await explain(world, reply.headers["x-request-id"])
            assert (told["pool"], told["backend"], told["state"]) == (
                "small",
                "small/b1",
                "admitted",
            )
            assert told["fallback"] == {"pool": "big", "cause": "overload"}
            assert "The pool big could not take it: it is overloaded." in told["sentence"]
            # Nothing says so of no backend: that cause has no setting.
            take_out(world)
            refused = await world.chat(model="big")
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                503,
                "model_unavailable",
            )


@story
async def test_a_prompt_too_long_for_its_pool_goes_where_the_window_is_larger():
    small_window = SimConfig(model="big", speed=0, max_model_len=64)
    async with gateway(small_window, SMALL, pools=two("context: small")) as world:
        words = "word " * 200
        reply = await world.chat(words, model="big", max_tokens=2)
        assert (reply.status_code, reply.headers.get("x-gateway-model")) == (200, "small")
        assert (await route(world, model="big", tokens=200))["pool"] == "small"
        # Too long for both: the client is told of the window that it asked for.
        refused = await world.chat("word " * 40_000, model="big", max_tokens=2)
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert "64 tokens" in refused.json()["error"]["message"]
        assert not [each for each in world.sims[0].requests if "chat" in each.path]


@pytest.mark.parametrize(
    ("path", "asked", "taken"),
    [
        ("completions", {"prompt": [5, 6, 7]}, False),
        ("completions", {"prompt": [[5, 6], [7]]}, False),
        ("completions", {"prompt": "hi", "logit_bias": {"50256": -100}}, False),
        ("completions", {"prompt": "hi", "stop_token_ids": [2]}, False),
        ("completions", {"prompt": "hi", "logit_bias": {}, "stop_token_ids": None}, True),
        ("completions", {"prompt": "hi", "seed": 1}, True),
    ],
)
def test_what_is_asked_in_the_tokens_of_its_model_is_answered_by_no_other(path, asked, taken):
    @story
    async def refused():
        async with gateway(BIG, SMALL, pools=two("no_backend: small")) as world:
            take_out(world)
            body = {"model": "big", "max_tokens": 1, **asked}
            reply = await world.http.post(f"/v1/{path}", json=body)
            assert reply.status_code == (200 if taken else 503), reply.text
            assert len(world.sims[1].received(f"/v1/{path}")) == taken

    refused()


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_other_models_engine_does_not_take_is_refused_as_by_its_own_pool(stream):
    """It reads no images, say, or has no parser of tools: the client's own model does."""

    @story
    async def refused():
        pools = two("no_backend: [small, third]") + "  third: {backends: [<2>]}\n"
        third = SimConfig(model="third", speed=0)
        async with gateway(BIG, SMALL, third, pools=pools, access=True) as world:
            take_out(world)
            world.sims[1].inject("http_500:400")
            reply = await world.chat(model="big", max_tokens=1, stream=stream)
            assert (reply.status_code, reply.headers["x-gateway-model"]) == (200, "third")
            world.sims[2].inject("http_500:422")
            reply = await world.chat(model="big", max_tokens=1, stream=stream)
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "model_unavailable")
            assert "Model `big`" in reply.json()["error"]["message"]
            assert "x-gateway-model" not in reply.headers
            assert world.access_lines()[-1]["pool"] == "big"
            await world.settled()

    refused()


@story
async def test_a_key_may_rule_it_out_and_must_be_allowed_the_other_model():
    async with gateway(BIG, SMALL, pools=two("no_backend: small")) as world:
        take_out(world)
        file = world.path.parent / "keys.yaml"
        never = keys.create(file, name="never", fallback=False)
        only = keys.create(file, name="only", models=("big",))
        both = keys.create(file, name="both", models=("big", "small"))
        assert (await reload(world.process)).done
        for key, status in ((never, 503), (only, 503), (both, 200)):
            headers = {"authorization": f"Bearer {key.key}"}
            reply = await world.chat(model="big", max_tokens=1, headers=headers)
            assert reply.status_code == status, reply.text
            if status == 503:
                assert "Model `big` is temporarily unavailable" in reply.json()["error"]["message"]
                assert "x-gateway-model" not in reply.headers
        assert [each.own.fallback for each in keys.list_keys(file)] == [None, False, None, None]


@story
async def test_adapters_fall_back_only_where_the_setting_names_them_and_vectors_never():
    lora = SimConfig(model="big", adapters=("sql", "legal"), speed=0)
    pools = two("no_backend: small, adapters: [sql]")
    async with gateway(lora, SMALL, pools=pools) as world:
        take_out(world)
        reply = await world.chat(model="sql", max_tokens=1)
        assert (reply.status_code, reply.json()["model"]) == (200, "small")
        assert (await world.chat(model="legal", max_tokens=1)).status_code == 503
        embedded = await world.http.post("/v1/embeddings", json={"model": "big", "input": "a"})
        assert embedded.status_code == 503


@story
async def test_what_the_other_pool_forbids_does_not_go_there():
    pools = two("no_backend: small").replace(
        "  small:\n", "  small:\n    parameters: {deny: [logit_bias]}\n"
    )
    async with gateway(BIG, SMALL, pools=pools) as world:
        take_out(world)
        assert (await world.chat(model="big", max_tokens=1)).status_code == 200
        reply = await world.chat(model="big", max_tokens=1, logit_bias={"1": 1})
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "model_unavailable")
        assert len(world.sims[1].received("/v1/chat/completions")) == 1


@story
async def test_two_pools_may_stand_in_for_each_other_and_a_request_never_goes_round():
    pools = two("no_backend: small").replace(
        "  small:\n", "  small:\n    fallback: {no_backend: big}\n"
    )
    async with gateway(BIG, SMALL, pools=pools, access=True) as world:
        take_out(world)
        assert (await world.chat(model="big", max_tokens=1)).json()["model"] == "small"
        take_out(world, "small/b1")
        reply = await world.chat(model="big", max_tokens=1)
        assert reply.status_code == 503
        line = world.access_lines()[-1]
        assert (line["pool"], line["fallback"], line["backend"]) == ("big", None, None)
        assert "Model `big` is temporarily unavailable" in reply.json()["error"]["message"]
        told = await explain(world, reply.headers["x-request-id"])
        assert (told["pool"], told["state"], told["fallback"]) == ("big", "refused", None)


@story
async def test_a_stream_that_broke_is_never_begun_again_elsewhere():
    pools = two("no_backend: small, overload: small")
    async with gateway(BIG, SMALL, pools=pools) as world:
        world.sims[0].inject("reset_after:3")
        reply = await world.chat(model="big", stream=True)
        assert "error" in json.loads(frames(reply.text)[-2])
        assert world.sims[1].received("/v1/chat/completions") == []


@story
async def test_a_backend_that_refuses_connections_has_its_requests_answered_by_the_other_pool():
    async with gateway(BIG, SMALL, pools=two("no_backend: small")) as world:
        await world.sims[0].__aexit__(None, None, None)
        reply = await world.chat(model="big", max_tokens=1)
        assert (reply.status_code, reply.headers.get("x-gateway-model")) == (200, "small")
        await world.settled()


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_only_server_does_not_take_as_it_stops_the_other_pool_answers(stream):
    """vLLM drains for `--shutdown-timeout`, and its health is good."""

    @story
    async def told():
        async with gateway(BIG, SMALL, pools=two("no_backend: small"), access=True) as world:
            world.sims[0].inject("stopping")
            reply = await world.chat(model="big", max_tokens=1, stream=stream)
            assert (reply.status_code, reply.headers.get("x-gateway-model")) == (200, "small")
            (line,) = world.access_lines()
            assert line["fallback"] == {"pool": "big", "cause": "no_backend"}
            assert (line["outcome"], line["attempts"], line["completion_tokens"]) == ("ok", 2, 1)
            await world.settled()

    told()


@story
async def test_what_needs_an_adapter_that_the_only_server_has_lost_the_other_pool_answers():
    big, pools = replace(BIG, adapters=("sql",)), two("no_backend: small, adapters: [sql]")
    async with gateway(big, SMALL, pools=pools, as_shipped=True) as world:
        assert (await world.chat(model="sql", max_tokens=1)).json()["model"] == "sql"
        unload = f"{world.sims[0].url}/v1/unload_lora_adapter"
        assert (await world.http.post(unload, json={"lora_name": "sql"})).status_code == 200
        reply = await world.chat(model="sql", max_tokens=1)
        assert (reply.status_code, reply.headers.get("x-gateway-model")) == (200, "small")
        assert len(world.sims[0].received("/v1/chat/completions")) == 2
        await world.settled()


@story
async def test_who_waited_in_public_is_not_answered_by_another_model():
    big = SimConfig(model="big", reply_tokens=4000)
    pools = two("overload: small").replace(
        "queue: {max_requests: 0}", "queue: {max_wait: 3s, announce: true}"
    )
    async with gateway(big, SMALL, pools=pools) as world:
        body = {"model": "big", "messages": [{"role": "user", "content": "go on"}], "stream": True}
        async with world.http.stream("POST", "/v1/chat/completions", json=body) as holding:
            assert holding.status_code == 200
            reply = await world.chat(model="big", stream=True)
            assert reply.status_code == 200
            assert "x-gateway-model" not in reply.headers
            assert "overloaded" in frames(reply.text)[-2]
            assert world.sims[1].received("/v1/chat/completions") == []


@story
async def test_a_share_of_the_queue_that_a_tenant_has_used_up_is_no_cause():
    big = SimConfig(model="big", reply_tokens=4000)
    pools = two("overload: small").replace(
        "queue: {max_requests: 0}", "queue: {max_requests: 2, tenant_share: 0.5}"
    )
    async with gateway(big, SMALL, pools=pools) as world:
        body = {"model": "big", "messages": [{"role": "user", "content": "go on"}], "stream": True}
        leave = asyncio.Event()

        async def client():
            async with world.http.stream("POST", "/v1/chat/completions", json=body):
                await leave.wait()

        async with asyncio.TaskGroup() as group:
            group.create_task(client(), name="holds the place")
            await world.until(lambda: world.in_flight() == 1)
            group.create_task(client(), name="waits")
            await world.until(lambda: world.process.handler.gate.queues()["big"][0] == 1)
            reply = await world.chat(model="big", max_tokens=5)
            assert (reply.status_code, reply.json()["error"]["code"]) == (429, "too_many_waiting")
            leave.set()
        assert world.sims[1].received("/v1/chat/completions") == []


@story
async def test_sound_is_written_by_the_other_model_too():
    pools = two("no_backend: small")
    async with gateway(BIG, SMALL, pools=pools) as world:
        take_out(world)
        reply = await world.http.post(
            "/v1/audio/transcriptions",
            data={"model": "big"},
            files={"file": ("a.wav", b"RIFF" + bytes(2000), "audio/wav")},
        )
        assert (reply.status_code, reply.headers.get("x-gateway-model")) == (200, "small"), (
            reply.text
        )
        (sent,) = world.sims[1].received("/v1/audio/transcriptions")
        assert b"small" in sent.body


@story
async def test_who_was_answered_by_another_pool_is_not_expected_back():
    big = SimConfig(model="big", reply_tokens=4000)
    async with gateway(big, SMALL, pools=two("overload: small")) as world:
        body = {"model": "big", "messages": [{"role": "user", "content": "go on"}], "stream": True}
        async with world.http.stream("POST", "/v1/chat/completions", json=body):
            await world.until(lambda: world.in_flight() == 1)
            for _ in range(5):
                reply = await world.chat("word " * 40, model="big", max_tokens=5)
                assert reply.headers["x-gateway-model"] == "small"
            promises = world.process.handler.gate._lines["big"].forecast._promises
            assert len(promises) == 0


@story
async def test_what_another_pool_may_have_executed_is_told_and_goes_no_further():
    tiny = SimConfig(model="tiny", speed=0)
    pools = two("no_backend: [small, tiny]") + "  tiny: {backends: [<2>]}\n"
    async with gateway(BIG, SMALL, tiny, pools=pools) as world:
        take_out(world)
        world.sims[1].inject("reset_before_headers")
        reply = await world.chat(model="big", max_tokens=1)
        assert (reply.status_code, reply.json()["error"]["code"]) == (502, "backend_error")
        assert reply.headers["x-gateway-model"] == "small"
        assert world.sims[2].received("/v1/chat/completions") == []
        take_out(world, "small/b1")
        assert (await world.chat(model="big", max_tokens=1)).json()["model"] == "tiny"


@story
async def test_another_pool_streams_by_its_own_settings_and_hides_what_its_tenants_may_not_see():
    big = SimConfig(model="big", speed=0)
    pools = (
        "pools:\n"
        "  big: {fallback: {no_backend: small}, backends: [<0>, <1>]}\n"
        "  small: {prefix_cache: per_tenant, backends: [<2>]}\n"
    )
    small = SimConfig(model="small", speed=0, prompt_tokens_details=True)
    async with gateway(big, big, small, pools=pools) as world:
        for backend in ("big/b1", "big/b2"):
            take_out(world, backend)
        asked = {"model": "big", "stream": True, "max_tokens": 2, "temperature": 0}
        asked["stream_options"] = {"include_usage": True}
        for _ in range(2):  # the second finds its prompt cached
            reply = await world.chat("word " * 200, **asked)
            assert reply.headers["x-gateway-model"] == "small"
        bodies = [json.loads(each.body) for each in world.sims[2].received("/v1/chat/completions")]
        assert all("return_token_ids" not in body for body in bodies)
        usage = json.loads(frames(reply.text)[-2])["usage"]
        assert usage["completion_tokens"] == 2
        assert not (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


@story
async def test_a_stream_that_another_pool_began_is_never_begun_again_by_a_third():
    slow = SimConfig(model="small", decode_step_s=0.02)
    tiny = SimConfig(model="tiny", speed=0)
    pools = (
        "pools:\n"
        "  big: {fallback: {no_backend: [small, tiny]}, backends: [<0>]}\n"
        "  small:\n"
        "    queue: {max_wait: 300ms}\n"
        "    backends: [{url: <1>, max_in_flight: 1}, {url: <2>, max_in_flight: 1}]\n"
        "  tiny: {backends: [<3>]}\n"
    )
    async with gateway(BIG, slow, slow, tiny, pools=pools) as world:
        take_out(world)
        body = {
            "model": "small",
            "messages": [{"role": "user", "content": "go on"}],
            "stream": True,
        }
        async with world.http.stream(
            "POST", "/v1/chat/completions", json={**body, "max_tokens": 4000}
        ) as holding:
            assert holding.status_code == 200
            await world.until(lambda: world.in_flight() == 1)
            free = next(n for n in (1, 2) if not world.process.table.get(f"small/b{n}").in_flight)
            world.sims[free].inject("reset_after:3")
            # The rest finds no room in time: that is the end of the stream, not a cause to begin anew.
            reply = await world.chat(model="big", stream=True, max_tokens=40, temperature=0)
        assert reply.headers["x-gateway-model"] == "small"
        told = [json.loads(each) for each in frames(reply.text) if each != "[DONE]"]
        assert "error" in told[-1], reply.text
        assert {each.get("model") for each in told[:-1]} == {"small"}
        assert world.sims[3].received("/v1/chat/completions") == []


@story
async def test_only_a_pool_that_serves_the_endpoint_answers_in_place_of_another():
    pools = two("no_backend: small").replace("  small:\n", "  small:\n    endpoints: [chat]\n")
    async with gateway(BIG, SMALL, pools=pools) as world:
        take_out(world)
        assert (await world.chat(model="big", max_tokens=1)).status_code == 200
        asked = {"model": "big", "prompt": "hello", "max_tokens": 1}
        reply = await world.http.post("/v1/completions", json=asked)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "model_unavailable")
        assert world.sims[1].received("/v1/completions") == []


# --- limits ---------------------------------------------------------------------------------------


async def limited(world, may_use="*", **limits):
    """Make a key with limits; return its headers."""
    path, limits = world.path.parent / "keys.yaml", KeyLimits(**limits)
    made = keys.create(path, name="ci", models=[may_use], limits=limits)
    assert (await reload(world.process)).done
    return {"authorization": f"Bearer {made.key}"}


@story
async def test_a_prompt_that_goes_elsewhere_for_its_length_is_charged_too():
    short = replace(BIG, max_model_len=64)
    async with gateway(short, SMALL, pools=two("context: small")) as world:
        ci = await limited(world, requests_per_minute=2)
        long = "word " * 200
        replies = [await world.chat(long, model="big", max_tokens=5, headers=ci) for _ in range(3)]
        assert [each.status_code for each in replies] == [200, 200, 429]
        assert replies[2].json()["error"]["code"] == "rate_limit_exceeded"


@story
async def test_a_prompt_that_all_engines_find_too_long_is_one_request_and_takes_no_tokens():
    big, small = replace(BIG, max_model_len=64), replace(SMALL, max_model_len=64)
    pools = two("context: small") + "    fallback: {context: big}\n"
    async with gateway(big, small, pools=pools) as world:
        ci = await limited(world, requests_per_minute=3, tokens_per_day=100_000)
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
        body = {"model": "big", "messages": [{"role": "user", "content": [image]}]}
        for _ in range(3):  # only an engine knows how long an image is
            reply = await world.http.post("/v1/chat/completions", json=body, headers=ci)
            assert reply.json()["error"]["code"] == "context_length_exceeded", reply.text
        reply = await world.http.post("/v1/chat/completions", json=body, headers=ci)
        assert reply.json()["error"]["code"] == "rate_limit_exceeded", reply.text
        assert [len(each.received("/v1/chat/completions")) for each in world.sims] == [3, 3]
        await world.settled()
        told = (await world.http.get("/v1/key", headers=ci)).json()["standing"]
        assert {each["rule"]: each["used"] for each in told}["tokens_per_day"] == 0


@story
async def test_what_two_pools_refuse_is_told_as_of_its_own():
    big, small = replace(BIG, max_model_len=64), replace(SMALL, max_model_len=64)
    pools = two("context: small", "prefix: off")
    pools = pools.replace("<0>,", "<0>, revision: v1,").replace(
        "[<1>]", "[{url: <1>, revision: v2}]"
    )
    async with gateway(big, small, pools=pools, access=True) as world:
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
        body = {"model": "big", "messages": [{"role": "user", "content": [image]}]}
        reply = await world.http.post("/v1/chat/completions", json=body)
        assert reply.json()["error"]["code"] == "context_length_exceeded"
        told = reply.headers
        assert (told["x-gateway-backend"], told["x-gateway-revision"]) == ("big/b1", "v1")
        (line,) = world.access_lines()
        assert (line["pool"], line["backend"], line["revision"]) == ("big", "b1", "v1")
        (sent,), (other,) = (each.received("/v1/chat/completions") for each in world.sims)
        ids = {dict(each.headers)[b"x-request-id"].decode() for each in (sent, other)}
        assert len(ids) == 2
        assert line["engine_request_id"] == dict(sent.headers)[b"x-request-id"].decode()


@pytest.mark.parametrize("refused", ["by its key", "by its limit", "by its backend"])
@story
async def test_a_prompt_that_an_engine_found_too_long_is_a_request_where_no_other_pool_takes_it(
    refused,
):
    """Else a key could send its engines any number of them."""
    big = replace(BIG, max_model_len=64)
    async with gateway(big, SMALL, pools=two("context: small")) as world:
        if refused == "by its backend":
            take_out(world, "small/b1")
        may_use = "big" if refused == "by its key" else "*"
        nothing = ("small", KeyLimits(input_tokens_per_minute=1))
        of_models = (nothing,) if refused == "by its limit" else ()
        ci = await limited(world, may_use, requests_per_minute=2, models=of_models)
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
        body = {"model": "big", "messages": [{"role": "user", "content": [image]}]}
        for _ in range(6):
            reply = await world.http.post("/v1/chat/completions", json=body, headers=ci)
        assert reply.json()["error"]["code"] == "rate_limit_exceeded", reply.text
        assert len(world.sims[0].received("/v1/chat/completions")) == 2


@story
async def test_the_limits_are_those_for_the_model_that_answers():
    one = KeyLimits(requests_per_minute=1)
    async with gateway(BIG, SMALL, pools=two("no_backend: small")) as world:
        ci = await limited(world, requests_per_minute=5, models=(("small", one), ("big", one)))
        take_out(world)
        codes = [
            (await world.chat(model="big", max_tokens=1, headers=ci)).status_code for _ in range(3)
        ]
        assert codes == [200, 429, 429]
        world.process.table.order("big/b1", Order.RESUME)
        reply = await world.chat(model="big", max_tokens=1, headers=ci)
        assert reply.status_code == 200  # nothing was taken for the model that did not answer
        assert "x-gateway-model" not in reply.headers
        assert reply.headers["x-ratelimit-remaining-requests"] == "0"


@story
async def test_what_another_model_answers_costs_what_that_one_costs():
    prices = "prices: {models: {big: {output: 1000}, small: {output: 1}}}"
    async with gateway(BIG, SMALL, pools=two("no_backend: small"), extra=prices) as world:
        assert (await world.chat(model="big", max_tokens=5)).status_code == 200
        take_out(world)
        assert (await world.chat(model="big", max_tokens=5)).status_code == 200
        await world.until(lambda: not world.process.ingress.live)
        world.process.ledger.post()
        await world.process.accounts.turn()
        lines = every_entry(world.process.config.state / "usage")
        assert [(each.model, each.money) for each in lines] == [("big", 0.005), ("small", 5e-6)]


@story
async def test_a_model_that_is_denied_is_so_by_each_of_its_names():
    pools = "pools: {big: {aliases: [gpt-4o], backends: [<0>]}, small: {backends: [<1>]}}"
    async with gateway(BIG, SMALL, pools=pools) as world:
        made = keys.create(world.path.parent / "keys.yaml", name="ci", deny=["big"])
        assert (await reload(world.process)).done
        ci = {"authorization": f"Bearer {made.key}"}
        codes = {
            name: (await world.chat(model=name, max_tokens=1, headers=ci)).status_code
            for name in ("big", "gpt-4o", "small")
        }
        assert codes == {"big": 404, "gpt-4o": 404, "small": 200}
        listed = (await world.http.get("/v1/models", headers=ci)).json()["data"]
        assert [each["id"] for each in listed] == ["small"]


@story
async def test_a_client_that_leaves_as_its_stream_moves_inside_the_other_pool_holds_no_place_there():
    slow = SimConfig(model="small", decode_step_s=0.005)
    pools = """\
pools:
  big: {fallback: {no_backend: small}, backends: [<0>]}
  small: {move_after: 0s, backends: [<1>, <2>]}
"""
    async with gateway(BIG, slow, slow, pools=pools) as world:
        take_out(world)
        asked = {"model": "big", "messages": [{"role": "user", "content": "go on"}]}
        asked |= {"stream": True, "temperature": 0, "max_tokens": 4000}
        async with world.http.stream("POST", "/v1/chat/completions", json=asked) as reply:
            parts = reply.aiter_raw()
            await anext(parts)
            (down,) = world.process.ingress.live
            took, other = sorted(world.process.table.backends("small"), key=lambda b: -b.in_flight)
            world.process.table.order(took.id, Order.DRAIN)
            async with asyncio.timeout(5):
                while not other.in_flight:  # it has a place there, and its story does not know yet
                    await asyncio.sleep(0)
            down.on_client_gone()
        await world.settled()


@story
async def test_a_client_that_leaves_as_it_waits_for_the_other_pool_was_at_none_of_its_backends():
    long = SimConfig(model="small", reply_tokens=4000)
    pools = two("no_backend: small").replace("[<1>]", "[{url: <1>, max_in_flight: 1}]")
    async with gateway(BIG, long, pools=pools, access=True) as world:
        body = {"model": "small", "messages": [{"role": "user", "content": "go"}], "stream": True}
        async with world.http.stream("POST", "/v1/chat/completions", json=body) as holding:
            assert holding.status_code == 200
            await world.sims[0].__aexit__(None, None, None)  # it refuses connections
            leaving = world.chat(model="big", headers={"x-request-id": "left"})
            asked = asyncio.get_running_loop().create_task(leaving)
            await world.until(lambda: world.process.handler.gate.queued("small") == 1)
            asked.cancel()
        await world.settled()
        (line,) = [each for each in world.access_lines() if each["id"] == "left"]
        assert (line["outcome"], line["attempts"]) == ("client_gone", 1)
        assert (line["pool"], line["backend"]) == ("small", None)


@story
async def test_who_fell_back_keeps_no_part_of_its_own_pools_budget_of_retries():
    big = SimConfig(model="big", speed=0)
    small = SimConfig(model="small", decode_step_s=0.03)
    pools = "pools: {big: {fallback: {overload: small}, backends: [<0>, <1>]}, small: {backends: [<2>]}}"
    async with gateway(big, big, small, pools=pools) as world:
        for each in world.sims[:2]:
            each.inject("admission_503")
        sent = [start(world.chat(model="big", max_tokens=100), name="chat") for _ in range(3)]
        backend = world.process.table.get("small/b1")
        await world.until(lambda: backend.in_flight == 3)
        await world.chat(model="big", max_tokens=1)
        assert 'next="over_budget"' not in await world.metrics()
        await asyncio.wait(sent)
