"""Many requests, a fifth of whose clients leave at a random moment: afterwards nothing may be left.

    python -m loadtest.soak --requests 100000

Fails when a slot, a request, a connection or a file descriptor is left, or when memory keeps growing.
"""

from __future__ import annotations

import argparse
import asyncio
import pathlib
import random
import sys
import time

from loadtest.client import Connection, request_bytes
from loadtest.harness import Site, open_files, pss_kib, site


async def worker(where: Site, count: list[int], rng: random.Random, tally: dict[str, int]) -> None:
    connection = Connection(where.port)
    while count[0] > 0:
        count[0] -= 1
        stream = rng.random() < 0.5
        leaves = rng.random() < 0.2
        tokens = rng.randrange(1, 12)
        leave_after = rng.randrange(0, tokens + 1) if leaves else None
        if leaves and not stream:
            leave_after = 0
        data = request_bytes(where.port, where.key, stream=stream, tokens=tokens)
        try:
            result = await connection.send(data, leave_after=leave_after)
            word = (
                "left"
                if leaves
                else (
                    "ok" if result.status == 200 and result.complete else f"status {result.status}"
                )
            )
            if word.startswith("status"):
                word += f" {result.body[:200]!r}"
        except (OSError, asyncio.IncompleteReadError) as error:
            connection.close()
            word = f"error {type(error).__name__}"
        tally[word] = tally.get(word, 0) + 1
    connection.close()


async def load(where: Site, requests: int, clients: int, seed: int) -> dict[str, int]:
    tally: dict[str, int] = {}
    count = [requests]
    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(worker(where, count, random.Random(seed * 1000 + number), tally))
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    failures = []
    with site(backends=3, sim_flags=("--decode-step", "0.001")) as where:
        asyncio.run(load(where, 2_000, args.clients, 0))  # warm up: pools, caches, code
        time.sleep(5)
        files_before, memory_before = open_files(where.pid), pss_kib(where.pid)
        memory = []
        started = time.monotonic()
        tally: dict[str, int] = {}
        for part in range(10):
            for word, number in asyncio.run(
                load(where, args.requests // 10, args.clients, args.seed + part)
            ).items():
                tally[word] = tally.get(word, 0) + number
            memory.append(pss_kib(where.pid))
            print(
                f"{(part + 1) * args.requests // 10:>8} requests  {memory[-1] / 1024:6.1f} MiB",
                flush=True,
            )
        took_s = time.monotonic() - started
        time.sleep(6)  # idle upstream connections expire
        in_flight = where.total("gateway_inflight_requests")
        files_after, memory_after = open_files(where.pid), pss_kib(where.pid)
        counted = where.total("gateway_requests_total")
        lines = pathlib.Path(where.log).read_text().splitlines(keepends=True)
        told = [line for line in lines if '"backend_error"' in line or '"bug"' in line]
        print("".join(told[:5]), end="")
    print(f"{args.requests} requests in {took_s:.0f} s: {tally}")
    print(
        f"in flight {in_flight:.0f}, files {files_before} -> {files_after}, memory {memory_before} -> {memory_after} KiB"
    )
    growth_kib = memory[-1] - memory[len(memory) // 2]
    print(
        f"memory growth over the second half: {growth_kib} KiB; requests counted by the gateway: {counted:.0f}"
    )
    if in_flight:
        failures.append("slots are left")
    if files_after > files_before + 2:
        failures.append("file descriptors are left")
    if growth_kib > 2048:
        failures.append("memory grows")
    if any(word.startswith(("error", "status")) for word in tally):
        failures.append("requests failed")
    print("FAILED: " + ", ".join(failures) if failures else "clean")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
