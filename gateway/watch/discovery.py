"""Watch every backend of the pool table, following it across reloads.

    run -- one task per backend -- probe   GET /health     2 s; 0.5 s while starting, down, unsure; at once
                                |                          when a request was lost there
                                |- scrape  GET /metrics    1 s
                                `- models  GET /v1/models  10 s; the probe reads it on coming up,
                                                           the scrape when an unknown adapter runs

Each loop waits for its own backend only, so one that is silent delays no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Final

from gateway.config.process import HealthConfig
from gateway.core.aio import Clock, periodic
from gateway.core.types import Observation, Scraped, ScrapeFailed
from gateway.pools.table import Backend, PoolTable
from gateway.watch.fetch import Pages
from gateway.watch.members import for_each_member
from gateway.watch.probe import Prober
from gateway.watch.scrape import scrape

_APART_S: Final = 0.05  # least time between two probes, however many requests are lost
_Turn = Callable[[], Awaitable[None]]


class Watchers:
    """All watch loops of one process. `health` may be replaced at any time; the loops follow."""

    def __init__(self, table: PoolTable, health: HealthConfig, clock: Clock) -> None:
        self.table = table
        self.health = health
        self.clock = clock
        self._hurried: dict[str, asyncio.Event] = {}

    def hurry(self, backend_id: str) -> None:
        """Have a backend probed now: a request was lost there."""
        if (hurried := self._hurried.get(backend_id)) is not None:
            hurried.set()

    async def run(self) -> None:
        """Watch until cancelled: backends that come get their loops, those that go lose them.

        Cancel: all loops end, nothing is observed any more.
        """
        await for_each_member(self.table, self._watch, name="watch", leaving=True)

    async def _watch(self, backend: Backend) -> None:
        def report(observation: Observation) -> None:
            # After a reload the id may stand for another server than the one that was asked.
            if self.table.get(backend.id) is backend:
                self.table.observe(backend.id, observation)
            elif isinstance(observation, Scraped):  # it may carry requests still
                backend.scraped(observation.sample)

        with closing(Pages(backend)) as pages:
            async with asyncio.TaskGroup() as group:
                prober = Prober(backend, pages, self.clock, report)
                unlisted: frozenset[str] = frozenset()  # adapters, as of the last scrape

                async def scraped() -> None:
                    nonlocal unlisted
                    if backend.plain:  # it may have /metrics, but what they mean is not known
                        return report(ScrapeFailed(self.clock.now()))
                    await scrape(pages, self.clock, report, timeout_s=self.health.timeout)
                    # Somebody else loaded them just now: the model list has their paths.
                    before, unlisted = unlisted, _unlisted(backend)
                    if unlisted - before:
                        await prober.refresh_models(self.health.timeout)

                async def probed() -> None:
                    await prober.probe(self.health.timeout)
                    await asyncio.sleep(_APART_S)

                def loop(
                    kind: str, turn: _Turn, pause_s: Callable[[], float], woken: asyncio.Event | None = None
                ) -> None:  # fmt: skip
                    name = f"{kind} {backend.id}"
                    group.create_task(
                        periodic(turn, every_s=pause_s, name=name, woken=woken), name=name
                    )

                hurried = self._hurried[backend.id] = asyncio.Event()
                loop("probe", probed, lambda: prober.pause_s(self.health.interval), hurried)
                loop(
                    "scrape",
                    scraped,
                    lambda: self.health.scrape_interval,
                )
                loop(
                    "models",
                    lambda: prober.refresh_models(self.health.timeout),
                    lambda: self.health.models_interval,
                )


def _unlisted(backend: Backend) -> frozenset[str]:
    """Return the adapters that run on a backend and are not in its model list, as it was read last."""
    running = backend.sample.running_adapters if backend.sample is not None else ()
    return frozenset(running) - backend.models.keys()
