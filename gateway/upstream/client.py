"""Connections to every backend: take an idle one or open one, send, give it back.

One process talks to a backend over as many connections as it has requests in flight. Idle ones are
reused last-in first-out and dropped after `keep_alive_s`, which must stay below the backend's own
idle limit (vLLM's uvicorn closes after 5 s), so that a request rarely meets a closing connection.

A backend that sends a second reply to a request could answer another tenant's with it. So a connection
rests after each reply, long enough for what follows right behind it; it is used again only while there
is nothing to read on it; and the connections of a backend that ever spoke unasked are not reused.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
import time
from collections import deque
from collections.abc import Collection, Coroutine, Iterator
from typing import Any, Final, TypeVar

import msgspec

from gateway.core.aio import InTime
from gateway.core.types import Transition
from gateway.pools.pulse import Waits
from gateway.pools.table import Backend
from gateway.upstream.connection import Connection
from gateway.upstream.held import end_held
from gateway.upstream.reply import Reply
from gateway.upstream.silence import Silence, waits_of
from gateway.upstream.sockets import connect_failed
from gateway.upstream.upload import Rest, UploadConnection

log = logging.getLogger("gateway.client")

_LENGTH: Final = b"content-length: "
_BACKLOG_S: Final = 0.02
_REST_S: Final = 0.002  # what follows right behind a reply has come by then
_Kind = TypeVar("_Kind", bound=Connection)


class Outgoing(msgspec.Struct, frozen=True):
    """One request as the backend gets it. `path` is a constant of the endpoint table.

    `engine_id` is what the engine calls it, `rest` what follows `body` when that is only the beginning,
    `trace` header lines with the context of the client's trace.
    """

    path: bytes
    content_type: bytes
    engine_id: str
    body: bytes
    rest: Rest | None = None
    trace: bytes = b""


class BackendConnections:
    """The connections to one backend; `busy` are those that carry a request."""

    def __init__(
        self,
        backend: Backend,
        *,
        keep_alive_s: float,
        connect_s: float | None = None,
        receive_bytes: int | None = None,
        rest_s: float = 0.0,
    ) -> None:
        """`rest_s` is how long a connection is not used after a reply; see the module."""
        self.backend = backend
        self._receive_bytes = receive_bytes
        self._connect_s = connect_s
        self._keep_alive_s = keep_alive_s
        self._rest_s = rest_s
        self._ssl = ssl.create_default_context() if backend.tls else None
        # Both in the order in which their last replies ended. A lost connection stays until somebody looks.
        self._resting: deque[Connection] = deque()
        self._idle: list[Connection] = []
        self._reuses = True
        self.busy: set[Connection] = set()
        self._freed_at = -math.inf  # when a reply last came to its end
        self.connecting = 0
        self._heads: dict[tuple[bytes, bytes], bytes] = {}  # see `_head`
        self.closed = False

    def send(self, out: Outgoing, silence: Silence, *, fresh: bool) -> Coroutine[Any, Any, Reply]:
        """Send on an idle connection, or a new one; with `fresh`, always a new one.

        An idle one is taken at once, so await what is returned at once.

        Raises:
            ConnectFailed: nothing was sent (502 unless another backend takes it).
            StaleConnection, BackendBroke, BackendTimeout: see `Connection.request`.
            GatewayError: see `UploadConnection.upload`.
        Cancel: the connection is closed.
        """
        if out.rest is not None and out.rest.left_bytes != 0:
            return self._upload(out, out.rest, silence)
        head = b"%b%d\r\nx-request-id: %b\r\n%b\r\n" % (
            self._heads.get((out.path, out.content_type)) or self._head(out.path, out.content_type),
            len(out.body),
            out.engine_id.encode(),
            out.trace,
        )
        connection = None if fresh else self.take_idle()
        if connection is None:
            return self._send_anew(head, out.body, silence)
        self.busy.add(connection)
        return connection.request(head, out.body, silence)

    async def _send_anew(self, head: bytes, body: bytes, silence: Silence) -> Reply:
        connection = await self.connect(Connection)
        self.busy.add(connection)
        return await connection.request(head, body, silence)

    async def _upload(self, out: Outgoing, rest: Rest, silence: Silence) -> Reply:
        connection = await self.connect(UploadConnection)
        head = b"x-request-id: %b\r\n%b" % (out.engine_id.encode(), out.trace)
        head = self._head(out.path, out.content_type).removesuffix(_LENGTH) + head
        self.busy.add(connection)
        return await connection.upload(head, out.body, rest, silence)

    def tick(self, now: float) -> None:
        """Close connections that have been idle too long and wake the busy ones."""
        self._wake_rested(now)
        oldest, idle = now - self._keep_alive_s, self._idle
        self._idle = [each for each in idle if each.usable and each.idle_since > oldest]
        for connection in idle:
            if connection.idle_since <= oldest:
                connection.abort()
        for connection in tuple(self.busy):
            connection.tick(now)
        end_held(self.backend, self.busy, now)

    def waits(self) -> Waits:
        """Return what the requests here wait for; right after `tick`, which sees what has come."""
        return waits_of((each.silence for each in self.busy), self._freed_at)

    def close(self) -> None:
        """Drop the idle connections; busy ones end with their request."""
        self.closed = True
        self._drop_idle()

    @property
    def idle(self) -> int:
        """Connections waiting for a request."""
        return sum(each.usable for each in (*self._idle, *self._resting))

    def take_idle(self) -> Connection | None:
        """Return the connection that was used last, if it may be used again; None when there is none."""
        now = time.monotonic()
        self._wake_rested(now)
        idle = self._idle
        while idle:
            connection = idle.pop()
            if now - connection.idle_since < self._keep_alive_s and connection.is_fit():
                return connection
            connection.abort()
            if connection.spoke_unasked:
                self.distrust()
        return None

    def _wake_rested(self, now: float) -> None:
        resting = self._resting
        while resting and now - resting[0].idle_since >= self._rest_s:
            self._idle.append(resting.popleft())

    def distrust(self) -> None:
        """Use no connection twice any more: what is on them may be another request's reply."""
        if self._reuses:
            self._reuses = False
            log.warning(
                "%s sent bytes that belong to no request; its connections are no longer reused",
                self.backend.id,
                extra={"event": "backend_unasked_bytes", "backend": self.backend.id},
            )
        self._drop_idle()

    def _drop_idle(self) -> None:
        dropped = (*self._idle, *self._resting)
        self._idle, self._resting = [], deque()
        for connection in dropped:
            connection.abort()

    async def connect(self, kind: type[_Kind]) -> _Kind:
        """Make a connection.

        Raises:
            ConnectFailed: there is none within `connect_s`, or it was lost as it was made; its cause says why.
        Cancel: nothing is left open.
        """
        self.connecting += 1
        try:
            connection = await self._open(kind)
            if connection.usable:
                return connection
            connection.abort()
            raise ConnectionResetError("lost as it was made")
        except (OSError, UnicodeError) as error:  # UnicodeError: not a name that DNS could hold
            raise connect_failed(error) from error
        finally:
            self.connecting -= 1

    async def _open(self, kind: type[_Kind]) -> _Kind:
        backend = self.backend
        async with InTime(self._connect_s):
            if backend.socket is not None:
                return await self._connect_socket(kind, backend.socket)
            transport, connection = await asyncio.get_running_loop().create_connection(
                lambda: kind(self._on_free, self._on_closed),
                backend.host,
                backend.port,
                ssl=self._ssl,
            )
        if self._receive_bytes is not None:
            raw = transport.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_bytes)
        return connection

    async def _connect_socket(self, kind: type[_Kind], path: str) -> _Kind:
        """Connect to a UNIX socket, whose system refuses at once where TCP would try again.

        What one read brings is bounded by the send buffer of the backend; ours does not count.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                _, connection = await loop.create_unix_connection(
                    lambda: kind(self._on_free, self._on_closed), path
                )
            except BlockingIOError:  # its backlog is full: connect(2), EAGAIN
                await asyncio.sleep(_BACKLOG_S)  # no event tells when there is room
            else:
                return connection

    def _on_free(self, connection: Connection) -> None:
        self.busy.discard(connection)
        if self.closed or not self._reuses:
            connection.abort()
            return
        connection.idle_since = self._freed_at = time.monotonic()
        self._resting.append(connection)

    def _on_closed(self, connection: Connection) -> None:
        self.busy.discard(connection)
        self._freed_at = max(self._freed_at, connection.idle_since)
        if connection.spoke_unasked:
            self.distrust()

    def _head(self, path: bytes, content_type: bytes) -> bytes:
        """Make the constant part of a request head, up to the content length's value."""
        head = b"POST %b HTTP/1.1\r\n%bcontent-type: %b\r\naccept: */*\r\n%b" % (
            path,
            address_lines(self.backend),
            content_type,
            _LENGTH,
        )
        if content_type == b"application/json":
            self._heads[path, content_type] = head
        return head


def address_lines(backend: Backend) -> bytes:
    """Return the lines of a request head that say which backend is meant, and that we may ask it."""
    key = backend.api_key
    authorization = b"" if key is None else b"authorization: Bearer %b\r\n" % key.encode()
    return b"host: %b\r\n%b" % (backend.host_header, authorization)


class Client:
    """All backends' connections, made on first use and dropped when the backend goes.

    `receive_bytes` is the kernel's receive buffer (Linux doubles it): it bounds what one read can
    bring, and so, with the client's write buffer, what a stream holds whose client does not read.
    """

    def __init__(self, *, connect_s: float, keep_alive_s: float, receive_bytes: int) -> None:
        self._receive_bytes = receive_bytes
        self._connect_s = connect_s
        self._keep_alive_s = keep_alive_s
        self._backends: dict[str, BackendConnections] = {}
        # Of backends that are gone, until no request is left.
        self._leaving: list[BackendConnections] = []

    def connections(self, backend: Backend) -> BackendConnections:
        """Return the connections of `backend`: new ones, once a reload has moved it to another address."""
        found = self._backends.get(backend.id)
        if found is None or found.backend is not backend:
            if found is not None:
                self._let_go(found)
            found = self._backends[backend.id] = BackendConnections(
                backend,
                connect_s=self._connect_s,
                keep_alive_s=self._keep_alive_s,
                receive_bytes=self._receive_bytes,
                rest_s=_REST_S,
            )
        return found

    def keep_only(self, backend_ids: Collection[str]) -> None:
        """Drop the idle connections of backends that are gone."""
        for backend_id in self._backends.keys() - set(backend_ids):
            self._let_go(self._backends.pop(backend_id))

    def tick(self, now: float) -> None:
        """Wake every connection; called about twice a second by the app."""
        for connections in self._all():
            connections.tick(now)
        self._leaving = [each for each in self._leaving if each.busy or each.connecting]

    def end_held(self, seen: Transition) -> None:
        """End what a backend holds, as far as its new phase says so."""
        if found := self._backends.get(seen.backend_id):
            end_held(found.backend, found.busy, time.monotonic())

    def waits(self) -> Iterator[tuple[Backend, Waits]]:
        """Go through the backends, with what the requests of each wait for; right after `tick`."""
        return ((each.backend, each.waits()) for each in self._all())

    def close(self) -> None:
        """Close everything, busy connections too: the backends stop working for them."""
        for connections in self._all():
            connections.close()
            for connection in tuple(connections.busy):
                connection.abort()

    def open_connections(self) -> tuple[int, int]:
        """Return how many connections carry a request, and how many are idle."""
        every = self._all()
        return sum(len(each.busy) for each in every), sum(each.idle for each in every)

    def _all(self) -> tuple[BackendConnections, ...]:
        return (*self._backends.values(), *self._leaving)

    def _let_go(self, gone: BackendConnections) -> None:
        gone.close()
        self._leaving.append(gone)
