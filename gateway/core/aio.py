"""Time and tasks: the only module that may create a task.

Every task has a name and an owner. `periodic` and `guarded` catch any `Exception`: background work must
outlive one bad turn, and says so in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Final, Protocol, TypeVar

log = logging.getLogger("gateway.aio")

Result = TypeVar("Result")

# Task(eager_start=True) runs the coroutine at once up to its first suspension (Python 3.12).
_EAGER: Final = sys.version_info >= (3, 12)
# What fails at once fails again: it is to fill neither a core nor the log.
_AFTER_BUG_S: Final = 1.0
# A loop that was held up runs its timers before it reads. So long after them it has read, too.
READ_S: Final = 0.001
_STOOD_STILL_S: Final = 5.0  # between two looks at the clock, of somebody who looks twice a second


class Clock(Protocol):
    """Where time comes from, so that tests can hold it."""

    def now(self) -> float:
        """Monotonic seconds."""

    def wall(self) -> float:
        """Seconds since the epoch."""


class SystemClock:
    """The machine's clocks."""

    now = staticmethod(time.monotonic)
    wall = staticmethod(time.time)


def start(
    coro: Coroutine[Any, Any, None], *, name: str, loop: asyncio.AbstractEventLoop | None = None
) -> asyncio.Task[None]:
    """Start a named task; on Python 3.12+ it runs at once up to its first suspension.

    The caller owns the task: keeps the reference and cancels or awaits it. On the hot path it also
    gives the running loop: asking asyncio for it costs a system call before Python 3.12.
    """
    loop = loop or asyncio.get_running_loop()
    if _EAGER:
        return asyncio.Task(coro, loop=loop, name=name, eager_start=True)  # type: ignore[call-arg,unused-ignore]
    return asyncio.Task(coro, loop=loop, name=name)


def after_reading(due: Callable[..., None], *args: Any) -> None:
    """Call `due` once the loop has read what has come by now, and its waiters had a turn: it may not be late at all."""
    loop = asyncio.get_running_loop()
    loop.call_later(READ_S, loop.call_soon, due, *args)


def in_time(
    loop: asyncio.AbstractEventLoop, seconds: float, due: Callable[..., None], *args: Any
) -> asyncio.TimerHandle:
    """Call `due` after these seconds, and as much later as `InTime` would wait; return what stops that, if in time.

    It may come although it was stopped, so `due` looks whether anything is to be done.
    """
    return loop.call_later(seconds, _due, loop, loop.time() + seconds, seconds, due, args)


def _due(
    loop: asyncio.AbstractEventLoop, at: float, most_s: float, due: Callable[..., None], args: tuple[Any, ...]
) -> None:  # fmt: skip
    late_s = min(loop.time() - at, most_s)
    loop.call_later(max(late_s, READ_S), loop.call_soon, due, *args)


async def guarded(work: Coroutine[Any, Any, Result], *, name: str) -> Result | None:
    """Run work in a group of tasks: what it raises is logged, and does not end the others.

    Returns what the work does; None where it raised. Cancel: cancels the work.
    """
    try:
        return await work
    except Exception:
        log.exception("task failed", extra={"event": "bug", "task": name})
        return None


async def periodic(
    turn: Callable[[], Awaitable[None]],
    *,
    every_s: float | Callable[[], float],
    name: str,
    jitter_ratio: float = 0.15,
    rng: random.Random | None = None,
    woken: asyncio.Event | None = None,
) -> None:
    """Run `turn` for ever, `every_s` (+- jitter) after the end of the one before, or once `woken` is set.

    `every_s` may be a function, asked after each turn, where the pace follows what was found.
    An exception in one turn is logged, and the loop goes on, a second later at the earliest. Run it in a TaskGroup.
    Cancel: stops at once, inside the turn too.
    """
    spread = rng or random.Random()
    while True:
        least_s = 0.0
        try:
            await turn()
        except Exception:
            log.exception("periodic task failed", extra={"event": "bug", "task": name})
            least_s = _AFTER_BUG_S
        pause_s = max(least_s, every_s() if callable(every_s) else every_s)
        pause_s *= 1 + spread.uniform(-jitter_ratio, jitter_ratio)
        if woken is None:
            await asyncio.sleep(pause_s)
            continue
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await woken.wait()
        woken.clear()


class InTime:
    """Bound a wait as `asyncio.timeout` does, but let what came while this process did not run count.

    The loop runs its timers before it looks at its sockets. So a timer that fires late would end a wait whose
    answer is there already. Here the time by which it is late is added, and then the loop looks at its sockets
    before the wait ends.

    Raises:
        TimeoutError: nothing came in these seconds; in up to twice as many where the timer was late.
    Cancel: passes through.
    """

    __slots__ = ("_limit", "_over_at", "_seconds", "_timer")

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._limit = asyncio.timeout(None)
        self._timer: asyncio.Handle | None = None
        self._over_at = 0.0

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()
        if self._seconds is not None:
            loop = asyncio.get_running_loop()
            self._over_at = loop.time() + self._seconds
            self._timer = loop.call_at(self._over_at, self._late, loop, self._seconds)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None  # it refers to this object
        await self._limit.__aexit__(kind, error, where)

    def _late(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        late_s = min(loop.time() - self._over_at, seconds)
        self._timer = loop.call_later(late_s, self._limit.reschedule, self._over_at)


class Running:
    """The time in which this process ran, as its owner knows who looks at the clock all the time.

    What lies between two looks, but for some seconds, is time in which it stood still.
    """

    def __init__(self, now: float) -> None:
        self._looked_at = now
        self._stood_s = 0.0

    def look(self, now: float) -> float:
        """Note a look; return the seconds since the one before."""
        ran, passed_s = self.at(now), now - self._looked_at
        self._looked_at, self._stood_s = now, now - ran
        return passed_s

    def at(self, now: float) -> float:
        """Return the clock without the time in which it stood still."""
        return now - self._stood_s - max(0.0, now - self._looked_at - _STOOD_STILL_S)


_BESIDE: Final = ThreadPoolExecutor(1, thread_name_prefix="beside")


async def beside(work: Callable[[], Result]) -> Result:
    """Run pure work in the one thread beside the loop, which goes on meanwhile.

    The interpreter lets the loop run at least every 5 ms, unless a single call into C takes longer.

    Cancel: work that has begun runs to its end, and is dropped.
    """
    return await asyncio.get_running_loop().run_in_executor(_BESIDE, work)


class _Apart(Executor):
    """Runs each work in a thread of its own, which does not hold up the end of the process."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        ended: Future[Any] = Future()
        ended.set_running_or_notify_cancel()

        def run() -> None:
            ended.set_result(work(*args, **named))

        threading.Thread(target=run, name="apart", daemon=True).start()
        return ended


_APART: Final = _Apart()


async def apart(work: Callable[[], Result]) -> Result:
    """Run work that may never end, as a read from a file server that hangs; it must raise nothing.

    Its thread does not hold up the end of the process. Cancel: at once; the work goes on, and is dropped.
    """
    return await asyncio.get_running_loop().run_in_executor(_APART, work)
