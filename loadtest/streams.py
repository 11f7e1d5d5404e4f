"""Memory per held stream: many slow streams, and many clients that do not read at all.

python -m loadtest.streams --streams 1000
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
import time

from loadtest.client import Connection, request_bytes
from loadtest.harness import Site, pss_kib, site

LIMIT_KIB = 256  # what one unread stream may hold


async def hold(where: Site, streams: int) -> float:
    """Hold streams that trickle; return KiB per stream."""
    before = pss_kib(where.pid)
    data = request_bytes(where.port, where.key, stream=True, tokens=400)
    connections = [Connection(where.port) for _ in range(streams)]
    tasks = [
        asyncio.get_running_loop().create_task(each.send(data, leave_after=5))
        for each in connections
    ]
    await asyncio.sleep(4)
    during = pss_kib(where.pid)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for connection in connections:
        connection.close()
    return (during - before) / streams


def stall(where: Site, streams: int) -> tuple[float, float]:
    """Ask for long streams and read nothing; return MiB grown and requests left afterwards."""
    before = pss_kib(where.pid)
    data = request_bytes(where.port, where.key, stream=True, tokens=30_000)
    sockets = []
    for _ in range(streams):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", where.port))
        client.sendall(data)
        sockets.append(client)
    time.sleep(8)
    grown = pss_kib(where.pid) - before
    for client in sockets:
        client.close()
    time.sleep(1)
    return grown / streams, where.total("gateway_inflight_requests")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    args = parser.parse_args()
    with site(backends=2, sim_flags=("--decode-step", "0.05", "--max-num-seqs", "2000")) as where:
        print(f"idle {pss_kib(where.pid) / 1024:.1f} MiB")
        print(
            f"{args.streams} trickling streams: {asyncio.run(hold(where, args.streams)):.1f} KiB each"
        )
    with site(backends=2, sim_flags=("--decode-step", "0", "--max-model-len", "65536")) as where:
        grown_kib, left = stall(where, 50)
        print(
            f"50 streams nobody reads: {grown_kib:.1f} KiB each; {left:.0f} in flight after they left"
        )
    return 0 if grown_kib <= LIMIT_KIB and left == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
