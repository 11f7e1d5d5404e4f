"""Upgrades under load: a new process of the gateway takes over, and every request has its whole reply.

    python -m loadtest.upgrade --upgrades 5                 200 streams and 500 requests/s while it happens
    python -m loadtest.upgrade --port 8080 --key gw_... --command 'systemctl restart vllm-gateway' --upgrades 3

Without --port it runs simulated backends and a gateway of its own. Half of the requests come over new
connections, half over kept ones. Exits with 1 if anything was refused, reset, cut, or not answered with 200.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import pathlib
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from loadtest.client import Connection, Result, request_bytes
from loadtest.harness import BIN, site

STREAM_TOKENS = 50
REQUEST_TOKENS = 1
BETWEEN_S = 6.0  # two upgrades
PATIENCE_S = 150.0


@dataclass
class Seen:
    """What became of all requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    # When requests waited, and how long.
    waits: list[tuple[float, float]] = field(default_factory=list)
    examples: dict[str, str] = field(default_factory=dict)

    def note(self, kind: str, result: Result, failure: BaseException | None = None) -> None:
        """Count one request; `failure` is how its connection failed."""
        if isinstance(failure, ConnectionRefusedError):
            word = "refused"
        elif failure is not None:
            word = "cut" if result.status else "reset"
        elif result.status != 200:
            word = f"status {result.status}"
        elif kind == "stream" and (result.error or b"[DONE]" not in result.last):
            word = "cut"
        else:
            word = "whole"
        self.outcomes[f"{kind} {word}"] += 1
        if word != "whole":
            self.examples.setdefault(f"{kind} {word}", repr(failure or result.body[:200]))
        elif kind != "stream":
            self.waits.append((result.sent_at, result.ended_at - result.sent_at))


class Load:
    """Streams that follow one another, and requests at a steady pace."""

    def __init__(self, port: int, key: str, seen: Seen) -> None:
        self.port, self.seen, self.over = port, seen, False
        self._stream = request_bytes(port, key, stream=True, tokens=STREAM_TOKENS)
        self._request = request_bytes(port, key, stream=False, tokens=REQUEST_TOKENS)
        self._rests: list[Connection] = []

    async def streams(self) -> None:
        """Have one stream after the other until it is over."""
        connection = Connection(self.port)
        while not self.over:
            await self._one("stream", connection, self._stream)
        connection.close()

    async def requests(self, per_s: float) -> None:
        """Begin requests at this pace, however long they take."""
        loop = asyncio.get_running_loop()
        due, number = loop.time(), 0
        async with asyncio.TaskGroup() as group:
            while not self.over:
                group.create_task(self._request_once(kept=number % 2 == 0))
                number += 1
                due += 1 / per_s
                await asyncio.sleep(max(0.0, due - loop.time()))
        for connection in self._rests:
            connection.close()

    async def _request_once(self, *, kept: bool) -> None:
        if not kept:
            connection = Connection(self.port)
            await self._one("new", connection, self._request)
            connection.close()
            return
        connection = self._rests.pop() if self._rests else Connection(self.port)
        await self._one("kept", connection, self._request)
        self._rests.append(connection)

    async def _one(self, kind: str, connection: Connection, data: bytes) -> None:
        result = Result()
        try:
            result = await connection.send(data)
        except (OSError, asyncio.IncompleteReadError) as error:
            connection.close()
            self.seen.note(kind, result, error)
            await asyncio.sleep(0.01)
            return
        self.seen.note(kind, result)


async def upgrades(words: list[str], count: int, load: Load) -> list[tuple[float, float, int, str]]:
    """Run the command so many times under the load; returns when, how long, its exit code, its words."""
    told = []
    for _ in range(count):
        await asyncio.sleep(BETWEEN_S)
        at = time.monotonic()
        ran = await asyncio.to_thread(
            subprocess.run, words, capture_output=True, text=True, timeout=PATIENCE_S
        )
        told.append((at, time.monotonic() - at, ran.returncode, (ran.stdout + ran.stderr).strip()))
        print(f"  {told[-1][1]:6.2f} s  exit code {ran.returncode}  {told[-1][3]}", flush=True)
    await asyncio.sleep(BETWEEN_S)
    load.over = True
    return told


async def measure(port: int, key: str, words: list[str], given: argparse.Namespace) -> bool:
    """Load the gateway, upgrade it meanwhile, and print what became of all requests."""
    seen = Seen()
    load = Load(port, key, seen)
    async with asyncio.TaskGroup() as group:
        told = group.create_task(upgrades(words, given.upgrades, load))
        group.create_task(load.requests(given.requests))
        for _ in range(given.streams):
            group.create_task(load.streams())
            await asyncio.sleep(0.005)
    spans = [(at, at + took + 1) for at, took, _, _ in told.result()]
    during = [wait for at, wait in seen.waits if any(a <= at <= b for a, b in spans)]
    beside = [wait for at, wait in seen.waits if not any(a <= at <= b for a, b in spans)]
    for name, waits in (("while upgrading", during), ("at other times", beside)):
        p50, p99 = statistics.median(waits), statistics.quantiles(waits, n=100)[98]
        print(
            f"requests {name}: {len(waits)}, p50 {p50 * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms,"
            f" longest {max(waits) * 1e3:.0f} ms"
        )
    for word, number in sorted(seen.outcomes.items()):
        print(f"{word}: {number} {seen.examples.get(word, '')}")
    worked = all((code == 0) is not given.fails for _, _, code, _ in told.result())
    return worked and not seen.examples


def main() -> int:
    """Run it; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrades", type=int, default=5)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--requests", type=float, default=500.0, help="per second")
    parser.add_argument(
        "--port", type=int, help="of a gateway that runs; needs --key and --command"
    )
    parser.add_argument("--key", default="")
    parser.add_argument("--command", default="", help="what upgrades or restarts it")
    parser.add_argument(
        "--fails", action="store_true", help="break the settings first, so that no upgrade succeeds"
    )
    given = parser.parse_args()
    if given.port:
        return not asyncio.run(measure(given.port, given.key, shlex.split(given.command), given))
    extra = "log: {access: false}\nshutdown: {grace: 60s}\n"
    with site(2, ("--decode-step", "0.2", "--max-num-seqs", "512"), extra) as where:
        admin = f"http://127.0.0.1:{where.admin_port}"
        words = [str(BIN / "vllm-gateway"), "upgrade", "--server", admin]
        settings = pathlib.Path(where.log).with_name("gateway.yaml")
        if given.fails:
            settings.write_text(settings.read_text() + "nothing_of_this_name: 1\n")
        try:
            return not asyncio.run(measure(where.port, where.key, words, given))
        finally:
            for pid in processes(settings):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
                    os.kill(pid, signal.SIGTERM)


def processes(settings: pathlib.Path) -> list[int]:
    """Return the gateway processes that serve by this settings file."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdecimal() else ()
            if b"serve" in words and str(settings).encode() in words:
                found.append(int(entry.name))
    return found


if __name__ == "__main__":
    sys.exit(main())
