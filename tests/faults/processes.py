"""A gateway in a process of its own, with an access log and metrics to read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tests import keyfiles as keys
from tests.abuse.support import Reply, head, raw
from tests.faults.ledgers import Held
from tests.faults.world import rss_of
from tests.stories.stubs import free_url

START_S = 40.0
_HELD = {
    "queued": r"gateway_queue_requests(?:\{[^}]*\})?",
    "slots": r"gateway_inflight_requests(?:\{[^}]*\})?",
}


@dataclass
class Served:
    """One gateway."""

    process: asyncio.subprocess.Process
    public_port: int
    admin_port: int
    keys: Mapping[str, str]  # by tenant
    log: pathlib.Path

    @property
    def key(self) -> str:
        """A key, whosever it is."""
        return next(iter(self.keys.values()))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    async def get(self, path: str, *, admin: bool = False) -> Reply:
        """Ask for a page."""
        async with raw(self.admin_port if admin else self.public_port) as client:
            await client.send(head("GET", path, "connection: close"))
            return await client.reply()

    async def metrics(self) -> str:
        """Return its metrics."""
        return (await self.get("/metrics", admin=True)).body.decode()

    async def ready(self, backends: int) -> None:
        """Wait until so many backends are in rotation."""
        wanted = re.compile(r'gateway_backend_phase\{[^}]*phase="ready"[^}]*\} 1')
        async with asyncio.timeout(START_S):
            while True:
                with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                    if len(wanted.findall(await self.metrics())) >= backends:
                        return
                await asyncio.sleep(0.05)

    async def held(self) -> Held:
        """Return what it holds now."""
        text = await self.metrics()

        def total(pattern: str) -> int:
            return int(sum(float(each) for each in re.findall(rf"^{pattern} (\S+)$", text, re.M)))

        return Held(
            requests=total(_HELD["slots"]),
            slots=total(_HELD["slots"]),
            queued=total(_HELD["queued"]),
            descriptors=len(os.listdir(f"/proc/{self.pid}/fd")),
            threads=len(os.listdir(f"/proc/{self.pid}/task")),
            memory_mib=rss_of(self.pid),
        )


@contextlib.asynccontextmanager
async def served(
    folder: pathlib.Path,
    urls: Sequence[str],
    extra: str = "",
    *,
    log: int | None = None,
    more_pools: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    tenants: Sequence[str] = ("test",),
    **pool: object,
) -> AsyncIterator[Served]:
    """Run a gateway whose pool `m` has these backends. `log`: a descriptor in place of the file."""
    pools = {"m": {"backends": list(urls), **pool}, **more_pools}
    public, admin = (free_url().removeprefix("http://") for _ in range(2))
    path = folder / "gateway.yaml"
    path.write_text(
        f"listen: {public}\nadmin: {{listen: {admin}}}\nkeys: {{file: keys.yaml}}\nlog: {{access: true}}\n"
        "health: {interval: 200ms, scrape_interval: 200ms, models_interval: 1s}\n"
        f"pools: {json.dumps(pools)}\n{extra}\n"
    )
    made = {
        name: keys.create(folder / "keys.yaml", name=name, wall_now=time.time()).key
        for name in tenants
    }
    where = folder / "gateway.log"
    with where.open("ab") as file, (folder / "gateway.err").open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "from gateway.cli.main import main; main()", "serve", "-c", str(path),
            stdout=file.fileno() if log is None else log, stderr=errors.fileno(),
        )  # fmt: skip
    ports = [int(each.rpartition(":")[2]) for each in (public, admin)]
    gate = Served(process, ports[0], ports[1], made, where)
    try:
        await gate.ready(sum(len(each["backends"]) for each in pools.values()))
        yield gate
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.kill()
        await process.wait()
