"""A small HTTP/1.1 server that can also misbehave: every reply holds its socket.

It behaves as the uvicorn under vLLM does: idle connections are closed after the keep-alive time, a
half-closed connection counts as a client that left, a client that leaves cancels its handler.
"""

from __future__ import annotations

import asyncio
import http
import itertools
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Final, cast

import httptools

_LINGER_ZERO: Final = struct.pack("ii", 1, 0)  # close() then sends a reset
_VARY: Final = {"vary": "Origin"}  # of vLLM's CORS middleware, behind what the answer has


@dataclass(slots=True)
class Received:
    """One request as it came, and what became of it. Times are the event loop's."""

    method: str
    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    at: float
    connection: int
    reused: bool  # not the first request of its connection
    query: str = ""
    status: int | None = None
    answered_at: float | None = None  # the head of the reply was sent
    begun_tokens: int = 0  # of the reply, that the prompt has already
    tokens_emitted: int = 0
    client_disconnected_at: float | None = None
    ended_at: float | None = None

    def header(self, name: str) -> str | None:
        """Return the first header of that name."""
        wanted = name.lower().encode()
        return next((v.decode("latin-1") for k, v in self.headers if k.lower() == wanted), None)

    def shown(self) -> dict[str, object]:
        """Return it as JSON can hold it."""
        return {
            "method": self.method,
            "path": self.path,
            "headers": [[k.decode("latin-1"), v.decode("latin-1")] for k, v in self.headers],
            "body": self.body.decode("utf-8", "replace"),
            "at": self.at,
            "connection": self.connection,
            "reused": self.reused,
            "status": self.status,
            "tokens_emitted": self.tokens_emitted,
            "client_disconnected_at": self.client_disconnected_at,
            "ended_at": self.ended_at,
        }


@dataclass(slots=True)
class _Draft:
    """A request while it is being parsed."""

    method: str = ""
    target: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)


class Reply:
    """The way back to the client: well-formed by default, broken on request."""

    def __init__(self, connection: Connection, request: Received, *, close: bool) -> None:
        self._connection = connection
        self._request = request
        self._close = close
        self.started = False
        self.ended = False

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        """Answer with a whole body."""
        fields = {"content-length": str(len(body))} | (headers or {}) | _VARY
        self._start(status, fields, b"" if self._request.method == "HEAD" else body)
        self._end()

    def start_stream(self, headers: dict[str, str]) -> None:
        """Send the head of a chunked answer."""
        self._start(200, headers | _VARY | {"transfer-encoding": "chunked"})

    async def chunk(self, data: bytes) -> None:
        """Send one chunk; wait while the client does not read."""
        self.raw(b"%x\r\n%b\r\n" % (len(data), data))
        await self._connection.writable.wait()

    def end_stream(self) -> None:
        """Send the last chunk."""
        self.raw(b"0\r\n\r\n")
        self._end()

    def start_sized(self, length: int, headers: dict[str, str]) -> None:
        """Send only the head of an answer of `length` bytes."""
        self._start(200, headers | {"content-length": str(length)} | _VARY)

    def raw(self, data: bytes) -> None:
        """Send bytes outside of any framing."""
        if data and not self._connection.transport.is_closing():
            self._connection.transport.write(data)

    def cut(self) -> None:
        """Close the connection in order (FIN), wherever the answer is."""
        self._connection.transport.close()

    def reset(self) -> None:
        """Close the connection with a reset."""
        self._connection.reset()

    def _start(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.started = True
        self._request.status = status
        self._request.answered_at = asyncio.get_running_loop().time()
        if self._close:
            headers = headers | {"connection": "close"}
        head = f"HTTP/1.1 {status} {_phrase(status)}\r\ndate: {formatdate(usegmt=True)}\r\nserver: uvicorn\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.raw(head.encode("latin-1") + b"\r\n" + body)

    def _end(self) -> None:
        self.ended = True
        if self._close:
            self._connection.transport.close()


Handler = Callable[[Received, Reply], Awaitable[None]]
_numbers = itertools.count(1)


class Connection(asyncio.Protocol):
    """One client connection: requests one after the other, each in a task that it owns."""

    def __init__(self, handler: Handler, connections: set[Connection], keep_alive_s: float) -> None:
        self._handler = handler
        self._connections = connections
        self._keep_alive_s = keep_alive_s
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._draft = _Draft()
        self._pending: deque[tuple[Received, bool]] = deque()
        self.task: asyncio.Task[None] | None = None  # of the request that is being answered
        self._current: Received | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._number = next(_numbers)
        self._served = 0
        self.draining = False  # close once the present request is answered
        self.transport: asyncio.Transport
        self.writable = asyncio.Event()
        self.writable.set()

    def drain(self) -> None:
        """Close it once the present request is answered; now where there is none."""
        self.draining = True
        if self.task is None:
            self.transport.close()

    def reset(self) -> None:
        """Close with a reset: whatever is unsent is lost."""
        sock = self.transport.get_extra_info("socket")
        if sock is not None and not self.transport.is_closing():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
        self.transport.abort()

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start waiting for the first request."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        self._connections.add(self)
        self._wait_for_next()

    def data_received(self, data: bytes) -> None:
        """Parse; whole requests are queued by `on_message_complete`."""
        self._stop_waiting()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.transport.close()
        except httptools.HttpParserError:
            body = b"Invalid HTTP request received."
            head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\n"
            self.transport.write(
                head + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            )
            self.transport.write(body)
            self.transport.close()

    def eof_received(self) -> None:
        """Treat a half-close as the end: returning nothing lets the transport close."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the request in progress: its client is gone."""
        self._connections.discard(self)
        self._stop_waiting()
        self._pending.clear()
        self.writable.set()
        if self._current is not None and self._current.ended_at is None:
            self._current.client_disconnected_at = self._loop.time()
        if self.task is not None:
            self.task.cancel()

    def pause_writing(self) -> None:
        """Hold `Reply.chunk` back: the client does not read."""
        self.writable.clear()

    def resume_writing(self) -> None:
        """Let `Reply.chunk` go on."""
        self.writable.set()

    # --- httptools ---

    def on_message_begin(self) -> None:
        """Begin a request."""
        self._draft = _Draft()

    def on_url(self, url: bytes) -> None:
        """Collect the target, which may come in parts."""
        self._draft.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep headers as they were written."""
        self._draft.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Answer an Expect at once."""
        self._draft.method = self._parser.get_method().decode()
        if any(k.lower() == b"expect" for k, _ in self._draft.headers):
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        """Collect the body."""
        self._draft.body += data

    def on_message_complete(self) -> None:
        """Queue the request; requests of one connection are answered in order."""
        draft = self._draft
        path, _, query = draft.target.decode("latin-1").partition("?")
        request = Received(
            method=draft.method,
            path=path,
            query=query,
            headers=draft.headers,
            body=bytes(draft.body),
            at=self._loop.time(),
            connection=self._number,
            reused=self._served > 0,
        )
        self._served += 1
        close = not self._parser.should_keep_alive() or self._parser.get_http_version() == "1.0"
        self._pending.append((request, close))
        self._next()

    # --- one request after the other ---

    def _next(self) -> None:
        if self.task is not None or not self._pending:
            return
        request, close = self._pending.popleft()
        self._current = request
        name = f"sim {request.method} {request.path}"
        self.task = self._loop.create_task(self._answer(request, close), name=name)

    async def _answer(self, request: Received, close: bool) -> None:
        reply = Reply(self, request, close=close)
        try:
            await self._handler(request, reply)
        finally:
            request.ended_at = self._loop.time()
            self.task = None
            if self.draining or not reply.ended:
                self.transport.close()
        self._wait_for_next()
        self._next()

    def _wait_for_next(self) -> None:
        if self._idle is None and not self._pending and not self.transport.is_closing():
            self._idle = self._loop.call_later(self._keep_alive_s, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None


def _phrase(status: int) -> str:
    try:
        return http.HTTPStatus(status).phrase
    except ValueError:
        return ""
