"""Hides how much of a prompt was in the prefix cache: who sees it can find out what others asked.

The counts become 0, in bytes that come in any pieces; Anthropic's input tokens get back what was taken off
them for the cache. A quote inside a JSON string is escaped, so only a real key can match.
Source: vLLM 0.32's usage objects; CVE-2025-46570.
"""

from __future__ import annotations

import re
from typing import Final

from gateway.core.types import Dialect
from gateway.wire.replies import Fault
from gateway.wire.sse import StreamWatch

_SPACE: Final = rb"[ \t\r\n]{0,8}"
_IS: Final = _SPACE + rb":" + _SPACE
_OFF_INPUT: Final = rb"cache_read_input_tokens|cache_creation_input_tokens"
_KEYS: Final = rb"cached_tokens(?:_per_turn)?|created_cache_tokens|cache_write_tokens|" + _OFF_INPUT
_COUNTS: Final = re.compile(rb'"(?:%b)"%b(?:[0-9]+|\[[0-9, \t\r\n]*\])' % (_KEYS, _IS))
_NUMBER: Final = re.compile(rb"[0-9]+")
_MESSAGE: Final = re.compile(
    rb'("input_tokens"%b)([0-9]{1,20})((?:%b,%b"(?:output_tokens|%b)"%b[0-9]{1,20})+)'
    % (_IS, _SPACE, _SPACE, _OFF_INPUT, _IS)
)
_TAKEN_OFF: Final = re.compile(rb'"(?:%b)"%b([0-9]{1,20})' % (_OFF_INPUT, _IS))
_LONGEST: Final = 1024  # bytes of keys and counts that belong together
# How a piece may end in the middle of them: only counts and their keys stand before the brace that ends them.
_BEGUN: Final = re.compile(
    rb'"(?:[a-z_]{0,31}|(?:input_tokens|%b)"[a-z0-9_:,"\[\] \t\r\n]*)\Z' % _KEYS
)


def veiled(body: bytes) -> bytes:
    """Return a whole reply without the counts; the same object when there are none."""
    return _COUNTS.sub(_as_nothing, _MESSAGE.sub(_put_back, body))


def _as_nothing(found: re.Match[bytes]) -> bytes:
    return _NUMBER.sub(b"0", found[0])


def _put_back(found: re.Match[bytes]) -> bytes:
    whole = sum(map(int, [found[2], *_TAKEN_OFF.findall(found[3])]))
    return b"%b%d%b" % (found[1], whole, found[3])


class Veil:
    """Hides the counts of one reply that is passed on in pieces; holds back at most 1 KiB."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Take what is to be sent; return what may be sent now."""
        data = self._held + data
        if data.endswith(b"}\n\n") and data.rfind(b"_token") < 0:  # most frames
            self._held = b""
            return data
        begun = _BEGUN.search(data, max(0, len(data) - _LONGEST))
        at = len(data) if begun is None else begun.start()
        self._held = data[at:]
        return veiled(data[:at])

    def end(self) -> bytes:
        """Return what was held back: nothing follows."""
        held, self._held = self._held, b""
        return veiled(held)


class VeiledStream(StreamWatch):
    """A stream whose client is not to see how much of its prompt was cached."""

    __slots__ = ("_veil",)

    def __init__(
        self, dialect: Dialect, *, choices: int, hide_usage: bool, request_id: str
    ) -> None:
        super().__init__(dialect, choices=choices, hide_usage=hide_usage, request_id=request_id)
        self._veil = Veil()

    def feed(self, data: bytes) -> bytes:
        """Take bytes as they came; return what may be sent on now."""
        return self._veil.feed(super().feed(data))

    def close(self) -> bytes:
        """Take note that the backend ended its stream in order; return the rest and the ending."""
        return self._veil.feed(super().close()) + self._veil.end()

    def broken(self, fault: Fault) -> bytes:
        """Take note that the stream broke off; return the ending that tells why."""
        return self._veil.feed(super().broken(fault)) + self._veil.end()
