"""A stream's chunks told by sight: one more token, shaped like the last one, passes unparsed.

An engine writes one frame per chunk of the chunked transfer coding (RFC 9112 section 7.1), and the
frames of one stream differ in one string only. So a read that is exactly one chunk with the head and
the tail of a frame that was judged before, and nothing but the inside of a string between them, says
nothing new. Nor does a read of several such chunks.

    d2\\r\\n   data: {"id":"x",...,"delta":{"content":"   some text   "},"finish_reason":null}]}\\n\\n   \\r\\n
    size     head, as before                         no end of it   tail, as before
"""

from __future__ import annotations

from typing import Final

_MAX_CHUNK: Final = 4096  # bytes; longer frames are rare, and parsed
_NEVER: Final = b"\0"  # begins no frame


def _size_line(chunk_bytes: int) -> bytes:
    """Return how a chunk of so many bytes, framing included, begins."""
    for digits in (1, 2, 3):
        line = b"%x\r\n" % max(0, chunk_bytes - digits - 4)
        if len(line) == digits + 2 and line[:1] != b"0":
            return line
    return _NEVER


# By a chunk's size: how it begins, and after how many bytes its frame does.
_BEGINNINGS: Final = tuple((line, len(line)) for line in map(_size_line, range(_MAX_CHUNK)))


class Shape:
    """What the frames of one stream have in common. Knows nothing until it has learnt one."""

    __slots__ = ("_head", "_head_bytes", "_tail", "_tail_bytes")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Fit nothing."""
        self._head = self._tail = _NEVER
        self._head_bytes = self._tail_bytes = 1

    def learn(self, frame: bytes) -> None:
        """Take the shape of one whole frame of JSON; its last string value may differ from now on."""
        begin = frame.rfind(b'":"') + 3
        end = frame.find(b'"', begin)
        if begin > 2 and end > 0:
            self._head, self._tail = frame[:begin], frame[end:] + b"\r\n"
            self._head_bytes, self._tail_bytes = begin, len(self._tail)

    def fits(self, chunk: bytes) -> bool:
        """Whether `chunk` is exactly one chunk of exactly one frame of this shape."""
        size = len(chunk)
        if size >= _MAX_CHUNK:
            return False
        line, head = _BEGINNINGS[size]
        begin, end = head + self._head_bytes, size - self._tail_bytes
        return (
            begin <= end
            and chunk.startswith(line)
            and chunk.startswith(self._head, head)
            and chunk.endswith(self._tail)
            and (chunk.find(b'"', begin, end) < 0 or _is_inside(chunk[begin:end]))
        )

    def count(self, data: bytes) -> int:
        """Return how many chunks `data` is when each is a frame of this shape; 0 for all else.

        An engine that is faster than we read leaves several in one read.
        """
        if not data.endswith(self._tail):
            return 0
        count = begin = 0
        while begin < len(data):
            end = data.find(self._tail, begin) + self._tail_bytes
            if not self.fits(data[begin:end]):
                return 0
            count += 1
            begin = end
        return count


def _is_inside(text: bytes) -> bool:
    """Whether all quotes of a text are escaped, so that it does not end the string it is in."""
    return b"\\\\" not in text and text.count(b'"') == text.count(b'\\"')
