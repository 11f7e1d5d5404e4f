"""The usage of a stream that several backends wrote, or whose last backend did not tell it. Pure."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from gateway.wire.objects import decode_or_none

_USAGE: Final = b'"usage":{'
_CHUNK: Final = msgspec.json.Decoder(dict[str, Any])
_COUNTED: Final = (
    b',"choices":[],"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}}\n\n'
)


def counted(head: bytes, prompt: int, reply: int) -> bytes:
    """Return the frame with this usage; `head` is how the stream's frames begin, up to their choices."""
    return head + _COUNTED % (prompt, prompt + reply, reply)


def added_up(frame: bytes, said: int, *, reasoned: bool) -> bytes:
    """Return a whole frame of a backend that went on behind so many tokens, with the usage of all."""
    if _USAGE not in frame:
        return frame
    chunk = decode_or_none(_CHUNK, frame[6:])
    if chunk is None or not isinstance(chunk.get("usage"), dict):
        return frame  # it is garbled
    add_up(chunk["usage"], said)
    if reasoned:  # it counts the reasoning of its own part, if at all
        chunk["usage"].pop("completion_tokens_details", None)
    return b"data: %b\n\n" % msgspec.json.encode(chunk)


def add_up(usage: dict[str, Any], said: int) -> None:
    """Count what was said before as output, and no more as a part of the prompt; leave garbled counts alone."""
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens") or 0
    if not (isinstance(prompt, int) and isinstance(completion, int)):
        return
    usage["prompt_tokens"], usage["completion_tokens"] = prompt - said, completion + said
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    if details and isinstance(cached, int):
        details["cached_tokens"] = min(cached, prompt - said)
