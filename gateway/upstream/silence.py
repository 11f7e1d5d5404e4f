"""How long a backend may be silent while a request waits for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from gateway.core.errors import BackendTimeout
from gateway.core.types import Need
from gateway.pools.pulse import Waits


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
    need: Need | None = None  # of the request; None: it is none of a client's
    was_broken: bool = False
    heard_at: float = -math.inf  # the last byte, to half a second
    open_at: float = math.inf  # since then we listen and hear nothing; inf before the first byte

    @property
    def limit_s(self) -> float:
        """How long it may last now."""
        return self.patience.stall_s if self.was_broken else self.patience.first_byte_s

    def broken(self, now: float) -> None:
        """Note that the backend said something."""
        self.was_broken = True
        self.since = self.heard_at = self.open_at = now

    def restart(self, now: float) -> None:
        """Count from now: until now the backend had nothing to say, or nobody listened."""
        self.since = now
        if self.was_broken:
            self.open_at = now

    def suspend(self) -> None:
        """Count nothing until `restart`: the backend waits for us, or nobody listens."""
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


def waits_of(silences: Iterable[Silence], heard_at: float) -> Waits:
    """Return what the requests at one backend wait for; `heard_at` is when a reply last ended."""
    oldest_at = oldest_stream_at = math.inf
    unread: list[tuple[float, int]] = []
    for silence in silences:  # 0.1 us each: there may be ten thousand
        since, need = silence.since, silence.need
        if silence.heard_at > heard_at:
            heard_at = silence.heard_at
        if since == math.inf or need is None:
            continue  # the backend waits for us, or the client does not read
        if since < oldest_at:
            oldest_at = since
        if since < oldest_stream_at and need.streams:
            oldest_stream_at = since
        if not silence.was_broken:
            unread.append((since, need.prompt_tokens))
    return Waits(heard_at, oldest_at, oldest_stream_at, tuple(unread))
