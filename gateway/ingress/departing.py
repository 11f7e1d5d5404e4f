"""How a stream of Messages or Responses leaves a backend that is drained: others tell its token ids first.

    drained, another one has room    others are asked for the ids (`counting.ids`), while it goes on
    they are proven                  nothing more is read of it for a moment: for the ids of what came meanwhile
    of all that was shown            it is cut, and goes on elsewhere, as any stream that leaves (`ingress.leaving`)

Where anything of that fails, nothing has happened to the stream, and it is tried again after a pause.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Coroutine
from typing import Any, Final

from gateway.admission.gate import Gate
from gateway.core import aio
from gateway.core.aio import Clock
from gateway.core.endings import Ending
from gateway.core.types import Ask
from gateway.ingress.downstream import Downstream
from gateway.ingress.leaving import Leaving
from gateway.ingress.measuring import Measuring
from gateway.ingress.retrying import Retrying
from gateway.ingress.settings import Settings
from gateway.pools.table import Backend
from gateway.resume.recited import RecitedStream
from gateway.upstream.relay import Relay

log = logging.getLogger("gateway.departing")

_MOST: Final = 16  # streams that are asked about at a time; the others are, half a second later
_HELD_S: Final = 1.0  # what a client waits at most, if the backends that are asked are slow
_AGAIN_S: Final = 1.0
_MOST_AGAIN_S: Final = 30.0


class Departing:
    """Has streams leave for which token ids must be asked, some at a time."""

    def __init__(self, gate: Gate, measuring: Measuring, retrying: Retrying, clock: Clock) -> None:
        self.leaving = Leaving(gate, measuring.table, clock)
        self.measuring = measuring
        self.retrying = retrying
        self.clock = clock
        self._under_way: set[asyncio.Task[None]] = set()

    @property
    def has_room(self) -> bool:
        """Whether one more stream may be asked about."""
        return len(self._under_way) < _MOST

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Find the ids of a stream, and have it leave."""
        task = aio.start(work, name="departure")
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a stream could not leave, by a bug", exc_info=error, extra={"event": "bug"})


class Departure:
    """Has one stream leave its backend. `close` it when the backend writes no more of it."""

    def __init__(  # noqa: PLR0913 - a stream, and all that decides about it
        self,
        departing: Departing,
        settings: Settings,
        down: Downstream,
        ask: Ask,
        stream: RecitedStream,
        backend: Backend,
        relay: Relay,
    ) -> None:
        self._departing = departing
        self._settings = settings
        self._down = down
        self._subject = ask, stream, backend, settings.going_on[ask.route.pool].move_after_s
        self._relay = relay
        self._task: asyncio.Task[None] | None = None
        self._again_at = -math.inf
        self._pause_s = _AGAIN_S

    def begin(self) -> None:
        """Have the stream leave if it can; called twice a second."""
        under_way = self._task is not None and not self._task.done()
        if under_way or self._departing.clock.now() < self._again_at:
            return
        if self._departing.has_room and self._departing.leaving.would_leave(*self._subject):
            self._task = self._departing.start(self._find())

    def close(self) -> None:
        """Ask no more."""
        if self._task is not None:
            self._task.cancel()

    async def _find(self) -> None:
        """Ask for the ids, and cut the stream behind what they prove.

        Cancel: nothing is held.
        """
        try:
            ask, stream, *_ = self._subject
            asked_at = self._departing.clock.now()
            proven, failed = await self._departing.measuring.find_ids(self._settings, ask, stream)
            if failed is not None:
                self._again_at = math.inf  # one more might die of it
                record, lost = self._down.record, self._departing.retrying.lost
                assert record is not None
                await lost(self._down, record, failed, Ending.BROKE, asked_at)
            elif proven and not self._leave():
                await self._catch_up(ask, stream)
        finally:
            self._again_at = max(self._again_at, self._departing.clock.now() + self._pause_s)
            self._pause_s = min(2 * self._pause_s, _MOST_AGAIN_S)

    async def _catch_up(self, ask: Ask, stream: RecitedStream) -> None:
        """Hold the stream until the ids of what came meanwhile are known, and have it leave then."""
        if not self._departing.leaving.would_leave(*self._subject):
            return
        self._relay.pause()
        within_s = min(_HELD_S, self._settings.patience.client_write_s / 2)
        try:
            async with asyncio.timeout(within_s):
                await self._departing.measuring.find_rest_of_ids(self._settings, ask, stream)
            self._leave()
        except TimeoutError:
            pass
        finally:
            self._relay.let_go()

    def _leave(self) -> bool:
        """Cut the stream if another backend has a place for it; return whether one has."""
        error = self._departing.leaving.leaves(*self._subject)
        if error is not None:
            self._relay.let_go(error)
        return error is not None
