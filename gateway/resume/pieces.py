"""The token ids of a text that was shown piece by piece, where nobody told them. Pure.

An engine shows whole tokens, so each frame ends where a token ends. A tokenizer that is given all of the
text cuts it into tokens again:

    frames       Once| upon a| time
    tokens       Once| upon| a| time      each frame ends with a token: these are taken
    tokens       On|ce upon| a| time      a token lies across a frame's end: the model cut it otherwise

Where a frame has one token, that proves which one. Where it has several, they are cut as the tokenizer
cuts them.

An engine that looks for stop strings holds back as many characters as the longest has, but one (`resume.seam`).
So a token ends that many characters behind the end of each frame, as far as that was shown. Another backend
goes on behind the last of these, and says again what was shown beyond it.

Of a thought, parsers hold back white space until more of it follows: it begins a frame, but its token may have ended
the one before.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

_NO_TEXT: Final = "\ufffd"  # stands for bytes that are no character: nobody knows which
_SPACES: Final = re.compile(rb"\s*")
_BYTE: Final = re.compile(r"<0x([0-9A-F]{2})>")
# How byte-level tokenizers write bytes: those that can be seen as themselves, the others from 256 on.
_SEEN: Final = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_UNSEEN: Final = sorted(set(range(0x100)) - set(_SEEN))
_BYTES: Final = {chr(each): each for each in _SEEN} | {
    chr(0x100 + place): each for place, each in enumerate(_UNSEEN)
}


def ends_of(pieces: Sequence[str], held_back_chars: int = 0) -> list[int]:
    """Return where in the text of all pieces tokens ended, in characters."""
    shown = sum(map(len, pieces))
    ends = (end + held_back_chars for end in accumulate(map(len, pieces)))
    return [end for end in ends if end <= shown]


def up_to(pieces: Sequence[str], seam_chars: int, held_back_chars: int) -> tuple[list[str], str]:
    """Return the pieces that tell where tokens end up to a seam, and what else of the text comes before it.

    That begins the first piece that another backend says from there: its engine holds back as many characters.
    """
    ends = accumulate(map(len, pieces))
    kept = [
        each for each, end in zip(pieces, ends, strict=True) if end + held_back_chars <= seam_chars
    ]
    return kept, "".join(pieces)[sum(map(len, kept)) : seam_chars]


def fits(
    pieces: Sequence[str], tokens: Sequence[str], held_back_chars: int = 0, *, trimmed: bool = False
) -> int | None:
    """Return how many tokens end where another backend can go on; None: these are not proven to be the tokens.

    They are, if they are the text of all pieces, and end wherever one ended. They are written as a tokenizer
    writes them: byte by byte, or with a mark for each space. `trimmed` pieces are those of a thought.
    """
    text = "".join(pieces)
    if _NO_TEXT in text:
        return None
    whole = text.encode()
    listed = _in_bytes(text, ends_of(pieces, held_back_chars))
    ends, last = {0, *listed}, max(listed, default=0)
    spaces = _spaces_at(whole, listed) if trimmed else {}
    for read in (_byte_level, _marked):
        spelled = [read(each) for each in tokens]
        known = [each for each in spelled if each is not None]
        if len(known) == len(spelled) and b"".join(known) == whole:
            places = [0, *accumulate(map(len, known))]
            crossed = ends - {*places}
            if all(not spaces.get(each, frozenset()).isdisjoint(places) for each in crossed):
                return places.index(last)
            return None
    return None


def _spaces_at(whole: bytes, ends: Sequence[int]) -> dict[int, frozenset[int]]:
    """Return, for each end, where else its token may have ended: within the white space behind it."""
    found = {}
    for end in ends:
        spaces = _SPACES.match(whole, end)
        assert spaces is not None
        found[end] = frozenset(range(end + 1, spaces.end() + 1))
    return found


def _in_bytes(text: str, ends: Sequence[int]) -> list[int]:
    if text.isascii():
        return [*ends]
    sizes = [0, *accumulate(len(each.encode()) for each in text)]
    return [sizes[each] for each in ends]


def _byte_level(token: str) -> bytes | None:
    try:
        return bytes(_BYTES[char] for char in token)
    except KeyError:
        return None


def _marked(token: str) -> bytes:
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()
