"""How far the clocks of backends and of Redis are from this machine's."""

from __future__ import annotations

import email.utils
import time
from collections.abc import Iterator
from typing import Final

from gateway.cli.doctor.findings import Finding, Verdict, ok
from gateway.core.aio import SystemClock
from gateway.store.scripts import PREFIX, Script
from gateway.store.shared import StoreUnavailable

_MOST_S: Final = 5.0  # a `Date` has whole seconds, and its reply was under way
_REDIS_S: Final = 3.0  # to connect, and to answer
_CLOCK: Final = Script("return redis.call('TIME')")
_CHANGE: Final = "timedatectl set-ntp true, on the machine whose clock is wrong"


def of_date(date: str, whose: str, verdict: Verdict, harm: str) -> Iterator[Finding]:
    """Yield how far a reply's `Date` is from this machine's clock; nothing if it has no date.

    `verdict` and `harm` are what is told if it is too far: `harm` ends the sentence.
    """
    try:
        theirs = email.utils.parsedate_to_datetime(date).timestamp()
    except ValueError:
        return
    yield from judged(time.time() - theirs, whose, verdict, harm)


def judged(apart_s: float, whose: str, verdict: Verdict, harm: str) -> Iterator[Finding]:
    """Yield whether clocks that are so far apart go together. Pure."""
    if abs(apart_s) <= _MOST_S:
        yield ok("clock", f"The clocks of this machine and of {whose} go together")
        return
    yield Finding(
        verdict=verdict, about="clock", change=_CHANGE,
        told=f"The clocks of this machine and of {whose} are {abs(apart_s):.0f} s apart: {harm}",
    )  # fmt: skip


async def redis_clock(url: str) -> list[Finding]:
    """Return how far the clock of the Redis at a URL is from this machine's."""
    try:
        from gateway.store.onredis import redis_store

        store = redis_store(url, SystemClock(), _REDIS_S)
    except (ImportError, ValueError) as error:  # `check` says more of it
        return [_unknown(error)]
    try:
        seconds, _ = await store.link.ask(_CLOCK, [f"{PREFIX}{{doctor}}"], [], _REDIS_S)
    except StoreUnavailable as error:
        return [_unknown(error)]
    finally:
        await store.close()
    harm = "limits and budgets go by Redis's clock, the end of keys by this one"
    return [*judged(time.time() - int(seconds), "Redis", "wrong", harm)]


def _unknown(error: Exception) -> Finding:
    return Finding(verdict="skipped", about="clock", told=f"The clock of Redis is not known: {error}",
                   change="vllm-gateway check --probe")  # fmt: skip
