"""What was lost at backends, and is not decided yet: values, and where they are kept.

A death loses all that its backend carried, and each of these requests asks again and again what became of it. So
they are found by request and by backend, and what a look costs does not grow with how many there are.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

# Two deaths are at the same place of an answer if fewer tokens lie between: engines are some tokens ahead of what
# was read of them.
_SAME_PLACE_TOKENS: Final = 32


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A keyed hash of a body, and the body's length."""

    digest: bytes
    body_bytes: int

    @property
    def id(self) -> str:
        """What it is called in messages."""
        return self.digest[:6].hex()


@dataclass(slots=True, eq=False)
class End:
    """What was lost at one backend within five seconds; all of it at one death, if it died."""

    backend_id: str
    began_at: float
    present: set[bytes] = field(default_factory=set)  # digests
    in_order: bool = False  # it ended a reply itself, so it was stopped, and did not crash
    proven_at: float = math.inf  # when it was known that it died


@dataclass(slots=True, eq=False)
class Loss:
    """One attempt that was lost."""

    of: Fingerprint
    pool: str
    end: End
    at: float
    sent_at: float
    said_tokens: int  # of its answer, by then

    def follows(self, first: Loss) -> bool:
        """Whether it was sent after another one was lost, and not at the same death."""
        return self.end is not first.end and self.sent_at >= first.at

    def told(self) -> Presence:
        """Return what other workers are told of it, once its backend's death is proven."""
        end, of = self.end, self.of
        return Presence(
            end.backend_id, self.pool, end.began_at, of.digest, of.body_bytes, self.at, self.sent_at, self.said_tokens
        )  # fmt: skip

    def repeats(self, first: Loss) -> bool:
        """Whether both may be this request's doing."""
        same_place = abs(self.said_tokens - first.said_tokens) < _SAME_PLACE_TOKENS
        return self.follows(first) and (
            same_place or len(self.end.present & first.end.present) == 1
        )


class Presence(msgspec.Struct, frozen=True, array_like=True):
    """That a request was at a death, as workers tell each other. They share a clock."""

    backend_id: str
    pool: str
    began_at: float  # of the death's `End`
    digest: bytes
    body_bytes: int
    at: float
    sent_at: float
    said_tokens: int


class Losses:
    """The losses that are not decided, at most `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._at: dict[str, deque[Loss]] = {}  # by backend, the oldest first
        self._of: dict[bytes, list[Loss]] = {}  # by request
        self._looked_at: dict[str, tuple[object, ...]] = {}

    def backends(self) -> Sequence[str]:
        """Return the ids of the backends where something was lost."""
        return tuple(self._at)

    def at(self, backend_id: str) -> Sequence[Loss]:
        """Return what was lost at such a backend, the oldest first."""
        return self._at[backend_id]

    def of(self, digest: bytes) -> Sequence[Loss]:
        """Return the lost attempts of a request."""
        return self._of.get(digest, ())

    def add(self, loss: Loss) -> Loss | None:
        """Keep one more, in the place of the one that is returned, if there is no room for it."""
        gone = None
        if self._count == self._most:
            gone = max(self._at.values(), key=len)[0]
            self.decided(gone.end.backend_id, [gone])
        self._at.setdefault(loss.end.backend_id, deque()).append(loss)
        self._of.setdefault(loss.of.digest, []).append(loss)
        self._count += 1
        return gone

    def decided(self, backend_id: str, losses: Iterable[Loss]) -> None:
        """Let go of losses at one backend, in their order."""
        there = self._at[backend_id]
        for loss in losses:
            there.remove(loss)
            others = self._of[loss.of.digest]
            others.remove(loss)
            if not others:
                del self._of[loss.of.digest]
            self._count -= 1
        if not there:
            del self._at[backend_id]
            self._looked_at.pop(backend_id, None)

    def looks_new(self, backend_id: str, told: tuple[object, ...]) -> bool:
        """Whether more is `told` of a backend than at the last look; the next one is compared with this."""
        known = self._looked_at.get(backend_id)
        self._looked_at[backend_id] = told
        return known != told

    def look_again(self, backend_id: str) -> None:
        """Have the next look be a new one, whatever is known by then."""
        self._looked_at.pop(backend_id, None)
