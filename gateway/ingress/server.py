"""uvicorn's protocol, with every request of the public listener taken at protocol level.

uvicorn's parser (httptools) reads every request. A POST to a path of the endpoint table becomes a
`Downstream`, and its story starts straight from the read callback, with the body that came along
already in hand; every other request becomes a `PlainRequest`, which Starlette answers. Both stand on
the connection in the same way, so the same bounds hold on every route: on a head, on what frames a
body, on requests sent ahead, and on the time that each may take.

One request is answered at a time. Once a request is refused for what it is, nothing more of its
connection is parsed: what still comes is read and dropped until the client has had time to read why.

The uvicorn internals leaned on are named in `tests/contracts/test_uvicorn.py`; the dependency is
pinned to one minor version for their sake.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httptools

from gateway.config.limits import CorsConfig
from gateway.core.errors import GatewayError, HeadTimeout
from gateway.ingress.connections import Connections, Line, Waits, has_left, surplus
from gateway.ingress.cors import Cors
from gateway.ingress.downstream import Downstream
from gateway.ingress.early import last_reply, too_many_connections
from gateway.ingress.plain import NO_BODY, PlainRequest, Takes
from gateway.ingress.reader import ClientLimits, RequestReader
from gateway.store.replicas import Told
from gateway.wire.calls import ENDPOINTS, EndpointSpec

# One read may bring thousands of tiny requests; each costs about 2 KiB until its turn.
_MOST_AHEAD: Final = 64


@dataclass(slots=True)
class Ingress:
    """What the connections of one listener share. `live` holds the requests in progress."""

    story: Callable[[Downstream], Coroutine[Any, Any, None]]
    limits: ClientLimits
    connections: Connections
    # Counts and logs what is refused before there is a request: error, request id, method and path, client.
    refused: Callable[[GatewayError, str, tuple[str, str], str | None], None]
    endpoints: Mapping[bytes, EndpointSpec] = field(default_factory=lambda: ENDPOINTS)
    takes: Takes = NO_BODY  # how much of a body other routes take
    cors: Cors | None = None  # None: web pages of other origins may not call
    live: set[Downstream] = field(default_factory=set)
    held: set[GatewayProtocol] = field(default_factory=set)  # connections that are not read from
    leaving: bool = False  # no connection outlives its next reply
    surplus: float = 0  # so many connections close behind their next reply
    _ids: Iterator[int] = field(default_factory=itertools.count)
    _id_prefix: str = field(default_factory=lambda: f"req_{os.urandom(8).hex()}")

    def new_id(self) -> str:
        """Return a request id: unguessable per process, then counted."""
        return self._id_prefix + next(self._ids).to_bytes(5).hex()

    def allow(self, config: CorsConfig) -> None:
        """Let web pages of these origins read replies from now on."""
        self.cors = Cors.of(config)

    def leave(self) -> None:
        """Have every connection close behind its next reply, which says so.

        One that is idle stays for as long as it may: to close it now could meet a request on its way.
        """
        self.leaving, self.surplus = True, math.inf
        for connection in self.connections.all():
            connection.close_behind_reply()

    def even_out(self, fellows: Sequence[Told]) -> None:
        """Give connections away, if the other workers have far fewer; called once a second, when they tell."""
        if not self.leaving:
            others = [each.connections for each in fellows]
            self.surplus = surplus(len(self.connections), others)

    def tick(self, now: float) -> None:
        """Enforce the deadlines of connections; called about twice a second."""
        self.connections.tick(now)
        for connection in tuple(self.held):
            if not connection.transport.is_closing() and has_left(connection.transport):
                connection.transport.abort()


class GatewayProtocol(RequestReader):
    """One client connection."""

    __slots__ = ("_answering", "_deaf", "_idle", "_ingress", "_line", "_ready", "_spec")

    pipeline: deque[Any]  # those that wait for the reply to an earlier one; the next is the last

    def __init__(self, ingress: Ingress, **kwargs: Any) -> None:
        super().__init__(ingress.limits, **kwargs)
        self._ingress = ingress
        self._line: Line | None = None  # where this connection waits for its client
        self._idle = ingress.connections.idle
        self._spec: EndpointSpec | None = None  # what the last head asks for; None: no inference
        self._deaf = False  # what still comes is dropped
        self._ready: Downstream | PlainRequest | None = None  # starts at the end of this read
        self._answering: Downstream | PlainRequest | None = None

    # --- asyncio.Protocol ---------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """Take the connection in, if there may be one more."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=self._ingress.limits.write_buffer_bytes)
        connections = self._ingress.connections
        host = self.client[0] if self.client else None
        refused = connections.enter(self, host, time.monotonic())
        if refused is None:
            self._wait(connections.heads)
        else:
            self._deaf = True
            self._say(too_many_connections(refused, connections))
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Parse, then start the story: a body that came with its head needs no wait."""
        if self._deaf:
            return
        error = self.read(data)
        if error is not None:
            self._refuse(error)
        ready, self._ready = self._ready, None
        if ready is not None:
            if not self.transport.is_closing():
                self._start(ready)
        elif self._line is self._idle and not self._deaf:
            self._wait(self._ingress.connections.heads)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the requests on this connection, then let uvicorn clean up."""
        self._stop_waiting()
        self._ingress.connections.leave(self)
        self._ingress.held.discard(self)
        if self._answering is not None:
            self._answering.on_client_gone()
            self._answering = None  # each holds the other
        self.pipeline.clear()
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

    # --- called by the parser -----------------------------------------------------------------------

    def on_ahead(self) -> None:
        """While another request is being answered, read no further than this read."""
        self.hold()

    def on_head(self) -> None:
        """Make a whole head a request.

        Raises:
            httptools.HttpParserError: too many requests wait for their turn.
        """
        previous = self.cycle
        waits = previous is not None and not previous.response_complete
        if waits and len(self.pipeline) >= _MOST_AHEAD:
            raise httptools.HttpParserError("too many requests sent ahead")
        spec = self._ingress.endpoints.get(self.url.partition(b"?")[0])
        self._spec = spec if self.parser.get_method() == b"POST" else None
        self.cycle = request = self._request()
        if waits:
            self.pipeline.appendleft(request)
        else:
            self._ready = request

    def on_head_again(self, whole: bytes | None) -> None:
        """Make the last head another request."""
        self.cycle = self._ready = self._request(whole)

    def _request(self, whole: bytes | None = None) -> Downstream | PlainRequest:
        """Return a request by the last head: of the inference routes, or for Starlette.

        `whole` is its body, if all of that came with the head.
        """
        ingress, spec = self._ingress, self._spec
        request: Downstream | PlainRequest
        if spec is None:
            request = PlainRequest(self, ingress.new_id())
            request.takes = ingress.takes
            if whole is not None:
                request.on_body(whole)
                request.on_message_complete()
        else:
            request = Downstream(self, spec, ingress.new_id(), whole)
        if ingress.cors is not None:
            request.cors_lines = ingress.cors.lines(self.headers)
        if ingress.surplus:
            ingress.surplus -= 1
            request.keep_alive = False
        return request

    # --- called by requests -------------------------------------------------------------------------

    def on_reply_complete(self, request: Downstream | PlainRequest) -> None:
        """Go on to the next request, or close; a body that is not whole is not waited for."""
        self._answering = None
        if not (request.keep_alive and request.body_complete):
            self._linger()
        elif self.pipeline:
            self.loop.call_soon(self._next)
        else:
            if self.flow.read_paused:
                self.read_on()
            self._wait(self._ingress.connections.heads if self.in_head else self._idle)

    def date_header(self) -> bytes:
        """Return the date line, which uvicorn renews every second."""
        return b"date: %b\r\n" % self.server_state.default_headers[0][1]

    # --- called by `Connections` and `Ingress` ------------------------------------------------------

    def close_behind_reply(self) -> None:
        """Have the reply that is due say `connection: close`, unless its head is written already."""
        last = self.cycle
        if last is not None and not last.started:
            last.keep_alive = False

    def expire(self, waits: Waits) -> None:
        """Give up what took too long: a head, an idle or lingering connection, unread bytes."""
        self._line = None
        if waits is Waits.CLOSING:
            self.transport.abort()
        elif waits is Waits.HEAD and (self.in_head or self.loose_bytes):
            seconds = self._ingress.connections.heads.seconds
            self._refuse(HeadTimeout(f"The request head did not arrive within {seconds:g} s."))
        else:
            self._close()

    def has_unsent(self) -> bool:
        """Whether it holds bytes that its client has not taken yet."""
        return self.transport.get_write_buffer_size() > 0

    def shed(self) -> None:
        """Close to make room for another; what is unsent goes out first."""
        self._line = None
        if self.has_unsent():
            self._close()
        else:
            self._deaf = True
            self.transport.abort()

    # --- the connection -----------------------------------------------------------------------------

    def _start(self, request: Downstream | PlainRequest) -> None:
        self._stop_waiting()
        self._answering = request
        request.writing_paused = self.flow.write_paused  # by what the reply before it left behind
        if isinstance(request, Downstream):
            self._ingress.live.add(request)
            request.start(self._ingress.story)
        else:
            request.start(self.app)

    def _next(self) -> None:
        """Start the next request of the pipeline; the rest of the last one's body is read now."""
        if self.transport.is_closing():
            return
        request = self.pipeline.pop()
        if not self.pipeline and not self.in_head:
            self.read_on()
        self._start(request)

    def _refuse(self, error: GatewayError) -> None:
        """Read no more of what is no valid request; those before it are still answered."""
        self._deaf = True
        last = self.cycle
        if last is not None and not last.response_complete:
            if last.body_complete:
                last.keep_alive = False  # the connection closes behind its reply
            else:
                last.break_off(error)
        elif not self.transport.is_closing():
            self._say(error)
            self._linger()

    def _say(self, error: GatewayError) -> None:
        """Write the last reply of the connection, to what is no valid request."""
        request_id = self._ingress.new_id()
        cors = self._ingress.cors
        lines = self.date_header() + (b"" if cors is None else cors.lines(self.headers or ()))
        self.transport.write(last_reply(error, request_id, lines))
        peer = self.client[0] if self.client else None
        client = self._ingress.connections.proxies.client_of(peer, self.headers)
        self._ingress.refused(error, request_id, self.request_line(), client)

    def hold(self) -> None:
        """Stop reading, but see whether the client is still there."""
        self.flow.pause_reading()
        self._ingress.held.add(self)

    def read_on(self) -> None:
        """Read again what `hold` has kept back."""
        if self.flow.read_paused and not self.transport.is_closing():
            self.flow.resume_reading()
        self._ingress.held.discard(self)

    def _linger(self) -> None:
        """Close once the client has had time to read the reply (RFC 9112 section 9.6)."""
        self._deaf = True
        if not self.transport.is_closing():
            self._wait(self._ingress.connections.lingering)
            self.transport.write_eof()

    def _close(self) -> None:
        """Close once what is written is read; a client that never reads is given up."""
        self._deaf = True
        if not self.transport.is_closing():
            self._wait(self._ingress.connections.closing)
            self.transport.close()

    def _wait(self, line: Line) -> None:
        if self._line is not None:
            del self._line[self]
        self._line = line
        line[self] = time.monotonic() + line.seconds

    def _stop_waiting(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            del line[self]
