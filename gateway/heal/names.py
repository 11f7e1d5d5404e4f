"""What replicas call a backend, and the lease on the restarts of a pool, in their shared store.

A backend at a loopback address or a UNIX socket belongs to this machine: with one configuration on two
machines, one id means two servers. So its name has the machine's in it, and each machine heals its own.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import urlsplit

from gateway.config.sockets import PREFIX
from gateway.pools.table import Backend


class Names:
    """The names of this machine's backends, and of those that all can reach."""

    def __init__(self, host: str | None = None) -> None:
        """`host` is what tells this machine from others; its host name unless said."""
        self._host = host or socket.gethostname()

    def of(self, backend: Backend) -> str:
        """Return what all replicas call a backend."""
        return f"{backend.id}@{self._host}" if _of_this_machine(backend.url) else backend.id

    def lease(self, pool: str, backends: Iterable[Backend]) -> str:
        """Return the name of the lease on the restarts of these backends of a pool."""
        return f"restarts/{pool}{self.scope(backends)}"

    def scope(self, backends: Iterable[Backend]) -> str:
        """Return what tells a pool of this machine from that of another one; empty where all mean the same backends."""
        return f"@{self._host}" if any(_of_this_machine(each.url) for each in backends) else ""


@lru_cache(maxsize=4096)  # it is asked of each backend up to 50 times a second
def _of_this_machine(url: str) -> bool:
    if url.startswith(PREFIX):
        return True
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
