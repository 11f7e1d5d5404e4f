"""One HTTP/1.1 connection to a backend: a request out, a reply head in, the body handed to a sink.

    IDLE --request()--> HEAD --headers--> COLLECT --whole body--> IDLE      (JSON: the reply carries its body)
                          |                  `--200, large--.
                          `--event stream-----------------> STREAM --end--> IDLE
    any state --connection lost, bad bytes, abort()--> CLOSED

A connection carries one request at a time, and what a backend says unasked must never become the reply
to another tenant's request. So these close the connection and set `spoke_unasked`: bytes while IDLE,
bytes after the end of a reply, and a reply that arrives before the backend's system has acknowledged
any byte of the request. A connection that has something to read is not fit to carry another request.
llhttp refuses conflicting lengths, bad chunk sizes and folded headers for us.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, cast

import httptools

from gateway.core.errors import BackendBroke, StaleConnection, UpstreamError
from gateway.upstream.reading import (
    CLOSED,
    COLLECT,
    HEAD,
    IDLE,
    MAX_ERROR_BYTES,
    MAX_FRAMING_BYTES,
    STREAM,
    Reading,
    UsualHead,
    usual_head,
)
from gateway.upstream.reply import Reply, Sink
from gateway.upstream.silence import ENDLESS, Silence
from gateway.upstream.sockets import Socket, says_timed_out

# Read from a backend before anybody takes the body: reading is paused beyond this.
_UNCLAIMED_BYTES: Final = 64 * 1024
# A connection closed by its idle limit says so within a round trip. Much later the backend may have
# worked on the request, and died of it.
_STALE_S: Final = 0.25
# A reply that was in flight while we sent arrives within a round trip; later ones are not examined.
_IN_FLIGHT_S: Final = 0.02


class Connection(Reading, asyncio.Protocol):
    """See the module. `on_free` is called when the connection may carry the next request."""

    __slots__ = (
        "_now", "_on_closed", "_on_free", "_sent_at", "_sent_bytes", "_sink", "_socket", "_transport", "_usual",
        "_used", "_waiter", "idle_since", "loop", "silence",
    )  # fmt: skip

    def __init__(
        self, on_free: Callable[[Connection], None], on_closed: Callable[[Connection], None]
    ) -> None:
        super().__init__()
        self._on_free = on_free
        self._on_closed = on_closed
        self.idle_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Reply] | None = None
        self._sink: Sink | None = None
        self.loop = asyncio.get_running_loop()  # asking for it costs a system call before 3.12
        self._now = self.loop.time
        self.silence = Silence(ENDLESS, 0.0)  # of the exchange under way, or the last
        self._used = False
        self._usual: UsualHead | None = None  # how the last reply began
        self._sent_at = 0.0
        self._sent_bytes = 0
        self._socket: Socket | None = None

    # --- the owner's side -----------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Whether a request may be sent now."""
        return (
            self.state is IDLE and self._transport is not None and not self._transport.is_closing()
        )

    def is_fit(self) -> bool:
        """Whether it may carry another request: there are no bytes to read that nobody asked for, and no end.

        This is a system call of 0.3 us.
        """
        transport, socket = self._transport, self._socket
        if self.state is not IDLE or transport is None or transport.is_closing():
            return False
        if socket is None or not socket.poll(0):
            return True
        self._unasked(socket.peek())
        return False

    async def request(self, head: bytes, body: bytes, silence: Silence) -> Reply:
        """Send one request and wait for the head of its reply (or all of it, see `Reply.body`).

        Raises:
            StaleConnection: the reused connection was dead; nothing was answered.
            BackendBroke: the backend closed or spoke nonsense (502).
            BackendTimeout: the backend was silent for too long (504).
        Cancel: closes the connection, which aborts the work at the backend.
        """
        transport = self._transport
        if transport is None or self.state is not IDLE:
            raise StaleConnection("the connection was closed before the request was sent")
        if self._parsed:
            self._reset()
        self._answered = False
        self.state = HEAD
        self.silence = silence
        waiter: asyncio.Future[Reply] = self.loop.create_future()
        self._waiter = waiter
        self._sent_at = self._now()
        self._sent_bytes = len(head) + len(body)
        if len(body) < _UNCLAIMED_BYTES:
            transport.write(head + body)
        else:
            transport.write(head)
            transport.write(body)
        try:
            return await waiter
        except asyncio.CancelledError:
            # A whole reply, which nobody takes now, has freed the connection: it may carry another request.
            if waiter.cancelled() or waiter.exception() or waiter.result().connection is not None:
                self.abort()
            raise

    def attach(self, sink: Sink) -> None:
        """Give the streamed body to `sink`, what has already come first."""
        self._sink = sink
        self.resume()
        self._deliver()

    def pause(self) -> None:
        """Stop reading: the client is slower than the backend."""
        if self._transport is not None and self.state is STREAM:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._transport is not None and self.state is STREAM:
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close at once; the backend sees the connection go and stops working for it."""
        self.state = CLOSED
        self._between_chunks = False
        self._sink = None
        if self._transport is not None:
            self._transport.abort()

    def end(self, error: UpstreamError) -> None:
        """End the request that it carries, if any, with an error of its backend."""
        if self.state not in (IDLE, CLOSED):
            self._fail(error)

    def tick(self, now: float) -> None:
        """Check for how long the reply has not grown; of a streamed one the sink does that."""
        if self._sink is not None:
            self._sink.on_tick(now)
        elif self.state in (HEAD, COLLECT):
            if self._held_bytes != self._ticked_bytes:
                self._ticked_bytes = self._held_bytes
                self.silence.broken(now)
            elif self.silence.too_long(now):
                self._fail(self.silence.error(now))

    # --- asyncio.Protocol -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport and make the parser."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        self._socket = Socket(self._transport)
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        """Take one read: what is known by sight, else what the parser finds in it."""
        if self._between_chunks:  # after a whole chunk the parser would be where it is now
            sink = self._sink
            if sink is not None and sink.on_chunk(data):
                return
        parser = self._parser
        if self.state is IDLE or parser is None:
            self._unasked(data)
            self.abort()
            return
        if not self._answered:
            if self._used and self._came_before_the_request():
                self._fail(self._unasked(data))
                return
            self._answered = True
            if self._answer_by_sight(data):
                return
        elif self._read_by_sight(data):
            self._deliver()
            return
        self._parse(parser, data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever waits; a reply whose end is the end of the connection is complete now."""
        try:
            if self._ends_with_connection() and exc is None and self.state in (COLLECT, STREAM):
                self._complete = True
                if self.state is COLLECT:
                    self._finish_collected()
                else:
                    self._deliver()
            elif self.state is HEAD and not self._answered and self._was_stale():
                self._fail(StaleConnection("the backend had closed the idle connection"))
            elif self.state is not IDLE:
                self._fail(BackendBroke("the backend closed the connection"))
        finally:  # else a bug above would keep it among the busy ones for good
            self.state = CLOSED
            self._transport = self._socket = self._parser = None
            self._on_closed(self)

    # --- inside -----------------------------------------------------------------------------------

    def _answer_by_sight(self, data: bytes) -> bool:
        """Answer with what vLLM writes: a read that is a whole reply, or begins a stream; False: parse it."""
        known = self._usual
        reply = None if known is None else known.reply(data)
        if reply is None:
            if self._begin_by_sight(data):
                return True
            self._usual = known = usual_head(data)
            reply = None if known is None else known.reply(data)
        if reply is None:
            return False
        self._release(keep_alive=True)
        self._answer(reply)
        return True

    def _parse(self, parser: httptools.HttpResponseParser, data: bytes) -> None:
        """Feed the parser, then hand on what it found, once per read."""
        self._parsed = True
        self._framing_bytes += len(data)
        head, self._unread_head = self._unread_head, b""
        try:
            if head:
                parser.feed_data(head)
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail(BackendBroke("the backend sent something that is not HTTP/1.1"))
            return
        self._between_chunks &= data.endswith(b"\n")  # else the next one's size may have begun
        if self._framing_bytes > MAX_FRAMING_BYTES and not self._complete:
            self._fail(BackendBroke("the backend sent too much between the parts of its reply"))
        elif self.state is STREAM:
            self._deliver()
        elif self._complete or self._held_bytes > MAX_ERROR_BYTES:
            self._finish_collected()

    def _start_stream(self, *, is_usual: bool = False) -> None:
        self.state = STREAM
        self._answer(Reply(self._status, self._headers, None, self, is_usual))

    def _answer(self, reply: Reply) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(reply)

    def _finish_collected(self) -> None:
        """Answer with a whole reply, or the beginning of an error that has no end in sight."""
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = []
        if self._complete:
            self._release(keep_alive=self._keep_alive)
        else:
            self.abort()  # the rest is not read
        self._answer(Reply(self._status, self._headers, body, None))

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
            self._release(keep_alive=self._keep_alive)
            sink.on_end(data)
        elif data:
            sink.on_data(data)

    def _release(self, *, keep_alive: bool) -> None:
        """Give the connection back, or close it when it may not be used again.

        A backend that answered before it read the whole request gets no more of it.
        """
        transport = self._transport
        if transport is None:
            return
        self._used, self.idle_since = True, self._now()
        if transport.get_write_buffer_size():
            self.state = CLOSED
            transport.abort()
        elif keep_alive and not transport.is_closing():
            transport.resume_reading()
            self.state = IDLE
            self._on_free(self)
        else:
            self.state = CLOSED
            transport.close()

    def _unasked(self, data: bytes) -> UpstreamError:
        """Note what was said unasked; return the error for a request that was sent meanwhile."""
        if not data or says_timed_out(data):  # it only closes the connection
            return StaleConnection("the backend had given up the idle connection")
        self.spoke_unasked = True
        return BackendBroke("the backend answered before it had the request")

    def _came_before_the_request(self) -> bool:
        """Whether a reply on a reused connection was surely sent before its request arrived.

        What is not proven may be so, too: the request may be acknowledged before we read the reply.
        """
        socket = self._socket
        return (
            self._now() - self._sent_at < _IN_FLIGHT_S
            and socket is not None
            and not socket.has_acknowledged_any_of(self._sent_bytes)
        )

    def _was_stale(self) -> bool:
        """Whether the backend cannot have worked: reused, and gone as soon as we sent."""
        return self._used and self._now() - self._sent_at < _STALE_S

    def _fail(self, error: UpstreamError) -> None:
        waiter, self._waiter = self._waiter, None
        sink, self._sink = self._sink, None
        self.abort()
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)
        if sink is not None:
            sink.on_lost(error)
