"""`Server`: where one vLLM server is, and what it is called."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from xxhash import xxh3_64_intdigest

from gateway.config.sockets import PREFIX


@dataclass(slots=True, eq=False)
class Server:
    """One vLLM server as the configuration names it."""

    pool: str
    name: str
    url: str  # origin: scheme, host and port, or unix:/path
    api_key: str | None = field(default=None, repr=False)
    member_since: float = -math.inf  # what was sent before went to another server of its name

    id: str = field(init=False)
    number: int = field(init=False)  # of its id, the same in every process
    host: str = field(init=False)
    port: int = field(init=False)
    socket: str | None = field(init=False)  # path of its UNIX socket: no host and port then
    origin: str = field(init=False)  # what its pages are fetched below
    tls: bool = field(init=False)
    host_header: bytes = field(init=False)
    # Adapters that the process before listed, until this one serves: they are loaded again.
    awaited: frozenset[str] = field(init=False, default=frozenset())
    # Adapters that an operator ordered to be there (True) or not.
    ordered: tuple[tuple[str, bool], ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        local = self.url.startswith(PREFIX)
        self.socket = self.url.removeprefix(PREFIX) if local else None
        self.origin = "http://localhost" if local else self.url
        parts = urlsplit(self.origin)
        self.id = f"{self.pool}/{self.name}"
        self.number = xxh3_64_intdigest(self.id.encode())
        self.tls = parts.scheme == "https"
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if self.tls else 80)
        self.host_header = parts.netloc.encode("ascii")
