"""Where in a stream another backend can go on: after a token whose text was shown, all of it. Pure.

    tokens   |tok |en1 |tok |en2 |tok |en3 |
    text     |Once| upo|n a | tim|e, t|here|
    shown    Once upon a tim               what the client has
                      ^ the seam           ^ it has this much more: the next one says it again

An engine that looks for stop strings holds back as many characters as the longest has, but one. So a
token is shown in full only when that many more have come.

Where tools are offered, a parser may hold back the beginning of a call, and nobody knows how much. So
the seam stays where the backend began, and the text of the tokens behind it tells where to go on
(`Trail.unsure`).

After a frame with one token that showed text, no character is half there. A frame with several tokens
may end with one that showed nothing, as it is the first part of a character: a busy engine puts tokens
together. So it is no place to go on, whatever its text is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_MOST_CHARS: Final = 64 * 1024  # since the last seam: what has none for so long will have none


@dataclass(frozen=True, slots=True)
class Reached:
    """How far a stream has come: the ids of its prompt, and those of all that the client has seen."""

    prompt: list[int]
    reply: list[int]
    again: str = ""  # what the client has seen beyond that, and another one says again
    text: str | None = None  # in place of the ids: all that was said
    text_tokens: int = 0  # about how many tokens it was

    @property
    def said_tokens(self) -> int:
        """How many tokens of the reply were said."""
        return len(self.reply) if self.text is None else self.text_tokens


class Seam:
    """The last seam of one stream, as it moves on; `ids_bytes` says how far the ids are kept there.

    Its owner moves it on by that number alone, for each token that showed all of its text at once.
    """

    __slots__ = (
        "_held_back", "_later", "_loose", "_loose_chars", "_skips", "ids_bytes", "lost", "shown_ids_bytes",
    )  # fmt: skip

    def __init__(self, held_back_chars: int) -> None:
        self._held_back = held_back_chars
        self.lost = False  # none was found for too long
        self.begin(0)

    def begin(self, ids_bytes: int) -> None:
        """Begin anew where a backend begins to write: it holds nothing back yet."""
        self.ids_bytes, self._skips = ids_bytes, 0
        self.shown_ids_bytes = ids_bytes  # until the last token that showed text
        self._later: list[tuple[str, int]] = []  # what was shown since, up to each later token
        self._loose: list[str] = []  # and since the last of these
        self._loose_chars = 0

    def show(self, text: str, ids_bytes: int, *, whole: bool) -> None:
        """Note text that was shown; `whole`: no character is half there after it."""
        if self._is_past:
            self._loose, self._loose_chars = [], 0
        self._loose.append(text)
        self._loose_chars += len(text)
        self.shown_ids_bytes = ids_bytes
        if whole:
            self._later.append(("".join(self._loose), ids_bytes))
            self._loose, self._loose_chars = [], 0
            self._advance()
        elif self._loose_chars > _MOST_CHARS:
            self.lost = True

    def _advance(self) -> None:
        shown_chars = 0
        for place in range(len(self._later) - 1, -1, -1):
            text, ids_bytes = self._later[place]
            if shown_chars >= self._held_back:
                self.ids_bytes, self._skips = ids_bytes, self._held_back
                del self._later[: place + 1]
                return
            shown_chars += len(text)

    @property
    def tail(self) -> str:
        """The last characters that were shown, as many as a part of a stop string can have."""
        return self._since()[: self._skips]

    @property
    def again(self) -> str:
        """What was shown beyond the seam, and will be said again."""
        return self._since()[self._skips :]

    @property
    def _is_past(self) -> bool:
        """Whether the seam has moved on behind all text that was noted."""
        return self.ids_bytes > self.shown_ids_bytes

    def _since(self) -> str:
        if self._is_past:
            return ""
        return "".join([*(text for text, _ in self._later), *self._loose])
