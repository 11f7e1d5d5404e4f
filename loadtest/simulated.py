"""The overload study in simulated time: four kinds of engine, every arm, one table against what is asked.

    python -m loadtest.simulated [--engines slow study fast tight] [--arms default ...] [--scenarios ...]
        [--seeds 1 2 3] [--jobs 2] [--cells] [--out FILE] [--with FILE]
    python -m loadtest.simulated --capacity          # measures the capacities anew, and nothing else

Nothing of it depends on how busy the machine is, and the same seed gives the same figures. A cell takes
a second or two. `--out` keeps the cells as JSON; `--with` compares with the cells of such a file, so that
arms which did not change need not be measured again.

Each cell begins with half load for a while: a gateway that met its engines before. The scenario `cold` is
4 x without it. In `lost` one of two servers takes no new request from the moment on at which counting begins.
In `lasting` a load of little more than the capacity goes on for minutes, and in `changed` 1.4 x of the usual requests
follow a batch of replies that were ten times as long.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import pathlib
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final

from loadtest.arrivals import Phase, merge, plan, shots
from loadtest.engines import BENCHES, Bench
from loadtest.openloop import Target, closed_loop, fire
from loadtest.outcomes import Outcome, figures
from loadtest.overload import goodput
from loadtest.scenarios import LASTS, TENANTS, Cell, Study
from loadtest.simulated_table import table_of
from loadtest.virtual import Direct, Engines, VirtualLoop, fewest_open
from loadtest.virtual_gateway import Gateway

# The settings of the pool; None stands for no gateway. `default` is what is shipped.
ARMS: Final[dict[str, dict[str, Any] | None]] = {
    "default": {},
    "tuned-150ms": {"queue": {"max_requests": 256, "max_wait": "150ms"}},
    "gateway-off": {"admission": "off"},
    "direct": None,
}
SCENARIOS: Final = ("levels", "surge", "fairness", "classes", "cold", "lost", "lasting", "changed")
LEVELS: Final = (0.5, 0.6, 0.8, 0.9, 1.0, 2.0, 4.0)
LASTING: Final = (1.0, 1.05, 1.1)
BATCH_TIMES: Final = 10  # as long as short replies
COUNT: Final = 2  # servers
WARM_S: Final = 20.0  # at least, of half load before a cell
GRACE_TIMES: Final = 3.0  # of the lead: so long after the last arrival what still runs is cut


@dataclass(frozen=True)
class Job:
    """One cell of one arm, to be run in a process of its own."""

    bench: str
    arm: str
    seed: int
    scenario: str
    label: str


def cells_of(bench: Bench, scenario: str, seed: int) -> list[Cell]:
    """Return the cells of one scenario, each after a stretch of half load."""
    study = Study(
        bench.profile, bench.capacity_per_s, bench.seconds, seed, lead_s=bench.lead_s, tail_s=3.0
    )
    if scenario == "cold":
        return [replace(study.level(4.0), scenario="cold", label="4")]
    warm_s, half_per_s = max(WARM_S, bench.lead_s), 0.5 * bench.capacity_per_s
    before = plan([Phase(warm_s, half_per_s)], bench.profile, TENANTS, seed + 500)
    match scenario:
        case "lost":
            cells = [study.lost()]
        case "lasting":
            cells = [study.lasting(level) for level in LASTING]
        case "changed":
            cells, warm_s = [study.changed()], LASTS * warm_s
            batch = bench.profile.batch(BATCH_TIMES)
            per_s = half_per_s * bench.profile.output_tokens / batch.output_tokens
            before = plan([Phase(warm_s, per_s)], batch, ("batch",), seed + 500)
        case _:
            cells = study.cells(scenario, [*LEVELS])
    found = []
    for cell in cells:
        later = [replace(shot, at_s=shot.at_s + warm_s) for shot in cell.shots]
        window = (cell.window[0] + warm_s, cell.window[1] + warm_s)
        lost_at_s = None if cell.lost_at_s is None else cell.lost_at_s + warm_s
        found.append(
            replace(
                cell,
                shots=merge(before, later),
                window=window,
                until_s=cell.until_s + warm_s,
                lost_at_s=lost_at_s,
            )
        )
    return found


def run_job(job: Job) -> dict[str, Any]:
    """Run one cell and return its figures."""
    bench = BENCHES[job.bench]
    cells = cells_of(bench, job.scenario, job.seed)
    cell = next(each for each in cells if each.label == job.label)
    began = time.process_time()
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        found = runner.run(measure(bench, job.arm, cell, job.seed))
    return {
        "engine": job.bench,
        "arm": job.arm,
        "seed": job.seed,
        "scenario": job.scenario,
        "label": job.label,
        **found,
        "took_s": round(time.process_time() - began, 2),
    }


async def measure(bench: Bench, arm: str, cell: Cell, seed: int) -> dict[str, Any]:
    """Measure one cell of one arm; its time is the running loop's, a `VirtualLoop`."""
    engines = Engines(bench.config, COUNT)
    settings, slo = ARMS[arm], bench.slo
    last_s = cell.until_s + GRACE_TIMES * bench.lead_s

    def awaited(outcome: Outcome, now_s: float) -> bool:
        counts = cell.window[0] <= outcome.shot.at_s < cell.window[1]
        return counts and now_s < last_s and outcome.may_become_good(slo, now_s)

    async def through(target: Target) -> dict[str, Any]:
        outcomes, cut_s = await fire(
            target, cell.shots, until_s=cell.until_s, retry=cell.retry, awaited=awaited
        )
        return figures(outcomes, slo, cell.window, cut_s)

    if settings is None:
        found = await through(Direct(engines, fewest_open(seed)))
    else:
        if arm.startswith("tuned"):
            settings = settings | {"slo": {"ttft": f"{slo.ttft_s}s", "itl": f"{slo.itl_s}s"}}
        gateway = Gateway(engines, settings, seed)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(gateway.run())]
            if cell.lost_at_s is not None:
                tasks.append(group.create_task(_lose(gateway, cell.lost_at_s)))
            found = await through(gateway)
            for each in tasks:
                each.cancel()
    return found | {"preemptions": engines.total("preemptions")}


async def _lose(gateway: Gateway, at_s: float) -> None:
    await asyncio.sleep(at_s)
    gateway.lose(0)


def capacity(bench: Bench, seed: int = 1) -> tuple[float, list[tuple[int, float]]]:
    """Return the best good replies/s of a closed loop straight to the engines, and those of the ramp."""

    async def measure() -> tuple[float, list[tuple[int, float]]]:
        target = Direct(Engines(bench.config, COUNT), fewest_open(seed))
        hold_s, settle_s = 2 * bench.lead_s, bench.lead_s
        source = shots(bench.profile, TENANTS, seed)
        steps = [(hold_s * place, count) for place, count in enumerate(bench.steps, start=1)]
        outcomes = await closed_loop(target, source, clients=steps)
        ramp = [
            (count, round(goodput(outcomes, bench.slo, until_s - settle_s, until_s), 2))
            for until_s, count in steps
        ]
        best = max(ramp, key=lambda step: step[1])[0]
        gentle = [(settle_s * (each + 1) / best, each + 1) for each in range(best)]
        until_s = 2 * settle_s + 3 * bench.seconds
        target = Direct(Engines(bench.config, COUNT), fewest_open(seed))
        outcomes = await closed_loop(target, source, clients=[*gentle, (until_s, best)])
        return goodput(outcomes, bench.slo, 2 * settle_s, until_s), ramp

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(measure())


def jobs(args: argparse.Namespace) -> Iterator[Job]:
    """Give the cells that were asked for."""
    for name in args.engines:
        for seed in args.seeds:
            for scenario in args.scenarios:
                for cell in cells_of(BENCHES[name], scenario, seed):
                    for arm in args.arms:
                        if ARMS[arm] is None and cell.lost_at_s is not None:
                            continue  # nobody is there who knows of it
                        yield Job(name, arm, seed, scenario, cell.label)


def main() -> None:
    """Run the command line."""
    args = parser().parse_args()
    if args.capacity:
        for name in args.engines:
            per_s, ramp = capacity(BENCHES[name])
            print(f"{name}: {per_s:.2f} good/s; in flight, good/s: {ramp}; {BENCHES[name].slo}")
        return
    began = time.monotonic()
    asked = list(jobs(args))
    cells = []
    with ProcessPoolExecutor(
        args.jobs, initializer=logging.disable, initargs=(logging.ERROR,)
    ) as pool:
        for found in pool.map(run_job, asked):
            cells.append(found)
            if args.out:
                args.out.write_text(json.dumps(cells, indent=1) + "\n")
    for file in args.compare:
        measured = {(each["engine"], each["arm"]) for each in cells}
        cells += [
            each
            for each in json.loads(file.read_text())
            if (each["engine"], each["arm"]) not in measured and each["engine"] in args.engines
        ]
    print(table_of(cells, details=args.cells))
    cpu_s = sum(each["took_s"] for each in cells[: len(asked)])
    print(f"{len(asked)} cells in {time.monotonic() - began:.0f} s, {cpu_s:.0f} s of CPU")


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    top = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--engines", nargs="+", default=[*BENCHES], choices=BENCHES)
    top.add_argument("--arms", nargs="*", default=[*ARMS], choices=ARMS)
    top.add_argument("--scenarios", nargs="+", default=[*SCENARIOS], choices=SCENARIOS)
    top.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    top.add_argument("--jobs", type=int, default=2, help="processes at a time")
    top.add_argument("--cells", action="store_true", help="show the figures of every cell, too")
    top.add_argument("--out", type=pathlib.Path, help="keep the cells as JSON")
    top.add_argument("--with", dest="compare", nargs="+", type=pathlib.Path, default=[])
    top.add_argument("--capacity", action="store_true")
    return top


if __name__ == "__main__":
    main()
