"""Attempts after failures: the engine's own pause, the budget, and what no attempt follows."""

import asyncio
from dataclasses import replace

import pytest

from gateway.core.aio import start
from gateway.sim.server import SimConfig
from tests.abuse.support import front_of, page, scripted
from tests.stories.support import FAST, frames, gateway, story
from tests.stories.test_admission import value

SLOW = SimConfig(model="m", decode_step_s=0.02)
FULL = page(b'{"error": {"message": "busy", "type": "x", "code": 503}}', "503 Service Unavailable")
ANSWER = (
    b'{"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [{"index": 0, '
    b'"message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}], '
    b'"usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}'
)


def retries(world, what):
    return value(world, f'gateway_retries_total{{next="{what}",pool="m"}}')


def full(after):
    return FULL.replace(b"\r\n\r\n", b"\r\nretry-after: %b\r\n\r\n" % after, 1)


@story
async def test_an_engine_that_is_full_is_asked_again_when_it_says_if_that_is_soon():
    replies = [full(b"1"), page(ANSWER)]
    async with scripted(lambda asked: replies.pop(0)) as backend, front_of(backend) as world:
        began = asyncio.get_running_loop().time()
        reply = await world.chat(max_tokens=1)
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-gateway-attempts"] == "2"
        assert asyncio.get_running_loop().time() - began >= 1.0
        assert await retries(world, "again") == 1
        await world.settled()


@story
async def test_a_longer_pause_is_the_client_s_to_make():
    async with scripted(lambda asked: full(b"9")) as backend, front_of(backend) as world:
        reply = await world.chat(max_tokens=1)
        assert reply.status_code == 503
        assert reply.headers["retry-after"] == "9"
        assert len(backend.asked) == 1


@story
async def test_a_client_that_has_given_up_by_then_is_told_at_once():
    async with scripted(lambda asked: full(b"2")) as backend, front_of(backend) as world:
        reply = await world.chat(max_tokens=1, headers={"x-stainless-read-timeout": "1"})
        assert reply.status_code == 503
        assert len(backend.asked) == 1


@story
async def test_no_more_than_a_fifth_of_what_is_under_way_is_tried_again():
    async with gateway(FAST, replace(SLOW, max_num_seqs=64)) as world:
        world.sims[0].inject("admission_503")
        async with asyncio.TaskGroup() as group:
            sent = [group.create_task(world.chat(max_tokens=20)) for _ in range(40)]
        statuses = [each.result().status_code for each in sent]
        assert set(statuses) == {200, 503}
        refused, elsewhere = await retries(world, "over_budget"), await retries(world, "elsewhere")
        assert statuses.count(503) == refused
        assert 0 < elsewhere <= 8
        assert (await world.chat(max_tokens=1)).status_code == 200  # nothing is left of it
        await world.settled()


def all_have_begun(world, count):
    return sum(each.bytes_out > 0 for each in world.process.ingress.live) == count


@story
async def test_a_stream_that_has_begun_leaves_its_place_in_the_budget_to_others():
    async with gateway(FAST, replace(SLOW, max_num_seqs=64)) as world:
        world.sims[0].inject("admission_503")
        async with asyncio.TaskGroup() as group:
            sent = []
            for _ in range(12):
                sent.append(group.create_task(world.chat(max_tokens=150, stream=True)))
                await world.until(lambda: all_have_begun(world, len(sent)))
            assert not any(each.done() for each in sent)
            assert await retries(world, "elsewhere") > 3
        assert {each.result().status_code for each in sent} == {200}


@story
async def test_clients_that_leave_before_another_attempt_leave_their_place_in_the_budget_to_others():
    answers = full(b"2")
    async with scripted(lambda asked: answers) as backend, front_of(backend) as world:
        for left in range(1, 5):
            asked = start(world.chat(max_tokens=1), name="a client that leaves")
            async with asyncio.timeout(5):
                while await retries(world, "again") != left:
                    assert await retries(world, "over_budget") is None
                    await asyncio.sleep(0.01)
            asked.cancel()  # while the gateway pauses
            await world.settled()
        assert len(backend.asked) == 4


@story
async def test_what_was_never_sent_is_tried_elsewhere_whatever_the_budget():
    async with gateway(FAST, replace(SLOW, max_num_seqs=64)) as world:
        world.sims[0].inject("refuse")
        async with asyncio.TaskGroup() as group:
            sent = [group.create_task(world.chat(max_tokens=5)) for _ in range(40)]
        assert {each.result().status_code for each in sent} == {200}
        await world.settled()


async def engine_dies(sim):
    sim.state.die()  # as vLLM does: error frames and 500s for all, /health says 503, then it is gone


async def process_dies(sim):
    await sim.stop()


@pytest.mark.parametrize("resumable", [True, False])
@pytest.mark.parametrize("crash", [engine_dies, process_dies])
@story
async def test_a_stream_that_was_only_kept_alive_is_answered_by_another_server(crash, resumable):
    reads_slowly = replace(FAST, speed=1.0, prefill_tokens_per_s=1.0)  # it comes to no token
    asked = {"stream": True, "max_tokens": 3, "logprobs": not resumable}
    often = "timeouts: {heartbeat: 500ms}"
    async with gateway(reads_slowly, reads_slowly, extra=often, access=True) as world:
        async with asyncio.TaskGroup() as group:
            sent = group.create_task(world.chat("word " * 200, **asked))
            await world.until(lambda: any(each.bytes_out for each in world.process.ingress.live))
            backends = world.process.table.backends("m")
            first = next(n for n, each in enumerate(backends) if each.in_flight)
            other = world.sims[1 - first].engine
            other.config = replace(other.config, prefill_tokens_per_s=130.0)
            await crash(world.sims[first])
        reply = sent.result()
        assert reply.text.startswith(": keep-alive")
        assert frames(reply.text)[-1] == "[DONE]"
        assert '"error"' not in reply.text
        await world.settled()
        (line,) = world.access_lines()
        assert line["outcome"] == "ok"
        assert line["ttft_s"] > 200 / 130  # no comment is a first token


@pytest.mark.parametrize("resumable", [True, False])
@story
async def test_a_server_that_says_comments_only_has_not_answered(resumable):
    """vLLM with `--sse-keep-alive-interval`, and llama.cpp, while they read a prompt."""
    asked = {"stream": True, "max_tokens": 3, "logprobs": not resumable}
    async with gateway(FAST, FAST, access=True) as world:
        for sim in world.sims:
            sim.inject("only_comments@1")
        async with asyncio.TaskGroup() as group:
            sent = group.create_task(world.chat(**asked))
            await world.until(lambda: any(each.bytes_out for each in world.process.ingress.live))
            backends = world.process.table.backends("m")
            first = next(n for n, each in enumerate(backends) if each.in_flight)
            world.sims[1 - first].clear()
            await process_dies(world.sims[first])
        reply = sent.result()
        assert reply.text.startswith(": keep-alive")
        assert frames(reply.text)[-1] == "[DONE]"
        assert '"error"' not in reply.text
        await world.settled()
        (line,) = world.access_lines()
        assert (line["outcome"], line["attempts"], line["resumed"]) == ("ok", 2, 0)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("crash", [engine_dies, process_dies])
@pytest.mark.parametrize("in_order", [False, True])
def test_what_a_crash_finds_unanswered_is_answered_by_another_server(in_order, crash, stream):
    """More than a fifth of what is under way: nothing is done twice, so it is in no budget.

    A vLLM that is stopped ends some replies in order, and breaks off the others.
    """
    reads_slowly = replace(FAST, speed=1.0, prefill_tokens_per_s=400.0)

    @story
    async def check():
        async with gateway(reads_slowly, reads_slowly) as world:
            first, second = world.sims
            if in_order:
                first.inject("abort_finish:0@1")
            while first.state.faults.active:
                assert (await world.chat("x", stream=True, max_tokens=1)).status_code == 200
            second.requests.clear()
            async with asyncio.TaskGroup() as group:
                sent = [
                    group.create_task(
                        world.chat(f"{each} " + "word " * 60, stream=stream, max_tokens=3)
                    )
                    for each in range(10)
                ]
                await world.until(lambda: all(b.in_flight for b in world.process.table))
                await asyncio.sleep(0.05)
                await crash(first)
            assert [each.result().status_code for each in sent] == [200] * 10
            assert not any('"error"' in each.result().text for each in sent)
            assert await retries(world, "elsewhere") > 3
            assert await retries(world, "over_budget") is None
            chats = [each for each in second.requests if each.path.endswith("completions")]
            assert len(chats) == 10
            await world.settled()

    check()


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
@pytest.mark.parametrize("stream", [True, False])
@story
async def test_what_an_engine_that_has_ended_had_is_answered_by_another_server_whatever_its_health(
    stream, version
):
    """vLLM that is stopped says so for seconds before its health page does."""
    async with gateway(*[replace(FAST, version=version)] * 2) as world:
        sim = world.sims[0]
        sim.inject("error_frame_after:0@3")
        while sim.state.faults.active:
            reply = await world.chat(max_tokens=3, stream=stream)
            assert reply.status_code == 200
            assert '"error"' not in reply.text
        assert world.process.table.get("m/b1").health.up
        await world.settled()


@story
async def test_what_another_engine_than_vllm_says_so_is_no_proof_that_it_has_ended():
    backends = "[{url: '<0>', engine: openai}, {url: '<1>', engine: openai}]"
    sims = [replace(FAST, version="0.33.0")] * 2
    async with gateway(*sims, pools=f"pools: {{m: {{backends: {backends}}}}}") as world:
        for sim in world.sims:
            sim.inject("error_frame_after:0@3")
        statuses = [(await world.chat(max_tokens=3)).status_code for _ in range(5)]
        assert 500 <= max(statuses) <= 502
        assert await retries(world, "elsewhere") is None


@story
async def test_what_a_server_that_lives_has_broken_off_is_not_sent_again():
    """It may still work on it."""
    async with gateway(FAST, FAST) as world:
        for sim in world.sims:
            sim.inject("reset_before_headers")
        assert (await world.chat(max_tokens=1)).status_code == 502
        chats = [each for sim in world.sims for each in sim.requests if "completions" in each.path]
        assert len(chats) == 1
