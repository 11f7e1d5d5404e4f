"""Why a request is answered by another pool than the one that it asked for."""

from __future__ import annotations

from enum import Enum

import msgspec


class Cause(Enum):
    """Why a pool does not answer a request itself; a metric label, and the name of a setting."""

    NO_BACKEND = "no_backend"  # none serves
    OVERLOAD = "overload"
    CONTEXT = "context"  # prompt plus output do not fit its window


class Fallback(msgspec.Struct, frozen=True, gc=False):
    """From which pool a request came here, and why."""

    pool: str
    cause: Cause
