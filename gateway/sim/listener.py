"""The listening socket of a simulated server: a TCP port, or a UNIX socket."""

from __future__ import annotations

import pathlib
import socket


def bind(host: str, port: int, uds: str | None) -> socket.socket:
    """Bind, without listening yet. Like vLLM, it takes no socket's file over.

    Raises:
        OSError: the address is taken, or not ours; its `filename` is the address.
    """
    where: str | tuple[str, int] = (host, port) if uds is None else uds
    family = socket.AF_INET if uds is None else socket.AF_UNIX
    sock = socket.socket(family, socket.SOCK_STREAM)
    if uds is None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(where)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, error.strerror, uds or f"{host}:{port}") from error
    sock.setblocking(False)
    return sock


def leave(sock: socket.socket, uds: str | None) -> None:
    """Close it; a socket's file goes too, unlike vLLM's, so that the path can be used again."""
    sock.close()
    if uds is not None:
        pathlib.Path(uds).unlink(missing_ok=True)
