"""A gateway whose backends are full: who waits, who is told to come again, and what it spares them."""

import asyncio
import contextlib
import json
import re
import time

import pytest

from gateway.core.types import Phase
from gateway.process import reload
from gateway.sim.server import SimConfig
from tests.stories.support import FAST, frames, gateway, story

SLOW = SimConfig(model="m", decode_step_s=0.01)


def one_at_a_time(**queue):
    """Return a pool whose only backend takes one request at a time."""
    backends = [{"url": "<0>", "max_in_flight": 1}]
    return "pools: " + json.dumps({"m": {"backends": backends, "queue": queue}})


def chats(sim):
    return sim.received("/v1/chat/completions")


def waiting(world):
    return world.process.handler.gate.queues()["m"][0]


def body(**more):
    return {"model": "m", "messages": [{"role": "user", "content": "x"}], **more}


@contextlib.asynccontextmanager
async def held(world, model="m", max_tokens=8000):
    """Hold the only place by a stream that lasts for seconds or minutes, until its client leaves."""
    long = {**body(stream=True, max_tokens=max_tokens), "model": model}
    async with world.http.stream("POST", "/v1/chat/completions", json=long) as reply:
        assert reply.status_code == 200
        assert world.in_flight() == 1
        yield


async def send(world, **more):
    """Send a chat on a connection of its own; return its writer."""
    text = json.dumps(body(**more))
    _, writer = await asyncio.open_connection("127.0.0.1", world.process.public_port)
    writer.write(
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {world.key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode()
    )
    return writer


async def value(world, sample):
    """Return the value of a sample of the gateway's metrics; None when it is not there."""
    found = re.search(rf"^{re.escape(sample)} (\S+)$", await world.metrics(), re.M)
    return float(found[1]) if found else None


# --- who waits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_waits_for_a_place_and_is_answered(stream):
    @story
    async def check():
        async with gateway(SLOW, pools=one_at_a_time()) as world, asyncio.TaskGroup() as group:
            async with held(world):
                second = group.create_task(world.chat(max_tokens=2, stream=stream))
                await world.until(lambda: waiting(world) == 1)
                began = time.monotonic()
                assert await value(world, 'gateway_queue_requests{pool="m"}') == 1
                assert await value(world, 'gateway_queue_tokens{pool="m"}') > 2
                assert len(chats(world.sims[0])) == 1
                waited_s = time.monotonic() - began
            reply = await second
            assert reply.status_code == 200
            if stream:
                assert frames(reply.text)[-1] == "[DONE]"
            queued = re.match(r"queue;dur=([\d.]+),", reply.headers["server-timing"])
            assert float(queued[1]) >= waited_s * 1000 - 1
            await world.settled()
            assert await value(world, 'gateway_queue_requests{pool="m"}') == 0
            assert await value(world, 'gateway_queue_wait_seconds_count{pool="m"}') == 1
            assert await value(world, 'gateway_queue_wait_seconds_sum{pool="m"}') >= waited_s

    check()


@story
async def test_a_crowd_at_a_single_place_is_served_one_by_one_and_none_is_lost():
    async with gateway(SLOW, pools=one_at_a_time()) as world:
        most = 0
        async with asyncio.TaskGroup() as group:
            replies = [group.create_task(world.chat(f"{n}", max_tokens=2)) for n in range(20)]
            while not all(each.done() for each in replies):
                most = max(most, world.sims[0].engine.running + world.sims[0].engine.waiting)
                await asyncio.sleep(0.001)
        assert {each.result().status_code for each in replies} == {200}
        assert most == 1
        await world.settled()
        assert waiting(world) == 0


@story
async def test_tokens_are_counted_at_once_while_all_that_generates_waits():
    asks = {
        "/tokenize": {"prompt": "a b"},
        "/detokenize": {"tokens": [5]},
        "/v1/messages/count_tokens": body(),
    }
    async with gateway(SLOW, pools=one_at_a_time()) as world, asyncio.TaskGroup() as group:
        async with held(world):
            group.create_task(world.chat(max_tokens=1))
            await world.until(lambda: waiting(world) == 1)
            for path, asked in asks.items():
                reply = await world.http.post(path, json={"model": "m", **asked})
                assert reply.status_code == 200
                assert reply.headers["x-gateway-backend"] == "m/b1"
            assert (world.in_flight(), waiting(world)) == (1, 1)


@story
async def test_a_client_that_leaves_while_it_waits_is_forgotten_and_never_reaches_a_backend():
    async with gateway(SLOW, pools=one_at_a_time()) as world:
        async with held(world):
            writer = await send(world)
            await world.until(lambda: waiting(world) == 1)
            writer.close()
            await world.at_once(lambda: waiting(world) == 0, looks=10)
        await world.settled()
        assert len(chats(world.sims[0])) == 1
        gone = 'gateway_client_disconnects_total{pool="m",stage="before_send"}'
        assert await value(world, gone) == 1
        assert (await world.chat(max_tokens=1)).status_code == 200


@story
async def test_a_lower_bound_on_the_queue_loses_none_of_those_who_wait():
    async with gateway(SLOW, pools=one_at_a_time(max_requests=50)) as world:
        async with asyncio.TaskGroup() as group:
            async with held(world):
                waits = [group.create_task(world.chat(max_tokens=1)) for _ in range(10)]
                await world.until(lambda: waiting(world) == 10)
                text = world.path.read_text()
                assert '"max_requests": 50' in text
                world.path.write_text(text.replace('"max_requests": 50', '"max_requests": 2'))
                assert (await reload(world.process)).done
                assert waiting(world) == 10
                refused = await world.chat(max_tokens=1)
                assert refused.headers["x-gateway-shed-reason"] == "queue_full"
        assert {each.result().status_code for each in waits} == {200}
        await world.settled()


@story
async def test_however_many_wait_for_an_adapter_the_base_model_answers_beside_them():
    lora = SimConfig(model="m", decode_step_s=0.01, adapters=("sql",))
    backends = [{"url": "<0>", "max_in_flight": 1}, {"url": "<1>", "max_in_flight": 1}]
    pools = "pools: " + json.dumps({"m": {"backends": backends}})
    async with gateway(lora, SLOW, pools=pools) as world, asyncio.TaskGroup() as group:
        async with held(world, "sql"):
            waits = [group.create_task(world.chat(model="sql", max_tokens=1)) for _ in range(60)]
            await world.until(lambda: waiting(world) == 60)
            for _ in range(3):
                assert (await world.chat(max_tokens=1)).status_code == 200
            assert waiting(world) == 60
            assert len(chats(world.sims[1])) == 3
        for each in waits:
            assert (await each).status_code == 200
        await world.settled()


@story
async def test_who_waits_is_served_by_the_backend_to_which_a_reload_gives_another_name():
    async with gateway(SLOW, pools=one_at_a_time()) as world, asyncio.TaskGroup() as group:
        async with held(world):
            second = group.create_task(world.chat(max_tokens=1))
            await world.until(lambda: waiting(world) == 1)
            text = world.path.read_text()
            world.path.write_text(text.replace('{"url"', '{"name": "other", "url"'))
            assert (await reload(world.process)).done
            third = group.create_task(world.chat(max_tokens=1))
            assert [(await each).status_code for each in (second, third)] == [200, 200]
        await world.settled()


@story
async def test_who_waits_when_the_gateway_stops_is_told_so():
    async with gateway(SLOW, pools=one_at_a_time()) as world, asyncio.TaskGroup() as group:
        async with held(world):
            second = group.create_task(world.chat(max_tokens=1))
            await world.until(lambda: waiting(world) == 1)
            world.process.stopping.set()
            reply = await second
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "shutting_down"
        assert len(chats(world.sims[0])) == 1


@story
async def test_who_waits_is_told_at_once_when_the_last_backend_is_gone():
    async with gateway(SLOW, pools=one_at_a_time()) as world, asyncio.TaskGroup() as group:
        async with held(world):
            second = group.create_task(world.chat(max_tokens=1))
            await world.until(lambda: waiting(world) == 1)
            world.sims[0].inject("health_500")
            await world.until(lambda: world.process.table.backends("m")[0].phase is Phase.DOWN)
            assert waiting(world) == 0
            reply = await second
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "model_unavailable"
        assert reply.headers["x-gateway-shed-reason"] == "no_backend"


# --- who is told to come again --------------------------------------------------------------------


def assert_shed(reply, reason, status=503):
    """Check that a reply is a refusal that says why, and when to come again."""
    assert reply.status_code == status
    assert reply.headers["x-gateway-shed-reason"] == reason
    assert 1 <= int(reply.headers["retry-after"]) <= 30
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "127.0.0.1" not in reply.text
    return error


@story
async def test_a_wait_ends_with_503_at_the_pools_longest():
    async with gateway(SLOW, pools=one_at_a_time(max_wait="300ms")) as world:
        async with held(world):
            began = time.monotonic()
            error = assert_shed(await world.chat(max_tokens=1), "queue_timeout")
            assert 0.3 <= time.monotonic() - began < 5
            assert error["code"] == "server_is_overloaded"
            assert "at its concurrency limit" in error["message"]
        await world.settled()
        assert len(chats(world.sims[0])) == 1
        assert await value(world, 'gateway_shed_total{pool="m",reason="queue_timeout"}') == 1


@story
async def test_a_client_that_says_how_long_it_waits_is_told_before_it_gives_up():
    async with gateway(SLOW, pools=one_at_a_time(max_wait="20s")) as world, held(world):
        reply = await world.chat(max_tokens=1, headers={"x-stainless-read-timeout": "2"})
        assert_shed(reply, "queue_timeout")
        decision = f"{world.admin_url}/admin/v1/decisions/{reply.headers['x-request-id']}"
        may_wait_s = (await world.http.get(decision)).json()["may_wait_s"]
        assert 1.5 < may_wait_s <= 1.75  # a quarter of a second is left for the answer to reach it
        waited_s = await value(world, 'gateway_queue_wait_seconds_sum{pool="m"}')
        assert waited_s >= may_wait_s - 0.01


@story
async def test_the_time_in_which_a_client_sends_is_not_taken_from_its_patience():
    async with gateway(SLOW, pools=one_at_a_time()) as world, held(world):
        text = json.dumps(body(max_tokens=1)).encode()

        async def slowly():
            await asyncio.sleep(0.5)  # as long as it is ready to wait afterwards
            yield text

        sent = {"content-type": "application/json", "content-length": str(len(text))}
        reply = await world.http.post(
            "/v1/chat/completions",
            content=slowly(),
            headers={**sent, "x-stainless-read-timeout": "0.5"},
        )
        assert_shed(reply, "queue_timeout")


@story
async def test_a_client_is_asked_to_come_again_once_and_not_again():
    async with gateway(SLOW, pools=one_at_a_time(max_requests=0)) as world, held(world):
        first = await world.chat(max_tokens=1, headers={"x-stainless-retry-count": "0"})
        assert_shed(first, "no_room")
        assert "x-should-retry" not in first.headers
        again = await world.chat(max_tokens=1, headers={"x-stainless-retry-count": "1"})
        assert_shed(again, "no_room")
        assert again.headers["x-should-retry"] == "false"


def test_a_refusal_at_once_is_no_wait():
    @story
    async def check():
        async with gateway(SLOW, pools=one_at_a_time(max_requests=0)) as world, held(world):
            assert_shed(await world.chat(max_tokens=1), "no_room")
            assert await value(world, 'gateway_shed_total{pool="m",reason="no_room"}') == 1
            assert await value(world, 'gateway_queue_wait_seconds_count{pool="m"}') is None

    check()


@story
async def test_one_tenant_cannot_fill_the_queue():
    pools = one_at_a_time(max_requests=4, tenant_share=0.5)
    async with gateway(SLOW, pools=pools) as world, asyncio.TaskGroup() as group:
        async with held(world):
            waits = [group.create_task(world.chat(max_tokens=1)) for _ in range(2)]
            await world.until(lambda: waiting(world) == 2)
            error = assert_shed(await world.chat(max_tokens=1), "tenant_queue_full", 429)
            assert (error["type"], error["code"]) == ("rate_limit_error", "too_many_waiting")
            assert waiting(world) == 2
        assert {(await each).status_code for each in waits} == {200}


@story
async def test_without_keys_there_are_no_shares_and_all_of_the_queue_is_used():
    pools = one_at_a_time(max_requests=4)
    async with gateway(SLOW, pools=pools) as world, asyncio.TaskGroup() as group:
        text = world.path.read_text()
        world.path.write_text(text.replace("keys: {file: keys.yaml}", "keys: none"))
        assert (await reload(world.process)).done
        async with held(world):
            waits = [group.create_task(world.chat(max_tokens=1)) for _ in range(4)]
            await world.until(lambda: waiting(world) == 4)
            assert_shed(await world.chat(max_tokens=1), "queue_full")
        assert {(await each).status_code for each in waits} == {200}


@story
async def test_a_request_larger_than_a_share_of_the_queue_is_told_what_it_counts():
    async with gateway(SLOW, pools=one_at_a_time(max_tokens=400)) as world, held(world):
        reply = await world.chat(max_tokens=1500, headers={"x-request-id": "large"})
        error = assert_shed(reply, "tenant_queue_full", 429)
        kept = world.process.handler.gate.decisions.get("large")
        assert "share of the queue is limited to 200 tokens" in error["message"]
        assert f"this request needs {kept.need.tokens} tokens" in error["message"]
        assert kept.need.tokens > 200


@story
async def test_a_request_that_only_an_estimate_makes_larger_than_the_kv_cache_is_served():
    small = SimConfig(model="m", speed=0, num_blocks=64, block_size=16, max_model_len=1024)
    async with gateway(small) as world:
        backend = world.process.table.backends("m")[0]
        await world.until(lambda: backend.room.capacity_tokens == 1024)
        reply = await world.chat("word " * 100, n=20, max_tokens=100)
        assert reply.status_code == 200
        assert len(reply.json()["choices"]) == 20


@story
async def test_a_batch_larger_than_the_kv_cache_is_told_by_all_of_its_prompts_and_served_whole():
    small = SimConfig("m", decode_step_s=0.01, num_blocks=64, block_size=16, max_model_len=1024)
    one = one_at_a_time()
    async with gateway(small, pools=one) as world, asyncio.TaskGroup() as group:
        backend = world.process.table.backends("m")[0]
        await world.until(lambda: backend.room.capacity_tokens == 1024)
        prompts = ["word " * 60] * 20
        batch = {"model": "m", "prompt": prompts, "max_tokens": 20}
        async with held(world, max_tokens=900):
            reply = group.create_task(world.http.post("/v1/completions", json=batch))
            await world.until(lambda: waiting(world) == 1)
            (decision,) = world.process.handler.gate.decisions
            assert decision.need.prompt_tokens >= len(prompts) * 60
            assert decision.need.output_tokens == len(prompts) * 20
            assert decision.need.tokens > 1024
        assert (await reply).status_code == 200
        assert len(reply.result().json()["choices"]) == len(prompts)


# --- the engine's own admission control -----------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_is_full_is_not_sick_and_another_answers(stream):
    @story
    async def check():
        async with gateway(FAST, FAST) as world:
            world.sims[0].inject("admission_503")
            first = world.process.table.backends("m")[0]
            for _ in range(20):
                reply = await world.chat(max_tokens=1, stream=stream)
                assert reply.status_code == 200, reply.text
                assert first.health.traffic_failures == 0
            assert len(chats(world.sims[0])) > 0
            assert len(chats(world.sims[1])) == 20
            assert first.phase is Phase.READY
            metrics = await world.metrics()
            assert "gateway_upstream_failures_total{" not in metrics
            assert "gateway_shed_total{" not in metrics
            cuts = 'gateway_backend_limit_cuts_total{backend="b1",pool="m",sign="refused"}'
            async with asyncio.timeout(5):
                while not await value(world, cuts):
                    await asyncio.sleep(0.05)

    check()


@pytest.mark.parametrize("stream", [False, True])
def test_when_every_engine_is_full_the_client_is_told_after_each_was_asked_once(stream):
    @story
    async def check():
        async with gateway(FAST, FAST) as world:
            for sim in world.sims:
                sim.inject("admission_503")
            reply = await world.chat(max_tokens=1, stream=stream)
            assert reply.status_code == 503
            assert reply.json()["error"]["code"] == "server_is_overloaded"
            assert 1 <= int(reply.headers["retry-after"]) <= 30
            assert [len(chats(sim)) for sim in world.sims] == [1, 1]
            await world.settled()
            assert await value(world, 'gateway_shed_total{pool="m",reason="engine"}') == 1
            assert all(
                each.health.traffic_failures == 0 for each in world.process.table.backends("m")
            )

    check()


def test_a_refusal_of_every_engine_says_that_it_is_the_engines():
    @story
    async def check():
        async with gateway(FAST) as world:
            world.sims[0].inject("admission_503")
            retried = {"x-stainless-retry-count": "1"}
            reply = await world.chat(max_tokens=1, headers=retried)
            assert_shed(reply, "engine")
            assert reply.headers["x-should-retry"] == "false"

    check()


# --- what it spares the engine --------------------------------------------------------------------


async def crowd(admission):
    """Send 24 prompts to a KV cache that holds ten; return the statuses and the preemptions."""
    tiny = SimConfig(
        model="m", num_blocks=256, block_size=16, max_model_len=1024, decode_step_s=0.005
    )
    async with gateway(tiny, pool={"admission": admission}) as world:
        backend = world.process.table.backends("m")[0]
        await world.until(lambda: backend.room.capacity_tokens == 4096)
        async with asyncio.TaskGroup() as group:
            replies = [
                group.create_task(world.chat(f"{n:03} " * 390, max_tokens=40, stream=True))
                for n in range(24)
            ]
        await world.settled()
        assert all(frames(each.result().text)[-1] == "[DONE]" for each in replies)
        return [each.result().status_code for each in replies], (
            world.sims[0].engine.totals.preemptions
        )


@story
async def test_a_crowd_that_does_not_fit_the_kv_cache_waits_and_nothing_is_preempted():
    assert await crowd("on") == ([200] * 24, 0)


@story
async def test_the_same_crowd_is_preempted_with_admission_off():
    statuses, preemptions = await crowd("off")
    assert statuses == [200] * 24
    assert preemptions > 0
