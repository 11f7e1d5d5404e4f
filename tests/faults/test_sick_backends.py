"""Backends that serve badly, or tell odd things of themselves: used less or not at all, and never for long on weak evidence."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import replace

import pytest

from gateway.core.types import Phase
from gateway.sim.server import SimServer
from tests.abuse.support import front_of, ledger, page, scripted
from tests.abuse.test_backends import reply, says, text_of
from tests.faults.ledgers import End
from tests.faults.toxic import Toxic
from tests.faults.world import FAST, SIM, recorded
from tests.stories.stubs import free_url
from tests.stories.support import gateway, story

METRICS = """vllm:num_requests_running{{engine="0",model_name="m"}} {running}
vllm:num_requests_waiting{{engine="0",model_name="m"}} {waiting}
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {kv}
vllm:generation_tokens_total{{engine="0",model_name="m"}} {tokens}
vllm:prompt_tokens_total{{engine="0",model_name="m"}} {tokens}
"""


def metrics(*, running=0, waiting=0, kv=0.0, tokens=1):
    text = METRICS.format(running=running, waiting=waiting, kv=kv, tokens=tokens).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n%b" % (
        len(text),
        text,
    )


def answered(asked):
    return reply("200 OK", "application/json", says(text_of(asked)))


# --- a process that stands still ----------------------------------------------------------------------


@contextlib.asynccontextmanager
async def process_of_its_own():
    """A simulated server in another process."""
    url = free_url()
    port = url.rpartition(":")[2]
    program = "from gateway.cli.main import main; main()"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, "sim", "--model", "m", "--port", port,
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield url, process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.kill()
        await process.wait()


def test_a_process_that_is_stopped_gets_nothing_new_and_serves_again_when_it_goes_on(measured):
    async def check():
        async with process_of_its_own() as (url, process), SimServer(SIM) as sim:
            pools = "pools: " + json.dumps({"m": {"backends": [url, sim.url]}})
            health = "timeout: 400ms, progress: 1s"
            extra = "timeouts: {stall: 2s, first_byte: 2s}"
            async with gateway(FAST, pools=pools, wait=False, health=health, extra=extra) as world:
                await world.until(lambda: len(world.process.table.backends("m")) == 2)
                backend = world.process.table.get("m/b1")
                await world.until(lambda: backend.phase is Phase.READY, 30)
                await world.until(lambda: world.process.table.get("m/b2").phase is Phase.READY)
                async with asyncio.TaskGroup() as group:
                    streams = [
                        group.create_task(world.chat(f"s{n}", max_tokens=200, stream=True))
                        for n in range(6)
                    ]
                    await world.until(lambda: backend.in_flight > 0)
                    await asyncio.sleep(0.3)
                    os.kill(process.pid, signal.SIGSTOP)
                    begun = time.monotonic()
                    await world.until(lambda: backend.phase is not Phase.READY, 20)
                    out_s = time.monotonic() - begun
                    for _ in range(10):
                        got = await world.chat(max_tokens=1)
                        assert got.headers["x-gateway-backend"] == "m/b2"
                assert all(each.result().text.endswith("data: [DONE]\n\n") for each in streams)
                os.kill(process.pid, signal.SIGCONT)
                await world.until(lambda: backend.phase is Phase.READY, 20)
                measured(f"no new requests after {out_s:.1f} s; in rotation again when it went on")
                await world.settled()

    story(check, seconds=58)()


# --- what it tells of itself ----------------------------------------------------------------------------

ODD_METRICS = {
    "silence": None,
    "an error": b"HTTP/1.1 500 Oops\r\ncontent-length: 0\r\n\r\n",
    "no page": b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
    "20 MiB": page(b"x" * (20 << 20)),
    "garbage": page(b"\x00<html>}{ vllm:num_requests_running{ NaN\n"),
    "not a number": metrics(running="NaN", waiting="NaN", kv="NaN"),
    "infinity": metrics(running="+Inf", waiting="-Inf", kv="+Inf"),
    "families are missing": page(b"vllm:num_requests_running 1\n"),
    "families have other names": page(b"vllm:requests_now_running 1\nvllm:kv_used 0.2\n"),
    "a line of 8 MiB": page(b'vllm:num_requests_running{a="%b"} 1\n' % (b"y" * (8 << 20))),
}


@pytest.mark.parametrize("what", ODD_METRICS)
def test_a_backend_with_odd_metrics_serves_all_the_same(what, measured):
    @story
    async def check():
        pages = {"/metrics": ODD_METRICS[what]}
        async with scripted(answered, pages) as one, scripted(answered) as other:
            async with front_of(one, other) as world:
                async with ledger(world, most_mib=64) as book:
                    for _ in range(5):  # through a few scrapes
                        async with asyncio.TaskGroup() as group:
                            asked = [group.create_task(world.chat()) for _ in range(8)]
                        assert {each.result().status_code for each in asked} == {200}
                        await asyncio.sleep(0.1)
                    assert one.asked
                    assert other.asked
                    phases = {each.phase for each in world.process.table.backends("m")}
                    assert phases == {Phase.READY}
                    await world.http.aclose()
                measured(f"{what}: the loop stood still for {1000 * book.lag_s:.0f} ms at most")

    check()


@story
async def test_a_backend_whose_kv_cache_is_full_gets_no_new_work():
    pages = {"/metrics": metrics(running=5, waiting=3, kv=1.0)}
    idle = {"/metrics": metrics()}
    async with scripted(answered, pages) as full, scripted(answered, idle) as other:
        async with front_of(full, other) as world:
            backend = world.process.table.get("m/b1")
            await world.until(lambda: backend.sample is not None)
            for _ in range(20):
                assert (await world.chat()).status_code == 200
            assert (len(full.asked), len(other.asked)) == (0, 20)
            pages["/metrics"] = metrics()
            await world.until(lambda: backend.sample.kv_usage_ratio == 0)
            async with asyncio.TaskGroup() as group:
                for _ in range(20):
                    group.create_task(world.chat())
            assert full.asked


@story
async def test_a_health_page_that_fails_takes_a_backend_out_while_others_serve():
    async with recorded(FAST, FAST) as run:
        run.world.sims[0].inject("health_500")
        backend = run.world.process.table.get("m/b1")
        await run.world.until(lambda: backend.phase is Phase.DOWN)
        assert all(line.end is End.COMPLETE for line in await run.ask_many(10))
        assert not run.world.sims[0].received("/v1/chat/completions")
        run.world.sims[0].clear()
        await run.world.until(lambda: backend.phase is Phase.READY)
        await run.reconciled()


SCALING = json.dumps({"error": "The model is currently scaling. Please try again later."}).encode()


@story
async def test_an_engine_that_scales_is_not_sick_and_another_answers():
    def scaling(asked):
        return reply("503 Service Unavailable", "application/json", SCALING)

    async with scripted(scaling) as one, scripted(answered) as other:
        async with front_of(one, other) as world:
            assert {(await world.chat()).status_code for _ in range(20)} == {200}
            assert one.asked
            phases = [each.phase for each in world.process.table.backends("m")]
            assert phases == [Phase.READY, Phase.READY]


@story
async def test_a_429_of_a_backend_is_told_and_not_held_against_it():
    async with recorded(FAST, FAST) as run:
        for sim in run.world.sims:
            sim.inject("http_500:429")
        lines = [await run.ask() for _ in range(20)]
        assert {(line.end, line.status) for line in lines} == {(End.REFUSED, 429)}
        assert all(line.retry_after for line in lines)
        backends = run.world.process.table.backends("m")
        assert {each.phase for each in backends} == {Phase.READY}
        await run.reconciled()


@story
async def test_a_window_that_shrinks_under_way_is_followed():
    async with recorded(FAST) as run:
        sim, long = run.world.sims[0], "word " * 500
        assert (await run.world.chat(long, max_tokens=1)).status_code == 200
        sim.state.config = replace(sim.state.config, max_model_len=64)
        known = run.world.process.table.get("m/b1")
        await run.world.until(lambda: known.window_tokens == 64, 10)
        asked = len(sim.received("/v1/chat/completions"))
        refused = await run.world.chat(long, max_tokens=1)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert len(sim.received("/v1/chat/completions")) == asked
        assert (await run.world.chat(max_tokens=1)).status_code == 200


@pytest.mark.parametrize("skew_s", [3600, -3600])
def test_a_backends_wrong_clock_changes_nothing(skew_s):
    def late(asked):
        told = json.loads(says(text_of(asked))) | {"created": int(time.time()) + skew_s}
        date = time.strftime("date: %a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + skew_s))
        return reply("200 OK", "application/json", json.dumps(told).encode(), date)

    @story
    async def check():
        started = b"process_start_time_seconds %f\n" % (time.time() + skew_s)
        pages = {"/metrics": metrics().replace(b"\r\n\r\n", b"\r\n\r\n", 1)}
        pages["/metrics"] = page(pages["/metrics"].partition(b"\r\n\r\n")[2] + started)
        async with scripted(late, pages) as backend, front_of(backend) as world:
            for _ in range(10):
                assert (await world.chat()).status_code == 200
            known = world.process.table.get("m/b1")
            assert known.phase is Phase.READY
            assert not known.stale(world.process.clock.now())

    check()


# --- slow ---------------------------------------------------------------------------------------------


def test_a_backend_behind_a_slow_line_loses_share_and_is_not_ejected(measured):
    async def check():
        async with recorded(SIM, SIM, toxics=[Toxic()], health="timeout: 3s") as run:
            run.proxies[0].down = Toxic(latency_s=0.2, jitter_s=0.2)

            async def client(number):
                for turn in range(6):
                    await run.ask(stream=bool(turn % 2), tokens=20)

            async with asyncio.TaskGroup() as group:
                for number in range(12):
                    group.create_task(client(number))
            backends = run.world.process.table.backends("m")
            assert {each.phase for each in backends} == {Phase.READY}
            assert {line.end for line in run.caller.lines} == {End.COMPLETE}
            run.proxies[0].down = Toxic()
            evidence = await run.reconciled()
            went = Counter(line.engine for line in evidence.engine)
            measured(f"{went['b1']} of {went.total()} requests went over the slow line")
            assert went["b1"] < went.total() / 2.5

    story(check, seconds=55)()
