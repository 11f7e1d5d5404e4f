"""`Predecessor`: the gateway whose place this process takes, at the other end of a channel.

The order of messages is in `messages`. Before `replaced_by` this side changes nothing, neither files nor backends, so
it may fail at any time without harm.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Final, Self

import msgspec

from gateway import __version__
from gateway.adapters.keepers import Adapters
from gateway.core.errors import ConfigError
from gateway.core.events import EventKind
from gateway.heal.handover import take_up
from gateway.launch import proc
from gateway.ops.upgrading import UpgradeFailed
from gateway.pools.table import Backend
from gateway.process import Process
from gateway.upgrade.messages import (
    MOST_BYTES,
    VARIABLE,
    Failed,
    Go,
    Inherits,
    Left,
    Loaded,
    Message,
    Ready,
    decode,
    encode,
    inherits,
)

_GO_S: Final = 60.0  # for the old gateway to pause what it does to backends
_WHY_CHARS: Final = 4000


class GaveUp(Exception):
    """The old gateway goes on serving, or has ended; this process is not needed."""


class Predecessor:
    """The old gateway. `listeners` are its sockets, by name; `kept`: systemd keeps them open, too."""

    def __init__(self, inherited: Inherits) -> None:
        for number in (inherited.channel, inherited.public, inherited.admin):
            os.set_inheritable(number, False)
        self._channel = socket.socket(fileno=inherited.channel)
        self.listeners = {
            "public": socket.socket(fileno=inherited.public),
            "admin": socket.socket(fileno=inherited.admin),
        }
        self.kept = inherited.kept
        self._process = proc.find(os.getppid())
        self.expects = Go([], [])
        self._left: Left | None = None  # what it told last; None: it has ended, or tells nothing
        self._is_ready = False

    @classmethod
    def of(cls, environ: MutableMapping[str, str]) -> Self | None:
        """Return the gateway whose place this process takes; None: it takes nobody's place.

        Raises:
            msgspec.DecodeError, OSError: the variable in the environment cannot be read, or names no sockets.
        """
        text = environ.pop(VARIABLE, None)
        return None if text is None else cls(inherits(text))

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Tell the old gateway why this start fails, if it fails before it is ready.

        Raises:
            GaveUp: it fails.
        """
        try:
            yield
        except Exception as error:
            if self._is_ready or isinstance(error, GaveUp):
                raise
            why = _why(error)[:_WHY_CHARS]
            with contextlib.suppress(OSError):
                self._send(Failed(why))
            raise GaveUp(f"the gateway that runs goes on serving: {why}") from error

    def detach(self) -> None:
        """Become nobody's child: a forked process goes on, and this one ends. Call it before any thread starts.

        A supervisor of all processes (systemd, say) then learns when the new one ends, although the old gateway still
        lives.
        """
        if os.fork():
            os._exit(0)

    def loaded(self, state: Path) -> None:
        """Tell the old gateway that this process can serve, and wait for its `Go`. Blocking. `state` is our folder.

        Raises:
            GaveUp: the old gateway does not want it.
            UpgradeFailed: the servers that the old gateway launched are not in our state folder.
        """
        self._channel.settimeout(_GO_S)
        try:
            self._send(Loaded(os.getpid(), __version__, hears_left=True))
            data = self._channel.recv(MOST_BYTES)
        except OSError as error:  # TimeoutError is one
            raise GaveUp(str(error)) from error
        message = decode(data) if data else None
        if not isinstance(message, Go):
            raise GaveUp("the gateway that started this process goes on, or has ended")
        if message.records and os.path.realpath(message.records) != os.path.realpath(state):
            raise UpgradeFailed(
                f"servers that the gateway launched run, and their records are in {message.records}: with"
                f" `state: {state}` they would not be found. Restart the gateway, or put `state` back"
            )
        self.expects = message
        self._channel.setblocking(False)

    async def replaced_by(self, process: Process, missing: list[str]) -> None:
        """Take its place: new connections are accepted by now, and it hands over what only one process may do.

        Cancel: nothing is held.
        """
        with contextlib.ExitStack() as failed:
            failed.callback(self._channel.close)
            self._send(Ready(missing))
            self._is_ready = True
            self._left = await self._next()  # None: it has ended
            failed.pop_all()
        self._leaves_to(process)

    async def follow(self, adapters: Adapters) -> None:
        """Have the adapters loaded that its last requests wait for, until it has ended. Call it once replaced.

        Cancel: nothing is held.
        """
        with self._channel:
            while self._left is not None:
                adapters.awaited_before = self._left.awaited
                self._left = await self._next()
        adapters.awaited_before = {}

    def _leaves_to(self, process: Process) -> None:
        """Take over orders and verdicts, and leave all older processes the time to finish."""
        detail = f"process {os.getpid()} with version {__version__} took over"
        process.supervisor.events.note(process.clock, EventKind.UPGRADE, "", "done", detail)
        take_up(process.supervisor, self.expects.restarts, self.expects.tried)
        process.rollouts.take_over()
        table, carried = process.table, process.table.carried_elsewhere
        process.finishing = finishing = [*self.expects.finishing]
        if self._process is not None:
            finishing.append((self._process.pid, self._process.started))

        def carried_there_too(backend_id: str, since: float) -> bool:
            there = any(proc.runs(*each) for each in finishing)
            return (there and _works(table.get(backend_id), since)) or carried(backend_id, since)

        table.carried_elsewhere = carried_there_too

    async def _next(self) -> Left | None:
        """Return what it tells next once all is handed over; None: it has closed the channel."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(self._channel, MOST_BYTES):
                with contextlib.suppress(msgspec.DecodeError):  # of another version
                    if isinstance(message := decode(data), Left):
                        return message
        return None

    def _send(self, message: Message) -> None:
        self._channel.send(encode(message))


def _works(backend: Backend | None, since: float) -> bool:
    """Whether an engine may be at work: no scrape since then shows it empty, or a reload removed its backend."""
    sample = None if backend is None else backend.sample
    return sample is None or sample.at < since or bool(sample.running or sample.waiting)


def _why(error: Exception) -> str:
    """Return what ended a start, for people."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, UpgradeFailed):
        return str(error)
    if isinstance(error, ConfigError):
        return "; ".join(error.findings)
    if isinstance(error, OSError):
        return ": ".join(str(part) for part in (error.filename, error.strerror) if part)
    return f"{type(error).__name__}: {error}"
