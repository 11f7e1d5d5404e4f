"""Keep the adapters of the configuration loaded, on every backend of their pool.

A backend that comes up has them loaded by `heal.unit`, if it is supervised. All others, and
those that lost one meanwhile, get it here: an adapter with a `path` that a serving backend does not
list is loaded, and tried again half a minute after it failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Final

from gateway.config.models import PoolConfig
from gateway.core.aio import Clock, periodic
from gateway.core.events import Event, EventKind, Events
from gateway.core.types import Phase
from gateway.pools.table import Backend, PoolTable
from gateway.watch.adapters import AdapterError, load
from gateway.watch.fetch import Pages

_EVERY_S: Final = 5.0
_RETRY_S: Final = 30.0
_LOAD_S: Final = 120.0  # to read its weights from a slow disk
_SERVING: Final = frozenset({Phase.READY, Phase.DEGRADED})


@dataclass(slots=True)
class AdapterLoader:
    """Loads what is missing. `pools` may be replaced at any time."""

    table: PoolTable
    clock: Clock
    events: Events
    pools: Mapping[str, PoolConfig]
    _tried_at: dict[tuple[str, str], float] = field(default_factory=dict)

    async def run(self) -> None:
        """Look every few seconds, for ever. Cancel: a load that is under way may come to its end."""
        await periodic(self.turn, every_s=_EVERY_S, name="adapters")

    async def turn(self) -> None:
        """Load what serving backends lack; one after the other on each, all backends at a time."""
        now = self.clock.now()
        for key in [key for key, at in self._tried_at.items() if now - at >= _RETRY_S]:
            del self._tried_at[key]
        async with asyncio.TaskGroup() as group:
            for backend in self.table:
                lacking = self._lacking(backend)
                if lacking:
                    group.create_task(self._load(backend, lacking), name=f"adapters {backend.id}")

    def _lacking(self, backend: Backend) -> dict[str, str]:
        pool = self.pools.get(backend.pool)
        if pool is None or pool.adapters == "auto" or backend.phase not in _SERVING:
            return {}
        return {
            each.name: each.path
            for each in pool.adapters
            if each.path is not None
            and each.name not in backend.models
            and (backend.id, each.name) not in self._tried_at
        }

    async def _load(self, backend: Backend, lacking: Mapping[str, str]) -> None:
        with closing(Pages(backend)) as pages:
            for name, path in lacking.items():
                self._tried_at[backend.id, name] = self.clock.now()
                try:
                    await load(pages, name, path, timeout_s=_LOAD_S)
                except AdapterError as error:
                    self._tell(backend, EventKind.ADAPTER_FAILED, name, str(error))
                else:
                    self._tell(backend, EventKind.ADAPTER, name, f"the adapter {name} is loaded")

    def _tell(self, backend: Backend, kind: EventKind, name: str, detail: str) -> None:
        self.events.tell(Event(self.clock.wall(), kind, backend.id, name, detail))
