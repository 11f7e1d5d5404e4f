"""How long a backend may be silent while a request waits for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gateway.core.errors import BackendTimeout


@dataclass(frozen=True, slots=True)
class Patience:
    """The limits of one request, in seconds."""

    first_byte_s: float  # from the request to the first byte, or to a stream's first event
    stall_s: float  # from then on
    heartbeat_s: float
    client_write_s: float


ENDLESS: Final = Patience(
    math.inf, math.inf, math.inf, math.inf
)  # who waits has a deadline of its own


def _never(since: float) -> bool:
    return False


class Silence:
    """The silence of one backend in one request, from the sending of its request to the end of its reply.

    Silence alone does not prove that a request is dead: a tool parser may withhold its text for
    minutes, and a long prompt takes as long to read. So when the limit has passed, `works` is asked
    whether the engine made progress since the time it is given (monotonic seconds). If so, the same
    limit starts again. `timeouts.total` bounds all of it.
    """

    __slots__ = ("_limit_s", "_works", "patience", "since")

    def __init__(
        self, patience: Patience, now: float, works: Callable[[float], bool] = _never
    ) -> None:
        self.patience = patience
        self._works = works
        self._limit_s = patience.first_byte_s
        self.since = now

    def broken(self, now: float) -> None:
        """Note that the backend said something."""
        self._limit_s = self.patience.stall_s
        self.since = now

    def restart(self, now: float) -> None:
        """Count from now: until now the backend had nothing to say, or nobody listened."""
        self.since = now

    def suspend(self) -> None:
        """Count nothing until `restart`: the backend waits for us."""
        self.since = math.inf

    def too_long(self, now: float) -> bool:
        """Whether the limit has passed, and nothing proves that the engine works."""
        if now - self.since < self._limit_s:
            return False
        if self._works(self.since):
            self.since = now
            return False
        return True

    def error(self) -> BackendTimeout:
        """Return the error for a silence that is too long (504)."""
        return BackendTimeout(
            f"The backend sent nothing for {self._limit_s:.0f} s, and nothing shows that it still works on "
            "this request. Please retry later."
        )
