"""One HTTP/1.1 connection to a backend: a request out, a reply head in, the body handed to a sink.

    IDLE --request()--> HEAD --headers--> COLLECT --whole body--> IDLE      (JSON: the reply carries its body)
                          |                  `--too large--.
                          `--event stream--------------> STREAM --end--> IDLE
    any state --connection lost, bad bytes, abort()--> CLOSED

A connection carries one request at a time. Bytes that come while IDLE, or after the end of a reply,
close it, so one reply can never be taken for another. llhttp refuses conflicting lengths, bad chunk
sizes and folded headers for us.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import Final, cast

import httptools

from gateway.core.errors import BackendBroke, BackendTimeout, StaleConnection, UpstreamError
from gateway.upstream.reply import Reply, Sink

# A reply that is no event stream is collected up to here, so that it can be judged and refused as a
# whole; beyond it, it is streamed like the others. Also what one stream may hold in memory.
WHOLE_REPLY_BYTES: Final = 256 * 1024
# Read from a backend before anybody takes the body: reading is paused beyond this.
_UNCLAIMED_BYTES: Final = 64 * 1024
_MAX_HEADER_BYTES: Final = 64 * 1024
# A connection closed by its idle limit says so within a round trip. Much later the backend may have
# worked on the request, and died of it.
_STALE_S: Final = 0.25
_MAX_INTERIM_REPLIES: Final = 8  # 1xx heads before the real one


class State(Enum):
    """Where the connection is in its one exchange."""

    IDLE = "idle"
    HEAD = "head"
    COLLECT = "collect"
    STREAM = "stream"
    CLOSED = "closed"


class Connection(asyncio.Protocol):
    """See the module. `on_free` is called when the connection may carry the next request."""

    def __init__(
        self, on_free: Callable[[Connection], None], on_closed: Callable[[Connection], None]
    ) -> None:
        self._on_free = on_free
        self._on_closed = on_closed
        self.state = State.IDLE
        self.idle_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._waiter: asyncio.Future[Reply] | None = None
        self._sink: Sink | None = None
        self._loop = asyncio.get_running_loop()  # asking for it costs a system call before 3.12
        self._deadline = 0.0
        self._used = False
        self._sent_at = 0.0
        self._reset()

    def _reset(self) -> None:
        self._headers: dict[bytes, bytes] = {}
        self._header_bytes = 0
        self._interim = 0
        self._status = 0
        self._parts: list[bytes] = []
        self._held_bytes = 0
        self._complete = False
        self._keep_alive = False
        self._answered = False
        self._between_chunks = False

    # --- the owner's side -----------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Whether a request may be sent now."""
        return (
            self.state is State.IDLE
            and self._transport is not None
            and not self._transport.is_closing()
        )

    async def request(self, head: bytes, body: bytes, deadline: float) -> Reply:
        """Send one request and wait for the head of its reply (or all of it, see `Reply.body`).

        Raises:
            StaleConnection: the reused connection was dead; nothing was answered.
            BackendBroke: the backend closed or spoke nonsense (502).
            BackendTimeout: no head by `deadline`, monotonic seconds (504).
        Cancel: closes the connection, which aborts the work at the backend.
        """
        transport = self._transport
        if transport is None or self.state is not State.IDLE:
            raise StaleConnection("the connection was closed before the request was sent")
        self._reset()
        self.state = State.HEAD
        self._deadline = deadline
        waiter: asyncio.Future[Reply] = self._loop.create_future()
        self._waiter = waiter
        self._sent_at = self._loop.time()
        if len(body) < _UNCLAIMED_BYTES:
            transport.write(head + body)
        else:
            transport.write(head)
            transport.write(body)
        try:
            return await waiter
        except asyncio.CancelledError:
            # A whole reply that was not taken any more has freed the connection: it may be another's.
            if waiter.cancelled() or waiter.exception() or waiter.result().connection is not None:
                self.abort()
            raise

    def attach(self, sink: Sink) -> None:
        """Give the streamed body to `sink`, what has already come first."""
        self._sink = sink
        self._resume()
        self._deliver()

    def pause(self) -> None:
        """Stop reading: the client is slower than the backend."""
        if self._transport is not None and self.state is State.STREAM:
            self._transport.pause_reading()

    def _resume(self) -> None:
        if self._transport is not None and self.state is State.STREAM:
            self._transport.resume_reading()

    resume = _resume

    def abort(self) -> None:
        """Close at once; the backend sees the connection go and stops working for it."""
        self.state = State.CLOSED
        self._between_chunks = False
        self._sink = None
        if self._transport is not None:
            self._transport.abort()

    def tick(self, now: float) -> None:
        """Check the deadline for the head, or pass the tick on to the sink."""
        if self.state in (State.HEAD, State.COLLECT):
            if now >= self._deadline:
                self._fail(BackendTimeout("the backend did not answer in time"))
        elif self._sink is not None:
            self._sink.on_tick(now)

    # --- asyncio.Protocol -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport and make the parser."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        """Feed the parser, then hand on what it found, once per read."""
        if self._between_chunks:  # after a whole chunk the parser would be where it is now
            sink = self._sink
            if sink is not None and sink.on_chunk(data):
                return
        if self.state is State.IDLE or self._parser is None:
            self.abort()  # nobody asked: an unread rest of something else
            return
        self._answered = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail(BackendBroke("the backend sent something that is not HTTP/1.1"))
            return
        if self.state is State.STREAM:
            self._deliver()
        elif self._complete:
            self._finish_collected()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever waits; a reply whose end is the end of the connection is complete now."""
        if (
            self._ends_with_connection()
            and exc is None
            and self.state in (State.COLLECT, State.STREAM)
        ):
            self._complete = True
            if self.state is State.COLLECT:
                self._finish_collected()
            else:
                self._deliver()
        elif self.state is State.HEAD and not self._answered and self._was_stale():
            self._fail(StaleConnection("the backend had closed the idle connection"))
        elif self.state is not State.IDLE:
            self._fail(BackendBroke("the backend closed the connection"))
        self.state = State.CLOSED
        self._transport = None
        self._parser = None
        self._on_closed(self)

    # --- httptools ------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Refuse what follows a whole reply in the same read."""
        if self._complete:
            raise httptools.HttpParserError("bytes after the reply")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect one header; a repeated one keeps its last value (none that we pass on repeats)."""
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > _MAX_HEADER_BYTES:
            raise httptools.HttpParserError("headers too large")
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Judge the head: an event stream is answered now, everything else when it is whole."""
        parser = self._parser
        assert parser is not None
        self._status = parser.get_status_code()
        if self._status < 200:
            return
        if self._complete:
            raise httptools.HttpParserError("a second reply to one request")
        if self._headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            self._start_stream()
        else:
            self.state = State.COLLECT

    def on_body(self, data: bytes) -> None:
        """Hold the bytes until the read is parsed; too much for a whole reply turns it into a stream."""
        self._parts.append(data)
        self._held_bytes += len(data)
        if self.state is State.COLLECT and self._held_bytes > WHOLE_REPLY_BYTES:
            self._start_stream()

    def on_chunk_header(self) -> None:
        """Note that a chunk has begun."""
        self._between_chunks = False

    def on_chunk_complete(self) -> None:
        """Note that a chunk has ended."""
        self._between_chunks = self.state is State.STREAM

    def on_message_complete(self) -> None:
        """Note the end; a 1xx head only makes room for the real one."""
        if self._status < 200:
            self._headers = {}
            self._interim += 1
            if self._interim > _MAX_INTERIM_REPLIES:
                raise httptools.HttpParserError("too many interim replies")
            return
        assert self._parser is not None
        self._keep_alive = (
            self._parser.should_keep_alive()
        )  # only true answers inside this callback
        self._complete = True

    # --- inside -----------------------------------------------------------------------------------

    def _start_stream(self) -> None:
        self.state = State.STREAM
        self._answer(Reply(self._status, self._headers, None, self))

    def _answer(self, reply: Reply) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(reply)

    def _finish_collected(self) -> None:
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = []
        reply = Reply(self._status, self._headers, body, None)
        self._release()
        self._answer(reply)

    def _deliver(self) -> None:
        sink = self._sink
        if sink is None:
            if self._held_bytes > _UNCLAIMED_BYTES and not self._complete:
                self.pause()
            return
        parts, self._parts = self._parts, []
        self._held_bytes = 0
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        if self._complete:
            self._sink = None
            self._release()
            sink.on_end(data)
        elif data:
            sink.on_data(data)

    def _release(self) -> None:
        """Give the connection back, or close it when it may not be used again."""
        transport = self._transport
        if transport is None:
            return
        self._used = True
        if self._keep_alive and not self._ends_with_connection() and not transport.is_closing():
            transport.resume_reading()
            self.state = State.IDLE
            self._on_free(self)
        else:
            self.state = State.CLOSED
            transport.close()

    def _ends_with_connection(self) -> bool:
        headers = self._headers
        return (
            bool(self._status)
            and b"content-length" not in headers
            and b"transfer-encoding" not in headers
        )

    def _was_stale(self) -> bool:
        """Whether the backend cannot have worked: reused, and gone as soon as we sent."""
        return self._used and self._loop.time() - self._sent_at < _STALE_S

    def _fail(self, error: UpstreamError) -> None:
        waiter, self._waiter = self._waiter, None
        sink, self._sink = self._sink, None
        self.abort()
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)
        if sink is not None:
            sink.on_lost(error)
