"""What is kept of a stream that is to go on by its text (`resume: text`): the frames, as they came. Pure.

They are read only once a backend fails. A text that is tokenised again gives other tokens at the seam,
and a template may trim it, so what follows is like what the first backend would have said, not the same.
How many tokens were said is counted by the frames that showed text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from gateway.core.types import Dialect
from gateway.resume.seam import Reached
from gateway.resume.shown import NOTHING, shown_by_chat, shown_by_completion
from gateway.wire.chunks import Shape, inside
from gateway.wire.objects import decode_or_none

_MOST_BYTES: Final = 1024 * 1024  # about five thousand tokens
_CHUNK: Final = msgspec.json.Decoder(dict[str, Any])
_TAIL_CHARS: Final = 4096  # a stop string may begin in it


class Transcript:
    """The frames of one stream. Its owner hands it every read, as to a `Trail`."""

    again: Final = ""  # nothing is said again
    reasoned: Final = False  # reasoning cannot be gone on with
    kind: Final = ""
    is_plain: Final = True
    counts: Final = None  # nobody tells token ids

    __slots__ = (
        "_bytes",
        "_first",
        "_retells",
        "_said",
        "_shape",
        "_unread",
        "lost",
        "proven",
        "said_tokens",
        "shows",
        "strayed",
    )

    def __init__(self, dialect: Dialect, shape: Shape) -> None:
        """`shape` is what the watch learnt of the stream's frames."""
        self._shape = shape
        self._retells = False  # another backend writes: its frames are told as the first one's
        self.shows = shown_by_chat if dialect is Dialect.CHAT else shown_by_completion
        self.proven = True  # who writes now has written something
        self.strayed = False  # what another backend writes is no continuation
        self.lost = False  # it is too long, or holds what cannot be gone on with
        self._said = ""  # as far as it was read
        self.said_tokens = 0  # about how many, as far as it was read
        self._unread: list[bytes] = []
        self._bytes = 0
        self._first: dict[str, Any] = {}  # what the first backend's frames say of themselves

    def tell(self, chunk: bytes) -> bytes | None:
        """Keep a chunk that is one more token, and return it; None for others."""
        if self._retells or not self._shape.fits(chunk):
            return None
        self.keep(inside(chunk))
        return chunk

    def tell_several(self, data: bytes) -> list[bytes]:
        """Keep what several chunks in one read tell, and return them; nothing: `data` must be parsed."""
        chunks = [] if self._retells else self._shape.split(data)
        for each in chunks:
            self.keep(inside(each))
        return chunks

    def keep(self, frame: bytes) -> None:
        """Keep a whole frame."""
        self.proven = True
        self._bytes += len(frame)
        if self._bytes > _MOST_BYTES:
            self.lost = True
            self._unread.clear()
        else:
            self._unread.append(frame)

    @property
    def leads_on(self) -> bool:
        """Whether another backend can go on from where it is."""
        unread, self._unread = self._unread, []
        said = [self._said]
        for frame in unread:
            shown = self.shows(frame) if b'"choices"' in frame else NOTHING
            if not self._first:
                chunk = decode_or_none(_CHUNK, frame[6:]) or {}
                self._first = {
                    name: chunk[name] for name in ("id", "created", "model") if name in chunk
                }
            if shown is None or shown.reasoning:
                self.lost = True
            elif shown.text:
                said.append(shown.text)
                self.said_tokens += 1
        self._said = "".join(said)
        return not self.lost

    @property
    def tail(self) -> str:
        """The last characters that were shown."""
        return self._said[-_TAIL_CHARS:]

    def reached(self) -> Reached | None:
        """Return from where another backend can go on; None where it cannot."""
        if not self.leads_on:
            return None
        return Reached([], [], text=self._said, text_tokens=self.said_tokens)

    def go_back(self, reached: Reached, head: bytes) -> None:
        """Another backend goes on from there."""
        self.proven, self._retells = False, True

    def retold(self, frame: bytes, add_up: Callable[[dict[str, Any]], None]) -> bytes:
        """Return a frame of another backend as one of the first; nothing for one that tells the role.

        `add_up` counts in a usage what was said before.
        """
        chunk = decode_or_none(_CHUNK, frame[6:])
        if chunk is None or not isinstance(chunk.get("choices"), list):
            return frame
        shown, ends = self.shows(frame), b'"finish_reason":"' in frame.replace(b": ", b":")
        if b'"role"' in frame and not ends and shown is not None and not shown.text:
            return b""
        if isinstance(usage := chunk.get("usage"), dict):
            add_up(usage)
        return b"data: %b\n\n" % msgspec.json.encode(chunk | self._first)
