"""Simulated backends in a process of their own, which break at the times of a plan and write a ledger.

    python -m tests.faults.engines PLAN LEDGER

The plan is JSON, `{"engines": n, "calm": n, "strikes": [{"at_s", "engine", "fault", "for_s"}, ...]}`. URLs come on
standard output, a line each; the first line on standard input starts the clock, its end stops all.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import sys
from collections.abc import Sequence
from functools import partial
from typing import Final

import msgspec

from gateway.sim.server import SimConfig, SimServer
from tests.faults import ledgers
from tests.faults.ledgers import EngineLine
from tests.faults.traffic import write_down

CALM: Final = "calm"  # the model, its pool, and the tenant who asks it
KILL: Final = "kill"  # the server goes away with all of its connections, and comes back
_KEEP_EVERY_S: Final = 0.5


class Strike(msgspec.Struct, frozen=True):
    """One fault of one engine: from when, and for how long it lasts."""

    at_s: float
    engine: int
    fault: str
    for_s: float


class Plan(msgspec.Struct, frozen=True):
    """What happens to how many engines, and how many others serve a model that nothing happens to."""

    engines: int
    strikes: Sequence[Strike]
    calm: int = 0

    def configs(self) -> list[SimConfig]:
        """Return what the engines are; those that nothing happens to come last."""
        # Slow enough that streams are under way when something breaks.
        struck = SimConfig(model="m", decode_step_s=0.01, max_num_seqs=256)
        # A first token takes 0.2 to 0.4 s, as those of real engines do: many times what a busy machine adds.
        calm = SimConfig(model=CALM, decode_step_s=0.2, max_num_seqs=256)
        return [struck] * self.engines + [calm] * self.calm


async def strike(sim: SimServer, what: Strike, killed: set[SimServer]) -> None:
    """Break one engine and heal it again; one that is killed is in `killed` until it comes back."""
    await asyncio.sleep(what.at_s)
    if what.fault == KILL:
        killed.add(sim)
        await sim.stop()
    else:
        sim.inject(what.fault)
    await asyncio.sleep(what.for_s)
    if what.fault == KILL:
        await sim.start()
        killed.discard(sim)
    else:
        sim.clear()


async def one_after_the_other(
    sim: SimServer, strikes: Sequence[Strike], killed: set[SimServer]
) -> None:
    """Carry out the strikes of one engine; none begins before the one before is over."""
    begun = asyncio.get_running_loop().time()
    for each in strikes:
        late = asyncio.get_running_loop().time() - begun
        due = Strike(max(0.0, each.at_s - late), each.engine, each.fault, each.for_s)
        await strike(sim, due, killed)


async def run(plan: Plan, path: pathlib.Path) -> None:
    """Serve until standard input ends."""
    lines: list[EngineLine] = []
    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:
        sims: list[SimServer] = []
        killed: set[SimServer] = set()
        for number, config in enumerate(plan.configs()):
            sim = await stack.enter_async_context(SimServer(config))
            sims.append(sim)
            write_down(sim, f"b{number + 1}", lines.append, partial(killed.__contains__, sim))
            print(sim.url, flush=True)
        await loop.run_in_executor(None, sys.stdin.readline)
        tasks = [
            loop.create_task(
                one_after_the_other(
                    sim, [each for each in plan.strikes if each.engine == number], killed
                )
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
