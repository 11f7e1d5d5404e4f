"""The listening socket of a simulated server: a TCP port, or a UNIX socket."""

from __future__ import annotations

import pathlib
import socket


def bind(host: str, port: int, uds: str | None) -> socket.socket:
    """Bind, without listening yet. Like vLLM, it takes no socket's file over.

    Raises:
        OSError: the address is taken, or not ours.
    """
    if uds is not None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(uds)
    else:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    sock.setblocking(False)
    return sock


def leave(sock: socket.socket, uds: str | None) -> None:
    """Close it; a socket's file goes too, unlike vLLM's, so that the path can be used again."""
    sock.close()
    if uds is not None:
        pathlib.Path(uds).unlink(missing_ok=True)
