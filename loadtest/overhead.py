"""What the gateway adds: direct and through it, in alternating rounds of one run.

    python -m loadtest.overhead --rounds 5 --out loadtest/reports/overhead.json

Means are subtracted; percentiles are shown side by side, never subtracted. Differences within the
spread of the rounds are no result. The load generator's own CPU is reported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import time

from loadtest.client import Connection, Result, request_bytes
from loadtest.harness import Site, cpu_s, pss_kib, site


async def closed_loop(
    port: int, key: str, *, stream: bool, tokens: int, clients: int, seconds: float
) -> list[Result]:
    """Let each client send one request after the other."""
    results: list[Result] = []
    until = time.monotonic() + seconds
    data = request_bytes(port, key, stream=stream, tokens=tokens)

    async def client() -> None:
        connection = Connection(port)
        while time.monotonic() < until:
            results.append(await connection.send(data))
        connection.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    return results


def percentile(values: list[float], share: float) -> float:
    """Return the value below which `share` of `values` lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def measure(where: Site, port: int, *, stream: bool, seconds: float) -> dict[str, float]:
    """Run one round against one port."""
    cpu, own, started = cpu_s(where.pid), time.process_time(), time.monotonic()
    results = asyncio.run(
        closed_loop(
            port, where.key, stream=stream, tokens=32 if stream else 4, clients=16, seconds=seconds
        )
    )
    took = time.monotonic() - started
    first = [1e3 * (result.first_at - result.sent_at) for result in results]
    gaps = [
        1e3 * (after - before)
        for result in results
        for before, after in zip(result.chunk_at, result.chunk_at[1:], strict=False)
    ]
    return {
        "requests": len(results),
        "failed": sum(not result.complete or result.status != 200 for result in results),
        "per_s": len(results) / took,
        "gateway_us_per_request": 1e6 * (cpu_s(where.pid) - cpu) / len(results),
        "gateway_us_per_chunk": 1e6
        * (cpu_s(where.pid) - cpu)
        / max(1, sum(len(each.chunk_at) for each in results)),
        "generator_cpu_ratio": (time.process_time() - own) / took,
        "first_byte_ms_mean": statistics.fmean(first),
        "first_byte_ms_p50": percentile(first, 0.5),
        "first_byte_ms_p99": percentile(first, 0.99),
        "gap_ms_p50": percentile(gaps, 0.5) if gaps else 0.0,
        "gap_ms_p99": percentile(gaps, 0.99) if gaps else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--out")
    args = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = {}
    with site(backends=1, sim_flags=("--decode-step", "0.005")) as where:
        idle_kib = pss_kib(where.pid)
        for _ in range(args.rounds):
            for stream in (False, True):
                for name, port in (("direct", where.backend_ports[0]), ("gateway", where.port)):
                    kind = f"{name} {'stream' if stream else 'json'}"
                    rounds.setdefault(kind, []).append(
                        measure(where, port, stream=stream, seconds=args.seconds)
                    )
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    report = {
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "idle_mib": idle_kib / 1024,
        "rounds": rounds,
    }
    print(f"{'':16}{'median of rounds (spread)':>40}")
    for kind, each in rounds.items():
        print(kind)
        for field in each[0]:
            values = [one[field] for one in each]
            print(
                f"    {field:26}{statistics.median(values):12.2f}   ({min(values):.2f} .. {max(values):.2f})"
            )
    for kind in ("json", "stream"):
        added = [
            through["first_byte_ms_mean"] - direct["first_byte_ms_mean"]
            for through, direct in zip(
                rounds[f"gateway {kind}"], rounds[f"direct {kind}"], strict=True
            )
        ]
        print(f"added mean time to first byte, {kind}: {statistics.median(added):.3f} ms")
    print(f"idle memory: {idle_kib / 1024:.1f} MiB")
    if args.out:
        with open(args.out, "w") as out:
            json.dump(report, out, indent=1)


if __name__ == "__main__":
    main()
