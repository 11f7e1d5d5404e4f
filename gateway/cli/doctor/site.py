"""Where the doctor asks a gateway: a URL that clients use, or the gateway's own listener."""

from __future__ import annotations

import http.client
import ssl
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from gateway.cli.local import LocalConnection

TIMEOUT_S: Final = 10.0  # of each step


@dataclass(frozen=True, slots=True)
class Site:
    """A URL, such as https://api.example.com/llm; `insecure`: its certificate is not verified.

    With `socket` it is asked through the UNIX socket at that path.
    """

    url: str
    insecure: bool = False
    socket: str = ""

    @property
    def tls(self) -> bool:
        """Whether it speaks TLS."""
        return self.url.startswith("https:")

    def path(self, path: str) -> str:
        """Return where a path of the gateway is there: behind the path of the URL."""
        return urlsplit(self.url).path.rstrip("/") + path

    def connect(self, timeout_s: float = TIMEOUT_S) -> http.client.HTTPConnection:
        """Return a connection to it, not open yet."""
        if self.socket:
            return LocalConnection(self.socket, timeout_s)
        parts = urlsplit(self.url)
        host, port = parts.hostname or "", parts.port
        if self.tls:
            return http.client.HTTPSConnection(
                host, port, timeout=timeout_s, context=self.context()
            )
        return http.client.HTTPConnection(host, port, timeout=timeout_s)

    def context(self) -> ssl.SSLContext:
        """Return how TLS is spoken to it."""
        context = ssl.create_default_context()
        if self.insecure:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context
