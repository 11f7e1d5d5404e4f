"""Ports for servers that a test starts as processes of their own."""

import secrets
import socket

_FIRST, _COUNT = 12_000, 20_000  # below those that the kernel gives to connections, from 32,768 on
_given: set[int] = set()


def free_port() -> int:
    """Return a port on which nothing listens; no other call in this process gets it, and no connection."""
    while True:
        port = _FIRST + secrets.randbelow(
            _COUNT
        )  # `random` has the same seed in all test processes
        if port in _given:
            continue
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        _given.add(port)
        return port
