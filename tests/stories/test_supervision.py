"""A gateway that starts, watches, restarts and stops its backends, on real sockets."""

from __future__ import annotations

from gateway.core.events import EventKind
from gateway.core.types import Phase
from tests.fakelaunch import Script
from tests.stories.supervised import fleet, launched, machine, managed
from tests.stories.support import story

# --- starting and coming back ---------------------------------------------------------------------


@story
async def test_a_launched_backend_is_started_at_boot_tried_and_serves():
    async with machine() as on, fleet(on, launched(on["m/b1"])) as world:
        assert len(world.slot().starts) == 1
        assert world.slot().sim.received("/v1/completions")  # one token, and a warm-up
        assert (await world.chat(max_tokens=2)).status_code == 200
        assert [each.label for each in world.told(EventKind.LAUNCH)] == ["exited"]
        assert not world.told(EventKind.RESTART)


@story
async def test_one_that_runs_already_is_tried_and_not_started():
    async with machine() as on:
        await on["m/b1"].begin()
        async with fleet(on, launched(on["m/b1"])) as world:
            assert world.slot().starts == []
            assert len(world.told(EventKind.STARTED)) == 1


@story
async def test_one_that_dies_is_out_at_once_and_comes_back():
    async with machine() as on:
        backends = launched(on["m/b1"]), launched(on["m/b2"])
        async with fleet(on, *backends) as world:
            up = __import__("asyncio").Event()
            world.slot().plan(Script(listens=up))
            await world.slot().die(exit_code=-9)
            await world.until(lambda: world.phase() is not Phase.READY)
            before = world.slot().received
            for _ in range(10):
                assert (await world.chat(max_tokens=1)).status_code == 200
            assert world.slot().received == before
            up.set()
            await world.serves()
            assert len(world.slot().starts) == 2
            (exited,) = world.told(EventKind.EXITED)
            assert exited.backend_id == "m/b1"
            (restart,) = world.told(EventKind.RESTART)
            assert restart.detail == "its process was killed by signal 9"
            metrics = await world.metrics()
            counted = 'gateway_backend_restarts_total{pool="m",backend="b1",cause="exited"} 1.0'
            assert counted in metrics


@story
async def test_a_managed_one_is_not_stopped_at_the_end():
    async with machine() as on:
        await on["m/b1"].begin()
        async with fleet(on, managed(on["m/b1"])):
            pass
        assert on["m/b1"].running
