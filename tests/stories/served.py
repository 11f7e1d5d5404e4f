"""A gateway as its users start it: a process of its own, over simulated backends in this one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import httpx2

from gateway.sim.server import SimConfig, SimServer
from tests import keyfiles as keys
from tests import loopback
from tests.ports import free_port

PROGRAM = pathlib.Path(sys.executable).with_name("vllm-gateway")


async def program(*words: str) -> str:
    """Run the program; return what it prints."""
    ran = await asyncio.create_subprocess_exec(
        PROGRAM, *words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    async with asyncio.timeout(30):
        printed, _ = await ran.communicate()
    return printed.decode()


@dataclass
class Served:
    """One gateway, whose process may be replaced. Each process that we start has a log of its own."""

    folder: pathlib.Path
    port: int
    admin_port: int
    key: str
    sims: list[SimServer]
    pids: list[int] = field(default_factory=list)  # the last one is in charge
    program: pathlib.Path = PROGRAM
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *words: str | pathlib.Path, pass_fds: tuple[int, ...] = ()) -> None:
        """Start it; `words` are another command line than the usual one."""
        usual = (self.program, "serve", "-c", self.path)
        log_file = self.folder / f"log{len(self.children)}"
        with log_file.open("ab") as log, (self.folder / "errors").open("ab") as errors:
            started = subprocess.Popen(
                words or usual,
                stdout=log,
                stderr=errors,
                pass_fds=pass_fds,
                stdin=subprocess.DEVNULL,
            )
        self.children.append(started)
        self.pids.append(started.pid)

    @property
    def started(self) -> subprocess.Popen[bytes]:
        """The process that was started last, by us."""
        return self.children[-1]

    @property
    def path(self) -> pathlib.Path:
        return self.folder / "gateway.yaml"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    @property
    def bearer(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    def lines(self, event: str) -> list[dict[str, object]]:
        """Return the log's lines about an event.

        No half of a line: one may be under way, or be the last that a killed process wrote.
        """
        logs = [(self.folder / f"log{place}").read_text() for place in range(len(self.children))]
        whole = [line for log in logs for line in log.rpartition("\n")[0].splitlines()]
        every = [json.loads(each) for each in whole if each[:1] == "{"]
        return [each for each in every if each.get("event") == event]

    def errors(self) -> str:
        return (self.folder / "errors").read_text()

    async def until(self, condition, seconds: float = 20.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.02)

    async def serves(self) -> None:
        """Wait until the gateway says that it is ready."""
        async with asyncio.timeout(60), loopback.client() as http:
            while True:
                with contextlib.suppress(httpx2.HTTPError):
                    if (await http.get(self.admin_url + "/readyz")).status_code == 200:
                        return
                assert runs(self.pids[-1]), self.errors()
                await asyncio.sleep(0.05)

    async def upgrade(self) -> subprocess.CompletedProcess[str]:
        """Run `vllm-gateway upgrade`; the new process's pid is added to `pids`."""
        words = [PROGRAM, "upgrade", "--server", self.admin_url]
        ran = await asyncio.to_thread(
            subprocess.run, words, capture_output=True, text=True, timeout=60
        )
        if ran.returncode == 0:
            self.pids.append(int(ran.stdout.split()[1]))
        return ran


def runs(pid: int) -> bool:
    try:
        return (
            pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        )
    except OSError:
        return False


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended by now: one that is no child of ours leaves at once."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@contextlib.asynccontextmanager
async def served(
    *sims: SimConfig,
    extra: str = "",
    pools: str | None = None,
    starts: Callable[[Served], None] = Served.start,
) -> AsyncIterator[Served]:
    """Run simulated backends, and a gateway as a process; whatever of it runs at the end is stopped."""
    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(SimServer(each)) for each in sims]
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        port, admin_port = free_port(), free_port()
        listed = pools or "pools: " + json.dumps({"m": {"backends": [sim.url for sim in servers]}})
        for number, sim in enumerate(servers):
            listed = listed.replace(f"<{number}>", sim.url)
        (folder / "gateway.yaml").write_text(
            f"version: 1\nlisten: 127.0.0.1:{port}\nadmin: {{listen: '127.0.0.1:{admin_port}'}}\n"
            f"keys: {{file: keys.yaml}}\nstate: {folder}/state\nlog: {{access: false}}\n"
            f"health: {{interval: 200ms, scrape_interval: 100ms}}\n{extra}\n{listed}\n"
        )
        key = keys.create(folder / "keys.yaml", name="test").key
        world = Served(folder, port, admin_port, key, servers)
        starts(world)
        try:
            await world.serves()
            yield world
        finally:
            try:
                for number in (signal.SIGTERM, signal.SIGTERM):
                    for pid in filter(runs, world.pids):
                        send(pid, number)
                    await asyncio.sleep(0.05)
                await world.until(lambda: not any(map(runs, world.pids)), 10)
            finally:
                for pid in filter(runs, world.pids):
                    send(pid, signal.SIGKILL)
                for child in world.children:
                    child.wait()
