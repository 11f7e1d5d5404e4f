"""What a connection gives to whoever asked: a reply's head, and its body to a sink."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from gateway.core.errors import UpstreamError

if TYPE_CHECKING:
    from gateway.upstream.connection import Connection


# The headers of a reply that belong to the answer; all others are about the backend.
# `metadata` says what raw bytes of vectors are. Source: vLLM 0.32, entrypoints/pooling/utils.py; of
# its other headers `endpoint-load-metrics` is sent only to who asks for it, which nobody can through us.
PASSED_HEADERS: Final = (b"content-type", b"content-disposition", b"content-language", b"metadata")
_RARE: Final = frozenset(PASSED_HEADERS[1:])
JSON_LINE: Final = b"content-type: application/json\r\n"
EVENT_STREAM: Final = b"text/event-stream; charset=utf-8"  # the content type of vLLM's streams
EVENT_STREAM_LINE: Final = b"content-type: %b\r\n" % EVENT_STREAM


class Sink(Protocol):
    """Who takes a streamed body. Called from the event loop's read callback; must not block."""

    def on_data(self, data: bytes) -> None:
        """Take body bytes, chunked framing already removed."""

    def on_chunk(self, chunk: bytes) -> bool:
        """Take a read that begins a chunk, framing included; False leaves it to the parser."""

    def on_end(self, data: bytes) -> None:
        """Take the last body bytes, if any; the connection is already free for others."""

    def on_lost(self, error: UpstreamError) -> None:
        """Learn that the backend broke off."""

    def on_tick(self, now: float) -> None:
        """Be woken about twice a second, for deadlines and heart-beats."""


class Reply(msgspec.Struct, frozen=True):
    """A reply's head. `body` is the whole body, or None when it is to be streamed through `connection`."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes | None
    connection: Connection | None
    # Its head has status 200 and a content type: that of JSON if it is whole, else of an event stream.
    is_usual: bool = False

    @property
    def content_type(self) -> bytes:
        """The media type without parameters, in lower case."""
        return self.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()

    @property
    def is_event_stream(self) -> bool:
        """Whether its media type says that the body comes in events."""
        if self.is_usual:
            return self.body is None
        if self.headers.get(b"content-type") == EVENT_STREAM:
            return True
        return self.content_type == b"text/event-stream"

    def passed_lines(self) -> bytes:
        """Return the lines of the client's head: those headers that go on to it."""
        if self.is_usual:
            return EVENT_STREAM_LINE if self.body is None else JSON_LINE
        headers = self.headers
        if b"content-type" in headers and _RARE.isdisjoint(headers):  # as nearly always
            return b"content-type: %b\r\n" % headers[b"content-type"]
        passed = [name for name in PASSED_HEADERS if name in headers]
        return b"".join([b"%b: %b\r\n" % (name, headers[name]) for name in passed])
