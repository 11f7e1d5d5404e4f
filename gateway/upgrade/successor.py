"""`Successor`: the process that is to take this gateway's place, at the other end of a channel.

It runs the code that is installed now, with the same command line and environment, and inherits our listeners.
Until it is ready it may be ended at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Self, TypeVar

import msgspec

from gateway.core.aio import periodic
from gateway.ops.upgrading import UpgradeFailed
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
)
from gateway.upgrade.notify import SOCKET as NOTIFY_SOCKET

_TELL_S: Final = 0.5
_ENDED_S: Final = 2.0  # for a process whose channel closed to be gone
# Programs that are PID 1 of a container for one child, and end the container together with it.
_CONTAINER_INITS: Final = frozenset({"tini", "docker-init", "dumb-init", "catatonit"})

Expected = TypeVar("Expected", Loaded, Ready)


def why_not(pid: int, parent: tuple[int, str], environ: Mapping[str, str]) -> str | None:
    """Return why no other process may take the place of this one; None where one may.

    `parent` is its parent's pid and name.
    """
    if pid == 1 or (parent[0] == 1 and parent[1] in _CONTAINER_INITS):
        return (
            "This gateway is the main process of a container, which ends when it does. Start a second"
            " container with the new image beside it, and stop this one when the new one is ready."
        )
    if environ.get("SYSTEMD_EXEC_PID") == str(pid) and not environ.get(NOTIFY_SOCKET):
        return (
            "The systemd unit of this gateway would take its end for a failure. Set `Type=notify` in the"
            " unit, as deploy/systemd/vllm-gateway.service has it, and restart it once."
        )
    return None


def command() -> list[str]:
    """Return the command line that runs this process again.

    A script is run by its name, so that a new installation under the same name is used.
    """
    if os.path.isfile(sys.argv[0]) and os.access(sys.argv[0], os.X_OK):
        return list(sys.argv)
    return [sys.executable, *sys.orig_argv[1:]]


class Successor:
    """The new process. One owner, who lets it go or ends it."""

    def __init__(self, started: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self._started = started
        self._channel = channel
        self.pid = started.pid  # then that of the process that will serve, from its `Loaded`
        self.version = ""
        self._hears_left = False
        self._left: Left | None = None  # what it was told last

    @classmethod
    def start(
        cls,
        public: socket.socket,
        admin: socket.socket,
        *,
        kept: bool,
        words: Sequence[str] | None = None,
    ) -> Self:
        """Start it with our listeners, by default with the command line of this process.

        Raises:
            UpgradeFailed: the system refused.
        """
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:  # no descriptors are left, say
            raise UpgradeFailed(f"cannot make a channel to it: {error.strerror}") from error
        ours.setblocking(False)
        # A message is sent as a whole or not at all; the system may allow less.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_BYTES)
        with theirs:
            given = Inherits(theirs.fileno(), public.fileno(), admin.fileno(), kept)
            words = words or command()
            try:
                started = subprocess.Popen(
                    words,
                    env={**os.environ, VARIABLE: encode(given).decode()},
                    stdin=subprocess.DEVNULL,
                    pass_fds=(given.channel, given.public, given.admin),
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise UpgradeFailed(f"cannot run {words[0]}: {error.strerror}") from error
        return cls(started, ours)

    async def loaded(self, within_s: float) -> None:
        """Wait until it has read its settings and can serve.

        Raises:
            UpgradeFailed: it cannot, or takes too long.
        """
        loaded = await self._hear(Loaded, within_s, "did not read its settings")
        self.pid, self.version = loaded.pid, loaded.version
        self._hears_left = loaded.hears_left
        self._started.poll()  # the process that we started has forked the one that will serve, and ended

    def go(self, message: Go) -> None:
        """Have it read the state folder, and serve.

        Raises:
            UpgradeFailed: it has ended.
        """
        try:
            self._channel.send(encode(message))
        except OSError as error:
            raise UpgradeFailed("it ended before it could serve") from error

    async def ready(self, within_s: float) -> list[str]:
        """Wait until it accepts connections; return the backends that it does not reach.

        Raises:
            UpgradeFailed: it cannot, or takes too long.
        """
        return (await self._hear(Ready, within_s, "did not accept connections")).missing

    def let_go(self, left: Left) -> None:
        """Leave to it what only one process may do."""
        self._started.poll()
        if not self._hears_left or not self._told(left):
            self._channel.close()

    async def tell(self, left: Callable[[], Left]) -> None:
        """Tell it `left` whenever that has changed. Call it once it was `let_go`. Cancel: the channel closes."""

        async def turn() -> None:
            if (now := left()) != self._left:
                self._told(now)

        with self._channel:
            if self._channel.fileno() >= 0:
                await periodic(turn, every_s=_TELL_S, name="heir")

    def _told(self, left: Left) -> bool:
        """Return whether it was told: it may have ended, or not read the messages before yet."""
        try:
            self._channel.send(encode(left))
        except OSError:
            return False
        self._left = left
        return True

    def end(self) -> None:
        """End it, and whatever it started, at once: nothing depends on it yet."""
        self._channel.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._started.pid, signal.SIGKILL)  # its session, which it leads
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._started.wait(_ENDED_S)

    async def _hear(self, kind: type[Expected], within_s: float, what: str) -> Expected:
        try:
            async with asyncio.timeout(within_s):
                message = await self._next()
        except TimeoutError:
            raise UpgradeFailed(f"it {what} within {within_s:.0f} s") from None
        except (OSError, msgspec.DecodeError) as error:
            raise UpgradeFailed(f"it said nothing that can be understood: {error}") from error
        if isinstance(message, kind):
            return message
        if isinstance(message, Failed):
            raise UpgradeFailed(message.why)
        raise UpgradeFailed(await self._how_it_ended())

    async def _next(self) -> Message | None:
        data = await asyncio.get_running_loop().sock_recv(self._channel, MOST_BYTES)
        return decode(data) if data else None

    async def _how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._started.wait, _ENDED_S)
        code = self._started.returncode
        how = f" with exit code {code}" if code else ""
        return f"it ended{how} before it could serve; what it wrote to standard error says why"


def parent_of_this() -> tuple[int, str]:
    """Return the pid and the name of this process's parent; the name is empty where it cannot be read."""
    parent = os.getppid()
    try:
        return parent, Path(f"/proc/{parent}/comm").read_text().strip()
    except OSError:
        return parent, ""
