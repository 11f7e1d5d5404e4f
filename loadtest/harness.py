"""Start a gateway and simulated backends as processes of their own, and read their costs from /proc.

Everything listens on loopback, is pinned (core 0: backends and load, core 1: the gateway) and is
ended by pid when the `with` block ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

LOAD_CORE, GATEWAY_CORE = 0, (os.cpu_count() or 1) - 1
BIN = pathlib.Path(sys.executable).parent
BACKEND = pathlib.Path(__file__).parent / "backend.py"


@dataclass(frozen=True)
class Site:
    """A running gateway: where it is, what opens it, and whose costs to read."""

    port: int
    admin_port: int
    key: str
    pid: int
    backend_ports: list[int]
    log: str

    def metrics(self) -> dict[str, float]:
        """Return every sample of /metrics by its full name with labels."""
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self.admin_port}/metrics", timeout=5
        ) as reply:
            lines = reply.read().decode().splitlines()
        return {
            name: float(value)
            for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")
        }

    def total(self, name: str) -> float:
        """Return the sum of all series of one metric."""
        return sum(value for key, value in self.metrics().items() if key.partition("{")[0] == name)


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of all threads of a process (scheduler's own account, in ns)."""
    total = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):
            total += int(
                pathlib.Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0]
            )
    return total / 1e9


def pss_kib(pid: int) -> int:
    """Return the proportional set size."""
    for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    return 0


def open_files(pid: int) -> int:
    """Return how many file descriptors a process holds."""
    return len(os.listdir(f"/proc/{pid}/fd"))


@contextlib.contextmanager
def process(
    command: list[str], core: int, *, cwd: str | None = None, log: str | None = None
) -> Iterator[int]:
    """Run a command pinned to a core; SIGTERM, then SIGKILL, at the end."""
    with open(log or os.devnull, "ab") as out:
        child = subprocess.Popen(
            command, cwd=cwd, stdout=out, stderr=out, stdin=subprocess.DEVNULL,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )  # fmt: skip
    try:
        yield child.pid
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(5)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def wait_for(port: int, path: str, seconds: float = 20.0) -> None:
    """Wait until a GET answers 200."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=1) as reply:
                if reply.status == 200:
                    return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


@contextlib.contextmanager
def site(backends: int = 2, sim_flags: tuple[str, ...] = (), extra: str = "") -> Iterator[Site]:
    """Run simulated backends and a gateway with everything switched on: keys, health, metrics, access log."""
    gateway = str(BIN / "vllm-gateway")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        ports = [free_port() for _ in range(backends)]
        for port in ports:
            command = [sys.executable, str(BACKEND), "--port", str(port), *sim_flags]
            stack.enter_context(process(command, LOAD_CORE))
        for port in ports:
            wait_for(port, "/health")
        public, admin = free_port(), free_port()
        config = pathlib.Path(folder, "gateway.yaml")
        listed = "\n".join(f"      - http://127.0.0.1:{port}" for port in ports)
        config.write_text(
            f"version: 1\nlisten: 127.0.0.1:{public}\nadmin: {{listen: 127.0.0.1:{admin}}}\n"
            f"keys: {{file: keys.yaml}}\npools:\n  m:\n    backends:\n{listed}\n{extra}"
        )
        made = subprocess.run(
            [gateway, "keys", "create", "load", "-c", str(config), "-o", "json"],
            check=True,
            capture_output=True,
        )
        log = str(pathlib.Path(folder, "gateway.log"))
        pid = stack.enter_context(
            process([gateway, "serve", "-c", str(config)], GATEWAY_CORE, log=log)
        )
        wait_for(public, "/readyz")
        os.sched_setaffinity(0, {LOAD_CORE})
        yield Site(public, admin, json.loads(made.stdout)["key"], pid, ports, log)
