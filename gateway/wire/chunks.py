"""A stream's chunks told by sight: one more token, shaped like the last one, passes unparsed.

An engine writes one frame per chunk of the chunked transfer coding (RFC 9112 section 7.1), and the
frames of one stream differ in one string only. So a read that is exactly one chunk with the head and
the tail of a frame that was judged before, and nothing but the inside of a string between them, says
nothing new. Nor does a read of several such chunks. Any other read that is exactly one chunk needs no
parser to be taken out of it.

    d2\\r\\n   data: {"id":"x",...,"delta":{"content":"   some text   "},"finish_reason":null}]}\\n\\n   \\r\\n
    size     head, as before                         no end of it   tail, as before
"""

from __future__ import annotations

from typing import Final

MAX_CHUNK: Final = 4096  # bytes; longer frames are rare, and parsed
_QUOTE: Final = ord('"')
_SIZES: Final = {b"%x" % size: size for size in range(MAX_CHUNK)}  # as engines write them


def _size_line(chunk_bytes: int) -> bytes:
    """Return how a chunk of so many bytes, framing included, begins; empty: none has so many."""
    for digits in (1, 2, 3):
        line = b"%x\r\n" % max(0, chunk_bytes - digits - 4)
        if len(line) == digits + 2 and line[:1] != b"0":
            return line
    return b""


# By a chunk's size: how it begins.
SIZE_LINES: Final = tuple(map(_size_line, range(MAX_CHUNK)))
# A chunk whose frame gets another id and time may grow by so much.
LONGER_BYTES: Final = 256
# By the bytes that a chunk holds: how it begins.
LINES: Final = tuple(b"%x\r\n" % held_bytes for held_bytes in range(MAX_CHUNK + LONGER_BYTES))


def inside(data: bytes) -> bytes:
    """Return what a chunk holds, if `data` is one whole chunk and nothing else; else nothing.

    Nothing, too, of a chunk that only the parser reads: the last one, one of 4 KiB, one with extensions.
    """
    size = len(data)
    line = SIZE_LINES[size] if size < MAX_CHUNK else b""
    held = data.removeprefix(line).removesuffix(b"\r\n")
    return held if line and len(held) == size - len(line) - 2 else b""


def framed(data: bytes) -> bytes:
    """Return one chunk that holds these bytes; there must be some, for an empty chunk is the last one."""
    size = len(data)
    line = LINES[size] if size < MAX_CHUNK else b"%x\r\n" % size
    return b"".join((line, data, b"\r\n"))  # half the time of `%`


def unframed(data: bytes) -> tuple[bytes, bool] | None:
    """Return what whole chunks hold, and whether the last chunk of the body is among them.

    None if `data` is anything else, or has extensions or trailers, which only the parser reads.
    """
    lines = data.split(b"\r\n")  # what chunks hold has line feeds alone
    if lines.pop() or len(lines) % 2:
        return None
    parts, ends = lines[1::2], False
    for place, part in enumerate(parts):
        if ends or _SIZES.get(lines[2 * place]) != len(part):
            return None
        ends = not part
    return b"".join(parts), ends


class Shape:
    """What the frames of one stream have in common. Knows nothing until it has learnt one."""

    __slots__ = ("_head", "_tail", "_tail_bytes")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Fit nothing."""
        self._head = self._tail = b""
        self._tail_bytes = MAX_CHUNK

    def learn(self, frame: bytes) -> None:
        """Take the shape of one whole frame of JSON; its last string value may differ from now on."""
        head, mark, rest = frame.rpartition(b'":"')
        _, quote, tail = rest.partition(b'"')
        if mark and quote:
            self._head, self._tail = head + mark, b'"%b\r\n' % tail
            self._tail_bytes = len(self._tail)

    def fits(self, chunk: bytes) -> bool:
        """Whether `chunk` is exactly one chunk of exactly one frame of this shape.

        Each token pays for this, so it uses what is fast in CPython: 0.3 us. To look for an int in bytes
        takes a tenth of the time that it takes to look for bytes.
        """
        size = len(chunk)
        line = SIZE_LINES[size] if size < MAX_CHUNK else b""
        beginning = line + self._head
        text = chunk.removeprefix(beginning).removesuffix(self._tail)
        if not line or len(beginning) + len(text) + self._tail_bytes != size:
            return False
        return _QUOTE not in text or is_inside(text)

    def split(self, data: bytes) -> list[bytes]:
        """Return the chunks in `data`; nothing, unless each is one frame of this shape.

        An engine that is faster than we read leaves several in one read.
        """
        tail = self._tail
        if not tail or not data.endswith(tail):
            return []
        chunks = [each + tail for each in data.split(tail)[:-1]]
        return chunks if all(map(self.fits, chunks)) else []


def is_inside(text: bytes) -> bool:
    """Whether all quotes of a text are escaped, so that it does not end the string it is in."""
    return b"\\\\" not in text and text.count(b'"') == text.count(b'\\"')
