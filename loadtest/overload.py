"""What overload does to vLLM servers, without and with a gateway that protects them.

    python -m loadtest.overload run --out FILE [--arms gateway tuned gateway-off direct vllm-router]
        [--scenarios levels surge fairness classes] [--levels 0.5 1 1.5 2 4] [--seconds 15]
        [--sim slow|study|fast|tight] [--retry] [--router PATH] [--backends URL URL --model tiny --profile tiny] [--add]
    python -m loadtest.overload report FILE        # loadtest/reports/overload.md and its plots

A long study may be measured in slices: with `--add` a run goes on with FILE, at the capacity found
there, and replaces the cells that it measures again. `--arms` without any measures the capacity alone.

The arm `gateway` has no setting touched. `--sim NAME` takes engines, load and objectives of
`loadtest.engines`; `loadtest.simulated` runs the same without sockets.

Capacity is measured first: the best goodput of a closed loop straight to the backends. Then come
open-loop Poisson arrivals at multiples of it; every arm gets the same requests at the same moments.

The machine must be quiet otherwise: the report says how busy it was. Real servers on the client's
own cores must yield to it, or what is measured is the client's wait for a core: `loadtest.real` starts
such servers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import pathlib
import platform
import re
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from typing import Any, Final

import uvloop

from loadtest.arms import ARMS, Backends, Entrance, KeyFolder, entrance, given, simulated
from loadtest.arrivals import PROFILES, Profile, shots
from loadtest.engines import BENCHES
from loadtest.harness import LOAD_CORE, cpu_s
from loadtest.openloop import Door, closed_loop, fire, scrape
from loadtest.outcomes import Outcome, Slo, figures
from loadtest.overload_report import write
from loadtest.scenarios import ALL_TENANTS, LEAD_S, NAMES, TENANTS, Cell, Study

GRACE_S: Final = 15.0  # after the last arrival: what still runs then is cut
HOLD_S: Final = 6.0  # a step of the capacity ramp
SETTLE_S: Final = 2.0  # of which this much does not count
STEPS: Final = (8, 16, 32, 48, 64, 80, 96, 128)
RAMP_UP_S: Final = 8.0
CONFIRM_S: Final = 20.0
REPORT: Final = pathlib.Path(__file__).parent / "reports" / "overload.md"


async def measure_capacity(door: Door, profile: Profile, slo: Slo, seed: int) -> dict[str, Any]:
    """Find the best goodput: more and more requests in flight, then the best number for longer."""
    plan = [(HOLD_S * place, count) for place, count in enumerate(STEPS, start=1)]
    ramp = []
    source = shots(profile, TENANTS, seed)
    outcomes = await closed_loop(door, source, clients=plan)
    for until_s, count in plan:
        ramp.append((count, round(goodput(outcomes, slo, until_s - HOLD_S + SETTLE_S, until_s), 3)))
    best = max(ramp, key=lambda step: step[1])[0]
    # They begin one after the other: all at once they would also end and begin again in step.
    gentle = [(RAMP_UP_S * (each + 1) / best, each + 1) for each in range(best)]
    until_s = RAMP_UP_S + SETTLE_S + CONFIRM_S
    outcomes = await closed_loop(door, source, clients=[*gentle, (until_s, best)])
    capacity = goodput(outcomes, slo, until_s - CONFIRM_S, until_s)
    return {"per_s": round(capacity, 3), "in_flight": best, "ramp": ramp}


def goodput(outcomes: Sequence[Outcome], slo: Slo, start_s: float, end_s: float) -> float:
    """Return the good replies per second that ended within a stretch of time."""
    good = [o for o in outcomes if o.ended_s is not None and o.is_good(slo)]
    return sum(start_s <= (o.ended_s or 0.0) < end_s for o in good) / (end_s - start_s)


async def run_cell(cell: Cell, entry: Entrance, backends: Backends, slo: Slo) -> dict[str, Any]:
    """Measure one cell: the clients' figures, the engines' and the CPU of every process."""

    def awaited(outcome: Outcome, now_s: float) -> bool:
        counts = cell.window[0] <= outcome.shot.at_s < cell.window[1]
        return counts and now_s < cell.until_s + GRACE_S and outcome.may_become_good(slo, now_s)

    peaks: dict[str, float] = {}
    before = await engines(backends)
    cpu = {"entrance": entry.pids, "backends": backends.pids}
    used = {name: sum(map(cpu_s, pids)) for name, pids in cpu.items()}
    own, all_cores, began = time.process_time(), busy_s(), time.monotonic()
    async with asyncio.TaskGroup() as group:
        watcher = group.create_task(watch(backends, peaks))
        outcomes, cut_s = await fire(
            entry.door, cell.shots, until_s=cell.until_s, retry=cell.retry, awaited=awaited
        )
        watcher.cancel()
    took = time.monotonic() - began
    after = await engines(backends)
    return {
        "scenario": cell.scenario,
        "label": cell.label,
        "seconds": round(cell.window[1] - cell.window[0], 3),
        **figures(outcomes, slo, cell.window, cut_s, entry.wait_s),
        "preemptions": after.get("vllm:num_preemptions_total", 0.0)
        - before.get("vllm:num_preemptions_total", 0.0),
        "tokens_per_s": round(
            (
                after.get("vllm:generation_tokens_total", 0)
                - before.get("vllm:generation_tokens_total", 0)
            )
            / took
        ),
        "peaks": peaks,
        "cpu_ratio": {
            "machine": round((busy_s() - all_cores) / took, 3),
            "client": round((time.process_time() - own) / took, 3),
            **{
                name: round((sum(map(cpu_s, pids)) - used[name]) / took, 3)
                for name, pids in cpu.items()
            },
        },
    }


async def engines(backends: Backends, patience_s: float = 60.0) -> dict[str, float]:
    """Return the engines' metrics, summed over the backends; a busy one is asked again."""
    totals: dict[str, float] = {}
    for host, port in backends.addresses:
        deadline = time.monotonic() + patience_s
        while not (seen := await scrape((host, port))):
            if time.monotonic() > deadline:
                raise SystemExit(f"no metrics from {host}:{port}")
            await asyncio.sleep(0.5)
        for name, value in seen.items():
            totals[name] = totals.get(name, 0.0) + value
    return totals


def busy_s() -> float:
    """Return the CPU seconds that all cores were busy since the machine started."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, *interrupts = map(int, file.readline().split()[1:8])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


async def watch(backends: Backends, peaks: dict[str, float]) -> None:
    """Keep the highest values that a look at each engine every second shows."""
    names = {"kv_usage": "vllm:kv_cache_usage_perc", "waiting": "vllm:num_requests_waiting"}
    while True:
        for address in backends.addresses:
            seen = await scrape(address)
            for short, name in names.items():
                peaks[short] = max(peaks.get(short, 0.0), round(seen.get(name, 0.0), 3))
        await asyncio.sleep(1.0)


async def drain(backends: Backends, seconds: float = 60.0) -> None:
    """Wait until the engines are idle."""
    deadline = time.monotonic() + seconds
    while True:
        seen = await engines(backends)
        if not seen.get("vllm:num_requests_running", 0) + seen.get("vllm:num_requests_waiting", 0):
            return
        if time.monotonic() > deadline:
            raise SystemExit("the backends did not become idle")
        await asyncio.sleep(0.2)


def run(args: argparse.Namespace) -> None:
    """Measure everything that was asked for; the file is written after every cell."""
    lead_s = take_bench(args)
    slo = Slo(args.ttft, args.itl)
    profile = PROFILES[args.profile]
    result: dict[str, Any] = json.loads(args.out.read_text()) if args.add else {"cells": []}
    result["meta"] = about(args)
    if args.capacity or not args.add:
        result["capacity"] = {"per_s": args.capacity}
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        keys = KeyFolder(folder, ALL_TENANTS)
        backends = stack.enter_context(chosen(args))
        if backends.pids:  # a real vLLM picks its own cores: stay where there is room
            os.sched_setaffinity(0, {LOAD_CORE})
        gc.disable()  # a collection would look like latency; a run makes little garbage
        result["meta"]["servers"] = tell(backends)
        if not result["capacity"]["per_s"]:
            door = Door(list(backends.addresses), backends.model)
            result["capacity"] = uvloop.run(measure_capacity(door, profile, slo, args.seed))
            uvloop.run(drain(backends))
            args.out.write_text(json.dumps(result, indent=1) + "\n")
        print("capacity:", result["capacity"], flush=True)
        study = Study(
            *(profile, result["capacity"]["per_s"], args.seconds, args.seed, args.retry),
            lead_s=lead_s,
        )
        for arm in args.arms:
            seconds = {"ttft_ms": slo.ttft_s, "itl_ms": slo.itl_s}
            objectives = {name: round(value * 1000) for name, value in seconds.items()}
            router = [args.router, *args.router_flags.split()]
            with entrance(arm, backends, keys, objectives, router) as entry:
                for cell in [c for name in args.scenarios for c in study.cells(name, args.levels)]:
                    entry.door.salt = time.time_ns()  # a server that ran before has seen no prompt
                    found = {"arm": arm} | uvloop.run(run_cell(cell, entry, backends, slo))
                    result["cells"] = [*others(result["cells"], found), found]
                    print(line_of(found), flush=True)
                    args.out.write_text(json.dumps(result, indent=1) + "\n")
                    uvloop.run(drain(backends))
                    gc.collect()


def take_bench(args: argparse.Namespace) -> float:
    """Take settings, load, objectives and capacity of a known engine; return the seconds of lead."""
    bench = BENCHES.get(args.sim)
    if bench is None:
        return LEAD_S
    args.sim, args.profile = json.dumps(bench.settings), bench.profile.name
    args.ttft, args.itl = bench.slo.ttft_s, bench.slo.itl_s
    args.capacity = args.capacity or bench.capacity_per_s
    return bench.lead_s


def others(cells: list[dict[str, Any]], found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cells that are not of the same arm, scenario and load as one."""
    names = ("arm", "scenario", "label")
    return [each for each in cells if any(each[name] != found[name] for name in names)]


def chosen(args: argparse.Namespace) -> contextlib.AbstractContextManager[Backends]:
    """Return the servers that were given, or simulated ones."""
    if args.backends:
        return contextlib.nullcontext(given(args.backends, args.model))
    return simulated(2, json.loads(args.sim))


def tell(backends: Backends) -> str:
    """Say what the servers tell of themselves: how many, which version, how large their cache is."""
    url = backends.urls[0]
    with urllib.request.urlopen(f"{url}/version", timeout=10) as reply:
        version = json.loads(reply.read())["version"]
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
        page = reply.read().decode()
    size = {name: value for name, value in re.findall(r'(block_size|num_gpu_blocks)="(\d+)"', page)}
    return (
        f"{len(backends.addresses)} vLLM {version} servers, model {backends.model}, each with"
        f" {size.get('num_gpu_blocks')} KV blocks of {size.get('block_size')} tokens"
    )


def about(args: argparse.Namespace) -> dict[str, Any]:
    """Say what was measured, where and with which settings."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    settings = {
        k: v for k, v in vars(args).items() if isinstance(v, str | float | int | list | bool)
    }
    return {
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "settings": settings,
    }


def line_of(found: dict[str, Any]) -> str:
    """Return one line about a cell."""
    ttft = found["ttft_s"] or {}
    bound = ">=" if "p99" in ttft.get("at_least", ()) else ""
    return (
        f"{found['arm']:12} {found['scenario']:8} {found['label']:6} offered {found['offered_per_s']:7.2f}/s"
        f"  good {found['goodput_per_s']:6.2f}/s  p99 TTFT {bound}{ttft.get('p99', 0):.2f} s"
        f"  preemptions {found['preemptions']:.0f}  {found['tokens_per_s']} tokens/s  {found['ends']}  cpu {found['cpu_ratio']}"
    )


def report(args: argparse.Namespace) -> None:
    """Write the report and its plots."""
    from loadtest.overload_plots import draw  # needs matplotlib, which measuring does not

    result = json.loads(args.file.read_text())
    if args.note:
        result["meta"]["note"] = args.note
    args.to.parent.mkdir(parents=True, exist_ok=True)
    names = draw(result, args.to)
    args.to.write_text(write(result, names))
    print(f"wrote {args.to} and {len(names)} plots")


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    top = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = top.add_subparsers(required=True)
    go = verbs.add_parser("run", help="measure")
    go.set_defaults(do=run)
    go.add_argument("--out", type=pathlib.Path, required=True)
    go.add_argument("--add", action="store_true", help="go on with the file")
    go.add_argument("--arms", nargs="*", default=list(ARMS), choices=ARMS)
    go.add_argument("--scenarios", nargs="+", default=["levels"], choices=NAMES)
    go.add_argument("--levels", nargs="+", type=float, default=[0.5, 1.0, 1.5, 2.0, 4.0])
    go.add_argument("--seconds", type=float, default=15.0, help="of arrivals that count")
    go.add_argument("--retry", action="store_true", help="clients obey Retry-After once")
    go.add_argument("--capacity", type=float, default=0.0, help="requests/s; 0: measure it")
    go.add_argument("--ttft", type=float, default=2.5, help="objective, seconds")
    go.add_argument("--itl", type=float, default=0.08, help="objective, seconds")
    go.add_argument("--profile", default="full", choices=PROFILES)
    go.add_argument("--seed", type=int, default=1)
    go.add_argument("--router", default="vllm-router", help="its executable")
    go.add_argument("--router-flags", default="", help="further flags for it, in one string")
    go.add_argument("--backends", nargs="+", default=[], help="URLs of running vLLM servers")
    go.add_argument("--model", default="m", help="the model that --backends serve")
    go.add_argument(
        "--sim",
        default="{}",
        help=f"settings of the simulated ones, as JSON, or one of {', '.join(BENCHES)}",
    )
    out = verbs.add_parser("report", help="write tables and plots")
    out.set_defaults(do=report)
    out.add_argument("file", type=pathlib.Path)
    out.add_argument("--to", type=pathlib.Path, default=REPORT)
    out.add_argument("--note", default="", help="a paragraph on the circumstances")
    return top


def main() -> None:
    """Run the command line."""
    args = parser().parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
