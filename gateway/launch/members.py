"""The processes of one launched server: find all of them, and end all of them.

A process belongs to a server by any of: the marker in its environment, its output into the server's log file,
the session of the server's first process. All three are needed: vLLM's engine overwrites its
environment with its title, a worker may have a session of its own, a child may close its output.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from gateway.launch import proc
from gateway.launch.launcher import LaunchError
from gateway.launch.proc import Process
from gateway.launch.record import Record

# Not VLLM_...: vLLM warns of unknown variables with such names. Servers never inherit our own variables that
# begin with GATEWAY_, so a gateway that runs in a server of another gateway is not mixed up with it.
MARK_BACKEND: Final = "GATEWAY_BACKEND"
MARK_START: Final = "GATEWAY_START"

# For processes that are left when the first one has ended: engines without an API server, or the server
# itself behind a wrapper. vLLM ends within a few seconds.
REST_GRACE_S: Final = 5.0
KILLED_S: Final = 10.0  # from SIGKILL until a process that still runs is stuck in the kernel


@dataclass(frozen=True, slots=True)
class Members:
    """What the processes of one backend have in common."""

    backend: str  # the marker's value: the state folder and the backend's id
    log: tuple[int, int] | None  # device and inode of the log file

    def find(self, record: Record | None) -> list[Process]:
        """Return the living processes of this start and of earlier ones. Blocking: it reads all of /proc."""
        me = os.getpid()
        session = _session(record)
        return [each for each in proc.every() if each.pid != me and self._owns(each, session)]

    def _owns(self, process: Process, session: tuple[int, int] | None) -> bool:
        if session is not None and process.session == session[0] and process.started >= session[1]:
            return True
        if proc.variables(process.pid, waits=True).get(MARK_BACKEND) == self.backend:
            return True
        return self.log is not None and proc.writes_to(process.pid, self.log)

    async def end(self, record: Record | None, grace_s: float) -> frozenset[int]:
        """End every process, and return the pids once none is left.

        The server's first process gets SIGTERM and `grace_s`: it ends its own children, and would take a child
        that got a signal at the same time for crashed. Then the others get SIGTERM and 5 s, then SIGKILL, with
        the whole group.

        Raises:
            LaunchError: some do not end, 10 s after SIGKILL.
        Cancel: signals that were sent stay sent.
        """
        members = await asyncio.to_thread(self.find, record)
        ended = set(members)
        first = [each for each in members if record is not None and record.is_of(each)]
        if first:
            await _ask(first, grace_s)
            members = await asyncio.to_thread(self.find, record)
            ended.update(members)
        await _ask(members, min(grace_s, REST_GRACE_S))
        until = asyncio.get_running_loop().time() + KILLED_S
        while members := await asyncio.to_thread(self.find, record):
            ended.update(members)
            left_s = until - asyncio.get_running_loop().time()
            if left_s <= 0:
                raise LaunchError(_stuck(members))
            _kill(members, record)
            await _gone(members, left_s)
        pids = frozenset(each.pid for each in ended)
        await asyncio.to_thread(_bury, pids, record)
        return pids


async def _ask(members: Iterable[Process], patience_s: float) -> None:
    for each in members:
        proc.tell(each, signal.SIGTERM)
        proc.tell(each, signal.SIGCONT)  # a stopped process could not handle SIGTERM
    await _gone(members, patience_s)


async def _gone(members: Iterable[Process], patience_s: float) -> None:
    """Wait until these have ended, at most `patience_s`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            for each in members:
                await proc.end_of(each)


def _kill(members: Iterable[Process], record: Record | None) -> None:
    if record is not None and any(each.group == record.pid for each in members):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(record.pid, signal.SIGKILL)  # all at once: none can start another
    for each in members:
        proc.tell(each, signal.SIGKILL)


def _bury(pids: Collection[int], record: Record | None) -> None:
    """Reap those that became our children: the first process of a container adopts all orphans.

    Not the server's first process: how it ended will still be asked.
    """
    session = _session(record)
    for each in proc.every(dead=True):
        its = each.pid in pids or (session is not None and each.session == session[0])
        if its and each.parent == os.getpid() and (record is None or each.pid != record.pid):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(each.pid, os.WNOHANG)


def _session(record: Record | None) -> tuple[int, int] | None:
    """Return session and start time of the server; None if another process has its number by now."""
    if record is None or not record.pid or record.boot != proc.boot_id():
        return None
    holder = proc.find(record.pid)
    if holder is not None and not record.is_of(holder):
        return None
    return record.pid, record.started


def _stuck(members: Iterable[Process]) -> str:
    named = ", ".join(str(each) for each in members)
    return (
        f"{named} did not end within {KILLED_S:.0f} s of SIGKILL: it is stuck in the kernel, as"
        " with a hanging GPU. Check `dmesg` for Xid errors; the machine may need a reboot."
    )
