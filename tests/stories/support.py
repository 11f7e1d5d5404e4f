"""A whole gateway in this process, on real sockets, in front of simulated backends."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import pathlib
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import httpx2
import uvloop

from gateway.app import build
from gateway.config.load import load_config
from gateway.core.aio import Clock
from gateway.core.types import Phase
from gateway.observe.outlet import Outlet
from gateway.process import Process
from gateway.running import run
from gateway.sim.server import SimConfig, SimServer
from tests import keyfiles as keys
from tests import loopback

FAST = SimConfig(model="m", speed=0)
_OFTEN = "interval: 200ms, scrape_interval: 100ms, models_interval: 500ms"


@dataclass
class World:
    """One gateway, its backends, and a client that holds a key."""

    process: Process
    sims: list[SimServer]
    key: str
    path: pathlib.Path
    http: httpx2.AsyncClient
    log: pathlib.Path | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.process.public_port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.process.admin_port}"

    async def chat(
        self, text: str = "hello", *, model: str = "m", headers=None, **more
    ) -> httpx2.Response:
        body = {"model": model, "messages": [{"role": "user", "content": text}], **more}
        return await self.http.post("/v1/chat/completions", json=body, headers=headers)

    async def rested(self) -> None:
        """Wait until connections to backends may be used again: they rest after each reply."""
        await asyncio.sleep(0.02)

    async def until(self, condition, seconds: float = 5.0) -> None:
        """Wait until `condition()` holds; fail when it does not in time."""
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.01)

    async def at_once(self, condition, looks: int = 25) -> None:
        """Wait for what needs no timer: 10 ms between looks. A machine that stands still does not use them up."""
        for _ in range(looks):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it did not come at once")

    async def ready(self, backends: int) -> None:
        await self.until(
            lambda: sum(each.phase is Phase.READY for pool in self.process.config.pools for each in self.process.table.backends(pool)) >= backends
        )  # fmt: skip

    def in_flight(self) -> int:
        return sum(
            each.in_flight
            for pool in self.process.config.pools
            for each in self.process.table.backends(pool)
        )

    def access_lines(self) -> list[dict[str, object]]:
        """Return the access lines so far; the gateway was started with `access=True`."""
        assert self.log is not None
        self.process.ledger.post()
        assert self.process.outlet.flush()
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [line for line in lines if "endpoint" in line]

    async def metrics(self) -> str:
        async with loopback.client() as http:
            return (await http.get(self.admin_url + "/metrics")).text

    async def settled(self) -> None:
        """Wait until nothing is in flight, and check that nothing is left."""
        await self.until(lambda: not self.process.ingress.live and self.in_flight() == 0)
        # A connection that was aborted is lost in the loop's next turn.
        await self.until(lambda: self.process.client.open_connections()[0] == 0)


def pools_yaml(sims: Sequence[SimServer], **settings: object) -> str:
    return json.dumps({"m": {"backends": [sim.url for sim in sims], **settings}})


@contextlib.asynccontextmanager
async def gateway(
    *sims: SimConfig,
    pools: str | None = None,
    extra: str = "",
    wait: bool = True,
    pool: dict[str, object] | None = None,
    access: bool = False,
    admin_token: str = "",
    health: str = "",
    keyed: str = "",
    clock: Clock | None = None,
    as_shipped: bool = False,
) -> AsyncIterator[World]:
    """Run simulated backends and a gateway; `pools` is YAML with {0}, {1}, ... for the backends' ports.

    `keyed` are further settings of keys. With `access` there is an access log, in a file; an empty `admin_token` is none.
    `as_shipped`: backends are looked at as seldom as by default.
    """
    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(SimServer(each)) for each in (sims or (FAST,))]
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        path = folder / "gateway.yaml"
        listed = pools if pools is not None else "pools: " + pools_yaml(servers, **(pool or {}))
        for number, server in enumerate(servers):
            listed = listed.replace(f"<{number}>", server.url)
        path.write_text(
            "version: 1\nlisten: 127.0.0.1:0\n"
            f"admin: {{listen: 127.0.0.1:0, token: '{admin_token}'}}\n"
            f"keys: {{file: keys.yaml{keyed}}}\n"
            f"log: {{access: {json.dumps(access)}}}\n"
            + ("" if as_shipped else f"health: {{{_OFTEN}, {health}}}\n")
            + f"shutdown: {{grace: 0s}}\n{extra}\n{listed}\n"
        )
        created = keys.create(folder / "keys.yaml", name="test", wall_now=time.time())
        log = stack.enter_context((folder / "log").open("wb")) if access else None
        outlet = Outlet() if log is None else Outlet(log.fileno())
        process = build(load_config(path), path, outlet, clock=clock)
        http = await stack.enter_async_context(loopback.client(timeout=25))
        async with asyncio.TaskGroup() as group:
            group.create_task(run(process), name="gateway")
            await process.listening.wait()
            http.base_url = f"http://127.0.0.1:{process.public_port}"
            http.headers["authorization"] = f"Bearer {created.key}"
            world = World(process, servers, created.key, path, http, folder / "log")
            try:
                if wait:
                    await world.ready(len(servers))
                yield world
            finally:
                process.stopping.set()


def story(test, seconds: float = 30.0):
    """Run an async test with a deadline of its own."""

    @functools.wraps(test)
    def run_it(*args, **kwargs):
        async def main():
            async with asyncio.timeout(seconds):
                await test(*args, **kwargs)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())

    return run_it


# Each process that starts takes a second, and several on a machine that has much else to do.
of_processes = functools.partial(story, seconds=55.0)


def frames(text: str) -> list[str]:
    """Return the data of each event of a stream."""
    return [line[6:] for line in text.split("\n") if line.startswith("data: ")]
