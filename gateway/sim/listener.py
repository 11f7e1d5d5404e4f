"""The listening socket of a simulated server: a TCP port, or a UNIX socket; and its TLS."""

from __future__ import annotations

import pathlib
import socket
import ssl

from gateway.sim.config import SimConfig


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


def accept(listener: socket.socket) -> socket.socket | None:
    """Return the next connection; None: there is none."""
    try:
        sock, _ = listener.accept()
    except (BlockingIOError, ConnectionAbortedError):
        return None
    sock.setblocking(False)
    if sock.family == socket.AF_INET:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def leave(sock: socket.socket, uds: str | None) -> None:
    """Close it; a socket's file goes too, unlike vLLM's, so that the path can be used again."""
    sock.close()
    if uds is not None:
        pathlib.Path(uds).unlink(missing_ok=True)


def tls_of(config: SimConfig) -> ssl.SSLContext | None:
    """Return what its connections are secured with; None: they are plain.

    Raises:
        OSError: there is no such certificate or key, or they do not belong together.
    """
    if config.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    return context
