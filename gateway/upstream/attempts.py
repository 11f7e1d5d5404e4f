"""What follows a failed attempt: one pure rule, the budget that bounds it, and the pause before it.

Only what surely was not executed, or has nobody who still works on it, is tried again:

    StaleConnection   an idle connection died unanswered    the same backend, on a fresh connection
    ConnectFailed     nothing was sent                      another backend, or a wait for one
    EngineFull        the engine took nothing of it         another backend that has room now; else the same
                                                            one, if it asks for it within two seconds
    any, if over      its backend is proven dead, ended it in order,     another backend, or a wait for one
                      has forgotten it, or stops and did not take it
    anything else     the engine may still work                          told

Nothing is tried again once the client has a byte of a reply, when the body is held nowhere any more,
after the third attempt in a pool (a fallback has attempts of its own), or when the client has given up by then.
The rest of a stream that was cut where it can go on (`resume.stream`) is a request of its own, which goes
elsewhere whatever has failed, at most three times; where the only backend left has no room for it, there again.
The client is told the last error: as a reply where none has begun, else in its stream. A full engine does not send
the client back to the queue, where all wait for the same engines: the client is told when to come again.

Of the requests under way in a pool at most a fifth may be such attempts, or three, until the backend has
answered. What never left the gateway is not counted, nor what is over where it was: it adds nothing to what
engines do.

A backend that was tried is left out of the choice until it has come back (`Ask.tried`).

Sources: RFC 9110 section 9.2.2 (no automatic retry of a non-idempotent method unless it surely was not
applied); Envoy (retry_budget: 20 %, min_retry_concurrency 3; full jitter from 25 ms, at most ten times that).
"""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import Final

from gateway.core.errors import ConnectFailed, EngineFull, StaleConnection, UpstreamError
from gateway.core.exclusion import Chance

MAX_ATTEMPTS: Final = 3
BUDGET_RATIO: Final = 0.2
BUDGET_FLOOR: Final = 3
_AGAIN_S: Final = 2.0  # an engine that asks for a longer pause is not waited for
_PAUSE_S, _LONGEST_PAUSE_S = 0.025, 0.25


class Next(Enum):
    """What follows a failed attempt."""

    TELL = "tell"  # no attempt: the client is told the error
    ELSEWHERE = "elsewhere"
    FRESH_CONNECTION = "fresh_connection"
    AGAIN = "again"  # the same backend, when it asks for it


def after(
    error: UpstreamError | EngineFull,
    *,
    attempts: int,
    repeatable: bool,
    over: bool,
    chance: Chance,
    left_s: float,
) -> Next:
    """Decide what follows the last of `attempts` in a pool, which failed with `error`.

    `repeatable`: the client has no byte of a reply, and the body is at hand. `over`: nobody works on it any
    more. `chance`: when a backend that was not tried has room. `left_s`: how long the client still waits.
    """
    if not repeatable or attempts >= MAX_ATTEMPTS or left_s <= 0:
        return Next.TELL
    if isinstance(error, StaleConnection):
        return Next.FRESH_CONNECTION
    if (over or isinstance(error, ConnectFailed)) and chance is not Chance.NEVER:
        return Next.ELSEWHERE
    if isinstance(error, EngineFull):
        if chance is Chance.NOW:
            return Next.ELSEWHERE
        if error.pause_s is not None and error.pause_s <= min(_AGAIN_S, left_s):
            return Next.AGAIN
    return Next.TELL


def adds_load(error: UpstreamError | EngineFull, *, over: bool) -> bool:
    """Whether another attempt after this failure counts against the budget: an engine may have work with it.

    Idle connections that a backend closes die together, and their requests were read by nobody.
    """
    return not over and not isinstance(error, ConnectFailed | StaleConnection)


def pause_s(step: Next, error: UpstreamError | EngineFull, attempts: int, chance: float) -> float:
    """Return how long to wait before another attempt, after so many in its pool, by `chance` (0 to 1).

    The first one goes elsewhere, where nothing is wrong yet: at once. Where two failed, much does.
    """
    if step is Next.AGAIN and isinstance(error, EngineFull):
        return error.pause_s or 0.0
    if step is Next.FRESH_CONNECTION or attempts < 2:
        return 0.0
    return chance * min(_PAUSE_S * 2.0 ** (attempts - 1), _LONGEST_PAUSE_S)


def rest_pause_s(error: EngineFull) -> float:
    """Return how long to wait before the rest of a stream is sent again to the only backend, which had no room."""
    return min(error.pause_s or _AGAIN_S / 2, _AGAIN_S)


class Budget:
    """Counts the attempts after failures that are under way, by pool. Their one owner."""

    def __init__(self) -> None:
        self._pools: dict[object, str] = {}  # by request
        self._under_way: Counter[str] = Counter()  # by pool

    def begin(self, request: object, pool: str, active: int) -> bool:
        """Count another attempt of a request and return True, if its pool with `active` requests may have one more."""
        self.end(request)
        allowed = max(BUDGET_FLOOR, int(BUDGET_RATIO * active))
        if self.under_way(pool) >= allowed:
            return False
        self._pools[request] = pool
        self._under_way[pool] += 1
        return True

    def end(self, request: object) -> None:
        """Count it no more; further calls do nothing."""
        pool = self._pools.pop(request, None)
        if pool is not None:
            self._under_way[pool] -= 1

    def under_way(self, pool: str) -> int:
        """Return how many there are in a pool."""
        return self._under_way[pool]
