"""Simulated engines in one process and in simulated time: no socket, no wait, and no gateway."""

from __future__ import annotations

import asyncio
import itertools
import random
import selectors
from collections.abc import Callable
from functools import partial
from typing import Any

from gateway.sim.config import SimConfig
from gateway.sim.sequence import Emitted, Sequence
from gateway.sim.state import SimState
from loadtest import outcomes
from loadtest.arrivals import Shot

Clock = Callable[[], float]


class _Jumps(selectors.DefaultSelector):
    """Waits for nothing: the time that a loop would sleep has passed at once."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everything waits, and no timer will ever end it")
        self.loop.at += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time stands still while anything can run, then jumps to the next timer. It is a clock too."""

    def __init__(self) -> None:
        self.at = 1000.0
        selector = _Jumps()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.at

    now = wall = time


class Reply:
    """One request in an engine: notes when its tokens come. A sink of the engine's driver."""

    def __init__(
        self, shot: Shot, outcome: outcomes.Outcome, clock: Clock, first: Callable[[], None]
    ) -> None:
        self.shot, self.outcome = shot, outcome
        self.ended = asyncio.get_running_loop().create_future()
        self._clock, self._first = clock, first

    @property
    def quiet_s(self) -> float | None:
        """How long ago its last token came; None before the first."""
        last_s = self.outcome.last_s
        return None if last_s is None else self._clock() - last_s

    def put_nowait(self, item: Emitted | None) -> None:
        """Take a token."""
        outcome, now = self.outcome, self._clock()
        if outcome.first_s is None:
            outcome.first_s = outcome.last_s = now
            outcome.status = 200
            outcome.cached_tokens = item.cache.found if item is not None else None
            self._first()
        outcome.gap_s = max(outcome.gap_s, now - (outcome.last_s or now))
        outcome.last_s = now
        if item is not None and item.finish and not self.ended.done():
            self.ended.set_result(None)


class Engines:
    """Some equal simulated servers."""

    def __init__(self, config: SimConfig, count: int) -> None:
        self.config = config
        self.states = [SimState(config) for _ in range(count)]
        self._ids = itertools.count()

    async def run(self, place: int, reply: Reply) -> None:
        """Have a server work on a request until its last token. Cancel: it forgets the request at once."""
        number = next(self._ids)
        shot, driver = reply.shot, self.states[place].drivers[0]
        driver.submit(self.sequence(number, shot), reply)
        try:
            await reply.ended
        finally:
            driver.abort(str(number))

    def sequence(self, number: int, shot: Shot) -> Sequence:
        """Return what an engine is asked; no two prompts share a token, so no cache holds a prefix."""
        first = number << 20
        prompt = tuple(range(first, first + shot.prompt_tokens))
        return Sequence(str(number), prompt, (0,) * shot.output_tokens)

    def total(self, name: str) -> float:
        """Return a counter, summed."""
        return sum(getattr(engine.totals, name) for each in self.states for engine in each.engines)


Place = Callable[[Any, list[int]], int]  # the server for a request, by the requests open at each


class Direct:
    """No gateway: each request goes at once to the server that `place` names.

    `first_token` is called with a request and its server when its first token has come.
    """

    def __init__(
        self,
        engines: Engines,
        place: Place,
        first_token: Callable[[Any, int], None] = lambda shot, place: None,
    ) -> None:
        self._engines, self._place, self._first_token = engines, place, first_token
        self._open = [0] * len(engines.states)

    def prepare(self, shot: Shot, *, retry: bool = False) -> Shot:
        """Nothing is to be made ahead."""
        return shot

    async def send(self, prepared: Shot, outcome: outcomes.Outcome, clock: Clock) -> None:
        """Send one request, see `openloop.Target`."""
        place = self._place(prepared, self._open)
        self._open[place] += 1
        outcome.sent_s, outcome.place = clock(), place
        first = partial(self._first_token, prepared, place)
        try:
            await self._engines.run(place, Reply(prepared, outcome, clock, first))
            outcome.ended_s, outcome.end = clock(), outcomes.End.COMPLETE
        finally:
            self._open[place] -= 1


def fewest_open(seed: int) -> Place:
    """Return the choice of the server with the fewest open requests; of several by chance."""
    rng = random.Random(seed)

    def place(shot: Shot, loads: list[int]) -> int:
        least = min(loads)
        return rng.choice([each for each, count in enumerate(loads) if count == least])

    return place
