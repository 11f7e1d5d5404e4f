"""One process of a worker, as the parent knows it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.core.channel import Channel, Unanswered
from gateway.store.shared import Lease


@dataclass(eq=False)
class Worker:
    """One process, and the leases that it holds. `ended` is set once the process has ended."""

    number: int
    pid: int
    began_at: float
    child: subprocess.Popen[bytes] | None = None  # None: its predecessor started it
    channel: Channel | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)  # it ended, or was replaced
    serving: asyncio.Event = field(default_factory=asyncio.Event)
    leases: dict[str, Lease] = field(default_factory=dict)
    reload_due: bool = False

    def send(self, which: signal.Signals) -> None:
        """Send a signal, if the process still runs."""
        if not self.ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, which)

    def reload(self) -> None:
        """Reload its settings once it serves: before that, the signal may end it."""
        self.reload_due = not self.serving.is_set()
        if not self.reload_due:
            self.send(signal.SIGHUP)

    def serves(self) -> None:
        """Note that it serves."""
        self.serving.set()
        if self.reload_due:
            self.reload()

    async def ask(self, what: str, args: Sequence[Any], within_s: float) -> Any:
        """Return its answer; None: it gave none in time."""
        if self.channel is None:
            return None
        try:
            return await self.channel.ask(what, *args, within_s=within_s)
        except Unanswered:
            return None

    def watch(self) -> None:
        """Set `ended` when the process is gone.

        Raises:
            OSError: it is gone already.
        """
        handle = os.pidfd_open(self.pid)
        loop = asyncio.get_running_loop()

        def gone() -> None:
            loop.remove_reader(handle)
            os.close(handle)
            if self.child is not None:
                self.child.wait()
            else:  # it may have become our child when its predecessor ended
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(self.pid, os.WNOHANG)
            self.ended.set()
            self.left.set()

        loop.add_reader(handle, gone)

    def how(self) -> str:
        """Return how it ended, as far as its parent can know."""
        code = None if self.child is None else self.child.returncode
        if code is None:
            return "has ended"
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"
