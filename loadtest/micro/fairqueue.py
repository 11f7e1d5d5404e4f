"""What one operation of the admission queue costs, by how much waits.

    python -m loadtest.micro.fairqueue [--rounds 500]

100 tenants in two bands, 16 backends; `place` goes through all 16, as the gate does. Prints medians
in microseconds. Every round leaves the queue as long as it was.

    take      the first request in fair order is placed
    passing   31 requests are looked at and blocked, the 32nd is placed
    none      32 requests are looked at, none is placed
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from gateway.admission.bounds import Limits
from gateway.admission.queue import Blocked, Claims, FairQueue
from gateway.admission.waiting import Waiting
from gateway.core.types import (
    Ask,
    Call,
    Caller,
    Credit,
    Demand,
    Dialect,
    Endpoint,
    Need,
    Route,
    Slot,
)

TENANTS = 100
LOOKS = 32  # the queue's own bound of one take, for one kind alone
FREE_TOKENS = {f"pool/b{number}": 1_000_000 + number for number in range(16)}
ROUTE = Route("m", "m", "m")
CALL = Call(Endpoint.CHAT, Dialect.CHAT, "m", False, b"{}")
BLOCKED = Blocked(frozenset(FREE_TOKENS))
LIMITS = Limits(requests=100_000, tokens=10**10, bytes=10**12, tenant_ratio=1.0)


class Gate:
    """Finds the emptiest backend, after it found room for nothing `blocked` times."""

    def __init__(self, blocked: int = 0) -> None:
        self.blocked = blocked

    def place(self, waiting: Waiting, claimed: Claims) -> Slot | Blocked:
        best, room = None, waiting.cost_tokens
        for backend_id, free_tokens in FREE_TOKENS.items():
            if free_tokens >= room and backend_id not in claimed:
                best, room = backend_id, free_tokens
        self.blocked -= 1
        return BLOCKED if best is None or self.blocked >= 0 else Slot(best, 0.0, 0, Credit(0, 0))


def request(rng: random.Random) -> Waiting:
    cost = int(min(60_000, rng.lognormvariate(7, 1.2)))
    caller = Caller("key", "somebody", f"tenant-{rng.randrange(TENANTS)}", rng.choice((0, 0, 5)))
    ask = Ask(ROUTE, CALL, Demand(cost, True), caller, Need(cost, 0))
    # Nobody awaits its turn.
    return Waiting(ask, None, 0.0, 30.0 + rng.random(), 4 * cost)  # type: ignore[arg-type]


def measure(queued: int, rounds: int) -> dict[str, float]:
    """Return the median cost in microseconds of each operation on a queue of this length."""
    rng = random.Random(1)
    queue = FairQueue(LIMITS, max_looks=2 * LOOKS, max_passes=10**9)
    costs: dict[str, list[float]] = defaultdict(list)
    held = [request(rng) for _ in range(queued)]
    for each in held:
        queue.offer(each)

    def timed(name: str, operation: Callable[..., Any], *arguments: object) -> Any:
        start = time.perf_counter()
        result = operation(*arguments)
        costs[name].append((time.perf_counter() - start) * 1e6)
        return result

    for _ in range(rounds):
        new = request(rng)
        timed("offer", queue.offer, new)
        taken, _ = timed("take", queue.take, Gate().place)
        if taken is not new:
            held[held.index(taken)] = new
        new = request(rng)
        held.append(new)
        queue.offer(new)
        leaving = held.pop(rng.randrange(len(held)))
        timed("ahead", queue.ahead, leaving)
        timed("remove", queue.remove, leaving)
        if queued >= LOOKS:
            taken, _ = timed("passing", queue.take, Gate(blocked=LOOKS - 1).place)
            timed("none", queue.take, Gate(blocked=LOOKS).place)
            queue.offer(taken)
    return {name: statistics.median(found) for name, found in costs.items()}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=500)
    rounds = options.parse_args().rounds
    names = ("offer", "take", "remove", "ahead", "passing", "none")
    print(f"{'queued':>8}" + "".join(f"{name:>10}" for name in names) + "   us, median")
    for queued in (0, 100, 1000, 10_000):
        found = measure(queued, rounds)
        row = (f"{found[name]:>10.1f}" if name in found else f"{'-':>10}" for name in names)
        print(f"{queued:>8}" + "".join(row))


if __name__ == "__main__":
    main()
