"""Ports for servers that a test starts as processes of their own."""

import fcntl
import functools
import os
import pathlib
import secrets
import socket
import tempfile

_FIRST, _COUNT = 12_000, 20_000  # below those that the kernel gives to connections, from 32,768 on
_given: set[int] = set()


def free_port() -> int:
    """Return a port on which nothing listens; no other test of this machine gets it, and no connection."""
    while True:
        # `random` has the same seed in all test processes.
        port = _FIRST + secrets.randbelow(_COUNT)
        if port in _given or not _is_ours(port):
            continue
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        _given.add(port)
        return port


def _is_ours(port: int) -> bool:
    """Keep a port from all other test processes until this one ends: who is to listen there may begin late."""
    try:
        fcntl.lockf(_ledger(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    return True


@functools.cache
def _ledger() -> int:
    """Open the file whose bytes stand for ports."""
    path = pathlib.Path(tempfile.gettempdir()) / f"vllm-gateway-test-ports-{os.getuid()}"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
