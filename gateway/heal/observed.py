"""What is seen of one backend: what runs, what its log says, whether its engine moves."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Final

from gateway.core.aio import Clock, start
from gateway.core.types import Phase, RequestRecord
from gateway.heal.judges import Judges, Memory
from gateway.heal.startup import StartWatch
from gateway.launch.launcher import Incarnation, Launcher, LaunchError, Seen
from gateway.launch.process import ProcessLauncher
from gateway.pools.hearing import canary_s
from gateway.pools.table import Backend
from gateway.watch.canary import canary
from gateway.watch.fetch import UNTRIED, FetchError, Pages

_LOOK_S: Final = 30.0
_MEMORY_EVERY_S: Final = 10.0  # it walks through /proc
_LOOP: Final = 3  # restarts of a service manager's
_LOOP_S: Final = 600.0
_WITH_WORK: Final = 0.5  # of the patience with an idle engine


@dataclass(frozen=True, slots=True)
class Timing:
    """How often a unit looks, and how long it waits for one token. Seconds."""

    every_s: float = 1.0  # between two looks
    first_token_s: float = 60.0  # of a cold engine: kernels are compiled on the way
    token_s: float = 10.0  # of an idle, warm engine; more behind work (`hearing.canary_s`)
    last_words_s: float = 5.0  # for a server whose engine died to end by itself


class Observed:
    """What is seen of one backend. Its `Unit` is its one owner."""

    def __init__(
        self, backend: Backend, pages: Pages, launcher: Launcher, clock: Clock, timing: Timing
    ) -> None:
        self.backend, self.launcher = backend, launcher
        self.seen: Seen | None = None  # None: its launcher cannot tell
        self._looking: asyncio.Task[None] | None = None  # a look that is not over
        self._seen_by = launcher  # its settings may have been others
        self.unseen = ""  # why it cannot
        self.trouble = ""  # why what was to be done about what runs could not be done
        self.incarnation: Incarnation | None = None  # the last one that ran, and
        self.since: float | None = None  # when it began; or was first seen, where nobody tells
        self.watch: StartWatch | None = None  # over its start
        self.judges = Judges()  # of its incarnation
        self._judged_from = clock.now()
        self.worked_at = clock.now()  # when it last gave a token that was asked for
        self.own_restarts = 0  # that its service manager made since we look
        self._pages, self._clock, self._timing = pages, clock, timing
        self._weighed_at = clock.now()
        self._restarted_at: deque[float] = deque(maxlen=_LOOP)  # by its service manager

    @property
    def untold(self) -> bool:
        """Whether the first look is not over, so that nothing can be ordered of what runs."""
        return self.seen is None and not self.unseen

    @property
    def outdated(self) -> bool:
        """Whether its launcher says that what runs was started with other settings than it has itself."""
        seen = self.seen if self._seen_by is self.launcher else None
        return seen is not None and seen.outdated and seen.incarnation == self.incarnation

    async def see(
        self, max_memory_bytes: int | None, patience_s: float | None = None
    ) -> Seen | None:
        """Return what a look finds; None where that cannot be told, or not yet: then it goes on beside."""
        if self._looking is None:
            look = self.look(max_memory_bytes)
            self._looking = start(look, name=f"look at {self.backend.id}")
        await asyncio.wait([self._looking], timeout=patience_s)
        if not self._looking.done():
            return None
        looked, self._looking = self._looking, None
        looked.result()
        return self.seen

    def look_no_more(self) -> None:
        """Give up a look that is not over."""
        looking, self._looking = self._looking, None
        if looking is not None:
            looking.cancel()

    async def look(self, max_memory_bytes: int | None) -> None:
        """See what runs and hear what it says. `seen` is None where that cannot be told now."""
        launcher = self.launcher
        lines: tuple[str, ...] = ()
        try:
            async with asyncio.timeout(_LOOK_S):
                seen = await launcher.look()
                if isinstance(launcher, ProcessLauncher):
                    lines = await launcher.new_lines()
                    await self._weigh(launcher, max_memory_bytes)
        except (LaunchError, TimeoutError) as error:
            self.seen, self.unseen = None, str(error) or "looking at it took too long"
            return
        now, before = self._clock.now(), self.seen
        if self.watch is not None:
            for line in lines:
                self.watch.heard(line, now)
        if before is not None and (more := seen.own_restarts - before.own_restarts) > 0:
            self.own_restarts += more
            self._restarted_at.extend([now] * min(more, _LOOP))
        self.seen, self.unseen, self._seen_by = seen, "", launcher
        if seen.running and seen.incarnation != self.incarnation:
            self.begins(seen.incarnation)
            if seen.began_at is not None:
                self.since = now - max(0.0, self._clock.wall() - seen.began_at)
        self.judges.scraped(self.backend, now)

    def crash_loops(self) -> bool:
        """Whether its service manager restarted it three times within ten minutes."""
        last = self._restarted_at
        return len(last) == _LOOP and self._clock.now() - last[0] < _LOOP_S

    def forget_restarts(self) -> None:
        """Begin to count anew: an operator has seen to it."""
        self._restarted_at.clear()

    def begins(self, incarnation: Incarnation | None) -> None:
        """Take note of another incarnation: what was held against the last one ended with it."""
        self.incarnation, self.since, self.judges = incarnation, self._clock.now(), Judges()
        self._judged_from, self.trouble = self.since, ""

    def ended(self, record: RequestRecord, *, failed: bool) -> None:
        """Count a request that ended; not one that was sent to another server, which had its place before."""
        if record.sent_at is None or record.sent_at >= self._judged_from:
            self.judges.errors.observe(record.ended_at or self._clock.now(), failed=failed)

    async def _weigh(self, launcher: ProcessLauncher, most: int | None) -> None:
        now = self._clock.now()
        if most is None:  # a limit that a reload took away holds nothing against it
            self.judges.memory = Memory()
        elif self.watch is None and now - self._weighed_at >= _MEMORY_EVERY_S:
            self._weighed_at = now
            self.judges.memory.observe(now, await launcher.memory_bytes(), most)

    # --- whether its engine works -----------------------------------------------------------------

    @property
    def moved_at(self) -> float:
        """When its engine was last known to work: by a scrape, a byte of a reply, or a test."""
        return max(self.worked_at, self.backend.pulse.moved_at)

    def still_s(self, patience_s: float) -> float:
        """Return how long nothing has moved, once only a test request tells whether it works; else 0.

        Sooner when it carries requests: an engine that froze between two of them shows none running.
        At once when those hear nothing for longer than is usual. A patience of 0 s: never.
        """
        backend = self.backend
        patience_s *= _WITH_WORK if backend.in_flight else 1.0
        serves = backend.phase is Phase.READY or backend.phase is Phase.DEGRADED
        still_s = self._clock.now() - self.moved_at
        quiet = patience_s <= still_s or backend.reason == "silent"
        return still_s if serves and patience_s and quiet else 0.0

    async def test(self, timeout_s: float | None = None) -> str | None:
        """Ask for one token; returns why there was none, "" if it came. A sign of life meanwhile is as good.

        The time it may take follows from the load, if it is not given.
        None, a look later, where no connection could be tried: that tells nothing of the engine.
        """
        began = self._clock.now()
        if timeout_s is None:
            timeout_s = canary_s(self.backend, self._timing.token_s, began)
        try:
            await canary(self._pages, self.backend, timeout_s=timeout_s)
        except FetchError as error:
            if error.reason in UNTRIED:
                await asyncio.sleep(self._timing.every_s)
                return None
            lives = error.reason == "timeout" and self.backend.pulse.moved_at > began
            return "" if lives else error.reason
        self.worked_at = self._clock.now()
        return ""
