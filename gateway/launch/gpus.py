"""How much memory GPUs have and who holds it, where nvidia-ml-py is installed (the extra `nvidia`).

The driver frees the memory of a killed process a moment after the process has gone. A vLLM that starts
in that moment measures too little free memory. Without the library, and in a container, where the driver
reports pids of the host, only the end of the processes is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Callable
from typing import Any, Final, TypeVar

from gateway.core.aio import apart

FREED_S: Final = 30.0  # longest wait for the driver to free the memory of ended processes
_LOOK_S: Final = 0.25

T = TypeVar("T")


def holders() -> frozenset[int] | None:
    """Return the processes that hold memory on any GPU; None where that cannot be known.

    Blocking: the driver is asked, in milliseconds.
    """
    return told_by(_holders)


def smallest_bytes(gpus: tuple[int, ...]) -> int | None:
    """Return the memory of the smallest of some GPUs (empty: of all); None where it is not known.

    Blocking, as `holders`.
    """
    sizes = told_by(lambda nvml: _sizes(nvml, gpus))
    return min(sizes) if sizes else None


def _holders(nvml: Any) -> frozenset[int]:
    devices = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
    running = (nvml.nvmlDeviceGetComputeRunningProcesses(device) for device in devices)
    return frozenset(process.pid for each in running for process in each)


def _sizes(nvml: Any, gpus: tuple[int, ...]) -> list[int]:
    places = gpus or range(nvml.nvmlDeviceGetCount())
    devices = map(nvml.nvmlDeviceGetHandleByIndex, places)
    return [int(nvml.nvmlDeviceGetMemoryInfo(device).total) for device in devices]


def told_by(ask: Callable[[Any], T], nvml: Any | None = None) -> T | None:
    """Return the driver's answer; None where its library is missing or fails. Blocking."""
    try:
        nvml = nvml or importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        return ask(nvml)
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


async def freed(
    ended: frozenset[int], holders: Callable[[], frozenset[int] | None] = holders
) -> frozenset[int]:
    """Wait until processes that ended hold no GPU memory; return those that still do after 30 s."""
    holding = ended
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FREED_S):
            while holding:
                held = await apart(holders)  # a driver that hangs may never answer
                holding = ended & (held or frozenset())
                if holding:
                    await asyncio.sleep(_LOOK_S)
    return holding
