"""How many tokens a prompt probably has that nobody has counted: for estimates, never to refuse by."""

from __future__ import annotations

from typing import Final

from gateway.core.types import Call

_BYTES_PER_TOKEN: Final = 4  # of English text and code
_UNKNOWN_TOKENS: Final = 1024  # of sound in a form
# A character that JSON escapes, as PHP and Python's json write it, has 6 bytes and as many tokens as it has
# in UTF-8: with 2 bytes there up to U+07FF, else 3. How many there are is asked of a few places.
_SHORT_BYTES: Final = 2048  # a prompt of no more is not worth it
_PLACES, _PLACE_BYTES = 4, 256


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

    Of a large body only a bound of the longest is known: what the scan cut of any prompt counts for it.
    """
    tokens = round(longest_tokens / call.longest_ratio)
    if call.text_bytes is None:
        return tokens
    return min(tokens, len(call.body) // _BYTES_PER_TOKEN + 1)


def _unescaped(body: bytes) -> float:
    """Return how many bytes a body would have without escapes, for each that it has."""
    step, saved = len(body) // _PLACES, 0
    for start in range(step // 2, len(body), step):
        end = start + _PLACE_BYTES
        if escapes := body.count(b"\\u", start, end):
            escapes -= body.count(b"\\\\u", start, end)  # JSON that is told as text is text
            saved += 3 * escapes + (body.count(b"\\u0", start, end) if escapes else 0)
    return 1 - saved / (_PLACES * _PLACE_BYTES)
