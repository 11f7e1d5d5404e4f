"""The end of all requests when the gateway ends."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from gateway.ingress.downstream import Downstream

log = logging.getLogger("gateway.app")

_LAST_WORDS_S: Final = 1.0  # for streams to take their error frame when the grace period is over


async def drain(live: set[Downstream], grace_s: float, hurry: asyncio.Event) -> None:
    """Let requests finish up to `grace_s`, or until `hurry`; then tell the rest, and end them."""
    log.info("draining", extra={"event": "draining", "requests": len(live), "grace_s": grace_s})
    hurried = asyncio.get_running_loop().create_task(hurry.wait(), name="second signal")
    try:
        await _ended(live, grace_s, hurried)
    finally:
        hurried.cancel()
    for down in tuple(live):
        if down.relay is not None:
            down.relay.shut_down()
        else:
            down.cancel()
    await _ended(live, _LAST_WORDS_S)


async def _ended(live: set[Downstream], patience_s: float, *unless: asyncio.Task[Any]) -> None:
    """Wait until every request in progress has ended, `patience_s` at most, or one of `unless` has."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    while tasks := [down.task for down in live if down.task and not down.task.done()]:
        left_s = deadline - loop.time()
        if left_s <= 0 or any(task.done() for task in unless):
            return
        # One task waits for them all: to look at each whenever one ends would be quadratic.
        everyone = loop.create_task(_all(tasks), name="requests in progress")
        try:
            await asyncio.wait(
                [everyone, *unless], timeout=left_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            everyone.cancel()


async def _all(tasks: list[asyncio.Task[None]]) -> None:
    await asyncio.wait(tasks)
