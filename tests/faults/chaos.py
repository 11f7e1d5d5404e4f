"""A mix of everything: streams, whole replies, vectors and clients that leave, while engines break at random.

    python -m tests.faults.chaos --seconds 100 --rate 40                   what CI runs
    python -m tests.faults.chaos --seconds 1800 --rate 200                 half an hour
    python -m tests.faults.chaos --seconds 600 --rate 50 --kills 1000      nothing but kills

Gateway and engines are processes of their own. At the end three ledgers are reconciled: every request
has one honest end, or this fails. A seed repeats requests and faults, though not their exact times.
The ledgers stay in the folder that is told where something was found.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import pathlib
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from gateway.sim.ask import CHAT, COMPLETIONS
from tests.faults import ledgers
from tests.faults.engines import KILL, Plan, Strike
from tests.faults.ledgers import EngineLine, Evidence, GatewayLine, Held
from tests.faults.processes import Served, served
from tests.faults.reconcile import Finding, reconcile
from tests.faults.traffic import EMBEDDINGS, Caller, Question

# A fault of the simulator, how often it is chosen, and how long it lasts at most.
FAULTS: Final = {
    KILL: (4, 2.0),
    "refuse": (2, 2.0),
    "frozen": (1, 6.0),
    "reset_after:{k}@{n}": (4, 2.0),
    "truncate_after:{k}@{n}": (2, 2.0),
    "truncate_chunk:{k}@{n}": (2, 2.0),
    "clean_end_without_done:{k}@{n}": (2, 2.0),
    "error_frame_after:{k}@{n}": (2, 2.0),
    "abort_finish:{k}@{n}": (1, 2.0),
    "stall_after:{k}@{n}": (1, 4.0),
    "reset_before_headers@{n}": (2, 1.0),
    "hang_before_headers:1s@{n}": (1, 2.0),
    "http_500@{n}": (2, 1.0),
    "html_error@{n}": (1, 1.0),
    "admission_503@{n}": (2, 1.0),
    "keepalive_close@{n}": (2, 2.0),
    "health_500": (1, 3.0),
    "slow_metrics": (1, 4.0),
    "garbage_metrics": (1, 3.0),
    "no_metrics": (1, 3.0),
}
EXTRA: Final = (
    "limits: {connections_per_address: 10000}\n"
    "timeouts: {stall: 3s, first_byte: 5s}\n"
    "shutdown: {grace: 10s}\n"
)
QUIET_S: Final = 2.0


@dataclasses.dataclass(frozen=True)
class Options:
    """What is asked for."""

    seconds: float
    rate: float
    seed: int
    engines: int = 4
    kills: int = 0  # nothing but so many kills


def planned(options: Options) -> Plan:
    """Return what breaks when. Pure: the same options give the same plan."""
    chance = random.Random(options.seed)
    strikes = []
    if options.kills:
        every_s = options.seconds / options.kills
        for number in range(options.kills):
            at_s = (number + chance.random()) * every_s
            down_s = chance.uniform(0.1, 2.0) * every_s * options.engines / 2
            strikes.append(Strike(at_s, chance.randrange(options.engines), KILL, down_s))
        return Plan(options.engines, sorted(strikes, key=lambda each: each.at_s))
    names, weights = list(FAULTS), [weight for weight, _ in FAULTS.values()]
    at_s = 1.0
    while at_s < options.seconds - 4:
        (name,) = chance.choices(names, weights)
        fault = name.format(k=chance.choice([0, 1, 2, 5, 12]), n=chance.randint(1, 8))
        for_s = chance.uniform(0.2, FAULTS[name][1])
        strikes.append(Strike(at_s, chance.randrange(options.engines), fault, for_s))
        at_s += chance.expovariate(1.0)
    return Plan(options.engines, strikes)


def question(chance: random.Random, number: int) -> Question:
    """Return the next request."""
    kind = chance.random()
    if kind < 0.1:
        return Question(f"n-{number:x}", EMBEDDINGS, stream=False)
    leaves = chance.random() < 0.1
    return Question(
        f"n-{number:x}",
        path=COMPLETIONS if chance.random() < 0.3 else CHAT,
        stream=kind < 0.8,
        tokens=chance.choice([1, 5, 15, 15, 40]),
        leave_after=chance.choice([0, 1, 2, 3, 8]) if leaves and kind < 0.8 else None,
    )


@contextlib.asynccontextmanager
async def engines(
    folder: pathlib.Path, plan: Plan
) -> AsyncIterator[tuple[asyncio.StreamWriter, list[str]]]:
    """Run the engines; a line written to them starts the plan."""
    path = folder / "plan.json"
    path.write_bytes(msgspec.json.encode(plan))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.faults.engines", str(path), str(folder / "engine.jsonl"),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        urls = [(await process.stdout.readline()).decode().strip() for _ in range(plan.engines)]
        yield process.stdin, urls
    finally:
        process.stdin.close()
        await process.wait()


async def traffic(options: Options, caller: Caller) -> None:
    """Ask at the rate, whatever becomes of it, and wait for all the ends."""
    chance = random.Random(options.seed)
    begun, number, at_s = time.monotonic(), 0, 0.0
    async with asyncio.TaskGroup() as group:
        while at_s < options.seconds:
            at_s += chance.expovariate(options.rate)
            number += 1
            await asyncio.sleep(max(0.0, begun + at_s - time.monotonic()))
            group.create_task(caller.ask(question(chance, number)))


async def at_rest(gate: Served, before: Held) -> Held:
    """Return what is held once all is quiet; keep-alive connections are given their time to end."""
    await asyncio.sleep(QUIET_S)
    for _ in range(10):
        held = await gate.held()
        if held.descriptors <= before.descriptors:
            break
        await asyncio.sleep(0.5)
    return held


async def run(options: Options, folder: pathlib.Path) -> tuple[Evidence, Plan, int]:
    """Run the mix; return the evidence, what broke, and the gateway's exit code."""
    plan = planned(options)
    async with engines(folder, plan) as (orders, urls):
        async with served(folder, urls, EXTRA) as gate:
            caller = Caller(gate.public_port, gate.key)
            for number in range(20):  # so that what is made once is there before
                await caller.ask(Question(f"n-0-{number:x}", stream=number % 2 == 0))
            await asyncio.sleep(QUIET_S)
            before = await gate.held()
            orders.write(b"go\n")
            await traffic(options, caller)
            after = await at_rest(gate, before)
            papers = {"metrics": await gate.metrics()}
            gate.process.send_signal(signal.SIGTERM)
            code = await gate.process.wait()
    ledgers.write(folder / "client.jsonl", caller.lines)
    papers |= {name: (folder / name).read_text() for name in ("gateway.log", "gateway.err")}
    evidence = Evidence(
        client=caller.lines,
        gateway=ledgers.read(gate.log, GatewayLine),
        engine=ledgers.read(folder / "engine.jsonl", EngineLine),
        before=before,
        after=after,
        papers=papers,
        secrets=[gate.key, "tell ["],
        inside=urls,
    )
    return evidence, plan, code


def summary(options: Options, evidence: Evidence, plan: Plan, found: list[Finding]) -> str:
    """Say what happened, in a few lines."""
    ends = Counter(line.end.value for line in evidence.client)
    outcomes = Counter(str(line.outcome) for line in evidence.gateway)
    faults = Counter(each.fault.partition(":")[0].partition("@")[0] for each in plan.strikes)
    resumed = sum(line.resumed > 0 for line in evidence.gateway)
    retried = sum(line.attempts > 1 + line.resumed for line in evidence.gateway)
    waits = sorted(
        line.first_at - line.sent_at for line in evidence.client if line.first_at is not None
    )
    p50, p99 = statistics.median(waits), waits[int(0.99 * (len(waits) - 1))]
    lines = [
        f"seed {options.seed}, {options.seconds:.0f} s, {options.rate:.0f} requests/s, {options.engines} engines",
        f"{len(plan.strikes)} faults: {_told(faults)}",
        f"{len(evidence.client)} requests at their clients: {_told(ends)}",
        f"{len(evidence.gateway)} in the log: {_told(outcomes)}",
        f"{len(evidence.engine)} attempts at engines; {resumed} streams went on elsewhere, {retried} requests were retried",
        f"first byte after {p50:.3f} s (median), {p99:.3f} s (99 %)",
        f"before: {evidence.before}",
        f"after:  {evidence.after}",
        f"{len(found)} violations of the invariants" if found else "the ledgers agree",
    ]
    return "\n".join(lines)


def _told(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


def main() -> int:
    """Run as a program; 0 where the ledgers agree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--rate", type=float, default=40, help="requests a second")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--kills", type=int, default=0, help="so many kills, and no other fault")
    options = Options(**vars(parser.parse_args()))
    print(f"seed {options.seed}", flush=True)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="chaos-"))
    evidence, plan, code = asyncio.run(run(options, folder))
    found = reconcile(evidence)
    print(summary(options, evidence, plan, found))
    for each in found[:40]:
        print(each)
    if code:
        print(f"the gateway exited with {code}")
    if found or code:
        print(f"the ledgers are in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
