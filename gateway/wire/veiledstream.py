"""A token stream whose client is not to see how much of its prompt was cached."""

from __future__ import annotations

from gateway.core.types import Dialect
from gateway.wire.replies import Fault
from gateway.wire.sse import StreamWatch
from gateway.wire.veil import Veil


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
