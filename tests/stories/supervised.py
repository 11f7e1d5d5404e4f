"""A gateway on real sockets that supervises the servers of a machine of ours."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import httpx2

from gateway.app import build
from gateway.config.load import load_config
from gateway.config.models import Config
from gateway.core.aio import Clock
from gateway.core.events import Event, EventKind
from gateway.core.types import Phase
from gateway.heal.fleet import Maker
from gateway.heal.observed import Timing
from gateway.heal.supervisor import Supervisor
from gateway.heal.unit import Unit
from gateway.observe.outlet import Outlet
from gateway.pools.table import Backend, PoolTable
from gateway.process import reload
from gateway.running import run
from gateway.store.shared import SharedStore
from tests import keyfiles as keys
from tests import loopback
from tests.fakelaunch import Machine, Slot, machine
from tests.stories.support import World

QUICK = {"backoff": "20ms", "max_backoff": "20ms", "canary": "0s", "drain": "10s"}
FAST = Timing(every_s=0.02, last_words_s=0.1)


@dataclass
class Fleet(World):
    """A world whose backends are supervised."""

    machine: Machine = None  # type: ignore[assignment]
    settings: dict[str, Any] = None  # type: ignore[assignment]

    def slot(self, backend_id: str = "m/b1") -> Slot:
        return self.machine[backend_id]

    def backend(self, backend_id: str = "m/b1") -> Backend:
        found = self.process.table.get(backend_id)
        assert found is not None
        return found

    def phase(self, backend_id: str = "m/b1") -> Phase:
        return self.backend(backend_id).phase

    def unit(self, backend_id: str = "m/b1") -> Unit:
        return self.process.supervisor.units[backend_id]

    def told(self, kind: EventKind, backend_id: str | None = None) -> list[Event]:
        """Events of a kind, the oldest first."""
        every = reversed([*self.process.supervisor.events.newest()])
        return [e for e in every if e.kind is kind and backend_id in (None, e.backend_id)]

    async def until(self, condition, seconds: float = 20.0) -> None:  # type: ignore[no-untyped-def]
        """As before; only the patience is that of a machine with much else to do."""
        await super().until(condition, seconds)

    async def serves(self, *backend_ids: str) -> None:
        ids = backend_ids or tuple(self.process.supervisor.units)
        await self.until(lambda: all(self.phase(each) is Phase.READY for each in ids))

    async def turns(self, count: int = 10) -> None:
        """Let the supervisor have so many turns, so that what it would do it has done."""
        supervisor, seen = self.process.supervisor, set[float]()

        def passed() -> bool:
            seen.add(supervisor.history.at)
            return len(seen) > count

        await self.until(passed)

    async def counted(self, metric: str, **labels: str) -> float:
        """The sum of a counter's series that have these labels."""
        found = 0.0
        for line in (await self.metrics()).splitlines():
            name, _, rest = line.partition("{")
            shown, _, value = rest.partition("} ")
            if name == metric and all(f'{k}="{v}"' in shown for k, v in labels.items()):
                found += float(value)
        return found

    def write(self) -> None:
        self.path.write_text(json.dumps(self.settings))

    async def reload(self) -> None:
        self.write()
        assert (await reload(self.process)).done

    async def admin(self, method: str, path: str, body: Any = None, **more: Any) -> httpx2.Response:
        if body is not None:
            more["json"] = body
        return await self.http.request(method, self.admin_url + path, **more)

    async def order(self, verb: str, backend_id: str = "m/b1", **body: Any) -> httpx2.Response:
        return await self.admin("POST", f"/admin/v1/backends/{backend_id}:{verb}", body)


def launched(slot: Slot, **more: Any) -> dict[str, Any]:
    """A backend with `launch`."""
    name = slot.id.partition("/")[2]
    return {"name": name, "launch": {"command": ["vllm", "serve", "m"], "port": slot.port, **more}}


def managed(slot: Slot) -> dict[str, Any]:
    """A backend that a service manager runs."""
    name = slot.id.partition("/")[2]
    return {
        "name": name,
        "url": f"http://127.0.0.1:{slot.port}",
        "restart": {"systemd": f"{name}.service"},
    }


def pool(*backends: dict[str, Any], **settings: Any) -> dict[str, Any]:
    quick = QUICK | settings.pop("supervision", {})
    return {"backends": [*backends], "supervision": quick, **settings}


def writes(slot: Slot) -> bool:
    """Whether its server is in the midst of an answer to a client."""
    assert slot.sim is not None
    asked = slot.sim.received("/v1/chat/completions")
    return any(each.tokens_emitted and each.ended_at is None for each in asked)


@contextlib.contextmanager
def held(*slots: Slot) -> Iterator[None]:
    """Let what these servers carry last until the end of this, however slow the machine: they give no token."""
    drivers = [each for slot in slots if slot.sim is not None for each in slot.sim.state.drivers]
    for each in drivers:
        each.freeze(frozen=True)
    try:
        yield
    finally:
        for each in drivers:
            each.freeze(frozen=False)


@contextlib.asynccontextmanager
async def fleet(
    on: Machine,
    *backends: dict[str, Any],
    wait: bool = True,
    store: SharedStore | None = None,
    timing: Timing = FAST,
    make_launcher: Maker | None = None,
    folder: pathlib.Path | None = None,
    extra: dict[str, Any] | None = None,
    clock: Clock | None = None,
    **settings: Any,
) -> AsyncIterator[Fleet]:
    """Run a gateway over the pool `m` of these backends; `settings` are the pool's."""
    async with contextlib.AsyncExitStack() as stack:
        folder = folder or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        path = folder / "gateway.yaml"
        written = {
            "version": 1,
            "listen": "127.0.0.1:0",
            "admin": {"listen": "127.0.0.1:0"},
            "keys": {"file": "keys.yaml"},
            "log": {"access": False},
            "health": {"interval": "50ms", "scrape_interval": "50ms", "models_interval": "100ms"},
            "shutdown": {"grace": "0s"},
            "pools": {"m": pool(*backends, **settings)},
            **(extra or {}),
        }
        path.write_text(json.dumps(written))
        created = keys.create(folder / "keys.yaml", name="test", wall_now=time.time())

        def supervise(
            table: PoolTable, clock: Clock, own: SharedStore, config: Config
        ) -> Supervisor:
            make = make_launcher or on.launcher
            return Supervisor(table, clock, store or own, config, make_launcher=make, timing=timing)

        process = build(load_config(path), path, Outlet(), supervise, clock)
        http = await stack.enter_async_context(loopback.client(timeout=25))
        async with asyncio.TaskGroup() as group:
            group.create_task(run(process), name="gateway")
            await process.listening.wait()
            http.base_url = f"http://127.0.0.1:{process.public_port}"
            http.headers["authorization"] = f"Bearer {created.key}"
            world = Fleet(process, [], created.key, path, http, machine=on, settings=written)
            try:
                if wait:
                    await world.serves()
                yield world
            finally:
                process.stopping.set()


__all__ = [
    "FAST",
    "QUICK",
    "Fleet",
    "fleet",
    "held",
    "launched",
    "machine",
    "managed",
    "pool",
    "writes",
]
