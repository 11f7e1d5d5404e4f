"""A gateway before simulated backends, with all three ledgers kept, and proxies between where asked for.

async with recorded(SIM, SIM) as run:
    run.world.sims[0].inject("reset_after:3")
    line = await run.ask(Question("n-1"))
    await run.reconciled()                      all invariants hold
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec

from gateway.sim.server import SimConfig, SimServer
from tests.abuse.support import descriptors, memory_mib
from tests.faults.ledgers import ClientLine, EngineLine, Evidence, GatewayLine, Held
from tests.faults.reconcile import FEW, reconcile
from tests.faults.toxic import Toxic, ToxicProxy, toxic
from tests.faults.traffic import Caller, Question, write_down
from tests.stories.support import World, gateway

SIM = SimConfig(model="m", decode_step_s=0.002)
FAST = SimConfig(model="m", speed=0)
_LOOK_S = 0.01


@dataclass
class Run:
    """One gateway with its ledgers."""

    world: World
    proxies: list[ToxicProxy]
    caller: Caller
    engine: list[EngineLine]
    before: Held = field(default_factory=Held)
    late_s: float = 0.0  # by which the loop that has all of it came too late, at most
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    async def ask(self, question: Question | None = None, **more: object) -> ClientLine:
        """Ask once; without a question a stream with a nonce of its own."""
        question = question or Question(f"n-{next(self.numbers):x}", **more)
        return await self.caller.ask(question)

    async def ask_many(self, count: int, **more: object) -> list[ClientLine]:
        """Ask that often at the same time."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.ask(**more)) for _ in range(count)]
        return [task.result() for task in tasks]

    def held(self) -> Held:
        """Return what this process holds now: gateway, clients and engines in one.

        Connections that are idle are not counted, with both their ends, nor are those of the proxies.
        """
        process = self.world.process
        busy, idle = process.client.open_connections()
        idle += sum(proxy.open for proxy in self.proxies)
        return Held(
            requests=len(process.ingress.live),
            slots=self.world.in_flight(),
            busy_connections=busy,
            descriptors=descriptors() - 2 * idle,
            tasks=sum(task.get_name() != "toxic" for task in asyncio.all_tasks()),
            threads=threading.active_count(),
            memory_mib=memory_mib(),
        )

    async def evidence(self, **more: object) -> Evidence:
        """Wait until all is quiet, and return what was written down."""
        await self.world.settled()
        # Keep-alive connections and probes come and go; what was leaked stays.
        with contextlib.suppress(TimeoutError):
            await self.world.until(
                lambda: self.held().descriptors <= self.before.descriptors + FEW, 2.0
            )
        lines = [msgspec.convert(line, GatewayLine) for line in self.world.access_lines()]
        log = self.world.log.read_text() if self.world.log is not None else ""
        told: dict[str, object] = {
            "before": self.before,
            "after": self.held(),
            "papers": {"log": log, "metrics": await self.world.metrics()},
            "secrets": [self.world.key, "tell ["],
            "late_s": self.late_s,
            "inside": [each.url for each in (*self.world.sims, *self.proxies)],
        }
        return Evidence(client=self.caller.lines, gateway=lines, engine=self.engine, **told | more)

    async def reconciled(self, **more: object) -> Evidence:
        """Check that the three ledgers say the same, and return them."""
        evidence = await self.evidence(**more)
        found = [str(each) for each in reconcile(evidence)]
        assert not found, "\n".join(found[:20])
        return evidence


@contextlib.asynccontextmanager
async def recorded(
    *sims: SimConfig, toxics: list[Toxic | None] | None = None, **more: object
) -> AsyncIterator[Run]:
    """Run backends, gateway and ledgers. `toxics`: one for what each backend says; None: no proxy.

    What else is given goes to `gateway`; `pool` are settings of the pool.
    """
    engine: list[EngineLine] = []
    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(SimServer(each)) for each in sims]
        proxies = []
        urls = []
        for server, spoiled in itertools.zip_longest(servers, toxics or ()):
            if spoiled is None:
                urls.append(server.url)
            else:
                proxies.append(await stack.enter_async_context(toxic(server.url, down=spoiled)))
                urls.append(proxies[-1].url)
        pool = more.pop("pool", {})
        more.setdefault("pools", "pools: " + json.dumps({"m": {"backends": urls, **pool}}))
        world = await stack.enter_async_context(gateway(FAST, access=True, wait=False, **more))
        await world.ready(sum(not each.active for each in (s.state.faults for s in servers)))
        world.sims[0].requests.clear()
        world.sims = servers
        for number, server in enumerate(servers, 1):
            write_down(server, f"b{number}", engine.append)
        run = Run(world, proxies, Caller(world.process.public_port, world.key), engine)
        looks = asyncio.get_running_loop().create_task(_look_at_the_clock(run))
        run.before = run.held()
        try:
            yield run
        finally:
            looks.cancel()
            await asyncio.wait([looks])


async def _look_at_the_clock(run: Run) -> None:
    """Note how late the loop is, until cancelled: others may hold the processors of this machine."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _LOOK_S
        await asyncio.sleep(_LOOK_S)
        run.late_s = max(run.late_s, loop.time() - due)


def rss_of(pid: int) -> float:
    """Return the resident memory of a process in MiB."""
    with open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
