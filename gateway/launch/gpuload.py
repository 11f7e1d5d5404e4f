"""Read the load of the GPUs of launched backends each minute, where nvidia-ml-py is installed (the extra `nvidia`).

The driver of a GPU that fell off the bus may never answer. So a thread asks, nobody waits for it, and figures
that it does not renew are dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gateway.config.flags import in_force
from gateway.config.models import Config
from gateway.config.placement import gpus_taken, share_of
from gateway.config.supervision import LaunchConfig
from gateway.core.aio import periodic
from gateway.core.gpu import GpuLoad
from gateway.launch.cmdline import environment
from gateway.launch.gpus import told_by
from gateway.launch.launcher import Changes

log = logging.getLogger("gateway.launch")

EVERY_S: Final = 60.0
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_UUID: Final = re.compile(r"(GPU|MIG)-")
_GIB: Final = 1 << 30

Loads = Mapping[str, Sequence[GpuLoad]]  # by backend


@dataclass(frozen=True, slots=True)
class Pins:
    """The GPUs that a launched backend may use."""

    names: tuple[str, ...] | None  # indices, or how UUIDs begin; None: all
    # The part of each GPU's memory that vLLM takes at its start; None: the settings do not say.
    share: float | None

    def holds(self, gpu: Gpu) -> bool:
        """Whether a GPU is one of them. A part of a GPU (MIG) must be named by its UUID: an index names no part."""
        if gpu.part is None and (self.names is None or str(gpu.index) in self.names):
            return True
        return any(gpu.uuid.startswith(name) for name in self.names or () if _UUID.match(name))


@dataclass(frozen=True, slots=True)
class Gpu:
    """The figures of a GPU, or of one part of it (MIG), from the driver."""

    index: int
    uuid: str
    used_bytes: int
    total_bytes: int
    busy_ratio: float | None
    part: int | None = None


def pins(launch: LaunchConfig, base: Mapping[str, str]) -> Pins | None:
    """Return the GPUs that a backend is pinned to; None: it uses no GPU. `base`: the gateway's environment. Pure."""
    flags = in_force(launch.command, launch.args)
    visible = environment(launch, base, Changes(), {}).get(_VISIBLE)
    if flags.get("device") == "cpu" or "VLLM_CPU_KVCACHE_SPACE" in launch.env:
        return None
    if visible is not None and visible.strip() in ("", "-1"):
        return None
    taken = gpus_taken(flags)
    most = None if taken is None else taken[0]
    if visible is not None:
        names = tuple(each.strip() for each in visible.split(","))
        # With `launch.gpus` the list is already exact; do not cut it.
        most = None if launch.gpus else most
        return Pins(names[:most], _share(flags))
    return Pins(None if most is None else tuple(map(str, range(most))), _share(flags))


def loads(gpus: Sequence[Gpu], pinned: Mapping[str, Pins]) -> dict[str, tuple[GpuLoad, ...]]:
    """Return the load of each backend's GPUs. Pure."""
    return {
        backend_id: tuple(
            GpuLoad(
                *(gpu.index, gpu.used_bytes, gpu.total_bytes, gpu.busy_ratio),
                _planned(gpu, pinned.values()),
                gpu.part,
            )
            for gpu in gpus
            if each.holds(gpu)
        )
        for backend_id, each in pinned.items()
    }


def _planned(gpu: Gpu, pinned: Collection[Pins]) -> float | None:
    shares = [each.share for each in pinned if each.holds(gpu)]
    known = [share for share in shares if share is not None]
    return min(sum(known), 1.0) if len(known) == len(shares) else None


def read(nvml: Any) -> list[Gpu]:
    """Return every GPU whose memory the driver reports; a divided one (MIG) as its parts. Blocking."""
    found: list[Gpu] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        with contextlib.suppress(nvml.NVMLError):  # it shares the machine's memory, or is lost
            device = nvml.nvmlDeviceGetHandleByIndex(index)
            if _in_parts(nvml, device):
                found += _parts(nvml, index, device)
            else:
                found.append(_gpu(nvml, index, device))
    return found


def _in_parts(nvml: Any, device: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(device)[0])  # present mode, mode after a reset
    except nvml.NVMLError:  # a GPU that cannot be divided
        return False


def _parts(nvml: Any, index: int, device: Any) -> Iterator[Gpu]:
    for part in range(nvml.nvmlDeviceGetMaxMigDeviceCount(device)):
        with contextlib.suppress(nvml.NVMLError):  # there is no part with that number
            own = nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, part)
            yield _gpu(nvml, index, own, part)


def _gpu(nvml: Any, index: int, device: Any, part: int | None = None) -> Gpu:
    memory, uuid, busy = nvml.nvmlDeviceGetMemoryInfo(device), nvml.nvmlDeviceGetUUID(device), None
    with contextlib.suppress(nvml.NVMLError):  # the driver does not know it of a part (MIG)
        busy = nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100
    return Gpu(index, uuid, int(memory.used), int(memory.total), busy, part)


class GpuWatch:
    """The GPUs of launched backends as they were within the last minute or two. One owner."""

    def __init__(self, config: Callable[[], Config], nvml: Any | None = None) -> None:
        self.seen: Loads = {}  # empty: not known
        self._config, self._nvml = config, nvml
        self._asking: threading.Thread | None = None

    async def run(self) -> None:
        """Look now and each minute; without the library, end at once. Cancel: at once."""
        if self._nvml is None and importlib.util.find_spec("pynvml") is None:
            return
        await periodic(self.look, every_s=EVERY_S, name="gpus")

    async def look(self) -> None:
        """Have a thread ask the driver. If the last one still waits, the figures are unknown."""
        pinned = {
            f"{name}/{backend.name}": found
            for name, pool in self._config().pools.items()
            for backend in pool.backends
            if backend.launch is not None
            and (found := pins(backend.launch, os.environ)) is not None
        }
        hangs = self._asking is not None and self._asking.is_alive()
        if hangs or not pinned:
            self.seen = {}
            return
        loop = asyncio.get_running_loop()
        self._asking = threading.Thread(
            target=self._ask, args=(loop, pinned), name="gpus", daemon=True
        )
        self._asking.start()

    def _ask(self, loop: asyncio.AbstractEventLoop, pinned: Mapping[str, Pins]) -> None:
        gpus = told_by(read, self._nvml) or []
        with contextlib.suppress(RuntimeError):  # the gateway ended meanwhile
            loop.call_soon_threadsafe(self._told, loads(gpus, pinned))

    def _told(self, seen: Loads) -> None:
        self.seen = seen
        for backend_id, gpus in seen.items():
            for gpu in gpus:
                log.info(
                    "GPU %s of %s: %.1f of %.1f GiB of memory in use, %s",
                    *(gpu.name, backend_id, gpu.used_bytes / _GIB, gpu.total_bytes / _GIB),
                    "busy: unknown" if gpu.busy_ratio is None else f"{gpu.busy_ratio:.0%} busy",
                    extra={
                        "event": "gpu",
                        "backend": backend_id,
                        "gpu": gpu.index,
                        "part": gpu.part,
                        "used_bytes": gpu.used_bytes,
                        "total_bytes": gpu.total_bytes,
                        "busy_ratio": gpu.busy_ratio,
                    },
                )


def _share(flags: Mapping[str, Any]) -> float | None:
    """Return the share of memory that vLLM takes; None: its cache has a fixed size, or the share cannot be read."""
    return None if "kv-cache-memory-bytes" in flags else share_of(flags)
