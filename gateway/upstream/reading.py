"""One HTTP/1.1 reply as the parser finds it: its head, then its body, whole or piece by piece."""

from __future__ import annotations

from enum import Enum
from typing import Final

import httptools

from gateway.upstream.reply import EVENT_STREAM

# A reply with status 200 that is no event stream is collected up to here, so that it can be judged as
# a whole; beyond it, it is streamed. Also what one stream may hold in memory.
WHOLE_REPLY_BYTES: Final = 256 * 1024
# Every other reply is an error, and never passed on as it is. What follows this much is not read.
MAX_ERROR_BYTES: Final = 1024 * 1024
# Reads in a row that bring nothing but framing: an unfinished head, trailers, chunk extensions. The
# parser keeps an unfinished header value in memory, so its callbacks alone cannot bound it.
MAX_FRAMING_BYTES: Final = 64 * 1024
_MAX_HEADER_BYTES: Final = 64 * 1024
_MAX_INTERIM_REPLIES: Final = 8  # 1xx heads before the real one


class State(Enum):
    """Where the connection is in its one exchange."""

    IDLE = "idle"
    HEAD = "head"
    COLLECT = "collect"
    STREAM = "stream"
    CLOSED = "closed"


# Before Python 3.12 a member that is looked up in its enum costs 0.15 us.
IDLE, HEAD, COLLECT, STREAM, CLOSED = State


class Reading:
    """What is known of a reply so far. The callbacks of httptools fill it in; `Connection` acts on it."""

    def __init__(self) -> None:
        self.state = IDLE
        self.spoke_unasked = False
        self._parser: httptools.HttpResponseParser | None = None
        self._found: dict[bytes, bytes] = {}  # headers as they came, since the last whole head
        self.on_header = self._found.setdefault  # called by the parser, for every header
        self._reset()

    def _reset(self) -> None:
        self._headers: dict[bytes, bytes] = {}  # in lower case; the first value of a repeated one
        self._found.clear()
        self._framing_bytes = 0
        self._interim = 0
        self._status = 0
        self._parts: list[bytes] = []
        self._held_bytes = self._ticked_bytes = 0
        self._complete = False
        self._keep_alive = False
        self._answered = False
        self._between_chunks = False

    def on_message_begin(self) -> None:
        """Refuse what follows a whole reply in the same read."""
        if self._complete:
            self.spoke_unasked = True
            raise httptools.HttpParserError("bytes after the reply")

    def on_headers_complete(self) -> None:
        """Judge the head: an event stream is answered now, everything else when it is whole."""
        parser = self._parser
        assert parser is not None
        found, headers = self._found, self._headers
        for name, value in found.items():
            headers.setdefault(name.lower(), value)
        found.clear()  # what comes from now on are trailers, of which none is passed on
        if self._framing_bytes > MAX_FRAMING_BYTES and _size(headers) > _MAX_HEADER_BYTES:
            raise httptools.HttpParserError("headers too large")
        self._framing_bytes = 0
        self._status = status = parser.get_status_code()
        if status < 200:
            self._headers = {}
            return
        if self._complete or status > 599:
            raise httptools.HttpParserError("a second reply to one request, or no status at all")
        if status == 200 and is_event_stream(headers):
            self._between_chunks = headers.get(b"transfer-encoding") == b"chunked"
            self._start_stream()
        else:
            self.state = COLLECT

    def on_body(self, data: bytes) -> None:
        """Hold the bytes until the read is parsed; too much for a whole reply turns it into a stream."""
        self._framing_bytes = 0
        self._parts.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > WHOLE_REPLY_BYTES and self.state is COLLECT and self._status == 200:
            self._start_stream()

    def on_chunk_header(self) -> None:
        """Note that a chunk has begun: its size is read."""
        self._between_chunks = False

    def on_chunk_complete(self) -> None:
        """Note that a chunk has ended."""
        self._between_chunks = self.state is STREAM

    def on_message_complete(self) -> None:
        """Note the end; a 1xx head only makes room for the real one."""
        if self._status < 200:
            self._interim += 1
            if self._interim > _MAX_INTERIM_REPLIES:
                raise httptools.HttpParserError("too many interim replies")
            return
        assert self._parser is not None
        self._keep_alive = (
            self._parser.should_keep_alive()
        )  # only true answers inside this callback
        self._complete = True

    # --- for the connection -----------------------------------------------------------------------

    def _start_stream(self) -> None:
        raise NotImplementedError

    def _ends_with_connection(self) -> bool:
        headers = self._headers
        return (
            bool(self._status)
            and b"content-length" not in headers
            and b"transfer-encoding" not in headers
        )


def _size(headers: dict[bytes, bytes]) -> int:
    return sum(len(name) + len(value) for name, value in headers.items())


def is_event_stream(headers: dict[bytes, bytes]) -> bool:
    """Whether a body can be read frame by frame; one that is compressed cannot."""
    kind = headers.get(b"content-type", b"")
    if kind != EVENT_STREAM and kind[:17].lower() != b"text/event-stream":
        return False
    return b"content-encoding" not in headers or not is_encoded(headers)


def is_encoded(headers: dict[bytes, bytes]) -> bool:
    """Whether a body is compressed, so that nobody here can read it. We never ask for that."""
    return headers.get(b"content-encoding", b"identity").strip().lower() != b"identity"
