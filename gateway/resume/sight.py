"""How a frame with token ids is told by sight, as `wire.chunks.Shape` tells one without. Pure.

    11b\\r\\n   data: {...,"delta":{"content":"   some text   "},...,"token_ids":[   713,88   ]}]}\\n\\n\\r\\n
    size      head, as before                           middle, as before            end

What the client gets of it is the same with `null` in place of the ids, and its size. Of a backend that
goes on with another's stream it gets the head of the first one's frames, which tells id and time.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from gateway.wire.chunks import LONGER_BYTES, MAX_CHUNK, SIZE_LINES, is_inside

CHOICES: Final = b',"choices":['
IDS: Final = b'"token_ids":['
_WRITES_IDS: Final = b"0123456789,"
_USAGE: Final = b'"usage":{'
_NAMES: Final = (b'"content', b'"text', b'"reasoning', b'"reasoning_content')  # of text


class Sight:
    """What the frames of one stream have in common. Knows nothing until it has learnt one.

    It keeps little. With a thousand streams, the processor's cache holds nothing of a stream any more when
    its next token comes. Then it takes longer to fetch a value than to compute it.
    """

    __slots__ = (
        "_after", "_around_bytes", "_end", "_first", "_head", "_middle", "_shown", "_shown_bytes",
    )  # fmt: skip

    def __init__(self) -> None:
        self.forget(b"")

    def forget(self, first: bytes) -> None:
        """Know nothing; `first` is how the frames are to begin, up to their choices, if not as they do."""
        self._first = first
        self._shown = self._head = self._middle = self._end = self._after = b""
        self._around_bytes = MAX_CHUNK  # all but head, text and ids: so many that nothing fits
        self._shown_bytes = 0  # all that the client's chunk holds but the text

    def learn(self, frame: bytes) -> None:
        """Take the shape of one whole frame with ids; know nothing if it cannot be told by sight.

        The first frame with a new head must show text. Only that one is parsed, which tells whether its text is
        reasoning or the answer.
        """
        head, quote, rest = frame.rpartition(b'":"')
        if not head.endswith(_NAMES):  # a finish reason, or nothing that is text
            self.forget(self._first)
            return
        text, closes, tail = rest.partition(b'"')
        middle, ids, end = tail.partition(IDS)
        _, bracket, end = end.partition(b"]")
        head += quote
        shown = self._first + head[head.find(CHOICES) :] if self._first else head
        if (
            not (closes and ids and bracket)
            or text.endswith(b"\\")  # that quote may be a part of the text
            or not (text or head == self._head)
            or frame.find(_USAGE) >= 0  # each of these must be parsed
            or len(frame) >= MAX_CHUNK
            or len(shown) - len(head) > LONGER_BYTES
        ):
            self.forget(self._first)
            return
        self._middle, self._end, self._after = _around(middle, end)
        self._around_bytes = len(b'"') + len(self._middle) + len(self._end)
        if head != self._head:
            self._head, self._shown = head, shown
        self._shown_bytes = len(self._shown) + len(self._after) - len(b"\r\n")

    def _apart(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """Return the text and the ids of each chunk in `data`; nothing, unless all have the learnt shape.

        An engine that is faster than we read leaves several in one read.
        """
        end = self._end
        if not end or not data.endswith(end) or data.find(self._middle) < 0:
            return []
        parts: list[tuple[bytes, bytes]] = []
        for each in data.split(end)[:-1]:
            size = len(each) + len(end)
            line = SIZE_LINES[size] if size < MAX_CHUNK else b""
            beginning = line + self._head
            before, _, ids = each.rpartition(b"[")
            text = (before + b"[").removeprefix(beginning).removesuffix(b'"' + self._middle)
            same_bytes = len(beginning) + self._around_bytes
            fits = line and same_bytes + len(text) + len(ids) == size
            if not fits or not ids or ids.strip(_WRITES_IDS) or not is_inside(text):
                return []
            parts.append((text, ids))
        return parts


@lru_cache(256)
def _around(middle: bytes, end: bytes) -> tuple[bytes, bytes, bytes]:
    """Return what is before and behind the ids, and what the client gets behind the text: streams share these."""
    return middle + IDS, b"]%b\r\n" % end, b'"%b%bnull%b\r\n' % (middle, IDS[:-1], end)
