"""Who holds GPU memory, where nvidia-ml-py is installed (the extra `nvidia`).

The driver frees the memory of a process that was killed a moment after the process has gone, and a
vLLM that starts in that moment measures too little free memory. Without the library, and in a
container, where the driver tells the host's pids, that the processes have gone is all that is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Callable
from typing import Any, Final

FREED_S: Final = 30.0  # most that is waited for the driver to free what ended processes held
_LOOK_S: Final = 0.25


def holders() -> frozenset[int] | None:
    """Return the processes that hold memory on any GPU; None where that cannot be known.

    Blocking: the driver is asked, in milliseconds.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        found: set[int] = set()
        for place in range(nvml.nvmlDeviceGetCount()):
            device = nvml.nvmlDeviceGetHandleByIndex(place)
            found.update(each.pid for each in nvml.nvmlDeviceGetComputeRunningProcesses(device))
        return frozenset(found)
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


async def freed(
    ended: frozenset[int], holders: Callable[[], frozenset[int] | None] = holders
) -> frozenset[int]:
    """Wait until processes that ended hold no GPU memory; return those that do after 30 s."""
    holding = ended
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FREED_S):
            while holding:
                held = await asyncio.to_thread(holders)
                holding = ended & (held or frozenset())
                if holding:
                    await asyncio.sleep(_LOOK_S)
    return holding
