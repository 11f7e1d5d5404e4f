"""Listening sockets, bound before anything else starts, so that a taken address is known at once."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from typing import Final

from gateway.config.models import Listen

_BACKLOG: Final = 4096  # connections the kernel holds while the loop is busy
_PROBE_S: Final = 0.5
# What the kernel holds for one client that does not read (Linux doubles it); left alone it grows to
# megabytes of an answer nobody takes, while the engine works on. Accepted sockets inherit it.
_SEND_BUFFER_BYTES: Final = 64 * 1024


def bind(where: Listen) -> socket.socket:
    """Bind and listen on a TCP address or a UNIX path; a stale socket file is taken over.

    Raises:
        OSError: the address is taken, or not ours.
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
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


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
        probe.settimeout(_PROBE_S)  # a listener with a full backlog is one, too
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError:
            return
