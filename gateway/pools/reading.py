"""How fast a backend reads prompts, and how much of them may be unread there at a time. Pure.

An engine reads many short prompts in one step. So the time of one alone tells how long a step takes, and
not how much goes into it: what is read together within about a second counts as well, and the best holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from gateway.pools.rate import Rate

_AHEAD_S: Final = 0.05  # two steps of an engine under load
_BESIDE_HIGHEST_S: Final = 0.015  # while the highest class is here: below a step of a fast engine
_AHEAD_LEAST_TOKENS: Final = 512  # a rate is a lower bound; a few short prompts go together
_STRETCH_S: Final = 1.0
_FORGOTTEN_S: Final = 600.0  # the quickest first token counts as twice as slow after it


@dataclass(slots=True)
class Reading:
    """What one backend has shown of its reading. Its one owner feeds it."""

    rate: Rate = field(default_factory=Rate)
    _quickest: tuple[float, int, float] = (math.inf, 0, 0.0)  # first token: seconds, prompt, when
    # The stretch in which tokens are counted. What was unread when it began may have been read in part.
    _began: float = -math.inf
    _read_tokens: int = 0
    _before_tokens: int = 0

    def comes(self, now: float, unread_tokens: int) -> None:
        """Note that a prompt is sent, beside what is unread; with nothing to read a stretch begins."""
        if not unread_tokens:
            self._began, self._read_tokens, self._before_tokens = now, 0, 0

    def first_token(self, now: float, ttft_s: float, tokens: int, unread_tokens: int) -> None:
        """Note a prompt that was read, beside what is unread still."""
        self.rate.learn(now, ttft_s, tokens)
        seconds, _, at = self._quickest
        if ttft_s <= seconds * math.exp2((now - at) / _FORGOTTEN_S):
            self._quickest = ttft_s, tokens, now
        self._read_tokens += tokens
        stretch_s = now - self._began
        if stretch_s >= ttft_s:  # all of this one's reading lies in it
            self.rate.learn(now, stretch_s, max(0, self._read_tokens - self._before_tokens))
        if stretch_s >= max(_STRETCH_S, 2 * ttft_s):
            self._began, self._read_tokens, self._before_tokens = now, 0, unread_tokens

    def ahead_tokens(self, now: float, *, beside_highest: bool = False) -> float:
        """Return how much of prompts may be unread at a time; infinite while no prompt was read.

        An engine reads prompts in the order in which they came: what is unread is waited for by all who
        come later, and no priority or fair share can change the order any more. It is less of others'
        prompts beside the highest of several classes. What comes while an engine answers that has
        nothing else to do is under way, not ahead: else one that answers late could never show how much
        it reads at a time (Little's law).
        """
        rate = self.rate.at(now)
        if rate is None:
            return math.inf
        ahead_s = _BESIDE_HIGHEST_S if beside_highest else _AHEAD_S + self._answers_s(rate)
        return max(rate * ahead_s, _AHEAD_LEAST_TOKENS)

    def _answers_s(self, rate: float) -> float:
        """Return what a first token takes beside the reading, by the quickest."""
        seconds, tokens, _ = self._quickest
        return max(0.0, seconds - tokens / rate) if tokens else 0.0
