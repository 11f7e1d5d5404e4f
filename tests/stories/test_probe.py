"""Probes of a server that another process replaces meanwhile."""

from __future__ import annotations

import asyncio
import contextlib

from gateway.core.types import ModelsSeen, Phase
from gateway.pools.facts import Tending
from gateway.watch.fetch import Pages
from gateway.watch.probe import Prober
from tests.stories.support import gateway, story


@story
async def test_what_was_asked_of_the_process_before_tells_nothing_of_the_next_one():
    async with gateway() as world:
        backend, table = next(iter(world.process.table)), world.process.table
        sim, told = world.sims[0], []
        with contextlib.closing(Pages(backend)) as pages:
            prober = Prober(backend, pages, world.process.clock, told.append)
            for ask in (prober.probe, prober.refresh_models):
                asked = len(sim.requests)
                sim.inject("hang_before_headers:100ms")
                asking = asyncio.create_task(ask(5.0))
                await world.until(lambda asked=asked: len(sim.requests) > asked)
                table.tend(backend.id, Tending(Phase.STARTING, "restart", "it begins", fresh=True))
                table.observe(backend.id, ModelsSeen(0.0, tuple(backend.models.values())))
                await asking
                assert told == []
                sim.clear()
                await ask(5.0)
                assert told
                told.clear()
