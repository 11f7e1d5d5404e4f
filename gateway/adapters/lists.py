"""The model lists of one pool's backends, read by its keeper when it cannot wait for the probes to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.adapters.server import Server
from gateway.core.aio import Clock
from gateway.core.types import ModelsSeen
from gateway.pools.table import Backend, PoolTable
from gateway.watch.adapters import AdapterError

_AGAIN_S: Final = 0.5  # between two reads of a list that is read again


@dataclass(slots=True)
class Lists:
    """`start` runs a reading as a background task, to its end."""

    table: PoolTable
    clock: Clock
    connect: Callable[[Backend], Server]
    start: Callable[[Coroutine[Any, Any, None], str], None]
    _reading: set[str] = field(default_factory=set)  # backends whose list is read, or was just now

    def begin(self) -> None:
        """Forget what was being read when all was cancelled."""
        self._reading.clear()

    def read_again(self, backend: Backend) -> None:
        """Begin to read the list of a backend, unless that was begun less than half a second ago."""
        if backend.id not in self._reading:
            self._reading.add(backend.id)
            self.start(self._read_again(backend), f"adapters {backend.id}")

    async def read(self, backend: Backend, server: Server) -> None:
        """Read the list of a backend into the pool table.

        Raises:
            AdapterError: it cannot be read.
        """
        models = tuple(await server.models())
        if self.table.get(backend.id) is backend:
            seen = ModelsSeen(self.clock.now(), models, backend.endpoints, backend.version)
            self.table.observe(backend.id, seen)

    async def _read_again(self, backend: Backend) -> None:
        try:
            with closing(self.connect(backend)) as server:
                await self.read(backend, server)
            await asyncio.sleep(_AGAIN_S)
        except AdapterError:
            pass  # its probes report what is wrong
        finally:
            self._reading.discard(backend.id)
