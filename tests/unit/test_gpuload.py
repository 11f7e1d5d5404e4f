"""How the GPUs of launched backends are: which they may use, what the driver tells, and what that means."""

import asyncio
import logging
import threading
import types

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.config.models import Config
from gateway.config.supervision import LaunchConfig
from gateway.core.aio import SystemClock
from gateway.core.gpu import GpuLoad
from gateway.launch.gpuload import Gpu, GpuWatch, Pins, loads, pins, read
from gateway.observe.metrics import Metrics
from gateway.observe.readings import Readings

GIB = 1 << 30


class NvmlError(Exception):
    """As the library raises."""


class Nvml:
    """What of pynvml is asked, for a machine with GPUs that hold so many of 80 GiB."""

    NVMLError = NvmlError

    def __init__(self, *used_gib, broken=(), no_rates=()):
        self.used_gib, self.broken, self.no_rates = used_gib, broken, no_rates
        self.threads = []
        self.answers = threading.Event()
        self.answers.set()

    def nvmlInit(self):
        self.threads.append(threading.current_thread())

    def nvmlShutdown(self):
        pass

    def nvmlDeviceGetCount(self):
        self.answers.wait(20)
        return len(self.used_gib)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetUUID(self, device):
        return f"GPU-{device}aaa-bbbb"

    def nvmlDeviceGetMemoryInfo(self, device):
        if device in self.broken:
            raise NvmlError
        used = int(self.used_gib[device] * GIB)
        return types.SimpleNamespace(used=used, total=80 * GIB, free=80 * GIB - used)

    def nvmlDeviceGetUtilizationRates(self, device):
        if device in self.no_rates:
            raise NvmlError
        return types.SimpleNamespace(gpu=10 + device, memory=3)


def launch(**settings):
    return LaunchConfig.model_validate(
        {"command": ["vllm", "serve", "m"], "port": 8001, **settings}
    )


@pytest.mark.parametrize(
    ("settings", "base", "expected"),
    [
        ({}, {}, Pins(None, 0.92)),
        ({"gpus": [2, 3]}, {}, Pins(("2", "3"), 0.92)),
        ({"gpus": [2], "args": {"gpu-memory-utilization": 0.5}}, {}, Pins(("2",), 0.5)),
        ({"args": {"kv-cache-memory-bytes": "8G"}}, {}, Pins(None, 0.0)),
        ({}, {"CUDA_VISIBLE_DEVICES": "1"}, Pins(("1",), 0.92)),
        ({"gpus": [2]}, {"CUDA_VISIBLE_DEVICES": "1"}, Pins(("2",), 0.92)),
        ({"env": {"CUDA_VISIBLE_DEVICES": "GPU-1aaa, 0"}}, {}, Pins(("GPU-1aaa", "0"), 0.92)),
        ({"env": {"CUDA_VISIBLE_DEVICES": ""}}, {}, None),
        ({"env": {"CUDA_VISIBLE_DEVICES": "-1"}}, {}, None),
        ({"env": {"VLLM_CPU_KVCACHE_SPACE": "4"}}, {}, None),
        ({"args": {"device": "cpu"}}, {}, None),
    ],
)
def test_a_backend_is_pinned_to_the_gpus_that_its_environment_shows_it(settings, base, expected):
    assert pins(launch(**settings), base) == expected


def test_what_the_driver_tells_of_each_gpu_is_read_and_what_it_does_not_tell_is_unknown():
    assert read(Nvml(40, 8, 4, broken={1}, no_rates={2})) == [
        Gpu(0, "GPU-0aaa-bbbb", 40 * GIB, 80 * GIB, 0.1),
        Gpu(2, "GPU-2aaa-bbbb", 4 * GIB, 80 * GIB, None),
    ]


def test_each_backend_has_its_own_gpus_and_those_that_share_one_plan_it_together():
    gpus = read(Nvml(40, 8))
    shared = {"m/a": Pins(("0",), 0.5), "m/b": Pins(("GPU-0",), 0.25), "m/c": Pins(None, 0.2)}
    found = loads(gpus, shared)
    first = GpuLoad(0, 40 * GIB, 80 * GIB, 0.1, 0.95)
    assert found["m/a"] == found["m/b"] == (first,)
    assert found["m/c"] == (first, GpuLoad(1, 8 * GIB, 80 * GIB, 0.11, 0.2))


@pytest.mark.parametrize(
    ("used_gib", "planned", "rest"),
    [(74, 0.92, 0.06), (79.2, 0.92, 0.87), (68, 0.0, 0.85), (40, 0.5, 0.0), (79, 1.0, 0.0)],
)
def test_what_counts_is_the_memory_that_settings_leave_free(used_gib, planned, rest):
    load = GpuLoad(0, int(used_gib * GIB), 80 * GIB, None, planned)
    assert load.rest_used_ratio == pytest.approx(rest, abs=0.01)


def watch_of(nvml, **settings):
    backend = {"name": "b1", "launch": {"command": ["vllm"], "port": 8001, **settings}}
    others = {"name": "b2", "url": "http://h:1"}
    config = Config.model_validate({"pools": {"m": {"backends": [backend, others]}}})
    return GpuWatch(lambda: config, nvml)


async def until(true):
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.005)


def test_a_look_is_logged_and_shown_and_asks_off_the_event_loop(caplog):
    caplog.set_level(logging.INFO, "gateway.launch")
    nvml = Nvml(40, 8)
    watch = watch_of(nvml, gpus=[1])

    async def story():
        await watch.look()
        await until(lambda: watch.seen)

    asyncio.run(story())
    assert watch.seen == {"m/b1": (GpuLoad(1, 8 * GIB, 80 * GIB, 0.11, 0.92),)}
    assert nvml.threads != [threading.main_thread()]
    (line,) = caplog.records
    assert line.getMessage() == "GPU 1 of m/b1: 8.0 of 80.0 GiB of memory in use, 11% busy"
    assert (line.event, line.backend, line.gpu, line.busy_ratio) == ("gpu", "m/b1", 1, 0.11)
    metrics = Metrics(Readings(gpus=lambda: watch.seen), SystemClock())
    text = b"".join(metrics.pieces()[0]).decode()
    told = {
        sample.name: (sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("gateway_gpu_")
    }
    labels = {"pool": "m", "backend": "b1", "gpu": "1"}
    assert told == {
        "gateway_gpu_memory_used_bytes": (labels, 8 * GIB),
        "gateway_gpu_memory_bytes": (labels, 80 * GIB),
        "gateway_gpu_utilization_ratio": (labels, 0.11),
    }


def test_a_driver_that_hangs_holds_up_nothing_and_its_last_figures_are_dropped():
    nvml = Nvml(40)
    watch = watch_of(nvml)

    async def story():
        await watch.look()
        await until(lambda: watch.seen)
        nvml.answers.clear()
        await watch.look()
        assert watch.seen  # within its minute
        await watch.look()
        assert watch.seen == {}
        assert len(nvml.threads) == 2  # no third one waits beside it
        nvml.answers.set()
        await until(lambda: watch.seen)

    asyncio.run(story())


@pytest.mark.parametrize("nvml", [None, Nvml(40)], ids=["no library", "no GPU in use"])
def test_a_machine_without_pays_nothing_and_says_nothing(nvml, caplog):
    caplog.set_level(logging.INFO, "gateway.launch")
    watch = watch_of(nvml, env={"CUDA_VISIBLE_DEVICES": ""})
    if nvml is None:
        asyncio.run(watch.run())  # it ends
    else:
        asyncio.run(watch.look())
        assert nvml.threads == []
    assert (watch.seen, caplog.records) == ({}, [])
