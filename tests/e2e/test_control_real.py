"""The watchers in front of a real vLLM: what it tells, and an engine that stands still."""

import asyncio
import contextlib
import os
import pathlib
import signal

import httpx2
import pytest

from gateway.config.models import Config
from gateway.core.aio import SystemClock
from gateway.core.types import Endpoint, Phase
from gateway.pools.table import PoolTable
from gateway.watch.discovery import Watchers
from tests.e2e.support import MODELS, need
from tests.e2e.vllms import vllm
from tests.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

PROGRESS_S = 5.0


@contextlib.contextmanager
def server(folder, port):
    lora = need(MODELS / "lora-a", "the adapter")
    adapter = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"lora-a={lora}")
    with vllm(port, *adapter, log=folder / "vllm.log") as process:
        yield process


def engine_core(process):
    """Return the pid of the process that runs the engine."""
    for entry in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            fields = (entry / "stat").read_text().rsplit(")", 1)
            name, parent = fields[0].split("(", 1)[1], int(fields[1].split()[1])
            if parent == process.pid and name.startswith("VLLM::Engine"):
                return int(entry.name)
    raise AssertionError("no engine process")


class Watched:
    def __init__(self, port):
        settings = Config.model_validate(
            {
                "pools": {"tiny": {"backends": [f"http://127.0.0.1:{port}"]}},
                # A patient timeout: the machine of the tests may be busy with other things.
                "health": {"progress": f"{PROGRESS_S:.0f}s", "timeout": "10s"},
            }
        )
        self.table = PoolTable(SystemClock())
        self.table.apply(settings.pools, settings.health)
        self.watchers = Watchers(self.table, settings.health, SystemClock())

    @property
    def backend(self):
        return self.table.get("tiny/b1")

    async def until(self, condition, seconds):
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.02)

    def tell(self):
        return [(each.before.name, each.after.name, each.reason) for each in self.table.transitions]


async def load(url, streams):
    """Keep `streams` long streams running until cancelled."""
    body = {"model": "tiny", "prompt": "the gateway", "max_tokens": 1900, "ignore_eos": True}

    async def one(http):
        while True:
            async with http.stream(
                "POST", "/v1/completions", json=body | {"stream": True}
            ) as reply:
                async for _ in reply.aiter_raw():
                    pass

    async with (
        httpx2.AsyncClient(base_url=url, trust_env=False, timeout=None) as http,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(streams):
            group.create_task(one(http))


async def stop_at_work(watched, engine):
    """Stop the engine at a moment that its metrics show work: they do not change any more then."""
    for _ in range(20):
        os.kill(engine, signal.SIGSTOP)
        enough = watched.backend.scrape_count + 2
        await watched.until(lambda least=enough: watched.backend.scrape_count >= least, 120)
        if watched.backend.sample.running > 0:
            return
        os.kill(engine, signal.SIGCONT)
        await asyncio.sleep(0.3)
    raise AssertionError("never stopped at work")


async def story(watched, process, url):
    await watched.until(lambda: watched.backend.phase is Phase.READY, 300)
    backend = watched.backend
    # What it tells.
    assert backend.window_tokens == 2048
    assert backend.adapters == ("lora-a",)
    assert backend.base_model == "tiny"
    assert backend.version
    assert backend.endpoints is not None
    assert {Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.MESSAGES} <= backend.endpoints
    assert Endpoint.EMBEDDINGS not in backend.endpoints
    await watched.until(lambda: backend.sample is not None, 120)

    # Its load, while it works for longer than the progress limit.
    async with asyncio.TaskGroup() as group:
        work = group.create_task(load(url, 2))
        await watched.until(lambda: backend.sample.running > 0, 300)
        await asyncio.sleep(PROGRESS_S + 2)
        assert backend.reason != "no_progress", watched.tell()

        # The engine stands still: /health stays 200, progress tells.
        engine = engine_core(process)
        try:
            await stop_at_work(watched, engine)
            await watched.until(lambda: backend.phase is Phase.DOWN, PROGRESS_S + 60)
            assert backend.reason == "no_progress"
            assert httpx2.get(f"{url}/health", trust_env=False).status_code == 200
        finally:
            os.kill(engine, signal.SIGCONT)
        await watched.until(lambda: backend.phase is Phase.READY, 120)

        # Its clients leave all at once: the load goes, the backend stays.
        work.cancel()
    await watched.until(lambda: backend.sample.running == 0, 120)
    await asyncio.sleep(PROGRESS_S + 1)
    await watched.until(lambda: backend.phase is Phase.READY, 120)

    # The engine dies, and the server with it.
    os.kill(engine, signal.SIGKILL)
    await watched.until(lambda: backend.phase is Phase.DOWN, 120)
    assert backend.reason in {"refused", "http_503", "reset", "timeout"}


def test_ready_load_standstill_recovery_and_death_of_a_real_vllm(tmp_path):
    async def main(process, port):
        watched = Watched(port)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(watched.watchers.run())
            await story(watched, process, f"http://127.0.0.1:{port}")
            task.cancel()

    port = free_port()
    with server(tmp_path, port) as process:
        asyncio.run(main(process, port))
