"""Values of traffic management: engine kinds, queues, fallbacks, canaries, shadows."""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

import msgspec


class Engine(Enum):
    """What kind of server a backend is."""

    VLLM = "vllm"
    OPENAI = "openai"  # any other with OpenAI's API: what it does not tell is unknown


class Queued(NamedTuple):
    """What waits for a pool."""

    requests: int = 0
    tokens: int = 0  # that they need
    oldest_s: float | None = None  # how long the first of them has waited; None: there is none

    def beside(self, other: Queued) -> Queued:
        """Return what waits in two queues."""
        oldest = [each.oldest_s for each in (self, other) if each.oldest_s is not None]
        return Queued(
            self.requests + other.requests, self.tokens + other.tokens, max(oldest, default=None)
        )


NOTHING_QUEUED: Final = Queued()


class Waited(NamedTuple):
    """One time that a request was in the queue of a pool, from when until when."""

    pool: str
    began_at: float
    ended_at: float


class Cause(Enum):
    """Why a pool does not answer a request itself; a metric label, and the name of a setting."""

    NO_BACKEND = "no_backend"  # none serves
    OVERLOAD = "overload"
    CONTEXT = "context"  # prompt plus output do not fit its window


class Trial(msgspec.Struct, frozen=True):
    """Which requests of a pool go to its canary: by share, by key, or by header."""

    revision: str
    share: float = 0.0  # of the conversations, 0..1
    keys: frozenset[str] = frozenset()  # ids
    by_header: bool = False


class Shadow(msgspec.Struct, frozen=True):
    """To which pool copies of some requests go. Their replies are dropped."""

    pool: str
    share: float  # of the conversations, 0..1
    most: int  # copies in flight


class Fallback(msgspec.Struct, frozen=True, gc=False):
    """From which pool a request came here, and why."""

    pool: str
    cause: Cause
