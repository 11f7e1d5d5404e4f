"""What limits cost the gateway: CPU a request for take and settle, in memory and on a Redis on loopback.

python -m loadtest.micro.limits [--redis-url redis://127.0.0.1:6379/0] [--rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import time
from collections.abc import Awaitable, Callable

import uvloop

from gateway.core.aio import SystemClock
from gateway.core.asked import Caller
from gateway.core.limits import Amounts, KeyLimits, Plan, Taken
from gateway.limiting.limiter import Limiter
from gateway.limiting.plans import compiled
from gateway.limiting.rules import header_lines
from gateway.store.shared import Lease, StoreUnavailable

_REQUESTS = 4000
_COSTS = Amounts(1.0, 100.0, 50.0, 150.0, 0.0)
_ACTUAL = Amounts(1.0, 100.0, 20.0, 120.0, 0.0)
_KEY = KeyLimits(10**8, 10**9, 10**9, 1000)
_DAILY = KeyLimits(10**8, tokens_per_day=10**12, budget_per_month=1e9)


def plans() -> dict[str, Plan]:
    """Return the plans that are measured."""
    few = Caller("k", "k", "t", limits=KeyLimits(10**8))
    key = Caller("k", "k", "t", limits=_KEY)
    found = {
        "requests/min of a key": compiled(few, None),
        "four rules of a key": compiled(key, None),
        "those, and three of its tenant": compiled(key, _DAILY),
    }
    return {name: plan for name, plan in found.items() if plan is not None}


async def cost_us(
    limiter: Limiter, plan: Plan, at_once: int, shared: bool, answers: Callable[[], Awaitable[None]]
) -> float:
    """Return the CPU of one request in microseconds."""

    async def client() -> None:
        for _ in range(_REQUESTS // at_once):
            taken = await limiter.take(plan, _COSTS)
            while isinstance(taken, Taken) and shared and not taken.shared:
                limiter.settle(taken, _COSTS)
                await answers()  # a busy machine kept Redis from answering in time
                taken = await limiter.take(plan, _COSTS)
            assert isinstance(taken, Taken)
            header_lines(plan, taken.used, taken.wall)
            limiter.settle(taken, _ACTUAL)

    began = time.process_time()
    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(client())
    return (time.process_time() - began) / _REQUESTS * 1e6


async def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--redis-url", default="")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    clock = SystemClock()
    arms = {"memory, 1 at once": (Limiter(clock, None, lambda: 1), 1)}
    store = None
    if args.redis_url:
        from gateway.store.onredis import redis_store

        store = redis_store(args.redis_url, clock)
        await store.link.client.ping()
        for at_once in (1, 8, 32):
            arms[f"redis, {at_once} at once"] = Limiter(clock, store.link, lambda: 1), at_once

    async def answers() -> None:
        while store is not None:
            await asyncio.sleep(1.1)
            with contextlib.suppress(StoreUnavailable):
                await store.renew(Lease("none", "none", 0, 0.0))
                return

    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(args.rounds):
        for name, (limiter, at_once) in arms.items():
            for what, plan in plans().items():
                found.setdefault((name, what), []).append(
                    await cost_us(limiter, plan, at_once, name.startswith("redis"), answers)
                )
    for (name, what), each in found.items():
        print(f"{name:20} {what:32} {statistics.median(each):7.1f} us (least {min(each):.1f})")
    if store is not None:
        await store.close()


if __name__ == "__main__":
    uvloop.run(main())
