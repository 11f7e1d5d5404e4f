"""Simulated backends in a process of their own, which break at the times of a plan and write a ledger.

    python -m tests.faults.engines PLAN LEDGER

The plan is JSON, `{"engines": n, "strikes": [{"at_s", "engine", "fault", "for_s"}, ...]}`. URLs come on
standard output, a line each; the first line on standard input starts the clock, its end stops all.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import sys
from collections.abc import Sequence
from typing import Final

import msgspec

from gateway.sim.server import SimConfig, SimServer
from tests.faults import ledgers
from tests.faults.ledgers import EngineLine
from tests.faults.traffic import write_down

KILL: Final = "kill"  # the server goes away with all of its connections, and comes back
_KEEP_EVERY_S: Final = 0.5


class Strike(msgspec.Struct, frozen=True):
    """One fault of one engine: from when, and for how long it lasts."""

    at_s: float
    engine: int
    fault: str
    for_s: float


class Plan(msgspec.Struct, frozen=True):
    """What happens to how many engines."""

    engines: int
    strikes: Sequence[Strike]


async def strike(sim: SimServer, what: Strike) -> None:
    """Break one engine and heal it again."""
    await asyncio.sleep(what.at_s)
    if what.fault == KILL:
        await sim.stop()
    else:
        sim.inject(what.fault)
    await asyncio.sleep(what.for_s)
    if what.fault == KILL:
        await sim.start()
    else:
        sim.clear()


async def one_after_the_other(sim: SimServer, strikes: Sequence[Strike]) -> None:
    """Carry out the strikes of one engine; none begins before the one before is over."""
    begun = asyncio.get_running_loop().time()
    for each in strikes:
        late = asyncio.get_running_loop().time() - begun
        await strike(sim, Strike(max(0.0, each.at_s - late), each.engine, each.fault, each.for_s))


async def run(plan: Plan, path: pathlib.Path) -> None:
    """Serve until standard input ends."""
    lines: list[EngineLine] = []
    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:
        sims = []
        for number in range(plan.engines):
            # Slow enough that streams are under way when something breaks.
            config = SimConfig(model="m", decode_step_s=0.01, max_num_seqs=256)
            sims.append(await stack.enter_async_context(SimServer(config)))
            write_down(sims[-1], f"b{number + 1}", lines.append)
            print(sims[-1].url, flush=True)
        await loop.run_in_executor(None, sys.stdin.readline)
        tasks = [
            loop.create_task(
                one_after_the_other(sim, [each for each in plan.strikes if each.engine == number])
            )
            for number, sim in enumerate(sims)
        ]
        ended = loop.run_in_executor(None, sys.stdin.read)
        while not ended.done():
            await asyncio.sleep(_KEEP_EVERY_S)
            kept, lines[:] = list(lines), []
            ledgers.write(path, kept)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()
    ledgers.write(path, lines)


if __name__ == "__main__":
    _plan = msgspec.json.decode(pathlib.Path(sys.argv[1]).read_bytes(), type=Plan)
    asyncio.run(run(_plan, pathlib.Path(sys.argv[2])))
