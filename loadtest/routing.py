"""The proof of routing for prefix caches: traces, pools and arms in simulated time, one table against the bars.

    python -m loadtest.routing [--traces ...] [--backends 2 8 32] [--arms ...] [--seeds 1] [--load 1.0]
        [--jobs 2] [--out FILE] [--with FILE ...] [--sockets FILE] [--report FILE]
    python -m loadtest.routing_sockets --help        # the same over sockets, beside real routers

Nothing of it depends on how busy the machine is, and the same seed gives the same figures. `--out` keeps
the cells as JSON; `--with` adds the cells of such files, so that arms which did not change need not be
measured again.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import pathlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Final

from loadtest.outcomes import End, Outcome
from loadtest.routing_table import over_sockets, report
from loadtest.routing_traces import NAMES, trace
from loadtest.routing_virtual import ARMS, run

# So long do the arrivals last, by the size of the pool; the first third fills caches and is not measured.
SECONDS: Final = {2: 60.0, 8: 45.0, 32: 18.0}
WARM_SHARE: Final = 1 / 3


@dataclass(frozen=True)
class Job:
    """One trace for one pool and one arm, to be run in a process of its own."""

    trace: str
    backends: int
    seed: int
    arm: str
    load: float = 1.0


def run_job(job: Job) -> dict[str, Any]:
    """Run one cell and return its figures."""
    seconds = SECONDS.get(job.backends, 60.0)
    began = time.process_time()
    planned = trace(job.trace, job.backends, seconds, job.seed, job.load)
    outcomes, _ = run(planned, job.arm, job.backends, job.seed)
    found = figures(outcomes, (seconds * WARM_SHARE, seconds), job.backends)
    return asdict(job) | found | {"took_s": round(time.process_time() - began, 2)}


def figures(
    outcomes: Sequence[Outcome], window: tuple[float, float], backends: int
) -> dict[str, Any]:
    """Sum up the requests that were due within the window.

    A first token that never came, because a request was refused or cut, counts as later than all others.
    Tokens, read and written, are those of the requests that ended within the window.
    """
    start, end = window
    due = [each for each in outcomes if start <= each.planned_s < end]
    read = [each for each in due if each.cached_tokens is not None]
    ended = [each.shot for each in outcomes if each.end is End.COMPLETE and start <= (each.ended_s or 0.0) < end]  # fmt: skip
    places = Counter(each.place for each in due if each.place is not None)
    prompts = sum(each.shot.prompt_tokens for each in read)
    waits = sorted(math.inf if each.ttft_s is None else each.ttft_s for each in due)
    return {
        "requests": len(due),
        "ends": dict(Counter(each.end.value for each in due)),
        "hit_ratio": sum(each.cached_tokens or 0 for each in read) / max(1, prompts),
        "tokens_per_s": sum(each.prompt_tokens + each.output_tokens for each in ended)
        / (end - start),
        "ttft_p50_s": quantile(waits, 0.5),
        "ttft_p99_s": quantile(waits, 0.99),
        "spread": max(places.values(), default=0) * backends / max(1, places.total()),
    }


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which that share of them lies; infinite for none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.inf


def jobs(args: argparse.Namespace) -> Iterator[Job]:
    """Give the cells that were asked for."""
    for seed in args.seeds:
        for backends in args.backends:
            for name in args.traces:
                for arm in args.arms:
                    yield Job(name, backends, seed, arm, args.load)


def main() -> None:
    """Run the command line."""
    args = parser().parse_args()
    began = time.monotonic()
    asked, cells = list(jobs(args)), list[dict[str, Any]]()
    with ProcessPoolExecutor(
        args.jobs, initializer=logging.disable, initargs=(logging.ERROR,)
    ) as pool:
        for found in pool.map(run_job, asked):
            cells.append(found)
            if args.out:
                args.out.write_text(json.dumps(cells, indent=1) + "\n")
    measured = {tuple(each[name] for name in _KEYS) for each in cells}
    for file in args.compare:
        older = json.loads(file.read_text())
        cells += [each for each in older if tuple(each[name] for name in _KEYS) not in measured]
    text = report(cells)
    if args.sockets:
        text += over_sockets(json.loads(args.sockets.read_text()))
    if args.report:
        args.report.write_text(text)
    print(text)
    print(f"{len(asked)} cells in {time.monotonic() - began:.0f} s")


_KEYS: Final = ("trace", "backends", "seed", "arm", "load")


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    top = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--traces", nargs="*", default=[*NAMES], choices=NAMES)
    top.add_argument("--backends", nargs="+", type=int, default=[*SECONDS])
    top.add_argument("--arms", nargs="*", default=[*ARMS], choices=ARMS)
    top.add_argument("--seeds", nargs="+", type=int, default=[1])
    top.add_argument("--load", type=float, default=1.0, help="times the rate of each trace")
    top.add_argument("--jobs", type=int, default=2, help="processes at a time")
    top.add_argument("--out", type=pathlib.Path, help="keep the cells as JSON")
    top.add_argument("--with", dest="compare", nargs="+", type=pathlib.Path, default=[])
    top.add_argument("--sockets", type=pathlib.Path, help="cells of `loadtest.routing_sockets`")
    top.add_argument("--report", type=pathlib.Path, help="write the tables to a file, too")
    return top


if __name__ == "__main__":
    main()
