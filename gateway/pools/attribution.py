"""Which ending of an attempt counts against its backend. Pure.

    class     endings                                         what follows
    HARD      connect, connect_timeout, broke, http_5xx,      counts: see `pools.health` and `pools.ejection`
              timeout, forgotten, stream, misdirected
    NACK      full                                            it is busy, not sick: its concurrency limit falls
    NEUTRAL   ours, stale, moved, rest_refused, down,         nothing: it is in order, or known already
              refused
    none      a reply of 4xx, a client that left              never observed: the client's own doing

A server closes idle connections when it likes, so one that was lost as it was used again proves nothing. A
request that ends because its backend is out of service tells nothing new.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from gateway.core.endings import Ending


class Failure(Enum):
    """Whose a failure is."""

    HARD = "hard"  # the backend's
    NACK = "nack"  # nobody's: the backend has no room
    NEUTRAL = "neutral"  # not the backend's, or nothing new


CLASS_OF: Final[Mapping[Ending, Failure]] = {
    Ending.CONNECT: Failure.HARD,
    Ending.CONNECT_TIMEOUT: Failure.HARD,
    Ending.BROKE: Failure.HARD,
    Ending.HTTP_5XX: Failure.HARD,
    Ending.TIMEOUT: Failure.HARD,
    Ending.FORGOTTEN: Failure.HARD,
    Ending.STREAM: Failure.HARD,
    Ending.MISDIRECTED: Failure.HARD,
    Ending.FULL: Failure.NACK,
    Ending.OURS: Failure.NEUTRAL,
    Ending.STALE: Failure.NEUTRAL,
    Ending.MOVED: Failure.NEUTRAL,
    Ending.REST_REFUSED: Failure.NEUTRAL,
    Ending.DOWN: Failure.NEUTRAL,
    Ending.REFUSED: Failure.NEUTRAL,
}


def is_hard(ending: Ending) -> bool:
    """Whether an ending counts against the backend."""
    return CLASS_OF[ending] is Failure.HARD
