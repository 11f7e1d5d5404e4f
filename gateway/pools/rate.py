"""How fast something goes: the best that was seen of it lately, or the mean of the last seconds. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

_HALF_LIFE_S: Final = 600.0  # outlasts minutes of overload, not an hour of other traffic
_LEAST: Final = 0.25  # of the best: what was not measured for hours is not slow


@dataclass(slots=True)
class Rate:
    """How fast a backend reads prompts, or writes one stream: the best seen lately, in tokens per second.

    A request's own rate is a lower bound, because its time holds the engine's queue and the shared
    batch too; so the best counts and congestion does not become the norm. It fades, so that a server that became
    slower is known after a while. A prompt found in the prefix cache is no reading: one such may at most
    double the best.
    """

    telling_tokens: int = 0  # fewer tell nothing of slowness: most of their time is not theirs
    _best: float = 0.0
    _at: float = 0.0

    def learn(self, now: float, seconds: float, tokens: int) -> float | None:
        """Take in one measurement; return the rate. Give a prompt's tokens without those known to be cached."""
        # Every stream pays for this, so without `max` and `min`: they cost more than all else here.
        seen, best = tokens / (seconds if seconds > 0.001 else 0.001), self._best
        known = best * math.exp2((self._at - now) / _HALF_LIFE_S)
        if best and (seen <= known or (tokens < self.telling_tokens and seen < _LEAST * best)):
            return known
        self._best, self._at = 2 * best if best and seen > 2 * best else seen, now
        return self._best or None

    def at(self, now: float) -> float | None:
        """Return the rate; None while nothing was measured."""
        return self._best * max(_LEAST, math.exp2((self._at - now) / _HALF_LIFE_S)) or None


class Fading:
    """How fast something went on average, over a memory that fades: what is older by it weighs 1/e."""

    def __init__(self, memory_s: float) -> None:
        self.amount = 0.0  # fades with age, as does the next
        self.seconds = 0.0
        self._memory_s = memory_s

    def passed(self, seconds: float, amount: float, memory_s: float = 0.0) -> None:
        """Note how much there was in the seconds since the last call; `memory_s` may lengthen the memory."""
        self.fade(seconds, max(self._memory_s, memory_s))
        self.amount += amount
        self.seconds += seconds

    def fade(self, seconds: float, memory_s: float) -> None:
        """Let time pass in which nothing was measured."""
        kept = math.exp(-seconds / memory_s)
        self.amount *= kept
        self.seconds *= kept

    def forget(self, memory_s: float) -> None:
        """Let all that was measured weigh no more than so many seconds: the memory became shorter."""
        if self.seconds > memory_s:
            self.amount *= memory_s / self.seconds
            self.seconds = memory_s

    @property
    def per_s(self) -> float:
        """The mean; 0 while nothing was measured."""
        return self.amount / self.seconds if self.seconds else 0.0
