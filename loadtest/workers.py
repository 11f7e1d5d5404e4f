"""What a request costs with one worker and with several, and whether more of them make it wait.

    python -m loadtest.workers --workers 1 2 --seconds 5

All processes of a gateway share one core here, so requests/s tell nothing of several cores. CPU for a
request must not grow with the workers, but for what wakes them; and where the engines are idle, no
request waits for room, whatever the other workers carry.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import statistics
import time
import urllib.request

from loadtest.harness import Site, cpu_s, site
from loadtest.overhead import closed_loop

_SETTLED_S = 3.0  # workers have told each other what they carry, more than once


def processes(pid: int) -> list[int]:
    """Return a process and all that it started, and these."""
    children = [
        int(child)
        for listed in pathlib.Path(f"/proc/{pid}/task").glob("*/children")
        for child in listed.read_text().split()
    ]
    return [pid, *(each for child in children for each in processes(child))]


def connections(where: Site) -> list[int]:
    """Return how many connections each worker has, as it told last."""
    url = f"http://127.0.0.1:{where.admin_port}/admin/v1/replicas"
    with urllib.request.urlopen(url, timeout=5) as reply:
        return [each["connections"] for each in json.load(reply)["data"]]


def waited(where: Site) -> float:
    """Return how many requests have waited for room."""
    return where.total("gateway_queue_wait_seconds_count")


def measure(where: Site, clients: int, seconds: float) -> tuple[float, float, float]:
    """Return CPU microseconds for a request, requests/s, and the share of requests that waited."""
    pids, before = processes(where.pid), waited(where)
    cpu, began = sum(map(cpu_s, pids)), time.monotonic()
    loop = closed_loop(
        where.port, where.key, stream=False, tokens=4, clients=clients, seconds=seconds
    )
    results = asyncio.run(loop)
    took = time.monotonic() - began
    done = sum(each.status == 200 for each in results)
    used_us = 1e6 * (sum(map(cpu_s, pids)) - cpu)
    return used_us / done, done / took, (waited(where) - before) / done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(f"{'workers':>8}{'us/request':>12}{'requests/s':>12}{'waited':>8}  connections")
    for count in args.workers:
        with site(sim_flags=("--decode-step", "0"), extra=f"workers: {count}\n") as where:
            time.sleep(_SETTLED_S)
            found = [measure(where, args.clients, args.seconds) for _ in range(args.rounds)]
            us, per_s, share = map(statistics.median, zip(*found, strict=True))
            print(f"{count:8}{us:12.1f}{per_s:12.0f}{share:8.1%}  {connections(where)}", flush=True)


if __name__ == "__main__":
    main()
