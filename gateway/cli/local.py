"""HTTP through a UNIX socket of this machine."""

from __future__ import annotations

import http.client
import socket


class LocalConnection(http.client.HTTPConnection):
    """A connection to the socket at a path; not open yet."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Open it."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
