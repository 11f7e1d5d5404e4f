"""What the dashboard costs: python -m loadtest.dashboard [BACKENDS] [SECONDS]

A gateway runs idle in front of simulated backends. Its CPU is read with the page closed and open, in turns. A real
Chromium tells what its own thread used while it showed them all, and which of its tasks were long.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

import uvloop
from playwright.async_api import CDPSession

from gateway.sim.server import SimConfig, SimServer
from tests.e2e.browser import browsing
from tests.ports import free_port
from tests.stories.served import PROGRAM

_ROUNDS = 3
_BEGINS_S = 40.0  # a gateway that starts has more to do, and the last hour has some buckets then
_LONG_TASKS = """
window.longTasks = [];
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) window.longTasks.push(entry.duration);
}).observe({type: "longtask", buffered: true});
"""
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


async def share(pid: int, seconds: float) -> float:
    """Return which share of a core a process uses, in percent."""
    before = cpu_s(pid)
    await asyncio.sleep(seconds)
    return 100 * (cpu_s(pid) - before) / seconds


async def main(backends: int, seconds: float) -> None:
    async with contextlib.AsyncExitStack() as stack:
        config = SimConfig(model="m")
        sims = [await stack.enter_async_context(SimServer(config)) for _ in range(backends)]
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        admin = free_port()
        settings = {
            "listen": f"127.0.0.1:{free_port()}",
            "admin": {"listen": f"127.0.0.1:{admin}"},
            "keys": "none",
            "state": str(folder / "state"),
            "pools": {"m": {"backends": [sim.url for sim in sims]}},
        }
        (folder / "gateway.yaml").write_text(json.dumps(settings))
        quiet = subprocess.DEVNULL
        served = await asyncio.create_subprocess_exec(
            PROGRAM, "serve", "-c", folder / "gateway.yaml", stdout=quiet, stderr=quiet
        )
        try:
            await asyncio.sleep(_BEGINS_S)
            await _measure(served.pid, f"http://127.0.0.1:{admin}/", seconds)
        finally:
            served.terminate()
            await served.wait()


async def _measure(pid: int, url: str, seconds: float) -> None:
    closed, opened, drawn, tasks = [], [], [], []
    for _ in range(_ROUNDS):
        closed.append(await share(pid, seconds))
        async with browsing(url) as seen:
            await seen.page.add_init_script(_LONG_TASKS)
            await seen.page.reload()
            await seen.until("b1", ".pools")
            await seen.page.wait_for_timeout(2_000)
            begun = await seen.page.evaluate("window.longTasks.splice(0)")
            debugger = await seen.page.context.new_cdp_session(seen.page)
            await debugger.send("Performance.enable")
            before = await _figures(debugger)
            opened.append(await share(pid, seconds))
            after = await _figures(debugger)
            thread_s, all_s = (after[name] - before[name] for name in ("ThreadTime", "Timestamp"))
            drawn.append(100 * thread_s / all_s)
            tasks.append((begun, await seen.page.evaluate("window.longTasks")))
            nodes = await seen.page.evaluate("document.querySelectorAll('*').length")
    print(
        f"gateway's CPU, page closed: {statistics.median(closed):.2f} % of a core {_told(closed)}"
    )
    print(
        f"gateway's CPU, page open:   {statistics.median(opened):.2f} % of a core {_told(opened)}"
    )
    print(f"page's thread:              {statistics.median(drawn):.2f} % of a core {_told(drawn)}")
    print(f"elements of the page: {nodes}")
    for begun, later in tasks:
        print(f"tasks over 50 ms: as it loads {_told(begun)} ms, then {_told(later)} ms")


async def _figures(debugger: CDPSession) -> dict[str, float]:
    """Return what Chromium counts of a page, times in seconds."""
    told = await debugger.send("Performance.getMetrics")
    return {each["name"]: each["value"] for each in told["metrics"]}


def _told(values: list[float]) -> str:
    return "[" + ", ".join(f"{each:.2f}" for each in values) + "]"


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        count = int(sys.argv[1]) if len(sys.argv) > 1 else 100
        runner.run(main(count, float(sys.argv[2]) if len(sys.argv) > 2 else 20.0))
