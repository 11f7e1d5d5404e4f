"""Probes of a server that another process replaces meanwhile."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from gateway.core.types import ModelsSeen, Phase
from gateway.pools.facts import Tending
from gateway.watch.fetch import Pages
from gateway.watch.probe import Prober
from tests.stories.support import gateway, story


class Late(Pages):
    """Pages that come when they are let."""

    def __init__(self, backend):
        super().__init__(backend)
        self.came, self.let = asyncio.Event(), asyncio.Event()

    async def get(self, path, *, timeout_s):
        page = await super().get(path, timeout_s=timeout_s)
        self.came.set()
        await self.let.wait()
        return page


@pytest.mark.parametrize("kind", ["probe", "refresh_models"])
@story
async def test_what_was_asked_of_the_process_before_tells_nothing_of_the_next_one(kind):
    async with gateway() as world:
        backend, table = next(iter(world.process.table)), world.process.table
        told = []
        with contextlib.closing(Late(backend)) as pages:
            ask = getattr(Prober(backend, pages, world.process.clock, told.append), kind)
            async with asyncio.TaskGroup() as group:
                group.create_task(ask(5.0))
                await pages.came.wait()
                table.tend(backend.id, Tending(Phase.STARTING, "restart", "it begins", fresh=True))
                table.observe(backend.id, ModelsSeen(0.0, tuple(backend.models.values())))
                pages.let.set()
            assert told == []
            await ask(5.0)
            assert told
