"""What prefix routing loses with several gateways before the same engines, in simulated time.

    python -m loadtest.routing_replicas [--traces ...] [--counts 1 2 4] [--backends 8] [--seeds 1]
        [--jobs 2] [--report FILE]

Each request goes to a gateway by chance, as behind a load balancer. The gateways tell each other what they have under
way (decision 038). `approximate` is the default: they tell each other, too, which prompts they sent where (041).
`alone` is the same without that: each learns from its own requests alone. `precise` sees all caches, as an index does that
follows the engines' KV events without a delay.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import pathlib
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from gateway.routing.exchange import PrefixExchange
from loadtest.replicas import Several
from loadtest.routing import SECONDS, WARM_SHARE, figures
from loadtest.routing_traces import NAMES, trace
from loadtest.routing_virtual import ENGINE, CachingEngines, RoutingGateway, SeeingGateway, play
from loadtest.virtual import VirtualLoop

KINDS: Final = {"approximate": RoutingGateway, "alone": RoutingGateway, "precise": SeeingGateway}
_TRACES: Final = ("many prompts", "chats", "agents", "hot spot", "restart", "random")


@dataclass(frozen=True)
class Job:
    """One cell, to be run in a process of its own."""

    trace: str
    index: str
    gateways: int
    backends: int
    seed: int


def run_job(job: Job) -> dict[str, Any]:
    """Run one cell and return its figures."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return job.__dict__ | runner.run(_measure(job))


class SharingGateways(Several):
    """Gateways that tell each other which prompts they sent where."""

    def __init__(self, every: Sequence[RoutingGateway], seed: int) -> None:
        super().__init__(every, seed, told=True)
        self._exchanges = []
        for place, each in enumerate(every):
            told = PrefixExchange(
                self.store,
                each.table,
                str(place),
                each.hasher,
                name_of=lambda backend: backend.id,
                secret=lambda: b"",
                count=lambda result, hashes: None,
                rng=random.Random(1000 * seed + place),
            )
            self._exchanges.append(told)

    async def run(self) -> None:
        """Have all gateways do their background work. Cancel: it ends."""
        async with asyncio.TaskGroup() as group:
            group.create_task(super().run())
            for each in self._exchanges:
                group.create_task(each.run())


async def _measure(job: Job) -> dict[str, Any]:
    seconds = SECONDS.get(job.backends, 60.0)
    planned = trace(job.trace, job.backends, seconds, job.seed, 1.0)
    engines = CachingEngines(ENGINE, job.backends)
    every = [KINDS[job.index](engines, {}, 100 * job.seed + place) for place in range(job.gateways)]
    several = (
        SharingGateways(every, job.seed)
        if job.index == "approximate" and job.gateways > 1
        else Several(every, job.seed, told=job.gateways > 1)
    )

    def forget() -> None:
        engines.states[0].drivers[0].forget_prefixes(preempt=True)

    async with asyncio.TaskGroup() as group:
        background = group.create_task(several.run())
        outcomes, _ = await play(planned, several, forget)
        background.cancel()
    return figures(outcomes, (seconds * WARM_SHARE, seconds), job.backends)


def table_of(cells: list[dict[str, Any]]) -> str:
    """Return the medians over the seeds, as Markdown."""
    groups = defaultdict(list)
    for each in cells:
        groups[each["trace"], each["index"], each["gateways"]].append(each)
    lines = [
        "| trace | index | gateways | hit rate | first token p50 | p99 | most/mean |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (name, index, gateways), group in groups.items():

        def of(figure: str, group: list[dict[str, Any]] = group) -> float:
            return statistics.median(each[figure] for each in group)

        lines.append(
            f"| {name} | {index} | {gateways} | {of('hit_ratio'):.1%} | {of('ttft_p50_s'):.3f} s"
            f" | {of('ttft_p99_s'):.3f} s | {of('spread'):.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the command line."""
    top = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--traces", nargs="+", default=[*_TRACES], choices=NAMES)
    top.add_argument("--counts", nargs="+", type=int, default=[1, 2, 4])
    top.add_argument("--backends", type=int, default=8)
    top.add_argument("--seeds", nargs="+", type=int, default=[1])
    top.add_argument("--jobs", type=int, default=2, help="processes at a time")
    top.add_argument("--report", type=pathlib.Path, help="write the table to a file, too")
    args = top.parse_args()
    jobs = [
        Job(name, index, count, args.backends, seed)
        for name in args.traces
        for index in KINDS
        for count in args.counts
        for seed in args.seeds
    ]
    cells = []
    with ProcessPoolExecutor(
        args.jobs, initializer=logging.disable, initargs=(logging.ERROR,)
    ) as pool:
        for cell in pool.map(run_job, jobs):
            cells.append(cell)
            print(table_of([cell]).splitlines()[-1], file=sys.stderr, flush=True)
    text = table_of(cells)
    if args.report:
        args.report.write_text(f"{text}\n")
    print(text)


if __name__ == "__main__":
    main()
