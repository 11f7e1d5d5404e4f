"""Whether the kernel killed a server, or a process of it, for lack of host memory.

SIGKILL alone proves nothing: anybody may send it. But the kernel counts its kills for each control
group, and for the whole machine. A count that rose shortly before a server ended is proof.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_CGROUPS: Final = Path("/sys/fs/cgroup")
_VMSTAT: Final = Path("/proc/vmstat")
_AT_ONCE_S: Final = 5.0  # until the end of a process that was killed itself is seen
_BEFORE_S: Final = 60.0  # an API server may take long to notice that its engine was killed


@dataclass(frozen=True, slots=True)
class Counter:
    """A file in which the kernel counts its kills: it has a line `oom_kill N`."""

    path: Path
    of_machine: bool = False  # it counts the kills on the whole machine

    def read(self) -> int | None:
        """Return the count; None where it cannot be read."""
        with contextlib.suppress(OSError, ValueError):
            for line in self.path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
        return None


def counter_of(pid: int) -> Counter | None:
    """Return the nearest counter for a process: its control group's, one above it, the machine's."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        name = "memory.events" if not controllers else "memory.oom_control"
        root = _CGROUPS / controllers
        group = root / path.lstrip("/")
        for each in (group, *group.parents):
            found = Counter(each / name)
            if found.read() is not None:
                return found
            if each == root:
                break
    machine = Counter(_VMSTAT, of_machine=True)
    return machine if machine.read() is not None else None


class OomKills:
    """Watches the counter of one server. Each call reads up to two small files."""

    def __init__(
        self,
        counter_of: Callable[[int], Counter | None] = counter_of,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counter_of, self._now = counter_of, now
        self._pid = 0
        self._counter: Counter | None = None
        self._count: int | None = None
        self._rose_at: float | None = None  # monotonic

    def watch(self, pid: int) -> None:
        """Take a reading while the process `pid` lives."""
        if pid != self._pid:
            self._pid, self._counter = pid, self._counter_of(pid)
            self._count = self._rose_at = None
        if self._counter is None:
            return
        count = self._counter.read()
        if self._count is not None and count is not None and count > self._count:
            self._rose_at = self._now()
        self._count = count

    def killed(self, pid: int, exit_code: int | None) -> bool | None:
        """Return whether the kernel killed it for lack of memory; call this just after its end. None: not known.

        The machine's count is proof only for a process that was itself ended by SIGKILL. All servers that a gateway
        launched may be in one control group, so an earlier kill there may have hit another one.
        """
        if pid != self._pid or self._count is None or self._counter is None:
            return None
        self.watch(pid)
        ago_s = math.inf if self._rose_at is None else self._now() - self._rose_at
        if ago_s > _BEFORE_S:
            return None if self._count is None else False
        if exit_code == -signal.SIGKILL and ago_s > _AT_ONCE_S:
            return None
        if self._counter.of_machine and exit_code != -signal.SIGKILL:
            return None
        return True
