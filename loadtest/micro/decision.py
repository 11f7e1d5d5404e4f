"""What it costs to admit a request and pick its backend, by backends and by requests that wait.

    python -m loadtest.micro.decision

"at once": need, entry and release with nobody waiting. "from the queue": a slot comes back, the gate
finds who is next, picks the backend and takes its slot, with so many requests waiting from a hundred
tenants. Both are to stay below 30 us at 16 backends and 10,000 waiting.
"""

from __future__ import annotations

import asyncio
import statistics
import time

from gateway.admission.gate import Gate
from gateway.config.models import Config
from gateway.core.aio import SystemClock, start
from gateway.core.types import (
    Ask,
    Call,
    Caller,
    Demand,
    Dialect,
    Endpoint,
    LoadSample,
    ModelsSeen,
    ProbePassed,
    Route,
    Scraped,
    ServedModel,
    Slot,
)
from gateway.pools.table import PoolTable
from gateway.routing.choice import Chooser

CALL = Call(Endpoint.CHAT, Dialect.CHAT, "m", False, b"{}", text_bytes=600)
ROUTE, DEMAND = Route("m", "m", "m"), Demand(1600, False, 16)
TENANTS = 100


def world(backends: int, limit: int | None) -> tuple[PoolTable, Gate]:
    """Make a pool of ready, lightly loaded backends, and its gate."""
    clock = SystemClock()
    table = PoolTable(clock)
    members = [
        {"url": f"http://127.0.0.1:{8000 + place}", "max_in_flight": limit}
        for place in range(backends)
    ]
    queue = {"max_requests": 100_000, "tenant_share": 1.0, "max_wait": "1h", "max_tokens": "900M"}
    config = Config.model_validate({"pools": {"m": {"backends": members, "queue": queue}}})
    gate = Gate(table, Chooser(table), clock)
    table.apply(config.pools, config.health)
    gate.configure(config.pools, {0})
    at = clock.now() + 1e6  # fresh for as long as this runs
    for backend in table:
        table.observe(backend.id, ModelsSeen(at, (ServedModel("m", None, 131_072),)))
        table.observe(backend.id, ProbePassed(at))
        table.observe(backend.id, Scraped(LoadSample(at, 3, 0, 0.2, 10_000_000)))
    return table, gate


def ask(gate: Gate, tenant: int) -> Ask:
    """Make a request's question for a backend."""
    caller = Caller(f"k{tenant}", "somebody", f"t{tenant}")
    return Ask(ROUTE, CALL, DEMAND, caller, gate.needs.of(CALL, DEMAND, caller))


def at_once(backends: int, rounds: int = 5, times: int = 5000) -> float:
    """Return microseconds per request that is let in at once and leaves, median of the rounds."""
    _, gate = world(backends, None)
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(times):
            slot = gate.enter(ask(gate, 1))
            assert slot is not None
            slot.release()
        taken.append((time.perf_counter() - began) / times * 1e6)
    return statistics.median(taken)


async def from_queue(backends: int, waiting: int, times: int = 2000) -> float:
    """Return microseconds per slot that comes back and is given to the next, median of single ones."""
    _, gate = world(backends, 4)
    held = []
    while (slot := gate.enter(ask(gate, 1))) is not None:
        held.append(slot)
    deadline = time.monotonic() + 3000
    done: list[Slot] = []

    async def one(place: int) -> None:
        asked = ask(gate, place % TENANTS)
        done.append(await gate.wait(asked, deadline=deadline, body_bytes=100, request_id="r"))

    tasks = [start(one(place), name="waits") for place in range(waiting + times)]
    await asyncio.sleep(0)
    taken = []
    for _ in range(times):
        slot = held.pop()
        began = time.perf_counter()
        slot.release()
        taken.append((time.perf_counter() - began) * 1e6)
        await asyncio.sleep(0)
        held.append(done.pop())
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    return statistics.median(taken)


def main() -> None:
    """Print the table."""
    print("admit and pick, us")
    for backends in (1, 4, 16):
        print(f"  at once, {backends:2d} backends: {at_once(backends):6.1f}")
    for waiting in (10, 1000, 10_000):
        taken = asyncio.run(from_queue(16, waiting, times=300))
        print(f"  from the queue, 16 backends, {waiting:6d} waiting: {taken:6.1f}")


if __name__ == "__main__":
    main()
