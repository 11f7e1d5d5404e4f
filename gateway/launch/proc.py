"""Read `/proc`: which processes there are, what belongs to them, who listens where.

A pid alone identifies no process, because it is used again; pid and start time (since boot) do. Everything
here is a momentary view: a process that cannot be read has gone, or is another user's. Everything except
`end_of` and `first_end` blocks: microseconds for one process, milliseconds for all.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
# Fields after the name, counted from 0: proc_pid_stat(5) numbers them from 3 (state).
_STATE, _PARENT, _GROUP, _SESSION, _THREADS, _STARTED = 0, 1, 2, 3, 17, 19
_MEMORY, _VARIABLES, _VARIABLES_END, _EXIT_STATUS = 20, 47, 48, 49
_DEAD: Final = "ZX"  # a zombie holds nothing but its number, once its other threads have ended too
_LISTEN: Final = "0A"  # TCP_LISTEN, include/net/tcp_states.h
# Of /proc/net/unix, proc_net(5). A connection that was accepted has the path of its listener.
_UNIX_STATE, _UNIX_INODE, _UNIX_PATH = 5, 6, 7
_UNCONNECTED: Final = "01"  # SS_UNCONNECTED, include/uapi/linux/net.h
_KIB: Final = 1024
_TICKS: Final = os.sysconf("SC_CLK_TCK")  # a second
_EXEC_S: Final = 1.0  # far more than an exec takes, unless its program is on a disk that hangs
_EXEC_POLL_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class Process:
    """One process as it was seen. `started` is in clock ticks since boot."""

    pid: int
    started: int
    parent: int
    group: int
    session: int
    name: str
    dead: bool

    def __str__(self) -> str:
        return f"{self.pid} ({self.name})"


@dataclass(frozen=True, slots=True)
class End:
    """The end of a process. `code`: what it exited with, or a signal's number below zero; None: not known."""

    process: Process
    code: int | None

    def __str__(self) -> str:
        if self.code is None:
            return f"{self.process} has ended"
        if self.code < 0:
            return f"{self.process} was killed by signal {-self.code}"
        return f"{self.process} exited with code {self.code}"


@functools.cache
def boot_id() -> str:
    """Return the id of this boot of the machine."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def find(pid: int) -> Process | None:
    """Return the process with this number, if there is one."""
    try:
        return parse_stat((_PROC / str(pid) / "stat").read_text())
    except (OSError, ValueError, IndexError):
        return None


def runs(pid: int, started: int) -> bool:
    """Return whether this very process still runs."""
    found = find(pid)
    return found is not None and found.started == started and not found.dead


def began_at(started: int) -> float:
    """Return when a process began, in seconds since the epoch."""
    return booted_at() + started / _TICKS


def booted_at() -> float:
    """Return when this machine was started, in seconds since the epoch, by the clock as it is now."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def parse_stat(text: str) -> Process:
    """Read a line of /proc/PID/stat; the name in it may hold spaces and parentheses."""
    head, _, tail = text.rpartition(")")
    pid, _, name = head.partition(" (")
    fields = tail.split()
    return Process(
        pid=int(pid),
        started=int(fields[_STARTED]),
        parent=int(fields[_PARENT]),
        group=int(fields[_GROUP]),
        session=int(fields[_SESSION]),
        name=name,
        dead=fields[_STATE] in _DEAD and int(fields[_THREADS]) <= 1,
    )


def every(*, dead: bool = False) -> Iterator[Process]:
    """Go through all living processes, or (`dead`) those that have ended and whose parent has not reaped them."""
    for entry in os.listdir(_PROC):
        if entry.isdecimal():
            found = find(int(entry))
            if found is not None and found.dead is dead:
                yield found


def variables(pid: int, *, waits: bool = False) -> dict[str, str]:
    """Return the environment a process was started with; empty where it cannot be read.

    A program that changes its title (vLLM's engine and workers do, by setproctitle) overwrites it.
    During an exec there is none to read. With `waits` this blocks until the exec has ended: call it in a thread.
    """
    until = time.monotonic() + (_EXEC_S if waits else 0.0)
    without = 0  # looks in a row: for microseconds an exec has an empty environment, too
    try:
        while not (raw := (_PROC / str(pid) / "environ").read_bytes()):
            memory, begin, end = _memory(pid)
            without = without + 1 if 0 < begin == end else 0
            if not memory or without > 1 or time.monotonic() >= until:
                return {}
            time.sleep(_EXEC_POLL_S)
    except OSError:
        return {}
    pairs = (item.partition("=") for item in os.fsdecode(raw).split("\0"))
    return {name: value for name, equals, value in pairs if equals}


def _memory(pid: int) -> tuple[int, int, int]:
    """Return the memory of a process (0: it is the kernel's), and where its environment begins and ends."""
    fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return int(fields[_MEMORY]), int(fields[_VARIABLES]), int(fields[_VARIABLES_END])


def writes_to(pid: int, file: tuple[int, int]) -> bool:
    """Return whether the standard output or error of a process is this file (device, inode)."""
    for number in (1, 2):
        with contextlib.suppress(OSError):
            found = os.stat(f"{_PROC}/{pid}/fd/{number}")
            if (found.st_dev, found.st_ino) == file:
                return True
    return False


def tell(process: Process, number: signal.Signals) -> None:
    """Send a signal to exactly this process; nothing happens if it has gone."""
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(process.pid)
        try:
            # With the handle open, the number cannot pass to another process between the check and the signal.
            if runs(process.pid, process.started):
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)


async def end_of(process: Process) -> None:
    """Wait until this very process has ended. Cancel: nothing is held."""
    await first_end([process])


async def first_end(processes: Iterable[Process]) -> End | None:
    """Wait until any of these very processes has ended, and return how; None if there are none.

    Raises:
        OSError: the system gives no handle.
    Cancel: nothing is held.
    """
    loop, watched = asyncio.get_running_loop(), False
    first: asyncio.Future[End] = loop.create_future()
    with contextlib.ExitStack() as held:
        for each in processes:
            try:
                handle = os.pidfd_open(each.pid)  # readable once the process has ended
            except ProcessLookupError:
                return End(each, None)
            held.callback(os.close, handle)
            loop.add_reader(handle, _settle, first, each)
            held.callback(loop.remove_reader, handle)
            if not runs(each.pid, each.started):
                return End(each, _code(each))
            watched = True
        return await first if watched else None


def _settle(first: asyncio.Future[End], ended: Process) -> None:
    if not first.done():
        first.set_result(End(ended, _code(ended)))  # now: its parent may be about to wait for it


def _code(ended: Process) -> int | None:
    """Return how a process ended; None once its parent has waited for it.

    The kernel says 0 of what this user may not see, so an exit code of 0 proves nothing.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = (_PROC / str(ended.pid) / "stat").read_text()
        status = int(text.rpartition(")")[2].split()[_EXIT_STATUS])
        found = parse_stat(text)
        if found.dead and found.started == ended.started and status:
            return os.waitstatus_to_exitcode(status)
    return None


def private_bytes(pid: int) -> int:
    """Return the memory that belongs to this process alone (RssAnon); 0 where it cannot be read."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (_PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * _KIB
    return 0


def holders(inodes: Iterable[str]) -> list[Process]:
    """Return the processes that hold any of these sockets, as far as this user may see."""
    sockets = {f"socket:[{inode}]" for inode in inodes}
    return [each for each in every() if sockets and _holds(each.pid, sockets)]


def bound(path: Path) -> list[str]:
    """Return the inodes of the sockets that are bound to this path, whether they listen or not."""
    found = []
    with contextlib.suppress(OSError):
        for line in (_PROC / "net/unix").read_text(errors="surrogateescape").splitlines()[1:]:
            fields = line.split(maxsplit=_UNIX_PATH)
            is_there = len(fields) > _UNIX_PATH and fields[_UNIX_PATH] == str(path)
            if is_there and fields[_UNIX_STATE] == _UNCONNECTED:
                found.append(fields[_UNIX_INODE])
    return found


def listening(port: int) -> Iterator[str]:
    """Yield the inodes of the sockets that listen on a TCP port."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]


def _holds(pid: int, sockets: set[str]) -> bool:
    folder = f"{_PROC}/{pid}/fd"
    with contextlib.suppress(OSError):
        for number in os.listdir(folder):
            with contextlib.suppress(OSError):
                if os.readlink(f"{folder}/{number}") in sockets:
                    return True
    return False
