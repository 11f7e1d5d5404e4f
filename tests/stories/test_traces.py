"""Requests as traces, in a collector that reads what OpenTelemetry's library sends."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from dataclasses import replace

import pytest

from gateway.sim.server import SimConfig
from tests.otlpreceiver import receiver
from tests.stories.support import FAST, gateway, story
from tests.stories.test_explain import LONG, admin, held, waiting
from tests.stories.test_fallback import BIG, SMALL, two

SECRET_WORD = "xylophone"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def settings(collector, **more):
    return "traces: " + str({"endpoint": collector.url, **more}).replace("True", "true")


def told_to(sim):
    """Return the trace, span and flags that each request to a simulated backend named."""
    named = [
        each.header("traceparent") for each in sim.requests if each.path.startswith("/v1/chat")
    ]
    return [tuple(each.split("-")[1:]) for each in named]


async def sent(world, collector, requests=1):
    """Have all spans so far sent, those of so many requests; the gateway may be sending some by itself."""
    await posted(world)
    await world.until(lambda: sum(each.kind == "server" for each in collector.spans) == requests)


async def posted(world):
    """Have all spans so far sent, but for those that are on their way."""
    world.process.ledger.post()
    await world.process.handler.tracing.traces._turn()


@story
async def test_a_request_is_a_trace_that_the_backends_spans_belong_to():
    with receiver() as collector:
        headers = {"authorization": "Bearer of-the-collector"}
        async with gateway(FAST, extra=settings(collector, headers=headers)) as world:
            reply = await world.chat(SECRET_WORD, max_tokens=3, headers={"x-request-id": "traced"})
            await sent(world, collector)
            ((trace_id, span_id, flags),) = told_to(world.sims[0])
        request, attempt = collector.spans
        assert (request.name, request.kind, request.parent_id) == ("chat m", "server", "")
        assert (attempt.name, attempt.kind, attempt.parent_id) == (
            "chat m",
            "client",
            request.span_id,
        )
        assert (trace_id, span_id, flags) == (request.trace_id, attempt.span_id, "01")
        assert attempt.trace_id == request.trace_id
        assert request.began_ns <= attempt.began_ns <= attempt.ended_ns <= request.ended_ns
        usage, told = reply.json()["usage"], request.attributes
        assert told["gen_ai.operation.name"] == "chat"
        assert told["gen_ai.request.model"] == "m"
        assert told["gen_ai.request.max_tokens"] == 3
        assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
        assert told["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
        assert told["http.response.status_code"] == 200
        assert (told["vllm_gateway.request_id"], told["vllm_gateway.outcome"]) == ("traced", "ok")
        assert attempt.attributes["vllm_gateway.backend"] == "m/b1"
        assert request.service == "vllm-gateway"
        assert not request.failed
        raw = b"".join(collector.raw)
        for hidden in (SECRET_WORD, world.key, world.sims[0].url, "127.0.0.1"):
            assert hidden.encode() not in raw
        assert collector.headers[0]["authorization"] == "Bearer of-the-collector"


@story
async def test_a_client_that_is_not_trusted_gets_a_link():
    with receiver() as collector:
        async with gateway(FAST, extra=settings(collector)) as world:
            await world.chat(headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
            await sent(world, collector)
            ((trace_id, _, flags),) = told_to(world.sims[0])
        assert flags == "01"
        assert trace_id != TRACE
        request = collector.spans[0]
        assert (request.parent_id, request.links) == ("", [(TRACE, PARENT)])


@story
async def test_a_client_that_is_trusted_names_the_trace_and_decides_whether_it_is_recorded():
    with receiver() as collector:
        async with gateway(FAST, extra=settings(collector, trust_clients=True, sample=0)) as world:
            for flags in ("01", "00"):
                parent = {"traceparent": f"00-{TRACE}-{PARENT}-{flags}", "tracestate": "a=b"}
                await world.chat(headers=parent)
            await world.chat()  # begins its own, of which none is recorded
            await sent(world, collector)
            recorded, unrecorded, own = told_to(world.sims[0])
            states = [each.header("tracestate") for each in world.sims[0].requests if each.body]
        request, attempt = collector.spans
        assert (request.trace_id, request.parent_id) == (TRACE, PARENT)
        assert recorded == (TRACE, attempt.span_id, "01")
        assert (unrecorded[0], unrecorded[2]) == (TRACE, "00")
        assert own[0] != TRACE
        assert own[2] == "00"
        assert [each for each in states if each] == ["a=b", "a=b"]


@story
async def test_a_wait_in_the_queue_is_a_span_and_a_refusal_is_an_error():
    pools = "pools: {m: {backends: [{url: <0>, max_in_flight: 1}], queue: {max_requests: 1}}}"
    with receiver() as collector:
        async with gateway(LONG, pools=pools, extra=settings(collector)) as world:
            async with held(world), waiting(world, "first"):
                assert (await world.chat()).status_code == 503
                await asyncio.sleep(0.01)  # a wait of less than a millisecond is none
            await world.settled()
            await sent(world, collector, 3)
        refused = next(each for each in collector.spans if each.attributes.get("error.type"))
        assert refused.failed
        assert refused.attributes["vllm_gateway.shed_reason"] == "queue_full"
        queue = collector.named("queue")
        waited = next(
            each
            for each in collector.spans
            if each.attributes.get("vllm_gateway.request_id") == "first"
        )
        assert (queue.kind, queue.parent_id) == ("internal", waited.span_id)
        assert waited.began_ns <= queue.began_ns < queue.ended_ns <= waited.ended_ns


@story
async def test_a_wait_that_follows_a_failed_attempt_is_a_span_behind_it():
    place = "{url: <%d>, max_in_flight: 1}"
    pools = f"pools: {{m: {{backends: [{place % 0}, {place % 1}]}}}}"
    with receiver() as collector:
        async with gateway(LONG, LONG, pools=pools, extra=settings(collector)) as world:
            async with contextlib.AsyncExitStack() as stack:
                async with held(world):
                    backends = world.process.table.backends("m")
                    (free,) = [place for place in (0, 1) if not backends[place].in_flight]
                    world.sims[free].inject("refuse")
                    asked = await stack.enter_async_context(waiting(world, "second"))
                    await asyncio.sleep(0.01)  # a wait of less than a millisecond is none
                assert (await asked).headers["x-gateway-attempts"] == "2"
            await world.settled()
            await sent(world, collector, 2)
        queue = collector.named("queue")
        request = next(each for each in collector.spans if each.span_id == queue.parent_id)
        first, second = (
            each
            for each in collector.spans
            if (each.kind, each.parent_id) == ("client", request.span_id)
        )
        times = [first.began_ns, first.ended_ns, queue.began_ns, queue.ended_ns, second.began_ns]
        assert [request.began_ns, *times, request.ended_ns] == sorted(
            [request.began_ns, *times, request.ended_ns]
        )


@pytest.mark.parametrize("window", [64, 4096])
@story
async def test_an_engine_that_refuses_what_another_pool_is_asked_for_has_its_span(window):
    """Else the engine's own spans would hang below one that nobody has."""
    pools = two("context: small")
    small = replace(SMALL, max_model_len=window)
    with receiver() as collector:
        async with gateway(
            replace(BIG, max_model_len=64), small, pools=pools, extra=settings(collector)
        ) as world:
            image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
            body = {"model": "big", "messages": [{"role": "user", "content": [image]}]}
            headers = {"x-request-id": "seen"}
            reply = await world.http.post("/v1/chat/completions", json=body, headers=headers)
            assert (reply.status_code == 200) == (window > 64)
            await sent(world, collector)
            named = [told_to(each)[0][1] for each in world.sims]
            async with admin(world) as http:
                tried = (await http.get("requests/seen")).json()["tried"]
        attempts = [each for each in collector.spans if each.kind == "client"]
        assert [each.span_id for each in attempts] == named
        backends = [each.attributes["vllm_gateway.backend"] for each in attempts]
        assert backends == [each["backend"] for each in tried] == ["big/b1", "small/b1"]
        assert attempts[0].attributes["error.type"] == tried[0]["outcome"] == "refused"


@story
async def test_a_stream_that_goes_on_elsewhere_has_an_attempt_that_failed_and_one_that_resumes():
    sim = SimConfig(model="m", speed=0, reply_tokens=40)
    with receiver() as collector:
        async with gateway(sim, sim, extra=settings(collector)) as world:
            for each in world.sims:
                each.inject("truncate_after:5")
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
            await world.http.post("/v1/chat/completions", json=body)
            await sent(world, collector)
        request = collector.spans[0]
        attempts = [each for each in collector.spans if each.kind == "client"]
        first, second = attempts[:2]
        assert (first.name, first.failed, first.attributes["error.type"]) == (
            "chat m",
            True,
            "stream",
        )
        assert second.name == "resume m"
        assert request.attributes["vllm_gateway.resumed"] >= 1
        token = collector.named("first_token")
        assert (token.parent_id, token.began_ns) == (first.span_id, first.began_ns)


@story
async def test_a_collector_that_fails_costs_no_request_and_is_told_once():
    with receiver() as collector:
        collector.status = 400  # not tried again
        async with gateway(FAST, extra=settings(collector), access=True) as world:
            traces = world.process.handler.tracing.traces
            for number in range(1, 4):
                assert (await world.chat()).status_code == 200
                await posted(world)
                await world.until(lambda n=number: traces.lost == n)
            assert world.process.outlet.flush()
        assert collector.spans == []


@story
async def test_what_is_left_is_sent_when_the_gateway_ends():
    with receiver() as collector:
        async with gateway(FAST, extra=settings(collector)) as world:
            await world.chat()
        assert [each.kind for each in collector.spans] == ["server", "client"]


@pytest.mark.parametrize("module", ["gateway.app", "gateway.cli.main", "gateway.running"])
def test_nothing_of_the_library_is_imported_without_traces(module):
    code = f"import sys, {module}; assert not [m for m in sys.modules if 'opentelemetry' in m]"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
