"""How long a backend may be silent while a request waits for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

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


def _never(since: float, now: float) -> bool:
    return False


class Silence(msgspec.Struct, gc=False):
    """The silence of one backend in one request, from the sending of its request to the end of its reply.

    Silence alone does not prove that a request is dead: a tool parser may withhold its text for
    minutes, and a long prompt takes as long to read. So when the limit has passed, `works(since, now)`
    is asked whether the engine made progress meanwhile. If so, the same limit starts again.
    `timeouts.total` bounds all of it. Times are monotonic seconds.
    """

    patience: Patience
    since: float
    works: Callable[[float, float], bool] = _never
    was_broken: bool = False

    @property
    def limit_s(self) -> float:
        """How long it may last now."""
        return self.patience.stall_s if self.was_broken else self.patience.first_byte_s

    def broken(self, now: float) -> None:
        """Note that the backend said something."""
        self.was_broken = True
        self.since = now

    def restart(self, now: float) -> None:
        """Count from now: until now the backend had nothing to say, or nobody listened."""
        self.since = now

    def suspend(self) -> None:
        """Count nothing until `restart`: the backend waits for us."""
        self.since = math.inf

    def too_long(self, now: float) -> bool:
        """Whether the limit has passed, and nothing proves that the engine works."""
        if now - self.since < self.limit_s:
            return False
        if self.works(self.since, now):
            self.since = now
            return False
        return True

    def error(self) -> BackendTimeout:
        """Return the error for a silence that is too long (504)."""
        return BackendTimeout(
            f"The backend sent nothing for {self.limit_s:.0f} s, and nothing shows that it still works on "
            "this request. Please retry later."
        )
