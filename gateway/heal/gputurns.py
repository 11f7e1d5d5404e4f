"""Turns on GPUs: backends that share one start one after the other.

vLLM measures free memory while it starts; a neighbour that starts or ends at the same time makes it
measure wrong, or fail (`Error in memory profiling`). A backend with no `gpus` may see all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from gateway.config.supervision import Remedy
from gateway.heal.charge import Charge

_ALL: Final = -1


class GpuTurns:
    """One lock a GPU. They are taken in their order, so that nobody waits in a circle."""

    def __init__(self) -> None:
        self._locks: dict[int, asyncio.Lock] = {_ALL: asyncio.Lock()}
        self._has: dict[int, Charge] = {}  # who has a GPU's turn, or had it last
        self._wait: dict[Charge, int] = {}  # for which GPU

    def know(self, gpus: Iterable[int]) -> None:
        """Take note of GPUs that a configuration names."""
        for gpu in gpus:
            self._locks.setdefault(gpu, asyncio.Lock())

    @asynccontextmanager
    async def turn(self, charge: Charge) -> AsyncIterator[None]:
        """Wait until no other start uses the backend's GPUs; others wait until this one is over.

        `charge.waits_for` tells for whom it waits.
        """
        async with AsyncExitStack() as stack:
            for gpu in self._needed(charge):
                await self._take(gpu, charge, stack)
            yield

    async def _take(self, gpu: int, charge: Charge, stack: AsyncExitStack) -> None:
        lock = self._locks[gpu]
        self._wait[charge] = gpu
        if lock.locked():
            charge.waits_for = _told(self._has[gpu], gpu)
        try:
            await stack.enter_async_context(lock)
        finally:
            self._wait.pop(charge, None)
            charge.waits_for = ""
        self._has[gpu] = charge
        for other in (each for each, wanted in self._wait.items() if wanted == gpu):
            other.waits_for = _told(charge, gpu)

    def _needed(self, charge: Charge) -> list[int]:
        launch = charge.config.launch
        if launch is None:
            return []
        everywhere = not launch.gpus or Remedy.SERIAL_START in charge.pool.remedies
        return sorted(self._locks) if everywhere else sorted(launch.gpus)


def _told(first: Charge, gpu: int) -> str:
    where = "" if gpu == _ALL else f" on GPU {gpu}"
    return f"until {first.id} has started{where}"
