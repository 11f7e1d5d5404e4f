"""How the GPUs of launched backends are: which they may use, what the driver tells, and what that means."""

import asyncio
import logging
import threading
import types
from dataclasses import dataclass

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.config.models import Config
from gateway.config.supervision import LaunchConfig
from gateway.core.aio import SystemClock
from gateway.core.gpu import GpuLoad
from gateway.launch.gpuload import Gpu, GpuWatch, Pins, loads, pins, read
from gateway.observe.metrics import Metrics
from gateway.observe.readings import Readings
from gateway.pools.table import PoolTable

GIB = 1 << 30


class NvmlError(Exception):
    """As the library raises."""


@dataclass(frozen=True)
class Part:
    """A part of a GPU (MIG)."""

    uuid: str
    used_gib: float
    gib: float


# As drivers name parts: since 470, and before.
NEW, OLD = (
    "MIG-c7384736-a75d-5afc-978f-d2f1294409fd",
    "MIG-GPU-3eb87630-93d5-b2b6-b8ff-9b359caf4ee2/1/0",
)


class Nvml:
    """What of pynvml is asked, for a machine with GPUs that hold so many of 80 GiB."""

    NVMLError = NvmlError

    def __init__(self, *used_gib, broken=(), no_rates=(), parts=None):
        self.used_gib, self.broken, self.no_rates = used_gib, broken, no_rates
        # Of GPUs in parts (MIG), by the GPU: those that there are, by their numbers.
        self.parts = parts or {}
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

    def nvmlDeviceGetMigMode(self, device):
        if not self.parts:
            raise NvmlError  # NVML_ERROR_NOT_SUPPORTED
        return [int(device in self.parts)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, device):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device, index):
        if index not in self.parts[device]:
            raise NvmlError  # NVML_ERROR_NOT_FOUND
        return self.parts[device][index]

    def nvmlDeviceGetUUID(self, device):
        if isinstance(device, Part):
            return device.uuid
        return f"GPU-{device}aaa-bbbb"

    def nvmlDeviceGetMemoryInfo(self, device):
        if isinstance(device, Part):
            used, total = int(device.used_gib * GIB), int(device.gib * GIB)
            return types.SimpleNamespace(used=used, total=total, free=total - used)
        if device in self.broken:
            raise NvmlError
        used = int(self.used_gib[device] * GIB)
        return types.SimpleNamespace(used=used, total=80 * GIB, free=80 * GIB - used)

    def nvmlDeviceGetUtilizationRates(self, device):
        if device in self.no_rates or isinstance(device, Part):
            raise NvmlError
        return types.SimpleNamespace(gpu=10 + device, memory=3)


def launch(**settings):
    return LaunchConfig.model_validate(
        {"command": ["vllm", "serve", "m"], "port": 8001, **settings}
    )


@pytest.mark.parametrize(
    ("settings", "base", "expected"),
    [
        ({}, {}, Pins(("0",), 0.92)),
        ({"args": {"tensor-parallel-size": 2, "data-parallel-size": 2}}, {}, Pins(("0", "1", "2", "3"), 0.92)),
        ({"args": {"tensor-parallel-size": 2, "nnodes": 2}}, {}, Pins(None, 0.92)),
        ({"env": {"CUDA_VISIBLE_DEVICES": "3,2,1"}, "args": {"tensor-parallel-size": 2}}, {}, Pins(("3", "2"), 0.92)),
        ({"env": {"CUDA_VISIBLE_DEVICES": NEW}}, {}, Pins((NEW,), 0.92)),
        ({"gpus": [2, 3]}, {}, Pins(("2", "3"), 0.92)),
        ({"gpus": [2], "args": {"gpu-memory-utilization": 0.5}}, {}, Pins(("2",), 0.5)),
        ({"args": {"kv-cache-memory-bytes": "8G"}}, {}, Pins(("0",), None)),
        ({}, {"CUDA_VISIBLE_DEVICES": "1"}, Pins(("1",), 0.92)),
        ({"gpus": [2]}, {"CUDA_VISIBLE_DEVICES": "1"}, Pins(("2",), 0.92)),
        ({"env": {"CUDA_VISIBLE_DEVICES": "GPU-1aaa, 0"}}, {}, Pins(("GPU-1aaa",), 0.92)),
        ({"env": {"CUDA_VISIBLE_DEVICES": ""}}, {}, None),
        ({"env": {"CUDA_VISIBLE_DEVICES": "-1"}}, {}, None),
        ({"env": {"VLLM_CPU_KVCACHE_SPACE": "4"}}, {}, None),
        ({"args": {"device": "cpu"}}, {}, None),
    ],
)  # fmt: skip
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


def test_where_one_server_takes_a_fixed_cache_what_settings_take_is_not_known():
    gpus = read(Nvml(75))
    found = loads(gpus, {"m/a": Pins(("0",), None), "m/b": Pins(("0",), 0.2)})
    assert found["m/a"] == found["m/b"] == (GpuLoad(0, 75 * GIB, 80 * GIB, 0.1, None),)
    assert found["m/a"][0].rest_used_ratio is None


def test_a_gpu_in_parts_is_told_as_its_parts():
    parts = {1: {0: Part(NEW, 30, 39.5), 3: Part(OLD, 5, 9.75)}}
    assert read(Nvml(40, 44, parts=parts)) == [
        Gpu(0, "GPU-0aaa-bbbb", 40 * GIB, 80 * GIB, 0.1),
        Gpu(1, NEW, 30 * GIB, int(39.5 * GIB), None, 0),
        Gpu(1, OLD, 5 * GIB, int(9.75 * GIB), None, 3),
    ]


def test_a_part_belongs_to_who_names_it_and_an_index_names_none():
    gpus = read(Nvml(40, parts={0: {0: Part(NEW, 36, 39.5), 1: Part(OLD, 39, 39.5)}}))
    found = loads(
        gpus,
        {
            "m/new": Pins((NEW,), 0.92),
            "m/old": Pins((OLD,), 0.92),
            "m/short": Pins(("MIG-c7384736",), 0.05),
            "m/index": Pins(("0",), 0.92),
            "m/all": Pins(None, 0.92),
        },
    )
    named = {each: [gpu.name for gpu in gpus] for each, gpus in found.items()}
    assert named == {
        "m/new": ["0:0"], "m/old": ["0:1"], "m/short": ["0:0"], "m/index": [], "m/all": [],
    }  # fmt: skip
    assert found["m/new"][0].planned_ratio == pytest.approx(0.97)
    assert found["m/new"][0].rest_used_ratio == 0.0
    assert found["m/old"][0].rest_used_ratio == pytest.approx(0.84, abs=0.01)


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
    assert (line.event, line.backend, line.gpu, line.part, line.busy_ratio) == (
        "gpu",
        "m/b1",
        1,
        None,
        0.11,
    )
    table = PoolTable(SystemClock())
    table.apply(Config.model_validate({"pools": {"m": {"backends": ["http://h:1"]}}}).pools)
    metrics = Metrics(Readings(backends=lambda: table, gpus=lambda: watch.seen), SystemClock())
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
        await until(lambda: len(nvml.threads) == 2)
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
