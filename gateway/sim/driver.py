"""Engines in real time: the event loop's clock advances the pure model, tokens go to sinks."""

from __future__ import annotations

import asyncio
import math
from typing import Final, Protocol

from gateway.sim.engine import Engine
from gateway.sim.sequence import Emitted, Sequence

DIED: Final = None  # what a sink gets when its engine died
# The timers of uvloop round to this; who asked again until then would keep the loop busy.
_EARLY_S: Final = 0.001


class Sink(Protocol):
    """Where the tokens of a request go, such as a queue."""

    def put_nowait(self, item: Emitted | None) -> None:
        """Take one token, or `DIED`."""


class Driver:
    """One engine and its timer. `speed` 0 makes every step end at once."""

    def __init__(self, engine: Engine, speed: float) -> None:
        self.engine = engine
        self.dead = False
        self._speed = speed
        self._loop = asyncio.get_running_loop()
        self._sinks: dict[str, Sink] = {}
        self._timer: asyncio.Handle | None = None
        self._frozen = False
        self._left: list[str] = []  # while it is frozen: it notices when it goes on
        self._virtual_now = 0.0

    def submit(self, sequence: Sequence, sink: Sink) -> None:
        """Queue a request; its tokens go to the sink."""
        self.engine.add(sequence, self._now())
        self._sinks[sequence.id] = sink
        self._plan()

    def abort(self, sequence_id: str) -> None:
        """Forget a request, finished or not. A frozen engine learns of it when it goes on."""
        self._sinks.pop(sequence_id, None)
        if self._frozen:
            self._left.append(sequence_id)
            return
        self.engine.abort(sequence_id)
        self._plan()

    def forget_prefixes(self, *, preempt: bool) -> bool:
        """Empty the prefix cache, see `Engine.forget_prefixes`."""
        forgot = self.engine.forget_prefixes(preempt=preempt)
        self._plan()
        return forgot

    def freeze(self, *, frozen: bool) -> None:
        """Stop or resume stepping; time goes on meanwhile."""
        self._frozen = frozen
        if not frozen:
            left, self._left = self._left, []
            for sequence_id in left:
                self.engine.abort(sequence_id)
        self._plan()

    def die(self) -> None:
        """Drop all requests; their sinks learn it."""
        self.dead = True
        for sequence_id, sink in list(self._sinks.items()):
            self.engine.abort(sequence_id)
            sink.put_nowait(DIED)
        self._sinks.clear()
        self.close()

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _now(self) -> float:
        return self._loop.time() * self._speed if self._speed else self._virtual_now

    def _plan(self) -> None:
        """Set the timer to the engine's next event."""
        self.close()
        due = self.engine.next_event_time()
        if due is None or self._frozen or self.dead:
            return
        if self._speed and due != -math.inf:
            self._timer = self._loop.call_at(due / self._speed, self._turn)
        else:
            self._timer = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        due, now = self.engine.next_event_time(), self._now()
        if due is not None and (not self._speed or due - now <= _EARLY_S * self._speed):
            now = self._virtual_now = max(now, due)
        for event in self.engine.step(now):
            if event.id in self._sinks:
                self._sinks[event.id].put_nowait(event)
                if event.finish is not None:
                    del self._sinks[event.id]
        self._plan()
