"""Several gateways before the same engines, in simulated time: what it costs that none sees what the others send.

    python -m loadtest.replicas [--counts 1 3 10] [--engines study] [--servers 2] [--levels 0.7 1 2 4]
        [--seeds 1 2 3] [--jobs 2] [--out FILE]

Each request goes to a gateway by chance, as behind a load balancer. `alone`: each gateway knows what the
metrics show, and what it sends itself. `told`: each tells the others what it has under way
(decision 038). The load grows with the servers, and is the same for any count of gateways.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import pathlib
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final

from gateway.admission.telling import Telling
from gateway.store.memory import MemoryStore
from loadtest.arrivals import Phase, Shot, merge, plan
from loadtest.engines import BENCHES, Bench
from loadtest.openloop import fire
from loadtest.outcomes import Outcome, figures
from loadtest.scenarios import TENANTS, Cell, Study
from loadtest.simulated import COUNT, GRACE_TIMES, WARM_S
from loadtest.virtual import Clock, Engines, VirtualLoop
from loadtest.virtual_gateway import Gateway


@dataclass(frozen=True)
class Job:
    """One cell, to be run in a process of its own."""

    bench: str
    servers: int
    gateways: int
    told: bool
    level: float
    seed: int


class Several:
    """Gateways with nothing in common but their engines and a store; a `Target`."""

    def __init__(self, every: Sequence[Gateway], seed: int, *, told: bool) -> None:
        self.every = every
        self._rng = random.Random(seed)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.store = store = MemoryStore(loop)
        self._telling = [
            Telling(
                store,
                loop,
                each.table,
                str(place),
                each.gate.anybody_waits,
                lambda backend: backend.id,
                random.Random(seed + place),
            )
            for place, each in enumerate(self.every)
        ]
        if not told:
            self._telling = []

    async def run(self) -> None:
        """Have all gateways do their background work. Cancel: it ends."""
        async with asyncio.TaskGroup() as group:
            for gateway in self.every:
                group.create_task(gateway.run())
            for telling in self._telling:
                group.create_task(telling.run())

    def prepare(self, shot: Shot, *, retry: bool = False) -> tuple[Gateway, Any]:
        """Choose a gateway by chance."""
        gateway = self._rng.choice(self.every)
        return gateway, gateway.prepare(shot, retry=retry)

    async def send(self, prepared: tuple[Gateway, Any], outcome: Outcome, clock: Clock) -> None:
        """Send one request, see `openloop.Target`."""
        gateway, shot = prepared
        await gateway.send(shot, outcome, clock)


def run_job(job: Job) -> dict[str, Any]:
    """Run one cell and return its figures."""
    bench = BENCHES[job.bench]
    grown = replace(bench, capacity_per_s=bench.capacity_per_s * job.servers / COUNT)
    cell = _cell(grown, job.level, job.seed)
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        found = runner.run(measure(grown, job, cell))
    return job.__dict__ | found


def _cell(bench: Bench, level: float, seed: int) -> Cell:
    study = Study(
        bench.profile, bench.capacity_per_s, bench.seconds, seed, lead_s=bench.lead_s, tail_s=3.0
    )
    warm_s, cell = max(WARM_S, bench.lead_s), study.level(level)
    before = plan([Phase(warm_s, 0.5 * bench.capacity_per_s)], bench.profile, TENANTS, seed + 500)
    later = [replace(shot, at_s=shot.at_s + warm_s) for shot in cell.shots]
    window = (cell.window[0] + warm_s, cell.window[1] + warm_s)
    return replace(cell, shots=merge(before, later), window=window, until_s=cell.until_s + warm_s)


async def measure(bench: Bench, job: Job, cell: Cell) -> dict[str, Any]:
    engines, slo = Engines(bench.config, job.servers), bench.slo
    last_s = cell.until_s + GRACE_TIMES * bench.lead_s

    def awaited(outcome: Outcome, now_s: float) -> bool:
        counts = cell.window[0] <= outcome.shot.at_s < cell.window[1]
        return counts and now_s < last_s and outcome.may_become_good(slo, now_s)

    every = [Gateway(engines, {}, 100 * job.seed + place) for place in range(job.gateways)]
    several = Several(every, job.seed, told=job.told)
    async with asyncio.TaskGroup() as group:
        background = group.create_task(several.run())
        outcomes, cut_s = await fire(
            several, cell.shots, until_s=cell.until_s, retry=cell.retry, awaited=awaited
        )
        background.cancel()
    return figures(outcomes, slo, cell.window, cut_s) | {
        "preemptions": engines.total("preemptions")
    }


_COLUMNS: Final[dict[str, Callable[[dict[str, Any]], float]]] = {
    "good/s": lambda cell: cell["goodput_per_s"],
    "p50 s": lambda cell: cell["ttft_s"]["p50"],
    "p99 s": lambda cell: cell["ttft_s"]["p99"],
    "refused": lambda cell: cell["refusals"]["count"],
    "preempted": lambda cell: cell["preemptions"],
}


def table_of(cells: list[dict[str, Any]]) -> str:
    """Return the medians over the seeds."""
    groups = defaultdict(list)
    for each in cells:
        told = "told" if each["told"] else "alone"
        groups[each["bench"], each["servers"], each["level"], each["gateways"], told].append(each)
    lines = ["engine  servers  load  gateways         " + "".join(f"{n:>11}" for n in _COLUMNS)]
    for (bench, servers, level, gateways, told), group in sorted(groups.items()):
        figures = [statistics.median(map(of, group)) for of in _COLUMNS.values()]
        name = f"{bench:8}{servers:7}{level:6g}{gateways:10}  {told:8}"
        lines.append(name + "".join(f"{figure:11.3f}" for figure in figures))
    return "\n".join(lines)


def main() -> None:
    """Run the command line."""
    top = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--counts", nargs="+", type=int, default=[1, 3, 10])
    top.add_argument("--engines", nargs="+", default=["study"], choices=BENCHES)
    top.add_argument("--servers", type=int, default=COUNT)
    top.add_argument("--levels", nargs="+", type=float, default=[0.7, 1.0, 2.0, 4.0])
    top.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    top.add_argument("--jobs", type=int, default=2, help="processes at a time")
    top.add_argument("--out", type=pathlib.Path, help="keep the cells as JSON")
    args = top.parse_args()
    jobs = [
        Job(bench, args.servers, count, told, level, seed)
        for bench in args.engines
        for level in args.levels
        for count in args.counts
        for told in ((True, False) if count > 1 else (False,))
        for seed in args.seeds
    ]
    with ProcessPoolExecutor(
        args.jobs, initializer=logging.disable, initargs=(logging.ERROR,)
    ) as pool:
        cells = list(pool.map(run_job, jobs))
    if args.out:
        args.out.write_text(json.dumps(cells, indent=1) + "\n")
    print(table_of(cells))


if __name__ == "__main__":
    main()
