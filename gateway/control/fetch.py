"""Fetch small pages of a backend: a deadline, a size limit, and failures as short closed words.

Each backend has a client of its own, apart from the traffic's connections: neither a full
connection pool nor another backend's silence can make a probe fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Iterable, Iterator
from typing import Final

import httpcore2
import httpx2

from gateway.pools.table import Backend

# A busy server's metrics are some 200 KB; what is larger than this is not vLLM's.
_MOST_BYTES: Final = 4 * 1024 * 1024
# Below vLLM's 5 s, and above the slowest probe interval, so that a connection is mostly reused.
_KEEP_ALIVE_S: Final = 3.5
# Probe, scrape and model list may be under way at the same time.
_MOST_CONNECTIONS: Final = 4


class FetchError(Exception):
    """There was no usable page.

    `reason` is refused, dns, tls, unreachable, timeout, reset, too_large, garbage, error, or
    http_NNN for a status that is not 200.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def open_client(backend: Backend) -> httpx2.AsyncClient:
    """Return a client for one backend's pages; close it when done."""
    headers = {"accept-encoding": "identity", "user-agent": "vllm-gateway"}
    if backend.api_key is not None:
        headers["authorization"] = f"Bearer {backend.api_key}"
    return httpx2.AsyncClient(
        transport=None if backend.socket is None else _SocketTransport(backend.socket),
        base_url=backend.origin,
        headers=headers,
        trust_env=False,
        follow_redirects=False,
        timeout=None,  # `fetch` sets it
        verify=ssl.create_default_context() if backend.tls else False,
        limits=httpx2.Limits(
            max_connections=_MOST_CONNECTIONS,
            max_keepalive_connections=_MOST_CONNECTIONS,
            keepalive_expiry=_KEEP_ALIVE_S,
        ),
    )


class _Sockets(httpcore2.AnyIOBackend):
    """Connects to a UNIX socket at once or not at all.

    While a backlog is full, anyio 4.16 asks again without end or pause (connect(2) says EAGAIN, and
    such a socket counts as writable): the whole gateway would stand still for one that hangs.
    """

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore2's interface
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as trial:
            trial.setblocking(False)
            if trial.connect_ex(path) == errno.EAGAIN:
                raise httpcore2.ConnectTimeout("the socket's backlog is full")
        return await super().connect_unix_socket(path, timeout, socket_options)


class _SocketTransport(httpx2.AsyncHTTPTransport):
    """Sends everything to one UNIX socket."""

    def __init__(self, path: str) -> None:
        super().__init__(verify=False, trust_env=False)
        self._pool = httpcore2.AsyncConnectionPool(
            uds=path,
            network_backend=_Sockets(),
            max_connections=_MOST_CONNECTIONS,
            max_keepalive_connections=_MOST_CONNECTIONS,
            keepalive_expiry=_KEEP_ALIVE_S,
        )


class _ByAddress(httpx2.AsyncBaseTransport):
    """Sends a request that names a UNIX socket in its extensions there (`uds`), others over TCP."""

    def __init__(self) -> None:
        self._tcp = httpx2.AsyncHTTPTransport(trust_env=False)
        self._sockets: dict[str, _SocketTransport] = {}

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        path = request.extensions.get("uds")
        if path is None:
            return await self._tcp.handle_async_request(request)
        transport = self._sockets.get(path)
        if transport is None:
            transport = self._sockets[path] = _SocketTransport(path)
        return await transport.handle_async_request(request)

    async def aclose(self) -> None:
        for transport in (self._tcp, *self._sockets.values()):
            await transport.aclose()


def open_shared_client() -> httpx2.AsyncClient:
    """Return a client for questions to any backend; close it when done.

    `extensions={"uds": path}` sends a question to a UNIX socket.
    """
    return httpx2.AsyncClient(transport=_ByAddress(), trust_env=False, follow_redirects=False)


async def fetch(client: httpx2.AsyncClient, path: str, *, timeout_s: float) -> bytes:
    """Return the body of a 200 reply to `GET path`, at most 4 MiB, within `timeout_s`.

    Raises:
        FetchError: there was none.
    Cancel: the connection is closed.
    """
    # One deadline for all. Connecting has its own, earlier one, because httpcore2 2.16 leaks the
    # socket of a TLS handshake that is cancelled from outside (tests/stories/test_control.py).
    connecting = httpx2.Timeout(None, connect=timeout_s / 2)
    body = bytearray()
    try:
        async with (
            asyncio.timeout(timeout_s),
            client.stream("GET", path, timeout=connecting) as reply,
        ):
            if reply.status_code != httpx2.codes.OK:
                raise FetchError(f"http_{reply.status_code}")
            async for chunk in reply.aiter_raw():
                body += chunk
                if len(body) > _MOST_BYTES:
                    raise FetchError("too_large")
    except (httpx2.HTTPError, httpx2.InvalidURL, TimeoutError) as error:
        raise FetchError(reason_of(error)) from error
    return bytes(body)


def reason_of(error: Exception) -> str:
    """Return the closed word for an exception of a fetch."""
    match error:
        case TimeoutError() | httpx2.TimeoutException():
            return "timeout"
        case httpx2.ConnectError():
            return _connect_reason(error)
        case httpx2.NetworkError() | httpx2.RemoteProtocolError():
            return "reset"
        case _:
            return "error"


def _connect_reason(error: BaseException) -> str:
    for cause in _causes(error):
        match cause:
            case ConnectionRefusedError() | FileNotFoundError():  # no such socket: nobody listens
                return "refused"
            case socket.gaierror():
                return "dns"
            case ssl.SSLError():
                return "tls"
    return "unreachable"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Go through what an exception was raised from, groups included."""
    found: BaseException | None = error
    while found is not None:
        yield found
        if isinstance(found, BaseExceptionGroup):
            for each in found.exceptions:
                yield from _causes(each)
        found = found.__cause__ or found.__context__
