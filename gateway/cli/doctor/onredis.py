"""Whether the Redis that gateways share keeps what they tell it, and goes by the same clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from gateway.cli.doctor.clocks import judged
from gateway.cli.doctor.findings import Finding, ok
from gateway.core.aio import SystemClock
from gateway.store.scripts import PREFIX, Script
from gateway.store.shared import StoreUnavailable

_ANSWERS_S: Final = 3.0  # to connect, and to answer
# The time, and what INFO says of its memory; nothing where this user may not ask.
_LOOK: Final = Script("""
local memory = redis.pcall('INFO', 'memory')
return {redis.call('TIME')[1], type(memory) == 'string' and memory or ''}
""")
_KEEPS: Final = "noeviction"
_HARM: Final = "limits and budgets go by Redis's clock, the end of keys by this one"


async def redis_findings(url: str) -> list[Finding]:
    """Return what there is to say of the Redis at a URL."""
    try:
        from gateway.store.onredis import redis_store

        store = redis_store(url, SystemClock(), _ANSWERS_S)
    except (ImportError, ValueError) as error:  # `check` says more of it
        return [_unknown(error)]
    try:
        seconds, memory = await store.link.ask(_LOOK, [f"{PREFIX}{{doctor}}"], [], _ANSWERS_S)
    except StoreUnavailable as error:
        return [_unknown(error)]
    finally:
        await store.close()
    return [*judged(time.time() - int(seconds), "Redis", "wrong", _HARM), *keeps(memory)]


def keeps(memory: str) -> Iterator[Finding]:
    """Yield whether a Redis keeps all keys, by what INFO says of its memory; nothing if it does not say. Pure."""
    told = dict(line.split(":", 1) for line in memory.splitlines() if ":" in line)
    policy, most = told.get("maxmemory_policy"), told.get("maxmemory")
    if policy is None or most is None:
        return
    if policy == _KEEPS or most == "0":
        yield ok("redis", "Redis drops no keys by itself")
        return
    yield Finding(
        verdict="wrong", about="redis", change=f"maxmemory-policy {_KEEPS}, in redis.conf",
        told=f"Redis drops keys by itself (`maxmemory-policy {policy}`, `maxmemory {most}`):"
        " limits, usage and shared keys are then lost, or counted twice",
    )  # fmt: skip


def _unknown(error: Exception) -> Finding:
    return Finding(verdict="skipped", about="clock", told=f"The clock of Redis is not known: {error}",
                   change="vllm-gateway check --probe")  # fmt: skip
