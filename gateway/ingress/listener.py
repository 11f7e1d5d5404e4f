"""The sockets that a gateway listens on, bound first so that a taken address is known at once; their servers."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator
from typing import Final, NamedTuple

import uvicorn
from starlette.types import ASGIApp

from gateway.config.units import Listen
from gateway.ingress.server import GatewayProtocol, Ingress

_BACKLOG: Final = 4096  # connections the kernel holds while the loop is busy
# A loop that is full of streams has some twenty turns a second. Beside 1,000 streams as fast as they go, 300 new
# clients a second had their replies after 0.16 s (p99 1.6 s) with eight in a turn; 0.12 s (1.2 s) with 32. An idle
# loop asks each copy of the listener in vain: 4 us for each connection.
_ACCEPTS_A_TURN: Final = 32
_PROBE_S: Final = 0.5
_KEEP_ALIVE_S: Final = 75  # of the admin listener; the public one has its own deadlines
_DATE_S: Final = 1.0  # what a date header resolves
# What the kernel holds for one client that does not read (Linux doubles it); left alone it grows to
# megabytes of an answer nobody takes, while the engine works on. Accepted sockets inherit it.
_SEND_BUFFER_BYTES: Final = 64 * 1024


# A filter for the kernel: of what comes to a listener, a SYN without ACK, which opens a connection, is dropped.
_ATTACH_FILTER: Final = 26  # SO_ATTACH_FILTER of Linux
_NO_SYN: Final = b"".join(
    struct.pack("HBBI", *each)
    for each in (
        (0x30, 0, 0, 13),  # load the byte with the flags
        (0x54, 0, 0, 0x12),  # SYN and ACK of them
        (0x15, 0, 1, 0x02),  # SYN alone?
        (0x06, 0, 0, 0),  # drop it
        (0x06, 0, 0, 0xFFFFFFFF),  # keep all else
    )
)
_ENDING_POLL_S: Final = 0.005
_LAST_S: Final = 0.25  # for handshakes under way to end, and for what has connected to be accepted


class Listeners(NamedTuple):
    """The two sockets that a gateway accepts connections from."""

    public: socket.socket
    admin: socket.socket
    kept: bool = False  # systemd has them open too: what connects when we have gone waits there


def bind(where: Listen) -> socket.socket:
    """Bind and listen on a TCP address or a UNIX path; a stale socket file is taken over.

    Raises:
        OSError: the address is taken, or not ours; its `filename` is the address.
    """
    if where.unix is not None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        address: tuple[str, int] | str = str(where.unix)
        _remove_stale(str(where.unix))
    else:
        family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        address = (where.host, where.port)
    try:
        prepare(listener)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, error.strerror or str(error), str(where)) from error
    return listener


def prepare(listener: socket.socket) -> None:
    """Set what a listener's connections inherit, and that it never blocks the loop."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    listener.setblocking(False)


def with_copies(listener: socket.socket) -> list[socket.socket]:
    """Return a listener and copies of it, so that a busy loop accepts several connections in a turn.

    libuv accepts one from each.
    """
    return [listener, *(listener.dup() for _ in range(_ACCEPTS_A_TURN - 1))]


async def accept_the_last(listener: socket.socket) -> None:
    """Let no client connect any more, and have the loop accept those that have: to close would reset them.

    A client that would connect now gets no answer. It tries again a second later, and is refused if the
    listener is closed by then. Elsewhere than on Linux, and on UNIX sockets, this does nothing.
    """
    if listener.family is socket.AF_UNIX or sys.platform != "linux":
        return
    code = ctypes.create_string_buffer(_NO_SYN)
    program = struct.pack("HP", len(_NO_SYN) // 8, ctypes.addressof(code))
    with contextlib.suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)
        await asyncio.sleep(_LAST_S)


def port_of(listener: socket.socket) -> int:
    """Return the port that was bound; 0 for a UNIX socket."""
    name = listener.getsockname()
    return int(name[1]) if isinstance(name, tuple) else 0


def _remove_stale(path: str) -> None:
    """Remove a socket file that nobody listens on any more; any other file stays."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
    except OSError:
        return
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        probe.settimeout(_PROBE_S)  # a listener whose backlog is full does not answer
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError:
            return


class Server(uvicorn.Server):
    """A uvicorn server that leaves signals to the app; `leave` ends it."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._leaving = asyncio.Event()
        self.accepting = asyncio.Event()

    def leave(self) -> None:
        """Have `serve` take no more connections, and end once the open ones are done."""
        self.should_exit = True
        self._leaving.set()

    def stop_accepting(self) -> None:
        """Take no more connections; the open ones go on until `leave`."""
        for listener in getattr(self, "servers", ()):
            listener.close()

    async def main_loop(self) -> None:
        """Renew the date header until it is to leave; uvicorn's own loop wakes ten times a second."""
        self.accepting.set()
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DATE_S):
                    await self._leaving.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End as soon as the last connection has; uvicorn's own takes a tenth of a second at least."""
        self.stop_accepting()
        for listener in sockets or ():
            listener.close()
        state = self.server_state
        for connection in tuple(state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while state.connections or state.tasks:  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(_ENDING_POLL_S)
                for server in self.servers:
                    await server.wait_closed()
        for task in tuple(state.tasks):
            task.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install nothing: the app owns the process's signals."""
        yield


def server_for(app: ASGIApp, ingress: Ingress) -> Server:
    """Make a listener's server. Run it with `serve(sockets=[...])`."""
    config = uvicorn.Config(
        app,
        http=functools.partial(GatewayProtocol, ingress),  # type: ignore[arg-type]
        loop="none",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=2,
    )
    return Server(config)
