"""Values of traffic management: engine kinds, fallbacks, canaries, shadows."""

from __future__ import annotations

from enum import Enum

import msgspec


class Engine(Enum):
    """What kind of server a backend is."""

    VLLM = "vllm"
    OPENAI = "openai"  # any other with OpenAI's API: what it does not tell is unknown


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
