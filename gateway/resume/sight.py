"""A frame with token ids told by sight, as `wire.chunks.Shape` tells one without. Pure.

    11b\\r\\n   data: {...,"delta":{"content":"   some text   "},...,"token_ids":[   713   ]}]}\\n\\n\\r\\n
    size      head, as before                           middle, as before         end

What the client gets of it is the same with `null` in place of the ids, and its size.
"""

from __future__ import annotations

from typing import Final

from gateway.wire.chunks import MAX_CHUNK, SIZE_LINES, is_inside

_IDS: Final = b'"token_ids":['
_TEXT: Final = (b'"content":"', b'"text":"')
_NULL_BYTES: Final = len(b"null") - len(b"[]")
_QUOTE: Final = ord('"')


class Sight:
    """What the frames of one stream have in common. Knows nothing until it has learnt one."""

    __slots__ = ("_after", "_end", "_head", "_middle")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Know nothing."""
        self._head = self._middle = self._end = self._after = b""

    def learn(self, frame: bytes) -> None:
        """Take the shape of one whole frame with ids."""
        head, quote, rest = frame.rpartition(b'":"')
        _, closes, tail = rest.partition(b'"')
        middle, ids, end = tail.partition(_IDS)
        _, bracket, end = end.partition(b"]")
        if quote and closes and ids and bracket and (head + quote).endswith(_TEXT):
            self._head, self._middle = head + quote, b'"%b%b' % (middle, ids)
            self._end = b"]%b\r\n" % end
            self._after = b'"%b%bnull%b\r\n' % (middle, ids[:-1], end)

    def tell(self, chunk: bytes) -> tuple[bytes, bytes, bytes] | None:
        """Return a chunk as the client gets it, its text and its ids; None when it is to be parsed."""
        size = len(chunk)
        line = SIZE_LINES[size] if size < MAX_CHUNK else b""
        if not (line and self._head):
            return None
        beginning, end = line + self._head, self._end
        text, middle, ids = chunk.removeprefix(beginning).removesuffix(end).rpartition(self._middle)
        fits = len(beginning) + len(text) + len(middle) + len(ids) + len(end) == size
        if not (fits and middle and ids.isdigit()) or (_QUOTE in text and not is_inside(text)):
            return None
        data_bytes = size - len(line) - 2 - len(ids) + _NULL_BYTES
        return b"%x\r\n%b%b%b" % (data_bytes, self._head, text, self._after), text, ids
