"""Loads and first tokens of 100 LoRA adapters on 4 servers that keep 16 each, in simulated time.

    python -m loadtest.adapters [--skews 0.8 1.1] [--rates 6 12] [--seeds 1] [--seconds 240] [--arms ...]
        [--jobs 2] [--report FILE]

Nothing of it depends on how busy the machine is, and the same seed gives the same figures.
"""

from __future__ import annotations

import argparse
import logging
import math
import pathlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Final

from loadtest import adapters_virtual as site
from loadtest.outcomes import End, Outcome

_WARM_SHARE: Final = 0.25  # of the time: it fills caches, and is not measured


@dataclass(frozen=True)
class Job:
    """One mix for one arm, to be run in a process of its own."""

    skew: float
    rate_per_s: float
    seconds: float
    seed: int
    arm: str


@dataclass(frozen=True)
class Cell:
    """The figures of one job."""

    job: Job
    requests: int
    whole: int  # that got all of their reply
    refused: int
    loads_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    ttft_p999_s: float
    tokens_per_s: float  # written, of requests that ended in time
    spread: float  # the most that one server got, over its even share
    took_s: float


def run_job(job: Job) -> Cell:
    """Run one cell and return its figures."""
    began, head_s = time.process_time(), _WARM_SHARE * job.seconds
    shots = site.mix(job.seconds, job.rate_per_s, job.skew, job.seed)
    outcomes, loads = site.run(shots, job.arm, job.seed, head_s)
    return cell(job, outcomes, loads, head_s, time.process_time() - began)


def cell(job: Job, outcomes: Sequence[Outcome], loads: int, head_s: float, took_s: float) -> Cell:
    """Sum up the requests that were due after the head.

    A first token that never came, because a request was refused or cut, counts as later than all others.
    """
    seconds = job.seconds - head_s
    due = [each for each in outcomes if each.planned_s >= head_s]
    ends = Counter(each.end for each in due)
    waits = sorted(math.inf if each.ttft_s is None else each.ttft_s for each in due)
    ended = (each for each in outcomes if each.end is End.COMPLETE)
    written = sum(
        each.shot.output_tokens for each in ended if head_s <= (each.ended_s or 0) < job.seconds
    )
    places = Counter(each.place for each in due if each.place is not None)
    most = max(places.values(), default=0) * site.BACKENDS / max(1, places.total())
    p50_s, p99_s, p999_s = (
        waits[min(len(waits) - 1, int(share * len(waits)))] for share in (0.5, 0.99, 0.999)
    )
    return Cell(
        job, len(due), ends[End.COMPLETE], ends[End.REFUSED], loads / seconds,
        p50_s, p99_s, p999_s, written / seconds, most, took_s,
    )  # fmt: skip


def table(cells: Sequence[Cell]) -> Iterator[str]:
    """Write the cells as a table, one mix after the other."""
    yield "| skew | req/s | arm | whole | refused | loads/s | first token p50 | p99 | p99.9 | tokens/s | spread |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for each in sorted(cells, key=lambda one: (one.job.skew, one.job.rate_per_s, one.job.seed)):
        job = each.job
        first = " | ".join(
            f"{s:.2f} s" for s in (each.ttft_p50_s, each.ttft_p99_s, each.ttft_p999_s)
        )
        yield (
            f"| {job.skew} | {job.rate_per_s:g} | {job.arm} | {each.whole / each.requests:.1%} | {each.refused} "
            f"| {each.loads_per_s:.2f} | {first} | {each.tokens_per_s:.0f} | {each.spread:.2f} |"
        )


def main() -> None:
    """Run all cells that are asked for, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--skews", type=float, nargs="+", default=[0.8, 1.1])
    parser.add_argument("--rates", type=float, nargs="+", default=[6.0, 12.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--arms", nargs="+", choices=site.ARMS, default=site.ARMS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--report", type=pathlib.Path)
    args = parser.parse_args()
    jobs = [
        Job(skew, rate, args.seconds, seed, arm)
        for skew in args.skews
        for rate in args.rates
        for seed in args.seeds
        for arm in args.arms
    ]
    with ProcessPoolExecutor(
        args.jobs, initializer=logging.disable, initargs=(logging.ERROR,)
    ) as pool:
        cells = [*pool.map(run_job, jobs)]
    lines = [*table(cells)]
    print("\n".join(lines))
    print(f"{sum(each.took_s for each in cells):.0f} s of CPU")
    if args.report is not None:
        args.report.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
