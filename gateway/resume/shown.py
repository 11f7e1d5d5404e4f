"""What one frame of a stream shows to its client, in what field. Pure."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec

from gateway.wire.objects import decode_or_none
from gateway.wire.sse import GOOD_REASONS

REASONING: Final = ("reasoning", "reasoning_content")
_KINDS: Final = (*REASONING, "content")


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None

    @property
    def is_told(self) -> bool:
        """Whether the client gets it: what an aborted request says last, it does not."""
        return self.finish_reason is None or self.finish_reason in GOOD_REASONS


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None


_CHUNK: Final = msgspec.json.Decoder(_Chunk)
_OBJECT: Final = msgspec.json.Decoder(dict[str, Any])


class Shown(NamedTuple):
    """What one frame shows."""

    kind: str  # the name of its field
    text: str
    reasoning: bool = False
    earlier_chars: int = 0  # of the text, in another field: the end of the reasoning


NOTHING: Final = Shown("", "")


def shown_by_chat(frame: bytes) -> Shown | None:
    """Return what a chunk shows; None: it cannot be gone on with, or is garbled."""
    chunk = decode_or_none(_CHUNK, frame[6:])
    if chunk is None:
        return None
    for choice in chunk.choices or ():
        delta = choice.delta if choice.delta and choice.is_told else _Delta()
        if delta.tool_calls:
            return None
        found = [name for name in _KINDS if getattr(delta, name)]
        if found:
            *earlier, last = [getattr(delta, name) for name in found]
            text = "".join((*earlier, last))
            reasoning = found[0] != "content"
            return Shown(found[-1], text, reasoning, earlier_chars=len(text) - len(last))
    return NOTHING


def shown_by_completion(frame: bytes) -> Shown | None:
    """Return what a chunk shows; None: it is garbled."""
    chunk = decode_or_none(_CHUNK, frame[6:])
    if chunk is None:
        return None
    return Shown("text", "".join(each.text or "" for each in chunk.choices or () if each.is_told))


def without(frame: bytes, shown: Shown | None, again: str) -> tuple[bytes, str] | None:
    """Return a chunk without text that its client has, and what of that text it does not say.

    `shown` is what the chunk shows, `again` what is to be said again. The chunk is empty where that is all
    of it. None: it says something else, or comes to a good end before it has said all.
    """
    chunk = decode_or_none(_OBJECT, frame[6:])
    if shown is None or chunk is None:
        return None
    for choice in chunk.get("choices") or ():
        reason = choice.get("finish_reason")
        if reason is not None and reason not in GOOD_REASONS:
            return frame, again
        if not (shown.text.startswith(again) or again.startswith(shown.text)):
            return None
        new, again = shown.text[len(again) :], again[len(shown.text) :]
        if not new and reason is None:
            return b"", again
        if again:
            return None
        holder = choice.get("delta") or choice
        holder[shown.kind or "content"] = new
    return b"data: %b\n\n" % msgspec.json.encode(chunk), again
