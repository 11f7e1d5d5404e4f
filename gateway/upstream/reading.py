"""One HTTP/1.1 reply as the parser finds it: its head, then its body, whole or piece by piece."""

from __future__ import annotations

import re
from enum import Enum
from typing import Final

import httptools
import msgspec

from gateway.upstream.reply import EVENT_STREAM, Reply
from gateway.wire.chunks import inside, unframed

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

# The head of a whole reply as vLLM's server writes it nearly always. Source: vLLM 0.32 with uvicorn 0.54;
# an id is written with `--enable-request-id-headers`.
_USUAL_HEAD: Final = re.compile(
    rb"HTTP/1\.1 200 OK\r\ndate: [ -~]{29}\r\nserver: uvicorn\r\ncontent-length: (\d{1,9})\r\n"
    rb"content-type: application/json\r\n(?:(?:vary|x-request-id): [!-~]{1,200}\r\n)*\r\n"
)
_USUAL_HEADERS: Final = {b"content-type": b"application/json"}  # nobody asks for the others

# Likewise of a stream. Its last line says that the body comes in chunks, so the connection is kept.
_USUAL_STREAM: Final = re.compile(
    rb"HTTP/1\.1 200 OK\r\ndate: [ -~]{29}\r\nserver: uvicorn\r\n"
    rb"content-type: text/event-stream; charset=utf-8\r\n"
    rb"(?:(?:vary|x-request-id): [!-~]{1,200}\r\n)*transfer-encoding: chunked\r\n\r\n"
)
_STREAM_HEADERS: Final = {b"content-type": EVENT_STREAM, b"transfer-encoding": b"chunked"}


class UsualHead(msgspec.Struct, frozen=True, gc=False):
    """A head of a usual reply: a server writes all of one second alike, but for the length of the body."""

    before: bytes  # the digits of its Content-Length
    behind: bytes  # them and a CR, to the end of the head

    def reply(self, data: bytes) -> Reply | None:
        """Return the whole reply that a read is, if it begins with this head and its length."""
        rest = data.removeprefix(self.before)
        if len(rest) == len(data):
            return None
        digits, _, rest = rest.partition(b"\r")
        body = rest.removeprefix(self.behind)
        if len(body) == len(rest) or digits != b"%d" % len(body):
            return None
        return Reply(200, _USUAL_HEADERS, body, None, is_usual=True)


def usual_head(data: bytes) -> UsualHead | None:
    """Return the head of a whole reply as vLLM writes it; None for any other reply, which is to be parsed.

    This takes a third of the parser's time.
    """
    head = _USUAL_HEAD.match(data)
    if head is None or len(data) - head.end() != int(head[1]):
        return None
    return UsualHead(data[: head.start(1)], data[head.end(1) + 1 : head.end()])


def usual_stream(data: bytes) -> bytes:
    """Return the head of a stream that a read begins with, if it is one as vLLM writes it; else nothing."""
    head = _USUAL_STREAM.match(data)
    return b"" if head is None else head[0]


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

    # With slots: a connection has more than 30 attributes, and CPython looks up each method of such an object anew.
    __slots__ = (
        "_answered", "_between_chunks", "_complete", "_found", "_framing_bytes", "_headers", "_held_bytes", "_interim",
        "_keep_alive", "_parsed", "_parser", "_parts", "_status", "_ticked_bytes", "_unread_head", "on_header",
        "spoke_unasked", "state",
    )  # fmt: skip

    def __init__(self) -> None:
        self.state = IDLE
        self.spoke_unasked = False
        self._parser: httptools.HttpResponseParser | None = None
        self._found: dict[bytes, bytes] = {}  # headers as they came, since the last whole head
        self.on_header = self._found.setdefault  # called by the parser, for every header
        self._reset()
        self._answered = False  # anything of the reply has come

    def _reset(self) -> None:
        """Forget what the parser has found."""
        self._parsed = False
        self._headers: dict[bytes, bytes] = {}  # in lower case; the first value of a repeated one
        self._found.clear()
        self._framing_bytes = 0
        self._interim = 0
        self._status = 0
        self._parts: list[bytes] = []
        self._held_bytes = self._ticked_bytes = 0
        self._complete = False
        self._keep_alive = False
        self._between_chunks = False
        # Of a stream that is read by sight, until the parser has to go on with it.
        self._unread_head = b""

    def on_message_begin(self) -> None:
        """Refuse what follows a whole reply in the same read."""
        if self._complete:
            self.spoke_unasked = True
            raise httptools.HttpParserError("bytes after the reply")

    def on_headers_complete(self) -> None:
        """Judge the head: an event stream is answered now, everything else when it is whole."""
        parser = self._parser
        assert parser is not None
        found = self._found
        if self.state is STREAM:  # it was known by sight; the parser needs it for what follows
            found.clear()
            return
        headers = {name.lower(): value for name, value in found.items()}
        if len(headers) != len(found):  # written in several ways: the first counts
            headers = {name.lower(): value for name, value in reversed(found.items())}
        self._headers = headers
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
        # The parser answers truly only inside this callback.
        self._keep_alive = self._parser.should_keep_alive()
        self._complete = True

    # --- what needs no parser ------------------------------------------------------------------------

    def _begin_by_sight(self, data: bytes) -> bool:
        """Begin a stream that a read begins as vLLM does; False: it is to be parsed."""
        head = usual_stream(data)
        if not head:
            return False
        data = data[len(head) :]
        one = inside(data)  # as nearly always
        rest = (one, False) if one else unframed(data)
        if rest is None:
            return False
        self._parsed = self._between_chunks = True
        self._unread_head = head
        self._status, self._headers = 200, _STREAM_HEADERS
        self._start_stream(is_usual=True)
        self._hold(*rest)
        return True

    def _read_by_sight(self, data: bytes) -> bool:
        """Take more of such a stream, if it is whole chunks; False: it is to be parsed."""
        found = unframed(data) if self._unread_head else None
        if found is None:
            return False
        self._hold(*found)
        return True

    def _hold(self, data: bytes, ends: bool) -> None:
        if data:
            self._parts.append(data)
            self._held_bytes += len(data)
        if ends:
            self._complete = self._keep_alive = True
            self._between_chunks = False
            self._unread_head = b""

    # --- for the connection -----------------------------------------------------------------------

    def _start_stream(self, *, is_usual: bool = False) -> None:
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
