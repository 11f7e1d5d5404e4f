"""The launcher of processes with a real vLLM: its engine is found, ended and never left behind."""

import asyncio
import contextlib
import os
import pathlib
import signal
import subprocess
import sys

import pytest
import uvloop

from gateway.config.supervision import LaunchConfig
from gateway.control.launchers.launcher import Changes, Seen, Superseded
from gateway.control.launchers.process import ProcessLauncher
from tests.e2e.support import CACHE, free_port, get, need

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

VLLM = pathlib.Path(os.environ.get("VLLM_GATEWAY_TEST_VLLM", CACHE / "vllm"))
MODELS = pathlib.Path(os.environ.get("VLLM_GATEWAY_TEST_MODELS", CACHE / "models"))
GRACE_S = 60.0
START_S = 240.0
PLAIN = Changes()

GATEWAY = """
import asyncio, pathlib, sys
from gateway.config.supervision import LaunchConfig
from gateway.control.launchers.launcher import Changes
from gateway.control.launchers.process import ProcessLauncher
async def main():
    config = LaunchConfig.model_validate_json(sys.argv[1])
    launcher = ProcessLauncher(config, pool="tiny", backend="b1", state=pathlib.Path(sys.argv[2]))
    print(await launcher.restart(None, grace_s=5, changes=Changes()), flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
"""


class Bench:
    def __init__(self, folder):
        self.folder = folder
        self.port = free_port()
        python, tiny = need(VLLM / "bin/python", "vLLM"), need(MODELS / "tiny", "the tiny model")
        self.config = LaunchConfig(
            command=(python, "-m", "vllm.entrypoints.openai.api_server", "--model", tiny),
            port=self.port,
            args={
                "served-model-name": "tiny",
                "max-model-len": 2048,
                "enforce-eager": True,
                "dtype": "float32",
            },
            env={
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "DO_NOT_TRACK": "1",
            },
        )

    def launcher(self):
        return ProcessLauncher(self.config, pool="tiny", backend="b1", state=self.folder)

    async def until(self, condition, seconds=START_S):
        async with asyncio.timeout(seconds):
            while not await condition():
                await asyncio.sleep(0.1)

    async def serving(self, launcher):
        async def healthy():
            assert (await launcher.look()).running, await launcher.log(4000)
            return get(f"http://127.0.0.1:{self.port}/health")[0] == 200

        await self.until(healthy)

    async def ended(self, launcher):
        async def gone():
            return not (await launcher.look()).running

        await self.until(gone, 60)


def session_of(pid):
    """Return the living processes of a session and their names."""
    found = {}
    for entry in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            name, _, rest = (entry / "stat").read_text().rpartition(")")
            fields = rest.split()
            if fields[0] not in "ZX" and int(fields[3]) == pid:
                found[int(entry.name)] = name.partition("(")[2]
    return found


def pid_of(incarnation):
    return int(incarnation.partition("-")[0])


def engine_of(incarnation):
    processes = session_of(pid_of(incarnation))
    (engine,) = [pid for pid, name in processes.items() if name.startswith("VLLM::Engine")]
    return engine


async def story(bench):
    launcher = bench.launcher()
    first = await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN)
    await bench.serving(launcher)
    assert await launcher.look() == Seen(first, running=True)
    assert "Application startup complete" in await launcher.log(100_000)
    assert await launcher.memory_bytes() > 200e6

    # The engine is killed: the server ends by itself, with the exit code 0.
    os.kill(engine_of(first), signal.SIGKILL)
    await bench.ended(launcher)
    assert await launcher.look() == Seen(first, running=False, exit_code=0)

    # Anew, with a change; then the server itself is killed, and its engine is left behind.
    changes = Changes(args={"max-model-len": 1024})
    second = await launcher.restart(first, grace_s=GRACE_S, changes=changes)
    assert session_of(pid_of(first)) == {}
    await bench.serving(launcher)
    assert b'"max_model_len":1024' in get(f"http://127.0.0.1:{bench.port}/v1/models")[1]
    engine = engine_of(second)
    os.kill(engine, signal.SIGSTOP)  # so that it cannot end by itself
    os.kill(pid_of(second), signal.SIGKILL)
    await bench.ended(launcher)
    assert (await launcher.look()).exit_code == -signal.SIGKILL
    assert engine in session_of(pid_of(second))
    with pytest.raises(Superseded):
        await launcher.restart(first, grace_s=GRACE_S, changes=PLAIN)

    third = await launcher.restart(second, grace_s=GRACE_S, changes=PLAIN)
    assert session_of(pid_of(second)) == {}
    await bench.serving(launcher)

    # A stop that is heeded: the server ends its engine, nothing has to be killed.
    await launcher.stop(third, grace_s=GRACE_S)
    assert session_of(pid_of(third)) == {}
    seen = await launcher.look()
    assert seen.exit_code in (0, -signal.SIGTERM), await launcher.log(4000)


def test_start_death_of_the_engine_restart_and_stop_leave_nothing(tmp_path):
    uvloop.run(story(Bench(tmp_path)))


def test_a_server_that_outlived_a_killed_gateway_is_adopted_and_ended(tmp_path):
    bench = Bench(tmp_path)
    words = [sys.executable, "-c", GATEWAY, bench.config.model_dump_json(), str(tmp_path)]
    gateway = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    started = gateway.stdout.readline().strip()

    async def adoption():
        launcher = bench.launcher()
        await bench.serving(launcher)
        gateway.kill()
        gateway.wait()
        gateway.stdout.close()
        engine_of(started)
        assert await launcher.look() == Seen(started, running=True)
        assert get(f"http://127.0.0.1:{bench.port}/health")[0] == 200
        assert "Application startup complete" in await launcher.log(100_000)
        await launcher.stop(started, grace_s=GRACE_S)
        assert session_of(pid_of(started)) == {}

    uvloop.run(adoption())
