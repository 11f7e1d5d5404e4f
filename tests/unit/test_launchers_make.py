"""Which launcher a backend has, and what the driver says of GPU memory."""

import asyncio
import sys
import threading

import pytest

from gateway.config.models import BackendConfig
from gateway.launch import gpus
from gateway.launch.command import CommandLauncher
from gateway.launch.docker import DockerLauncher
from gateway.launch.kubernetes import KubernetesLauncher
from gateway.launch.launcher import Launcher
from gateway.launch.make import make
from gateway.launch.process import ProcessLauncher
from gateway.launch.systemd import SystemdLauncher

NVML = """
import os, pathlib
class NVMLError(Exception): pass
class Used:
    def __init__(self, pid): self.pid = pid
class Memory:
    def __init__(self, total): self.total = total
FAILS = os.environ.get("NVML_FAILS", "")
def nvmlInit():
    if FAILS == "init": raise NVMLError("no driver")
def nvmlShutdown(): pathlib.Path(os.environ["NVML_CALLS"]).write_text("shutdown ")
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(place): return place
def nvmlDeviceGetComputeRunningProcesses(device):
    if FAILS == "ask": raise NVMLError("gone")
    return [Used(100 + device), Used(7)]
def nvmlDeviceGetMemoryInfo(device):
    if FAILS == "ask": raise NVMLError("gone")
    return Memory((24 - 8 * device) << 30)
"""


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"launch": {"command": ["vllm"], "port": 8001}}, ProcessLauncher),
        ({"url": "http://h:1", "restart": {"systemd": "vllm@1"}}, SystemdLauncher),
        ({"url": "http://h:1", "restart": {"docker": "vllm"}}, DockerLauncher),
        ({"url": "http://h:1", "restart": {"kubernetes": "ml/vllm-0"}}, KubernetesLauncher),
        ({"url": "http://h:1", "restart": {"command": ["restart-it"]}}, CommandLauncher),
        ({"url": "http://h:1"}, None),
    ],
)
def test_each_backend_has_the_launcher_it_asks_for(tmp_path, settings, kind):
    async def story():
        launcher: Launcher | None = make(BackendConfig.model_validate(settings), "a/b", tmp_path)
        assert type(launcher) is (kind or type(None))
        if launcher is not None:
            assert launcher.launches is (kind is ProcessLauncher)
            await launcher.close()

    asyncio.run(story())
    assert list(tmp_path.iterdir()) == []  # nothing is touched before it is used


@pytest.fixture
def nvml(tmp_path, monkeypatch):
    (tmp_path / "pynvml.py").write_text(NVML)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("NVML_CALLS", str(tmp_path / "calls"))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    yield tmp_path / "calls"
    sys.modules.pop("pynvml", None)


def test_those_that_hold_memory_on_any_gpu_are_known(nvml):
    assert gpus.holders() == {100, 101, 7}
    assert nvml.read_text() == "shutdown "


@pytest.mark.parametrize(("used", "gib"), [((), 16), ((0,), 24), ((0, 1), 16)])
def test_the_smallest_gpu_of_those_used_is_known(nvml, used, gib):
    assert gpus.smallest_bytes(used) == gib << 30
    assert nvml.read_text() == "shutdown "


@pytest.mark.parametrize("fails", ["init", "ask"])
def test_a_driver_that_does_not_answer_is_no_knowledge(nvml, monkeypatch, fails):
    monkeypatch.setenv("NVML_FAILS", fails)
    assert gpus.holders() is gpus.smallest_bytes(()) is None


def test_without_the_library_nothing_is_known(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpus.holders() is gpus.smallest_bytes(()) is None


def test_a_driver_that_hangs_takes_no_thread_that_others_need():
    async def story():
        answers = threading.Event()

        def never():
            answers.wait()

        async with asyncio.TaskGroup() as group:
            for _ in range(40):  # more than the loop has threads
                group.create_task(gpus.freed(frozenset({1}), never))
            try:
                await asyncio.sleep(0)
                async with asyncio.timeout(10):
                    assert await asyncio.to_thread(lambda: 7) == 7
            finally:
                answers.set()

    asyncio.run(story())
