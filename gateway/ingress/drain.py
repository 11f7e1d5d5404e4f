"""The end of requests that the gateway ends: of one that takes too long, and of all when it stops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sized
from typing import Any, Final

from gateway.core.errors import EndedByShutdown, ShuttingDown, TookTooLong
from gateway.ingress.connections import Connections
from gateway.ingress.downstream import Downstream

log = logging.getLogger("gateway.app")

_LOOK_S: Final = 0.25  # between two looks at how many connections are left
_SOON_S: Final = 0.02  # between two looks at whether any is busy
_HEADS_S: Final = 2.0  # for what has connected to ask, and for replies of other routes
_LAST_WORDS_S: Final = 1.0  # for streams to take their error frame when the grace period is over


def end_late(live: set[Downstream], now: float, total_s: float) -> None:
    """End what takes longer than `timeouts.total`, whatever it waits for; called about twice a second."""
    for down in tuple(live):
        if now - down.received_at >= total_s:
            down.stop(
                TookTooLong(
                    f"The request took longer than {total_s:g} s (`timeouts.total`). Ask for less at "
                    "a time, or have the limit raised."
                )
            )


def shutting_down() -> ShuttingDown:
    """Return the refusal of a request that comes or waits while the gateway stops (503)."""
    return ShuttingDown(
        "This gateway is shutting down. Retry; another replica will answer.", retry_after_s=1
    )


async def announce_stop(live: Sized, seconds: float, hurry: asyncio.Event) -> None:
    """Give load balancers this long to learn that the gateway stops, or until `hurry`.

    Meanwhile connections and requests are taken as ever.
    """
    extra = {"event": "announcing", "requests": len(live), "seconds": seconds}
    log.info("stopping; new connections are taken for %g s more", seconds, extra=extra)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await hurry.wait()


async def let_finish(live: set[Downstream], grace_s: float, hurry: asyncio.Event) -> None:
    """Let requests finish up to `grace_s`, or until `hurry`."""
    log.info(
        "draining", extra={"event": "draining", "requests": len(live), "grace_s": round(grace_s, 3)}
    )
    hurried = asyncio.get_running_loop().create_task(hurry.wait(), name="second signal")
    try:
        await _ended(live, grace_s, hurried)
    finally:
        hurried.cancel()


async def let_answer(connections: Connections, within_s: float) -> None:
    """Wait until no connection has a head on its way or a reply due, `within_s` at most.

    Requests that are no inference are not among those in progress.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + min(within_s, _HEADS_S)
    while connections.busy and loop.time() < deadline:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(_SOON_S)


async def end(live: set[Downstream]) -> None:
    """Tell the requests that are left, and end them."""
    for down in tuple(live):
        if down.relay is not None:
            down.stop(EndedByShutdown("This gateway is shutting down. Retry.", retry_after_s=1))
        else:
            down.cancel()
    await _ended(live, _LAST_WORDS_S)


async def outlast(connections: Sized, grace_s: float, hurry: asyncio.Event) -> float:
    """Wait until the last connection has closed, `grace_s` at most, or until `hurry`.

    Returns what is left of the time. Another process accepts connections meanwhile.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + grace_s
    log.info(
        "another process took over; connections that are open are served until they close",
        extra={"event": "outlasting", "connections": len(connections), "grace_s": grace_s},
    )
    while len(connections) and (left_s := deadline - loop.time()) > 0:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(_LOOK_S, left_s)):
                await hurry.wait()
                return 0.0
    return max(0.0, deadline - loop.time())


async def _ended(live: set[Downstream], patience_s: float, *unless: asyncio.Task[Any]) -> None:
    """Wait until every request in progress has ended, `patience_s` at most, or one of `unless` has."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    while tasks := [down.task for down in live if down.task and not down.task.done()]:
        left_s = deadline - loop.time()
        if left_s <= 0 or any(task.done() for task in unless):
            return
        # One task waits for them all: to look at each whenever one ends would be quadratic.
        everyone = loop.create_task(asyncio.wait(tasks), name="requests in progress")
        try:
            await asyncio.wait(
                [everyone, *unless], timeout=left_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            everyone.cancel()
