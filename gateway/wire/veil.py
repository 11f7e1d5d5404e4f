"""Hides how much of a prompt was in the prefix cache: who sees it can find out what others asked.

The counts become 0, in bytes that come in any pieces. A quote inside a JSON string is escaped, so
only a real key can match. Source: vLLM 0.32's usage objects; CVE-2025-46570.
"""

from __future__ import annotations

import re
from typing import Final

_KEYS: Final = rb"cached_tokens|cache_read_input_tokens|cache_creation_input_tokens"
_COUNT: Final = re.compile(rb'("(?:%b)"[ \t\r\n]{0,8}:[ \t\r\n]{0,8})[0-9]+' % _KEYS)
_LONGEST: Final = 96  # bytes of a key and its count
# How a piece may end in the middle of a key or its count.
_BEGUN: Final = re.compile(
    rb'"(?:[a-z_]{0,31}|(?:%b)"[ \t\r\n]{0,8}(?::[ \t\r\n]{0,8}[0-9]{0,20})?)\Z' % _KEYS
)


def veiled(body: bytes) -> bytes:
    """Return a whole reply without the counts; the same object when there are none."""
    return _COUNT.sub(rb"\g<1>0", body)


class Veil:
    """Hides the counts of one reply that is passed on in pieces; holds back at most 96 bytes."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Take what is to be sent; return what may be sent now."""
        data = self._held + data
        begun = _BEGUN.search(data, max(0, len(data) - _LONGEST))
        at = len(data) if begun is None else begun.start()
        self._held = data[at:]
        return veiled(data[:at])

    def end(self) -> bytes:
        """Return what was held back: nothing follows."""
        held, self._held = self._held, b""
        return veiled(held)
