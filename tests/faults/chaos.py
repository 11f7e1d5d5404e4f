"""A mix of everything: streams, whole replies, vectors and clients that leave, while engines break at random.

    python -m tests.faults.chaos --seconds 120 --rate 25                   what CI runs
    python -m tests.faults.chaos --seconds 1800 --rate 200                 half an hour
    python -m tests.faults.chaos --seconds 600 --rate 50 --kills 1000      nothing but kills

Three tenants ask a pool each: most requests go to engines that break all the time, some to engines that
the gateway launches and that crash (`tended`), some to engines that nothing happens to. First all is quiet
for a while, to compare with.

Gateway and engines are processes of their own. At the end three ledgers are reconciled: every request
has one honest end, who asks engines that are well notices nothing, and what crashed, and nothing else, was
restarted, or this fails. A seed repeats requests and faults, though not their exact times. The ledgers stay
in the folder that is told where something was found.
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
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final

import msgspec

from gateway.sim.ask import CHAT, COMPLETIONS
from tests.faults import ledgers
from tests.faults.engines import CALM, KILL, Plan, Strike
from tests.faults.ledgers import End, EngineLine, Evidence, GatewayLine, Held
from tests.faults.processes import Served, served
from tests.faults.reconcile import Finding, reconcile, ttft_p99_s
from tests.faults.tended import CRASH, TENDED, Tended, tended
from tests.faults.tended import planned as planned_crashes
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
STRUCK: Final = "m"  # the model, its pool, and the tenant who asks it
SHARES: Final = {STRUCK: 0.7, CALM: 0.15, TENDED: 0.15}  # of the requests
CALM_ENGINES: Final = 2


@dataclasses.dataclass(frozen=True)
class Options:
    """What is asked for."""

    seconds: float
    rate: float
    seed: int
    engines: int = 4
    kills: int = 0  # nothing but so many kills
    quiet: float = 12.0  # seconds before anything breaks


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
        return Plan(options.engines, sorted(strikes, key=lambda each: each.at_s), CALM_ENGINES)
    names, weights = list(FAULTS), [weight for weight, _ in FAULTS.values()]
    at_s = 1.0
    while at_s < options.seconds - 4:
        (name,) = chance.choices(names, weights)
        fault = name.format(k=chance.choice([0, 1, 2, 5, 12]), n=chance.randint(1, 8))
        for_s = chance.uniform(0.2, FAULTS[name][1])
        strikes.append(Strike(at_s, chance.randrange(options.engines), fault, for_s))
        at_s += chance.expovariate(1.0)
    return Plan(options.engines, strikes, CALM_ENGINES)


def question(chance: random.Random, number: int) -> Question:
    """Return the next request."""
    (model,) = chance.choices([*SHARES], [*SHARES.values()])
    kind = chance.random()
    if kind < 0.1:
        return Question(f"n-{number:x}", EMBEDDINGS, stream=False, model=model)
    leaves = chance.random() < 0.1
    return Question(
        f"n-{number:x}",
        path=COMPLETIONS if chance.random() < 0.3 else CHAT,
        stream=kind < 0.8,
        tokens=chance.choice([1, 5, 15, 15, 40]),
        leave_after=chance.choice([0, 1, 2, 3, 8]) if leaves and kind < 0.8 else None,
        model=model,
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
        urls = [
            (await process.stdout.readline()).decode().strip()
            for _ in range(plan.engines + plan.calm)
        ]
        yield process.stdin, urls
    finally:
        process.stdin.close()
        await process.wait()


async def traffic(options: Options, callers: Mapping[str, Caller]) -> None:
    """Ask at the rate, whatever becomes of it, and wait for all the ends."""
    chance = random.Random(options.seed)
    begun, number, at_s = time.monotonic(), 0, 0.0
    async with asyncio.TaskGroup() as group:
        while at_s < options.quiet + options.seconds:
            at_s += chance.expovariate(options.rate)
            number += 1
            await asyncio.sleep(max(0.0, begun + at_s - time.monotonic()))
            asked = question(chance, number)
            group.create_task(callers[asked.model].ask(asked))


async def faults(options: Options, orders: asyncio.StreamWriter, crashing: Tended) -> float:
    """Have engines break once the quiet time is over; return when that was."""
    await asyncio.sleep(options.quiet)
    begun = time.monotonic()
    orders.write(b"go\n")
    await crashing.break_them(planned_crashes(options.seconds, random.Random(options.seed)))
    return begun


async def at_rest(gate: Served, before: Held) -> Held:
    """Return what is held once all is quiet; keep-alive connections are given their time to end."""
    await asyncio.sleep(QUIET_S)
    for _ in range(10):
        held = await gate.held()
        if held.descriptors <= before.descriptors:
            break
        await asyncio.sleep(0.5)
    return held


async def run(options: Options, folder: pathlib.Path) -> tuple[Evidence, int]:
    """Run the mix; return the evidence, and the gateway's exit code."""
    plan = planned(options)
    async with contextlib.AsyncExitStack() as stack:
        orders, urls = await stack.enter_async_context(engines(folder, plan))
        crashing = stack.enter_context(tended(folder))
        struck, calm = urls[: plan.engines], urls[plan.engines :]
        pools = {CALM: {"backends": calm}, TENDED: crashing.pool}
        running = served(folder, struck, EXTRA, more_pools=pools, tenants=[*SHARES])
        gate = await stack.enter_async_context(running)
        callers = {each: Caller(gate.public_port, gate.keys[each], each) for each in SHARES}
        for number in range(20):  # so that what is made once is there before
            for place, each in enumerate(SHARES):
                nonce = f"n-0-{number:x}-{place}"
                asked = Question(nonce, stream=number % 2 == 0, tokens=2, model=each)
                await callers[each].ask(asked)
        await asyncio.sleep(QUIET_S)
        before = await gate.held()
        async with asyncio.TaskGroup() as group:
            broke = group.create_task(faults(options, orders, crashing))
            group.create_task(traffic(options, callers))
        after = await at_rest(gate, before)
        papers = {"metrics": await gate.metrics()}
        gate.process.send_signal(signal.SIGTERM)
        code = await gate.process.wait()
    lines = [line for each in callers.values() for line in each.lines]
    ledgers.write(folder / "client.jsonl", lines)
    papers |= {name: (folder / name).read_text() for name in ("gateway.log", "gateway.err")}
    evidence = Evidence(
        client=lines,
        gateway=ledgers.read(gate.log, GatewayLine),
        engine=[
            line for path in folder.glob("engine*.jsonl") for line in ledgers.read(path, EngineLine)
        ],
        before=before,
        after=after,
        papers=papers,
        secrets=[*gate.keys.values(), "tell ["],
        inside=[*urls, str(folder)],
        faulted_tenants=frozenset(SHARES) - {CALM},
        faults_from=broke.result(),
        restarts=ledgers.restarts(crashing.lives),
        true_faults=frozenset(crashing.broken),
    )
    return evidence, code


def summary(options: Options, evidence: Evidence, found: Sequence[Finding]) -> str:
    """Say what happened, in a few lines."""
    ends = Counter(line.end.value for line in evidence.client)
    outcomes = Counter(str(line.outcome) for line in evidence.gateway)
    struck = Counter(_kind(each) for each in planned(options).strikes)
    harmless = Counter(
        _kind(each) for each in planned_crashes(options.seconds, random.Random(options.seed)) if each.fault != CRASH
    )  # fmt: skip
    resumed = sum(line.resumed > 0 for line in evidence.gateway)
    retried = sum(line.attempts > 1 + line.resumed for line in evidence.gateway)
    waits = sorted(
        line.first_at - line.sent_at for line in evidence.client if line.first_at is not None
    )
    p50, p99 = statistics.median(waits), waits[int(0.99 * (len(waits) - 1))]
    calm = [line for line in evidence.client if line.tenant == CALM and line.end is not End.LEFT]
    assert evidence.faults_from is not None
    quiet_s, during_s = ttft_p99_s(calm, evidence.faults_from)
    lines = [
        f"seed {options.seed}, {options.quiet:.0f} s of quiet, {options.seconds:.0f} s of faults,"
        f" {options.rate:.0f} requests/s, {options.engines} engines that break",
        f"{struck.total()} faults: {_told(struck)}",
        f"{len(evidence.client)} requests at their clients: {_told(ends)}",
        f"{len(evidence.gateway)} in the log: {_told(outcomes)}",
        f"{len(evidence.engine)} attempts at engines; {resumed} streams went on elsewhere, {retried} requests were retried",
        f"first byte after {p50:.3f} s (median), {p99:.3f} s (99 %)",
        f"where nothing breaks: {sum(line.end is End.COMPLETE for line in calm)} of {len(calm)} complete;"
        f" first byte of streams after {quiet_s:.3f} s (99 %) before, {during_s:.3f} s during the faults",
        f"launched engines: {len(evidence.true_faults)} crashes, {len(evidence.restarts)} restarts;"
        f" and {harmless.total()} other faults: {_told(harmless)}",
        f"before: {evidence.before}",
        f"after:  {evidence.after}",
        f"{len(found)} violations of the invariants" if found else "the ledgers agree",
    ]
    return "\n".join(lines)


def _kind(strike: Strike) -> str:
    return strike.fault.partition(":")[0].partition("@")[0]


def _told(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


def main() -> int:
    """Run as a program; 0 where the ledgers agree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=120, help="so long engines break")
    parser.add_argument("--quiet", type=float, default=12, help="seconds before anything breaks")
    parser.add_argument("--rate", type=float, default=25, help="requests a second")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--kills", type=int, default=0, help="so many kills, and no other fault")
    options = Options(**vars(parser.parse_args()))
    print(f"seed {options.seed}", flush=True)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="chaos-"))
    evidence, code = asyncio.run(run(options, folder))
    found = reconcile(evidence)
    print(summary(options, evidence, found))
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
