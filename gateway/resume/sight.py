"""How a frame with token ids is told by sight, as `wire.chunks.Shape` tells one without. Pure.

    11b\\r\\n   data: {...,"delta":{"content":"   some text   "},...,"token_ids":[   713,88   ]}]}\\n\\n\\r\\n
    size      head, as before                           middle, as before            end

What the client gets of it is the same with `null` in place of the ids, and its size. Of a backend that
goes on with another's stream it gets the head of the first one's frames, which tells id and time.
"""

from __future__ import annotations

from typing import Final

from gateway.wire.chunks import MAX_CHUNK, MOST_SIZES, NEVER, SIZE_LINES

CHOICES: Final = b',"choices":['
_IDS: Final = b'"token_ids":['
_TEXT: Final = (b'"content":"', b'"text":"', b'"reasoning":"', b'"reasoning_content":"')


class Sight:
    """What the frames of one stream have in common. Knows nothing until it has learnt one."""

    __slots__ = ("_after", "_end", "_first", "_head", "_middle", "_shown", "_shown_by", "_sizes")

    def __init__(self) -> None:
        self.forget(b"")

    def forget(self, first: bytes) -> None:
        """Know nothing; `first` is how the frames are to begin, up to their choices, if not as they do."""
        self._first = first
        self._shown = self._head = self._end = self._after = b""
        self._middle = NEVER
        self._sizes: dict[int, tuple[bytes, int]] = {}
        self._shown_by: dict[
            int, bytes
        ] = {}  # by the bytes of the text: how the client's chunk begins

    def learn(self, frame: bytes) -> None:
        """Take the shape of one whole frame with ids."""
        head, quote, rest = frame.rpartition(b'":"')
        text, closes, tail = rest.partition(b'"')
        if text.endswith(b"\\"):  # that quote may be a part of the text
            return
        middle, ids, end = tail.partition(_IDS)
        _, bracket, end = end.partition(b"]")
        if quote and closes and ids and bracket and (head + quote).endswith(_TEXT):
            self._head, self._middle = head + quote, b'"%b%b' % (middle, ids[:-1])
            self._shown = self._first + self._head[self._head.find(CHOICES) :]
            if not self._first:
                self._shown = self._head
            self._end = b"]%b\r\n" % end
            self._after = b'"%b%bnull%b\r\n' % (middle, ids[:-1], end)
            self._sizes, self._shown_by = {}, {}

    def _expect(self, size: int) -> tuple[bytes, int]:
        """Return how a chunk of this size begins if it fits, and the bytes of its text and ids."""
        line = SIZE_LINES[size] if size < MAX_CHUNK else b""
        if not (line and self._head):
            return NEVER, -1
        beginning = line + self._head
        same_bytes = len(beginning) + len(self._middle) + len(b"[") + len(self._end)
        expected = beginning, size - same_bytes
        if len(self._sizes) == MOST_SIZES:
            self._sizes.clear()
        self._sizes[size] = expected
        return expected

    def _begin(self, text_bytes: int) -> bytes:
        """Return how the client's chunk with so many bytes of text begins."""
        data_bytes = len(self._shown) + text_bytes + len(self._after) - 2
        shown = b"%x\r\n%b" % (data_bytes, self._shown)
        if len(self._shown_by) == MOST_SIZES:
            self._shown_by.clear()
        self._shown_by[text_bytes] = shown
        return shown
