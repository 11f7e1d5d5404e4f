"""The client's side of one request: its head and body in, a reply out, in its own HTTP dialect.

uvicorn keeps a "cycle" per request on its protocol; on the inference routes a `Downstream` stands in
its place. It has no reference to itself anywhere, so a finished request is freed by reference counts
alone and the garbage collector stays out of the way.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from gateway.core import aio
from gateway.core.addresses import Proxies
from gateway.core.errors import GatewayError, UnsupportedMediaType
from gateway.core.types import Call, Dialect, RequestRecord
from gateway.ingress.bodies import Hold
from gateway.ingress.body import Body
from gateway.ingress.gathering import Gathering
from gateway.ingress.heads import CLIENT_ID
from gateway.ingress.keeping import Kept
from gateway.ingress.upload import Upload
from gateway.pools.losses import Fingerprint
from gateway.resume.stream import TrailedStream
from gateway.upstream.relay import Relay
from gateway.upstream.reply import EVENT_STREAM, Reply
from gateway.wire.calls import EndpointSpec
from gateway.wire.chunks import framed
from gateway.wire.forms import FormReader
from gateway.wire.frames import OPENAI, error_frame
from gateway.wire.replies import Fault
from gateway.wire.sse import DONE

if TYPE_CHECKING:
    from gateway.ingress.server import GatewayProtocol

_MESSAGES: Final = Dialect.MESSAGES  # looked up once: 0.15 us before Python 3.12
_SECONDS: Final = re.compile(rb"\d{1,6}(?:\.\d{1,9})?")
# With x-accel-buffering nginx never holds a chunk back, whatever its own setting.
_EVENT_STREAM_HEADERS: Final = b"cache-control: no-cache, no-transform\r\nx-accel-buffering: no\r\n"


# The head that a stream gets before any backend was asked.
_WAITING_STREAM: Final = Reply(200, {b"content-type": EVENT_STREAM}, b"", None)


class Downstream:
    """One request of one client. Owned by the protocol until its reply is complete."""

    __slots__ = (
        "_announced_bytes", "_content_length", "_dropped", "_event_stream", "_http11", "_protocol", "_transport",
        "asked", "body", "body_complete", "bytes_out", "cors_lines", "extra_headers", "fields", "fingerprint",
        "gathering", "gone", "headers", "hold", "id", "keep_alive", "kept", "received_at", "record", "relay",
        "response_complete", "spec", "started", "started_at", "stopped_by", "takes_chunks", "task", "trailed",
        "upload", "write_chunk", "writing_paused",
    )  # fmt: skip

    def __init__(
        self, protocol: GatewayProtocol, spec: EndpointSpec, new_id: str, whole: bytes | None = None
    ) -> None:
        """Take the request that the protocol has just read the head of, or all of: `whole` is its body.

        A credential that comes twice with different values is kept as both, joined by a comma, which
        no key contains: it will be refused.
        """
        self._protocol = protocol
        self._transport = protocol.transport
        self.spec = spec
        self.headers = protocol.headers  # as they came, but maybe for the length
        self.fields = fields = protocol.fields  # likewise
        self._content_length = protocol.content_length
        self.id = new_id
        if b"x-request-id" in fields and CLIENT_ID.fullmatch(fields[b"x-request-id"]):
            self.id = fields[b"x-request-id"].decode()
        self.received_at = time.monotonic()
        self._http11 = protocol.http11
        self.body = Body() if whole is None else Body.of(whole)
        # Then the connection may carry another request.
        self.body_complete = whole is not None
        self.hold: Hold | None = None  # the room of a large body
        self.kept: Kept | None = None  # the body, as long as its stream may need it
        self._dropped = False
        self.upload: Upload | None = None
        self.takes_chunks = False
        # Writes what is framed already, while `takes_chunks`; its caller adds to `bytes_out`.
        self.write_chunk: Callable[[bytes], object] = protocol.transport.write
        self.extra_headers = b""  # header lines of our own, for whatever reply is written
        self.cors_lines = b""  # and those for browsers
        self.bytes_out = 0
        self.keep_alive = protocol.keep_alive
        self.response_complete = False  # read by uvicorn
        self.started = False
        self.started_at: float | None = None
        self.writing_paused = False
        self._announced_bytes = 0
        self._event_stream = False
        self.gone = False
        # Set once the story has begun: from then on a cancellation ends in its `finally`. Only the story changes it.
        self.record: RequestRecord | None = None
        self.relay: Relay | None = None
        # Its stream, if another backend may go on with it.
        self.trailed: TrailedStream | None = None
        self.asked: Call | None = None  # what its client sent, once it was read
        self.fingerprint: Fingerprint | None = None  # of its body, once an attempt was lost
        self.gathering: Gathering | None = None  # its stream, if its client gets it as a whole
        self.stopped_by: GatewayError | None = None  # why it ends early
        self.task: asyncio.Task[None] | None = None

    # --- the request --------------------------------------------------------------------------------

    @property
    def content_type(self) -> bytes:
        """The media type of its body, as the client wrote it."""
        return self.fields.get(b"content-type", b"")

    @property
    def is_encoded(self) -> bool:
        """Whether its body is compressed."""
        return self.fields.get(b"content-encoding", b"identity").lower() != b"identity"

    @property
    def retry_count(self) -> int:
        """How often its client has tried before, as its SDK says."""
        count = self.fields.get(b"x-stainless-retry-count", b"")
        return int(count[:4]) if count.isdigit() else 0

    @property
    def patience_s(self) -> float:
        """How long the client says that it waits for bytes."""
        seconds = self.fields.get(b"x-stainless-read-timeout", b"")
        return float(seconds) if _SECONDS.fullmatch(seconds) else math.inf

    @property
    def revision(self) -> bytes:
        """Which revision its client wishes for."""
        return self.fields.get(b"x-gateway-revision", b"")

    @property
    def _expects_continue(self) -> bool:
        # HTTP/1.0 knows no interim reply, and would take it for the reply (RFC 9110 section 10.1.1).
        return self._http11 and self.fields.get(b"expect", b"").lower() == b"100-continue"

    async def read_body(self, limit_bytes: int, timeout_s: float) -> bytes | None:
        """Return the whole body; None when it is longer and comes by `body.next_part`.

        Raises:
            UnsupportedMediaType: the body is compressed (415).
            BodyTooLarge, BodyTimeout, GatewayError: see `Body.read`.
        Cancel: nothing is held.
        """
        if self.is_encoded:
            raise _compressed()
        if self._expects_continue:
            self.body.on_wanted = self._say_continue
        return await self.body.read(limit_bytes, timeout_s, self._bytes_to_come())

    def _say_continue(self) -> None:
        self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def pause_reading(self) -> None:
        """Let no more of the body come."""
        if not self.body_complete:
            self._protocol.hold()

    def resume_reading(self) -> None:
        """Let the body come."""
        if not self.body_complete:
            self._protocol.read_on()

    def drop_body(self) -> None:
        """Give up a large body and the room it takes; nothing may be tried again after that."""
        hold, self.hold = self.hold, None
        if hold is not None:
            self._dropped = True
            self.body.take()
            hold.release()

    def forget_stream(self) -> None:
        """Give up what is kept to go on with its stream."""
        kept, self.kept = self.kept, None
        if kept is not None:
            kept.release()
            self.trailed = None

    def open_upload(self, limit_bytes: int, timeout_s: float) -> Upload:
        """Take the body as a form that is sent on as it comes; the request closes it.

        Raises:
            UnsupportedMediaType: the body is compressed, or no form (415).
            BodyTooLarge: its Content-Length is more than `limit_bytes` (413).
        """
        if self.is_encoded:
            raise _compressed()
        self.upload = upload = Upload(
            FormReader(self.content_type),
            self._protocol.flow,
            self._transport,
            content_length=self._bytes_to_come(),
            limit_bytes=limit_bytes,
            timeout_s=timeout_s,
        )
        for part in self.body.take():
            upload.on_data(bytes(part))
        if self.body.error is not None:
            upload.fail(self.body.error)
        if self.body_complete:
            upload.on_end()
        elif self._expects_continue:
            self._say_continue()
        return upload

    def _bytes_to_come(self) -> int | None:
        """Return the Content-Length of a body that is not whole; None in chunks, or once it is."""
        return None if self.body_complete else self._content_length

    def on_body(self, data: bytes) -> None:
        """Collect body bytes; those that come after the reply are dropped."""
        if self.response_complete:
            return
        if self.upload is not None:
            self.upload.on_data(data)
        else:
            self.body.on_data(data)

    def on_message_complete(self) -> None:
        """Note that the body is whole."""
        self.body_complete = True
        if self.upload is not None:
            self.upload.on_end()
        self.body.on_end()

    def break_off(self, error: GatewayError) -> None:
        """End a request whose body cannot be read on, unless its reply has begun without it."""
        if self.upload is not None:
            self.upload.fail(error)
        self.body.fail(error)

    def client_of(self, proxies: Proxies) -> str | None:
        """Return the client's address, behind these proxies; None on a UNIX socket."""
        peer = self._protocol.client
        return proxies.client_of(peer[0] if peer else None, self.headers)

    @property
    def answering(self) -> bool:
        """Whether a reply has begun that cannot begin again; comments alone do not count."""
        return self.bytes_out > self._announced_bytes or (
            self.started and not self._announced_bytes
        )

    @property
    def begun(self) -> bool:
        """Whether no other model may answer: the head of a reply is out, or a second backend went on with one."""
        return self.started or (self.trailed is not None and self.trailed.went_on)

    @property
    def body_at_hand(self) -> bool:
        """Whether the body can still be sent: it was not dropped, and no backend has more than its head."""
        return not self._dropped and (self.upload is None or not self.upload.sent_on)

    # --- the reply ------------------------------------------------------------------------------------

    def respond(self, status: int, lines: bytes, body: bytes) -> None:
        """Write a whole reply and finish. `lines` belong to its head.

        Does nothing for a client that has gone.
        """
        if self.gone:
            return
        if not self.body_complete:
            self.keep_alive = False
        self._write_head(status, b"%bcontent-length: %d\r\n" % (lines, len(body)), body)
        self._finish()

    def begin(self, reply: Reply, data: bytes = b"") -> None:
        """Write a streamed reply's head and first bytes; in chunks for HTTP/1.1, else closed at its end."""
        passed = reply.passed_lines()
        self._event_stream = reply.is_event_stream
        if self._event_stream:
            passed += _EVENT_STREAM_HEADERS
        if self._http11:
            self.takes_chunks = not self.gone
            passed += b"transfer-encoding: chunked\r\n"
        else:
            self.keep_alive = False
        self._write_head(reply.status, passed, self._framed(data))

    def write(self, data: bytes) -> None:
        """Write body bytes of a streamed reply."""
        if self.gone:
            return
        self.bytes_out += len(data)
        self._transport.write(self._framed(data))

    def _framed(self, data: bytes) -> bytes:
        return framed(data) if self.takes_chunks and data else data

    def announce(self, position: int, eta_s: float | None) -> None:
        """Answer a stream that waits for room with 200 and a comment that says how long."""
        if not self.gone:
            eta = b"" if eta_s is None else b" eta=%ds" % math.ceil(eta_s)
            self.beat(_WAITING_STREAM, b": queued position=%d%b\n\n" % (position, eta))

    def beat(self, reply: Reply, comment: bytes) -> None:
        """Write a comment, so that nothing in between thinks the connection dead; it is no part of an answer."""
        answering = self.answering
        if not self.started:
            self.begin(reply)
            self.started_at = None  # the first byte that counts is yet to come
        self.write(comment)
        if not answering:
            self._announced_bytes = self.bytes_out

    def tell(self, fault: Fault) -> None:
        """End a stream that has begun with an error in its own protocol; cut a reply that is no stream."""
        if not self._event_stream:
            self.cut()
            return
        dialect, sequence = self.spec.dialect, self.trailed.next_sequence if self.trailed else 0
        frame = error_frame(fault, dialect, self.id, sequence)
        self.end(frame + (DONE if dialect in OPENAI else b""))

    def end(self, data: bytes = b"") -> None:
        """Finish a streamed reply, after its last bytes."""
        if self.gone:
            self.response_complete = True
            return
        self.bytes_out += len(data)
        self._transport.write(self._framed(data) + (b"0\r\n\r\n" if self.takes_chunks else b""))
        self._finish()

    def cut(self) -> None:
        """End a reply that cannot be finished: the connection closes without the last chunk."""
        self.keep_alive = False
        self.response_complete = True
        self._transport.abort()

    def _write_head(self, status: int, lines: bytes, body: bytes) -> None:
        self.started = True
        self.started_at = time.monotonic()
        if self.gone:
            return
        self.bytes_out += len(body)
        close = b"" if self.keep_alive else b"connection: close\r\n"
        request_id = self.id.encode()
        if self.spec.dialect is _MESSAGES:  # Anthropic's SDKs read this one
            lines += b"request-id: %b\r\n" % request_id
        self._transport.write(
            b"".join(
                (
                    STATUS_LINE[status],
                    self._protocol.date_header(),
                    lines,
                    b"x-request-id: ",
                    request_id,
                    b"\r\n",
                    self.extra_headers,
                    self.cors_lines,
                    close,
                    b"\r\n",
                    body,
                )
            )
        )

    def _finish(self) -> None:
        self.response_complete = True
        self.relay = None
        self._protocol.on_reply_complete(self)

    # --- called by the protocol -----------------------------------------------------------------------

    def start(self, story: Callable[[Downstream], Coroutine[Any, Any, None]]) -> None:
        """Start the request's story as a task that this object owns."""
        self.task = aio.start(story(self), name="request", loop=self._protocol.loop)

    def on_client_gone(self) -> None:
        """The connection is lost: end the story wherever it waits."""
        self.gone = True
        self.takes_chunks = False
        if not self.response_complete:
            self.cancel()

    def stop(self, error: GatewayError) -> None:
        """End the request early for a reason of the gateway's own; the client gets `error`, if it has no answer yet."""
        if self.stopped_by is None and not self.response_complete:
            self.stopped_by = error
            if self.relay is None or not self.relay.end_early(error):
                self.cancel()

    def cancel(self) -> None:
        """End the story. One that has not begun ends by itself: it looks first whether its client is there."""
        if self.record is not None and self.task is not None and not self.task.done():
            self.task.cancel()

    def pause_writing(self) -> None:
        """Note that the client's buffer is full."""
        self.writing_paused = True
        if self.relay is not None:
            self.relay.pause()

    def resume_writing(self) -> None:
        """Note that the client's buffer has drained."""
        self.writing_paused = False
        if self.relay is not None:
            self.relay.resume()


def _compressed() -> UnsupportedMediaType:
    return UnsupportedMediaType(
        "Compressed request bodies are not accepted. Send the body without Content-Encoding."
    )
