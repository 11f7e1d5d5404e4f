"""A simulated backend that the gateway launches, and that notes its life.

    python -m tests.faults.launched NAME MODEL FOLDER --uds SOCKET

SIGUSR1 ends it as a crash does: its connections break, and nobody is told. Its ledger is complete then,
which it would not be after SIGKILL. SIGTERM ends it in order.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pathlib
import signal
import time
from typing import Final

from gateway.sim.server import SimConfig, SimServer
from tests.faults import ledgers
from tests.faults.ledgers import EngineLine, Life
from tests.faults.traffic import write_down

CRASHED: Final = 1  # the exit code
_KEEP_EVERY_S: Final = 0.5


async def run(name: str, model: str, folder: pathlib.Path, uds: str) -> int:
    """Serve until a signal comes; return the exit code."""
    lines: list[EngineLine] = []
    told: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number, ends_with in ((signal.SIGUSR1, CRASHED), (signal.SIGTERM, 0)):
        loop.add_signal_handler(number, told.put_nowait, ends_with)
    code: int | None = None
    sim = SimServer(SimConfig(model=model, uds=uds))
    write_down(sim, name, lines.append, lambda: code == CRASHED)
    life = Life(engine=name, pid=os.getpid(), began_at=time.monotonic())
    ledgers.write(folder / "lives.jsonl", [life])
    async with sim:
        while code is None:
            try:
                async with asyncio.timeout(_KEEP_EVERY_S):
                    code = await told.get()
            except TimeoutError:
                kept, lines[:] = list(lines), []
                ledgers.write(folder / f"engine-{name}.jsonl", kept)
    ledgers.write(folder / f"engine-{name}.jsonl", lines)
    return code


def main() -> int:
    """Run as a program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("model")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--uds", required=True)
    return asyncio.run(run(**vars(parser.parse_args())))


if __name__ == "__main__":
    raise SystemExit(main())
