"""Backends that cannot be reached, or that answer nothing: another one answers, or the client is told at once."""

import asyncio
import statistics
import time

import pytest

from gateway.core.types import Phase
from gateway.sim.server import SimConfig
from tests.faults.ledgers import End
from tests.faults.toxic import Toxic
from tests.faults.traffic import Question
from tests.faults.world import FAST, recorded
from tests.stories.support import story


@story
async def test_one_of_three_that_refuses_costs_nobody_anything_and_is_out_within_seconds(measured):
    async with recorded(FAST, FAST, FAST) as run:
        run.world.sims[0].inject("refuse")
        begun = time.monotonic()
        for line in await run.ask_many(30):
            assert line.end is End.COMPLETE
        first = run.world.process.table.backends("m")[0]
        await run.world.until(lambda: first.phase is Phase.DOWN, 6.0)
        measured(f"30 of 30 answered; out of rotation after {time.monotonic() - begun:.1f} s")
        evidence = await run.reconciled()
        assert max(line.attempts for line in evidence.gateway) <= 2


@story
async def test_one_that_does_not_answer_connections_delays_by_the_connect_timeout_only(measured):
    async with recorded(FAST, FAST, toxics=[Toxic()], health="fall: 50") as run:
        proxy = run.proxies[0]
        proxy.deafen()
        proxy.reset()
        lines = await run.ask_many(6)
        assert all(line.end is End.COMPLETE for line in lines)
        waits = [line.first_at - line.sent_at for line in lines]
        measured(f"first byte after at most {max(waits):.2f} s; `timeouts.connect` is 1 s")
        evidence = await run.reconciled()
        assert any(line.attempts == 2 for line in evidence.gateway)
        proxy.hear()


@story
async def test_a_reset_before_the_head_on_a_fresh_connection_is_told_and_not_repeated():
    async with recorded(FAST, FAST) as run:
        for sim in run.world.sims:
            sim.inject("reset_before_headers@1")
        line = await run.ask()
        assert (line.end, line.status) == (End.REFUSED, 502)
        backends = run.world.process.table.backends("m")
        assert sum(each.health.traffic_failures for each in backends) == 1
        evidence = await run.reconciled()
        assert [each.attempts for each in evidence.gateway] == [1]


def test_connections_that_are_closed_just_as_they_are_used_again_cost_no_request(measured):
    """The backend closes idle connections after 100 ms, and 2,000 requests come after 95 to 105 ms."""

    async def check():
        async with recorded(SimConfig(model="m", speed=0, keep_alive_s=0.1)) as run:

            async def client(number):
                for turn in range(40):
                    await asyncio.sleep(0.095 + 0.00025 * turn)
                    question = Question(f"n-{number:x}-{turn:x}", stream=bool(turn % 2), tokens=1)
                    line = await run.caller.ask(question)
                    assert line.end is End.COMPLETE, line

            async with asyncio.TaskGroup() as group:
                for number in range(50):
                    group.create_task(client(number))
            evidence = await run.reconciled()
            assert len(evidence.client) == 2000
            again = sum(line.attempts > 1 for line in evidence.gateway)
            twice = len(evidence.engine) - len({line.nonce for line in evidence.engine})
            measured(f"2,000 of 2,000 answered, {again} sent again, {twice} at the engine twice")
            assert twice == 0

    story(check, seconds=55)()


@pytest.mark.parametrize("stream", [False, True])
def test_a_pool_that_dies_as_a_whole_says_so_at_once_and_serves_seconds_after_its_return(
    stream, measured
):
    @story
    async def check():
        async with recorded(FAST, FAST, FAST) as run:
            for sim in run.world.sims:
                sim.inject("refuse")
            backends = run.world.process.table.backends("m")
            await run.world.until(lambda: all(each.phase is Phase.DOWN for each in backends))
            before = sum(len(sim.received("/v1/chat/completions")) for sim in run.world.sims)
            lines = [await run.ask(stream=stream) for _ in range(50)]
            assert {(line.end, line.status) for line in lines} == {(End.REFUSED, 503)}
            assert all(line.retry_after for line in lines)
            asked = sum(len(sim.received("/v1/chat/completions")) for sim in run.world.sims)
            assert asked == before
            took = statistics.median(line.ended_at - line.sent_at for line in lines)
            begun = time.monotonic()
            run.world.sims[0].clear()
            while (await run.ask(stream=stream)).end is not End.COMPLETE:
                await asyncio.sleep(0.05)
            back_s = time.monotonic() - begun
            assert back_s < 5
            measured(
                f"refused after {1000 * took:.0f} ms (median), served {back_s:.1f} s after the first is back"
            )
            await run.reconciled()

    check()
