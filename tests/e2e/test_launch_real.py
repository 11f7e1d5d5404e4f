"""The launcher of processes with a real vLLM: its engine is found, ended and never left behind."""

import asyncio
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
import uvloop

from gateway.config.supervision import LaunchConfig
from gateway.counting.tokens import BackendCounter
from gateway.launch.launcher import Changes, Runs, Seen, Superseded
from gateway.launch.process import ProcessLauncher
from gateway.pools.backend import Backend
from gateway.watch.fetch import FetchError, Pages
from gateway.wire.calls import ENDPOINTS, parse_call
from tests.e2e.support import MODELS, VLLM, VLLM_ENV, gateway, get, need
from tests.e2e.vllms import FORKING
from tests.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

GRACE_S = 60.0
START_S = 240.0
PLAIN = Changes()

GATEWAY = """
import asyncio, pathlib, sys
from gateway.config.supervision import LaunchConfig
from gateway.launch.launcher import Changes
from gateway.launch.process import ProcessLauncher
async def main():
    config = LaunchConfig.model_validate_json(sys.argv[1])
    launcher = ProcessLauncher(config, pool="tiny", backend="b1", state=pathlib.Path(sys.argv[2]))
    print(await launcher.restart(None, grace_s=5, changes=Changes()), flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
"""


class Bench:
    def __init__(self, folder, env=VLLM_ENV | FORKING):
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
            env=env,
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

        await self.until(gone, 120)


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
    assert await launcher.look() == Seen(first, Runs.RUNNING)
    assert "Application startup complete" in await launcher.log(100_000)
    assert await launcher.memory_bytes() > 200e6

    # The engine is killed: the server ends by itself, with the exit code 0.
    os.kill(engine_of(first), signal.SIGKILL)
    await bench.ended(launcher)
    seen = await launcher.look()
    assert (seen.incarnation, seen.state, seen.exit_code) == (first, Runs.ENDED, 0)
    assert not seen.oom_killed

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

    # The next start ends what is left of it. One that is stopped before it serves leaves nothing, too.
    third = await launcher.restart(second, grace_s=GRACE_S, changes=PLAIN)
    assert session_of(pid_of(second)) == {}
    await launcher.stop(third, grace_s=5)
    assert session_of(pid_of(third)) == {}


def test_start_death_of_the_engine_restart_and_stop_leave_nothing(tmp_path):
    uvloop.run(story(Bench(tmp_path)))


def test_a_server_that_outlived_a_killed_gateway_is_adopted_and_ended(tmp_path):
    bench = Bench(tmp_path, VLLM_ENV)  # its engine imports everything anew, as it does without us
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
        assert await launcher.look() == Seen(started, Runs.RUNNING)
        assert get(f"http://127.0.0.1:{bench.port}/health")[0] == 200
        assert "Application startup complete" in await launcher.log(100_000)
        await launcher.stop(started, grace_s=GRACE_S)
        assert session_of(pid_of(started)) == {}

    uvloop.run(adoption())


async def serving_on(launcher, backend):
    with contextlib.closing(Pages(backend)) as pages:
        async with asyncio.timeout(START_S):
            while True:
                assert (await launcher.look()).running, await launcher.log(4000)
                with contextlib.suppress(FetchError):
                    return await pages.get("/v1/models", timeout_s=2)
                await asyncio.sleep(0.2)


def test_a_server_on_a_socket_serves_and_can_listen_there_again_after_it_was_killed(tmp_path):
    where = tmp_path / "run" / "tiny.sock"
    config = Bench(tmp_path).config.model_copy(update={"port": None, "socket": where})
    backend = Backend("tiny", "b1", f"unix:{where}")
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}

    async def on_socket():
        launcher = ProcessLauncher(config, pool="tiny", backend="b1", state=tmp_path)
        first = await launcher.restart(None, grace_s=GRACE_S, changes=PLAIN)
        assert b'"tiny"' in await serving_on(launcher, backend)
        with gateway(tmp_path, f"pools: {{tiny: {{backends: ['unix:{where}']}}}}") as front:
            status, told = front.post("/v1/chat/completions", ask)
            assert (status, told["usage"]["completion_tokens"]) == (200, 4)
        with contextlib.closing(Pages(backend)) as pages:
            counter = BackendCounter(pages, deadline_s=10)
            call = parse_call(ENDPOINTS[b"/v1/chat/completions"], json.dumps(ask).encode())
            assert await counter.count(call, "tiny") == told["usage"]["prompt_tokens"]

        os.kill(pid_of(first), signal.SIGKILL)
        async with asyncio.timeout(60):
            while (await launcher.look()).running:
                await asyncio.sleep(0.1)
        assert where.is_socket()
        second = await launcher.restart(first, grace_s=GRACE_S, changes=PLAIN)
        await serving_on(launcher, backend)

        # A stop that is heeded: the server ends its engine, nothing has to be killed.
        await launcher.stop(second, grace_s=GRACE_S)
        assert session_of(pid_of(second)) == {}
        seen = await launcher.look()
        assert seen.exit_code in (0, -signal.SIGTERM), await launcher.log(4000)

    uvloop.run(on_socket())
