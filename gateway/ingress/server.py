"""uvicorn, with the inference routes taken at protocol level.

uvicorn parses every request (httptools) and runs the Starlette app for all but one kind: a POST to a
path of the endpoint table becomes a `Downstream`, and its story starts straight from the read
callback, with the body that came along already in hand. What uvicorn lacks is added here: a cap on
the head's bytes and headers, a deadline for it, a lingering close after an early refusal, errors in
OpenAI's form, and word to the story when its client's connection is lost.

The uvicorn internals leaned on are named in `tests/contracts/test_uvicorn.py`; the dependency is
pinned to one minor version for their sake.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.core.errors import (
    GatewayError,
    HeadTimeout,
    HeadTooLarge,
    MethodNotAllowed,
    RequestError,
    UnknownUrl,
)
from gateway.ingress.downstream import Downstream
from gateway.ingress.early import last_reply
from gateway.ingress.heads import CLIENT_ID, origin_form, without_upgrade
from gateway.wire.calls import ENDPOINTS

# After an early refusal the rest of the body is read and dropped for this long, so that the client
# can read the reply before it sees the connection close (RFC 9112 section 9.6).
_LINGER_S: Final = 2.0
_SHOWN_BYTES: Final = 128  # of a request target in an error


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """What one client connection may be and hold."""

    max_bytes: int
    max_headers: int
    timeout_s: float
    keep_alive_s: float
    write_s: float  # how long what is written may stay unread once the connection closes
    write_buffer_bytes: int  # unsent bytes from which the backend is not read any more


@dataclass(slots=True)
class Ingress:
    """What the connections of the public listener share. `live` holds the requests in progress."""

    story: Callable[[Downstream], Coroutine[Any, Any, None]]
    limits: ClientLimits
    live: set[Downstream] = field(default_factory=set)
    connections: set[GatewayProtocol] = field(default_factory=set)
    _ids: Iterator[int] = field(default_factory=itertools.count)
    _process: str = field(default_factory=lambda: os.urandom(8).hex())

    def new_id(self) -> str:
        """Return a request id: unguessable per process, then counted."""
        return f"req_{self._process}{next(self._ids):08x}"

    def tick(self, now: float) -> None:
        """Enforce the deadlines of heads and lingering closes; called about twice a second."""
        for connection in tuple(self.connections):
            connection.tick(now)


class GatewayProtocol(HttpToolsProtocol):
    """One client connection."""

    cycle: Any  # uvicorn's RequestResponseCycle, or a Downstream on the inference routes
    pipeline: Any  # pairs of those and their app

    def __init__(self, ingress: Ingress, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._ingress = ingress
        self._head_since: float | None = self.loop.time()  # None while no head is awaited
        self._head_bytes = 0
        self._read_bytes = 0  # of the read that is being parsed
        self._max_headers = ingress.limits.max_headers
        self._max_bytes = ingress.limits.max_bytes
        self._idle_since: float | None = None
        self._refusal: GatewayError | None = None
        self._linger_until: float | None = None
        self._closing_since: float | None = None
        self._ready: Downstream | None = None  # has its head; starts at the end of this read
        self._answering: Downstream | None = None

    # --- asyncio.Protocol ---------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """Count the connection."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=self._ingress.limits.write_buffer_bytes)
        self._ingress.connections.add(self)

    def data_received(self, data: bytes) -> None:
        """Parse, then start the story: a body that came with its head needs no wait."""
        self._unset_keepalive_if_required()
        self._read_bytes = len(data)
        if self._idle_since is not None:
            self._idle_since = None
            self._await_head()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._ready = None
            self.send_400_response("")
        if self._head_since is not None:
            self._head_bytes += len(data)
            if self._head_bytes > self._max_bytes:
                self._refuse_head(self._too_large())
        ready, self._ready = self._ready, None
        if ready is not None and not self.transport.is_closing():
            self._start(ready)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the requests on this connection, then let uvicorn clean up."""
        self._ingress.connections.discard(self)
        if self._answering is not None:
            self._answering.on_client_gone()
            self._answering = None  # each holds the other
        self.pipeline.clear()
        if type(self.cycle) is Downstream:
            self.cycle = None
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Pass the client's back-pressure on to the request that is being answered."""
        super().pause_writing()
        if self._answering is not None:
            self._answering.pause_writing()

    def resume_writing(self) -> None:
        """Let the answer go on."""
        super().resume_writing()
        if self._answering is not None:
            self._answering.resume_writing()

    # --- httptools ----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Start a request; the ASGI scope that uvicorn makes here is only made for its own routes."""
        self.url = b""
        self.headers = []
        if self._head_since is None:
            self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take one header. What a head may hold is checked at its end, and after each read of it."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Take the inference routes here; leave the others to uvicorn and Starlette."""
        self._check_head()
        if self.parser.should_upgrade():
            self._refuse_tunnel()
            return  # `_parse` has this head parsed once more
        self._head_since = None
        if not self.url.startswith(b"/"):
            self._take_path()
        spec = ENDPOINTS.get(self.url.partition(b"?")[0])
        if spec is None or self.parser.get_method() != b"POST":
            self._to_starlette()
            return
        previous = self.cycle
        http11 = self.parser.get_http_version() == "1.1"
        self.cycle = down = Downstream(
            self, spec, new_id=self._ingress.new_id(), now=time.monotonic()
        )
        down.read_head(
            self.headers, http11=http11, keep_alive=http11 and self.parser.should_keep_alive()
        )
        if previous is None or previous.response_complete:
            self._ready = down
        else:
            self.flow.pause_reading()  # pipelined: waits for its turn
            self.pipeline.appendleft((down, None))

    def on_body(self, body: bytes) -> None:
        """Hand body bytes to whom the request belongs."""
        if type(self.cycle) is Downstream:
            self.cycle.on_body(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Note the end of the request; a refused body that is now read ends the lingering."""
        if self.parser.should_upgrade():
            return  # the end of a head that is parsed once more
        if type(self.cycle) is Downstream:
            self.cycle.on_message_complete()
            if self._linger_until is not None:
                self._close()
        else:
            super().on_message_complete()

    # --- uvicorn ------------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if type(cycle) is Downstream:
            self._start(cycle)
        else:
            super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP in OpenAI's form, and close."""
        self._refuse_head(
            self._refusal or RequestError("The request is not valid HTTP/1.1.", code="invalid_http")
        )

    def _to_starlette(self) -> None:
        url, headers = self.url, self.headers
        super().on_message_begin()
        self.url, self.headers = url, headers
        self.scope["headers"] = headers
        self.expect_100_continue = (b"expect", b"100-continue") in headers
        sent_id = dict(headers).get(b"x-request-id", b"")
        request_id = sent_id.decode() if CLIENT_ID.fullmatch(sent_id) else self._ingress.new_id()
        self.scope["state"]["request_id"] = request_id
        super().on_headers_complete()
        own = (b"x-request-id", request_id.encode())
        self.cycle.default_headers = [*self.cycle.default_headers, own]

    # --- ours ---------------------------------------------------------------------------------------

    def _parse(self, data: bytes | memoryview) -> None:
        """Have bytes parsed, and every offer to change the protocol ignored.

        The parser stops behind a head with such an offer and takes what follows for another protocol.
        So it gets the head again without the offer, then what follows.

        Raises:
            httptools.HttpParserError: this is not a request that can be served.
        """
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = memoryview(data)[offer.args[0] :]
            method, version = self.parser.get_method(), self.parser.get_http_version()
            head = without_upgrade(method, self.url, version, self.headers)
            self.parser = httptools.HttpRequestParser(self)  # the other may be done after `close`
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
            self.parser.feed_data(head)

    def _start(self, down: Downstream) -> None:
        self._answering = down
        down.writing_paused = self.flow.write_paused  # by what the reply before it left behind
        self._ingress.live.add(down)
        down.start(self._ingress.story)

    def on_reply_complete(self, down: Downstream) -> None:
        """Go on to the next request, close, or linger until the rest of a refused body is read."""
        self._answering = None
        if not down.body_complete:
            self._linger_until = self.loop.time() + _LINGER_S
            return
        if not down.keep_alive:
            self._close()
        elif self.pipeline:
            self.loop.call_soon(self.on_response_complete)
        else:
            self._idle_since = self.loop.time()  # in place of uvicorn's timer per response

    def date_header(self) -> bytes:
        """Return the date line, which uvicorn renews every second."""
        return b"date: %b\r\n" % self.server_state.default_headers[0][1]

    def tick(self, now: float) -> None:
        """Close what took too long: a head that does not end, a lingering close."""
        limits = self._ingress.limits
        lingered = self._linger_until is not None and now >= self._linger_until
        idle = self._idle_since is not None and now - self._idle_since >= limits.keep_alive_s
        unread = self._closing_since is not None and now - self._closing_since >= limits.write_s
        if unread:
            self.transport.abort()
        elif lingered or idle:
            self._close()
        elif self._head_since is not None and now - self._head_since >= limits.timeout_s:
            if self._head_bytes:
                self._refuse_head(
                    HeadTimeout(f"The request head did not arrive within {limits.timeout_s:.0f} s.")
                )
            else:
                self.transport.close()

    def _await_head(self) -> None:
        self._head_since = self.loop.time()
        self._head_bytes = 0

    def _close(self) -> None:
        """Close once what is written is read; `tick` gives up on a client that never reads."""
        if self._closing_since is None:
            self._closing_since = self.loop.time()
        self._linger_until = None
        self.transport.close()

    def _refuse_tunnel(self) -> None:
        """Refuse CONNECT, which has no path; the parser takes it for an offer, too."""
        if self.parser.get_method() == b"CONNECT":
            self._refusal = MethodNotAllowed("This gateway is not a proxy: CONNECT is not allowed.")
            raise httptools.HttpParserError("a tunnel")

    def _take_path(self) -> None:
        """Reduce a request target that is a whole URL to its path; refuse any other."""
        self.url = origin_form(self.url)
        if not self.url.startswith(b"/"):
            target = self.url[:_SHOWN_BYTES].decode("latin-1")
            self._refusal = UnknownUrl(f"Unknown request target: {target}")
            raise httptools.HttpParserError("no path")

    def _check_head(self) -> None:
        """Refuse a whole head that is too large; it may have come in one read, with other bytes."""
        headers = self.headers
        may_be_large = self._head_bytes + self._read_bytes > self._max_bytes
        if len(headers) > self._max_headers or (
            may_be_large
            and sum(len(name) + len(value) for name, value in headers) > self._max_bytes
        ):
            self._refusal = self._too_large()
            raise httptools.HttpParserError("the request head is too large")

    def _too_large(self) -> HeadTooLarge:
        limits = self._ingress.limits
        return HeadTooLarge(
            f"The request head is larger than {limits.max_bytes} bytes or has more than {limits.max_headers} headers."
        )

    def _refuse_head(self, error: GatewayError) -> None:
        """Answer a request that has no valid head, and close."""
        if self._answering is not None or self._linger_until is not None:
            self.transport.abort()  # another request is being answered, or was refused
            return
        if self.transport.is_closing():
            return
        reply = last_reply(error, self._ingress.new_id(), self.date_header())
        self.transport.write(reply)
        self.transport.close()
