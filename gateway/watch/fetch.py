"""Ask a backend for small pages: with a deadline, a size limit, and failures as words of a closed set.

Each `Pages` has connections of its own, apart from those of the traffic: neither a full connection pool nor
another backend's silence can make a probe fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from http import HTTPStatus
from typing import Final

from gateway.core.aio import InTime
from gateway.core.errors import ConnectFailed, NothingFree, StaleConnection, UpstreamError
from gateway.pools.table import Backend
from gateway.upstream.client import BackendConnections, address_lines
from gateway.upstream.connection import Connection
from gateway.upstream.reply import Reply
from gateway.upstream.silence import ENDLESS, Silence

# A busy server's metrics are some 200 KB; a page larger than this is not vLLM's.
_MOST_PAGE_BYTES: Final = 4 << 20
# `/tokenize` returns the id of every token, some 7 bytes each.
_MOST_ANSWER_BYTES: Final = 32 << 20
# Below vLLM's 5 s, and above the slowest probe interval, so that a connection is mostly reused.
_KEEP_ALIVE_S: Final = 3.5
# Probe, scrape and model list may be under way at the same time; counts of prompts queue before a
# server's real work.
_MOST_CONNECTIONS: Final = 4


# Reasons of a `FetchError`: TLS failed.
OF_TLS: Final = frozenset({"tls", "tls_untrusted", "tls_expired", "tls_name"})
# The server does not let us in, or is another one.
DENIED: Final = frozenset({"http_401", "http_403", "http_404"})
# The server was never asked: its name is not known, or this machine has no port, descriptor or memory free.
UNTRIED: Final = frozenset({"dns", "ours"})


class FetchError(OSError):
    """No usable page came.

    `reason` is ours (this machine had no port, descriptor or memory for a connection), refused, dns,
    tls, tls_untrusted, tls_expired, tls_name (its certificate: see `_certificate_reason`), unreachable,
    timeout, reset, too_large, garbage, or http_NNN for a status that is not 200.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Pages:
    """One backend's pages, over at most four connections; close it when done.

    An idle connection that is too old is closed instead of used.
    """

    def __init__(self, backend: Backend) -> None:
        self._connections = BackendConnections(backend, keep_alive_s=_KEEP_ALIVE_S)
        self._places = asyncio.Semaphore(_MOST_CONNECTIONS)
        self._lines = (
            b"%baccept: */*\r\naccept-encoding: identity\r\nuser-agent: vllm-gateway\r\n"
            % address_lines(backend)
        )

    async def get(self, path: str, *, timeout_s: float) -> bytes:
        """Return the body of a 200 reply to `GET path`, at most 4 MiB, within `timeout_s`.

        Raises:
            FetchError: there was none.
        Cancel: the connection is closed.
        """
        return (await self._page(path, timeout_s))[1]

    async def date(self, path: str, *, timeout_s: float) -> str:
        """Return the `Date` of a 200 reply to `GET path` within `timeout_s`; empty: it has none.

        Raises:
            FetchError: there was no such reply.
        Cancel: the connection is closed.
        """
        reply, _ = await self._page(path, timeout_s)
        return reply.headers.get(b"date", b"").decode("latin-1")

    async def post(self, path: str, body: bytes, *, timeout_s: float) -> tuple[int, bytes]:
        """Return the status and body, at most 32 MiB, of the reply to a JSON body within `timeout_s`.

        Raises:
            FetchError: there was none.
        Cancel: the connection is closed, which aborts the work at the backend.
        """
        head = (
            b"POST %b HTTP/1.1\r\n%bcontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            % (path.encode(), self._lines, len(body))
        )
        reply, answer = await self._ask(head, body, timeout_s, _MOST_ANSWER_BYTES)
        return reply.status, answer

    def close(self) -> None:
        """Drop the idle connections; one that carries a question is closed after its answer."""
        self._connections.close()

    async def _page(self, path: str, timeout_s: float) -> tuple[Reply, bytes]:
        head = b"GET %b HTTP/1.1\r\n%b\r\n" % (path.encode(), self._lines)
        reply, page = await self._ask(head, b"", timeout_s, _MOST_PAGE_BYTES)
        if reply.status != HTTPStatus.OK:
            raise FetchError(f"http_{reply.status}")
        return reply, page

    async def _ask(
        self, head: bytes, body: bytes, timeout_s: float, most_bytes: int
    ) -> tuple[Reply, bytes]:
        try:
            async with InTime(timeout_s), self._places:
                idle = self._connections.take_idle()
                if idle is not None:
                    with contextlib.suppress(StaleConnection):  # nothing was answered: ask anew
                        return await _exchange(idle, head, body, most_bytes)
                fresh = await self._connections.connect(Connection)
                return await _exchange(fresh, head, body, most_bytes)
        except (TimeoutError, UpstreamError) as error:
            raise FetchError(_reason(error)) from error


async def _exchange(
    connection: Connection, head: bytes, body: bytes, most_bytes: int
) -> tuple[Reply, bytes]:
    reply = await connection.request(head, body, Silence(ENDLESS, 0.0))
    if reply.body is not None:
        return reply, reply.body
    return reply, await _LongBody(connection, most_bytes).read()


class _LongBody:
    """Collects a body that the connection hands on in parts (`upstream.reply.Sink`)."""

    def __init__(self, connection: Connection, most_bytes: int) -> None:
        self._connection: Connection | None = connection  # None once the body has ended
        self._most_bytes = most_bytes
        self._held = bytearray()
        self._whole: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def read(self) -> bytes:
        """Return all of it. Cancel: the connection is closed."""
        assert self._connection is not None
        self._connection.attach(self)
        try:
            return await self._whole
        finally:
            if self._connection is not None:
                self._connection.abort()

    def on_data(self, data: bytes) -> None:
        """Collect a part of the body; too large a body is a failure."""
        self._held += data
        if len(self._held) > self._most_bytes and not self._whole.done():
            self._whole.set_exception(FetchError("too_large"))

    def on_chunk(self, chunk: bytes) -> bool:
        """Leave the framing to the parser."""
        return False

    def on_end(self, data: bytes) -> None:
        """Complete the body; the connection is not ours any more."""
        self._connection = None
        self.on_data(data)
        if not self._whole.done():
            self._whole.set_result(bytes(self._held))

    def on_lost(self, error: UpstreamError) -> None:
        """Fail: the rest of the body will not come."""
        if not self._whole.done():
            self._whole.set_exception(error)

    def on_tick(self, now: float) -> None:
        """Do nothing: the caller has a deadline."""


def _reason(error: Exception) -> str:
    """Return the reason why an exchange failed."""
    match error:
        case TimeoutError():
            return "timeout"
        case NothingFree():
            return "ours"
        case ConnectFailed():
            return _connect_reason(error.__cause__)
        case _:
            return "reset"


def _connect_reason(cause: BaseException | None) -> str:
    match cause:
        case ConnectionRefusedError() | FileNotFoundError():  # no such socket: nobody listens
            return "refused"
        case socket.gaierror() | UnicodeError():
            return "dns"
        case ssl.SSLCertVerificationError():
            return _certificate_reason(cause.verify_code)
        case ssl.SSLError():
            return "tls"
        case _:
            return "unreachable"


def _certificate_reason(code: int) -> str:
    """Return the reason why a certificate is not accepted, by OpenSSL's number (x509_vfy.h)."""
    match code:
        case 9 | 10:  # not yet valid, has expired
            return "tls_expired"
        case 62 | 64:  # another host name, another IP address
            return "tls_name"
        case 18 | 19 | 20 | 21:  # its own authority, or one that is not trusted here
            return "tls_untrusted"
        case _:
            return "tls"
