"""How much of a prompt its beginnings are, where it holds pictures: these have far fewer tokens than bytes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from gateway.wire.prompts import MEDIUM_BYTES

_SIGN: Final = b"base64"
_DATA: Final = b'"data"'
_NEAR_BYTES: Final = 128  # Anthropic's `data` stands behind `type` and `media_type`
_MOST: Final = 256  # signs; what comes behind them counts by its bytes


def weighed(text: bytes, ends: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Return the ends of a prompt's beginnings and its size, as if each medium in it were a little text."""
    runs = _runs(text)
    starts = [start for start, _ in runs]
    saved = [0, *accumulate(end - start for start, end in runs)]

    def weight(end: int) -> int:
        before = bisect_right(starts, end)
        left_out = saved[before]
        if before and runs[before - 1][1] > end:  # it ends within a medium
            left_out -= runs[before - 1][1] - end
        return end - left_out

    return tuple(map(weight, ends)), weight(len(text))


def _runs(text: bytes) -> list[tuple[int, int]]:
    """Return where media stand, in order, without as much of each as it counts for."""
    runs, at, quote = [], text.find(_SIGN), 0
    for _ in range(_MOST):
        if at < 0:
            break
        if quote < at:  # else it is known where this string ends
            quote = text.find(b'"', at)
            quote = len(text) if quote < 0 else quote
        start, end = at, quote
        if end - at <= _NEAR_BYTES:  # the data is a field of its own
            field = text.find(_DATA, end, end + _NEAR_BYTES)
            if field >= 0:
                start = text.find(b'"', field + len(_DATA))
                end = text.find(b'"', start + 1)
                end = len(text) if end < 0 else end
        at += len(_SIGN)
        if start >= 0 and end - start > MEDIUM_BYTES and not _is_said(text[start : start + 256]):
            runs.append((start + MEDIUM_BYTES, end))
            at = end
        at = text.find(_SIGN, at)
    return runs


def _is_said(beginning: bytes) -> bool:
    """Whether a text only speaks of base64: data has neither spaces nor escapes."""
    return b" " in beginning or b"\\" in beginning
