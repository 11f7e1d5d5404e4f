"""What is found by looking for minutes: a dead engine, failures, memory, a collapse of pace, a schedule.

The gateway's clock is ours: it runs with the machine's, and we put it forward. So minutes pass in
which scrapes, probes and turns of supervision are real ones, over real sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from dataclasses import replace
from functools import partial

import httpx2
import pytest

from gateway.core.aio import SystemClock
from gateway.core.events import EventKind
from gateway.core.types import Endpoint, Phase, RequestRecord
from gateway.core.types import Outcome as RequestOutcome
from gateway.heal.decisions import Why
from gateway.heal.fleet import launcher_of
from gateway.heal.states import Starting
from tests import loopback
from tests.fakelaunch import Script
from tests.stories.supervised import fleet, launched, machine, managed
from tests.stories.support import story
from tests.stories.test_supervision import SERVER

long_story = partial(story, seconds=90.0)  # many turns; seconds on a machine that is quiet


class Forward:
    """The machine's clocks, put forward; `local` sets the time of the day."""

    def __init__(self):
        self.ahead_s = 0.0
        self.wall_ahead_s = 0.0

    def now(self):
        return SystemClock.now() + self.ahead_s

    def wall(self):
        return SystemClock.wall() + self.wall_ahead_s

    def local(self, hour, minute):
        day = time.mktime((2026, 3, 3, hour, minute, 0, 0, 0, -1))
        self.wall_ahead_s = day - SystemClock.wall()


async def step(world, clock, seconds=5.0):
    """Let so much time pass at once; return when every backend was scraped and judged after it."""
    clock.ahead_s += seconds
    at = clock.now()
    charges = world.process.supervisor.units.values()
    down = (Phase.DOWN, Phase.STARTING)  # what is down may have no metrics

    def judged():
        seen = all(
            each.observed.judges.sampled_at >= at or each.backend.phase in down for each in charges
        )
        return seen and world.process.supervisor.history.at >= at

    await world.until(judged)


async def until_restart(world, clock, seconds=5.0):
    """Let time pass until a restart is ordered; return its event."""
    while not world.told(EventKind.RESTART):
        await step(world, clock, seconds)
    return world.told(EventKind.RESTART)[0]


async def comes_back(world):
    await world.until(lambda: len(world.told(EventKind.STARTED, "m/b1")) == 2)
    await world.serves()
    await world.turns()
    assert len(world.told(EventKind.RESTART)) == 1


@pytest.mark.parametrize(
    ("fault", "why", "after_s"),
    [
        ("unhealthy_then_ok:100000", "/health reports that the engine is dead (503)", 5.0),
        ("refuse", "health checks failed in a row, most recently: connection refused", 30.0),
    ],
    ids=["it says so", "silent"],
)
@story
async def test_a_server_whose_process_lives_and_does_not_serve_is_restarted(fault, why, after_s):
    async with machine() as on:
        clock, backends = Forward(), (launched(on["m/b1"]), launched(on["m/b2"]))
        async with fleet(on, *backends, clock=clock) as world:
            for each in (fault, "http_500"):
                world.slot().sim.inject(each)
            await world.until(lambda: world.phase() is Phase.DOWN)
            since = world.backend().health.since
            restart = await until_restart(world, clock)
            took_s = clock.now() - since
            assert restart.label == "engine_dead"
            assert restart.detail.startswith("its process runs but does not serve: ")
            assert f"{why}, and " in restart.detail
            assert "http_" not in restart.detail
            assert after_s <= took_s < after_s + 30.0
            await comes_back(world)


@story
async def test_one_that_fails_most_of_its_requests_is_drained_and_restarted():
    async with machine() as on:
        clock, backends = Forward(), (launched(on["m/b1"]), launched(on["m/b2"]))
        async with fleet(on, *backends, clock=clock) as world:
            await world.order("drain", "m/b2")  # so that all of them come to b1
            answers = []
            for _ in range(3):  # never five in a row, which takes it out by itself
                world.slot().sim.inject("http_500@4")
                answers += [(await world.chat(max_tokens=1)).status_code for _ in range(5)]
            assert answers == [500, 500, 500, 500, 200] * 3
            told = "12 of 15 requests failed in the last 5 min"
            await world.until(lambda: told in getattr(world.unit().decision, "evidence", ""))
            assert world.unit().decision.why is Why.BUDGET  # bad as it is, it alone serves
            await world.order("undrain", "m/b2")
            await world.until(lambda: world.told(EventKind.RESTART))
            (restart,) = world.told(EventKind.RESTART)
            assert restart.label == "errors"
            assert restart.detail == told
            await comes_back(world)


def failed(sent_at, ended_at):
    """Return twelve streams that were sent to b1 then, and broke off."""
    every = [RequestRecord("r", Endpoint.CHAT, sent_at, stream=True) for _ in range(12)]
    for each in every:
        each.backend_id, each.outcome = "m/b1", RequestOutcome.STREAM_BROKEN
        each.sent_at, each.ended_at = sent_at, ended_at
    return every


@story
async def test_what_the_server_before_failed_is_not_held_against_the_one_that_has_its_place():
    async with machine() as on:
        clock, backends = Forward(), (launched(on["m/b1"]), launched(on["m/b2"]))
        async with fleet(on, *backends, clock=clock) as world:
            before = world.unit().observed.since
            await world.slot().die()
            await comes_back(world)
            (first,) = world.told(EventKind.RESTART)
            world.process.supervisor.ended(failed(before, clock.now()))
            await world.turns()
            assert world.told(EventKind.RESTART) == [first]
            world.process.supervisor.ended(failed(clock.now(), clock.now()))
            await world.until(lambda: len(world.told(EventKind.RESTART)) == 2)
            assert world.told(EventKind.RESTART)[-1].label == "errors"


@story
async def test_what_clients_did_wrong_is_not_held_against_a_backend():
    async with machine() as on:
        clock, backends = Forward(), (launched(on["m/b1"]), launched(on["m/b2"]))
        async with fleet(on, *backends, clock=clock) as world:
            world.slot().sim.inject("http_500:400")
            await world.order("drain", "m/b2")
            for _ in range(20):
                assert (await world.chat(max_tokens=1)).status_code == 400
            await world.order("undrain", "m/b2")
            await world.turns()
            assert not world.told(EventKind.RESTART)
            assert world.phase() is Phase.READY


@long_story
async def test_one_that_holds_more_memory_than_it_may_is_restarted():
    async with machine() as on:
        await on["m/b2"].begin()  # others start it, and nobody restarts it
        other = {"name": "b2", "url": f"http://127.0.0.1:{on['m/b2'].port}"}
        slot, clock = on["m/b1"], Forward()
        command = [sys.executable, "-c", SERVER, str(slot.port)]
        backend = {"name": "b1", "launch": {"command": command, "port": slot.port}}
        little = {"supervision": {"max_memory": "1MiB"}}
        async with fleet(
            on, backend, other, make_launcher=launcher_of, clock=clock, **little
        ) as world:
            before, began = world.unit().observed.seen.incarnation, clock.now()
            restart = await until_restart(world, clock)
            assert restart.label == "memory"
            assert restart.detail.endswith("of host memory, more than max_memory")
            assert clock.now() - began >= 30.0  # a peak is no leak
            await comes_back(world)
            assert world.unit().observed.seen.incarnation != before


@long_story
async def test_a_limit_on_memory_that_is_taken_away_restarts_nothing_any_more():
    async with machine() as on:
        slot, clock = on["m/b1"], Forward()
        command = [sys.executable, "-c", SERVER, str(slot.port)]
        backend = {"name": "b1", "launch": {"command": command, "port": slot.port}}
        little = {"supervision": {"max_memory": "1MiB"}}
        async with fleet(on, backend, make_launcher=launcher_of, clock=clock, **little) as world:
            while world.unit().decision is None:
                await step(world, clock)
            assert world.unit().decision.why is Why.LAST  # it waits until it is idle
            del world.settings["pools"]["m"]["supervision"]["max_memory"]
            await world.reload()
            await world.until(lambda: world.unit().decision is None)


@long_story
async def test_the_only_backend_gets_its_new_command_line_after_five_idle_minutes():
    async with machine() as on:
        clock = Forward()
        async with fleet(on, launched(on["m/b1"]), clock=clock) as world:
            assert (await world.chat(max_tokens=1)).status_code == 200
            idle_since = clock.now()
            world.settings["pools"]["m"]["backends"][0]["launch"]["args"] = {"max-model-len": 4096}
            await world.reload()
            while clock.now() - idle_since < 280.0:
                await step(world, clock)
                assert world.unit().decision.why is Why.LAST
            assert not world.told(EventKind.RESTART)
            restart = await until_restart(world, clock)
            assert restart.label == "operator"
            await comes_back(world)
            assert world.backend().window_tokens == 4096


# --- pace -----------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def asked(*slots, streams=6):
    """Have others than the gateway ask each server for long answers, until the end."""

    async def ask(http, slot):
        body = {"model": "m", "prompt": "hello", "max_tokens": 8000, "stream": True}
        with contextlib.suppress(httpx2.HTTPError):
            await http.post(f"http://127.0.0.1:{slot.port}/v1/completions", json=body)

    async with loopback.client(timeout=None) as http:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(http, slot)) for slot in slots for _ in range(streams)]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()


@long_story
async def test_one_that_falls_to_a_fraction_of_its_pace_and_its_peers_is_restarted():
    quick = {"interval": "20ms", "scrape_interval": "20ms", "models_interval": "1h"}
    async with machine() as on:
        clock, slots = Forward(), (on["m/b1"], on["m/b2"])
        for slot in slots:
            slot.speed = 1.0
        settings = {"extra": {"health": quick | {"progress": "1h"}}, "slow_start": "1s"}
        backends = [launched(slot) for slot in slots]
        async with fleet(on, *backends, clock=clock, **settings) as world, asked(*slots):
            await world.until(lambda: world.unit("m/b2").backend.sample.running == 6)
            began = clock.now()
            while clock.now() - began < 12 * 60:  # its past: ten minutes and a little more
                await step(world, clock, 8.0)
            assert not world.told(EventKind.RESTART)
            (driver,) = world.slot().sim.state.drivers
            driver.engine.config = replace(driver.engine.config, decode_step_s=0.3)
            fell = clock.now()
            restart = await until_restart(world, clock, 8.0)
            assert (restart.backend_id, restart.label) == ("m/b1", "slow")
            assert "with 6 running, under 0.30 of its usual" in restart.detail
            assert clock.now() - fell >= 4 * 60  # of five slow minutes the first had begun before
            world.slot().speed = 0.0
            await comes_back(world)


# --- its start -----------------------------------------------------------------------------------


@story
async def test_how_long_a_start_took_that_another_gateway_began_counts_from_its_process():
    async with machine() as on:
        slot, clock, listens = on["m/b1"], Forward(), asyncio.Event()
        slot.plan(Script(listens=listens))
        await slot.begin()
        slot.began_at = clock.wall() - 3600.0
        async with fleet(on, launched(slot), clock=clock, wait=False) as world:
            await world.until(lambda: isinstance(world.unit().state, Starting))
            clock.ahead_s += 10.0  # it does not answer yet, so it is to give a token first
            await world.until(lambda: world.unit().state.owes)
            listens.set()
            await world.serves()
            (started,) = world.told(EventKind.STARTED)
            seconds = started.detail.removeprefix("serves ").removesuffix(" s after its start")
            assert int(seconds) >= 3600


# --- the schedule ---------------------------------------------------------------------------------


@story
async def test_a_scheduled_restart_goes_by_when_the_server_began_not_by_when_its_gateway_did():
    async with machine() as on:
        for name, hours in (("m/b1", 20), ("m/b2", 5)):
            await on[name].begin()
            on[name].began_at = time.time() - hours * 3600.0
        daily = {"supervision": {"restart_every": "12h"}}
        async with fleet(on, managed(on["m/b1"]), managed(on["m/b2"]), **daily) as world:
            await world.until(lambda: on["m/b1"].starts)
            await world.serves()
            await world.turns(20)
            assert [each.label for each in world.told(EventKind.RESTART)] == ["scheduled"]
            assert (len(on["m/b1"].starts), len(on["m/b2"].starts)) == (1, 0)


@long_story
async def test_scheduled_restarts_wait_for_their_window_and_go_one_after_the_other():
    async with machine() as on:
        clock, backends = Forward(), (launched(on["m/b1"]), launched(on["m/b2"]))
        clock.local(2, 30)
        due = {"supervision": {"restart_every": "1m", "restart_window": "03:00-04:00"}}
        async with fleet(on, *backends, clock=clock, **due) as world:
            begun = []

            async def age():
                for _ in range(8):
                    await step(world, clock, 8.0)

            def both_wait():
                each = [charge.decision for charge in world.process.supervisor.units.values()]
                return all(decision is not None and decision.why is Why.WINDOW for decision in each)

            await age()
            await world.until(both_wait)
            left_s = world.unit().decision.until - clock.now()
            assert 29 * 60 <= left_s <= 30 * 60
            assert not world.told(EventKind.RESTART)

            world.process.table.on_transition.append(
                lambda _: begun.append(world.process.table.serving()[0])
            )
            clock.local(3, 10)
            for name in ("m/b1", "m/b2"):
                await world.until(lambda n=name: len(world.told(EventKind.STARTED, n)) == 2)
            await world.serves()
            assert min(begun) == 1  # of two
            assert [each.label for each in world.told(EventKind.RESTART)] == ["scheduled"] * 2
            assert "it has run for 60 s (restart_every)" in world.told(EventKind.RESTART)[0].detail

            clock.local(4, 0)  # the window is over
            await age()
            await world.until(both_wait)
            assert len(world.told(EventKind.RESTART)) == 2


@story
async def test_what_ended_before_the_clock_was_set_back_by_a_day_is_no_crash_loop():
    clock = Forward()
    async with machine() as on, fleet(on, launched(on["m/b1"]), clock=clock) as world:

        async def ends():
            told = (await world.admin("GET", "/admin/v1/overview")).json()
            return told["pools"][0]["backends"][0]["ended"]

        async def dies():
            starts = len(world.told(EventKind.STARTED))
            await world.slot().die()
            await world.until(lambda: len(world.told(EventKind.STARTED)) > starts)

        for _ in range(3):
            await dies()
        assert await ends() == 3
        clock.wall_ahead_s += 3600.0
        assert await ends() == 0
        clock.wall_ahead_s -= 86400.0
        assert await ends() == 0
        await dies()
        assert await ends() == 1
