"""How many tokens a prompt probably has that nobody has counted: for estimates, never to refuse by."""

from __future__ import annotations

from typing import Final

from gateway.core.types import Call

_BYTES_PER_TOKEN: Final = 4  # of English text and code
_UNKNOWN_TOKENS: Final = 1024  # of sound in a form
# A character that JSON escapes, as PHP and Python's json write it, has 6 bytes and as many tokens as it has
# in UTF-8: with 2 bytes there up to U+07FF, else 3. How many there are is asked of a few places.
_SHORT_BYTES: Final = 2048  # a prompt of no more is not worth it
_PLACES, _PLACE_BYTES = 8, 128


def likely_tokens(call: Call) -> int:
    """Return how many tokens the longest prompt of a call probably has, by its bytes."""
    size = call.text_bytes if call.likely_bytes is None else call.likely_bytes
    if size is None:
        return _UNKNOWN_TOKENS
    if size > _SHORT_BYTES < len(call.body):
        size = int(size * _unescaped(call.body))
    return size // _BYTES_PER_TOKEN + 1


def tokens_of_all(call: Call, longest_tokens: int) -> int:
    """Return how many tokens all prompts of a call probably have, by those of the longest.

    Of a large body the longest is known at most: what the scan cut of any of them counts for it.
    """
    tokens = round(longest_tokens / call.longest_ratio)
    if call.text_bytes is None:
        return tokens
    return min(tokens, len(call.body) // _BYTES_PER_TOKEN + 1)


def _unescaped(body: bytes) -> float:
    """Return how many bytes a body would have without escapes, for each that it has."""
    step, escapes, short = len(body) // _PLACES, 0, 0
    for start in range(step // 2, len(body), step):
        place = body[start : start + _PLACE_BYTES]
        if here := place.count(b"\\u") - place.count(
            b"\\\\u"
        ):  # of text that holds JSON all is text
            escapes += here
            short += place.count(b"\\u0")
    return 1 - (3 * escapes + short) / (_PLACES * _PLACE_BYTES)
