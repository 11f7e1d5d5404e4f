"""Where those who wait are told that they stand, if they asked for it (`queue.announce`)."""

from __future__ import annotations

from operator import attrgetter
from typing import Final

from gateway.admission.forecast import Forecast
from gateway.admission.queue import FairQueue
from gateway.admission.waiting import Waiting

_EVERY_S: Final = 2.0  # often enough to look alive, rarer than any idle time-out on the way
# Per tick: a position costs up to 70 us. So of 1,024 who wait each is told every 8 s.
_AT_ONCE: Final = 64


def announce(queue: FairQueue, forecast: Forecast, now: float) -> None:
    """Tell those who asked for it where they are; a few at a time, whom nothing was told for longest."""
    due = [
        waiting
        for waiting in queue
        if waiting.announce is not None and now - waiting.announced_at >= _EVERY_S
    ]
    due.sort(key=attrgetter("announced_at"))
    for waiting in due[:_AT_ONCE]:
        ahead = queue.ahead(waiting)
        waiting.announced_at = now
        if ahead.tokens < waiting.ahead_tokens:
            waiting.moved_at = now
        waiting.ahead_tokens = ahead.tokens
        if waiting.announce is not None and not waiting.turn.done():
            waiting.announce(ahead.requests + 1, _left_s(forecast, waiting, ahead.tokens, now))


def _left_s(forecast: Forecast, waiting: Waiting, ahead_tokens: int, now: float) -> float | None:
    """Estimate how long a request still waits; None when nobody knows, or it should have gone by now."""
    ahead_s, room_s = forecast.drain.eta_s(ahead_tokens), forecast.room_s(waiting.ask, now)
    if ahead_s is None or room_s is None:
        return None
    left_s = ahead_s + room_s - (now - max(waiting.came_at, waiting.moved_at))
    return left_s if left_s > 0 else None
