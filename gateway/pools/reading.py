"""How fast a backend reads prompts, and how much of them may be unread there at a time. Pure.

An engine reads many short prompts in one step. So the time of one alone tells how long a step takes, and
not how much goes into it: what is read together within about a second counts as well, and the best holds.

A batch that is full reads nothing until one of its requests ends. The metrics show it two scrapes later; the
prompts show it at once: the oldest waits longer than all that may be unread takes to be read.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from gateway.core.types import Credit
from gateway.pools.rate import Rate

_AHEAD_S: Final = 0.05  # two steps of an engine under load
_BESIDE_HIGHEST_S: Final = 0.015  # while the highest class is here: below a step of a fast engine
_AHEAD_LEAST_TOKENS: Final = 512  # a rate is a lower bound; a few short prompts go together
_FOLLOWED: Final = 1024  # prompts: of more the oldest are not looked after
_SAME_S: Final = 1e-6  # two moments that are no further apart are one, but for rounding
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
    # Prompts that no later one has overtaken, the oldest first: when each was sent.
    _sent: deque[tuple[float, Credit]] = field(default_factory=lambda: deque(maxlen=_FOLLOWED))

    def comes(self, now: float, credit: Credit, unread_tokens: int) -> None:
        """Note that a prompt was sent; it is one of those that are unread. With no other a stretch begins."""
        if credit.read_at is None:  # else nobody sees when it is read
            self._sent.append((now, credit))
            unread_tokens -= credit.unread_tokens
        if not unread_tokens:
            self._began, self._read_tokens, self._before_tokens = now, 0, 0

    def first_token(self, now: float, ttft_s: float, tokens: int, unread_tokens: int) -> None:
        """Note a prompt that was read, beside what is unread still. Those sent before it are being read."""
        sent = self._sent
        while sent and (sent[0][0] < now - ttft_s - _SAME_S or not _unread(sent[0][1])):
            sent.popleft()
        self.rate.learn(now, ttft_s, tokens)
        seconds, _, at = self._quickest
        if tokens and ttft_s <= seconds * math.exp2((now - at) / _FORGOTTEN_S):
            self._quickest = ttft_s, tokens, now
        self._read_tokens += tokens
        stretch_s = now - self._began
        if stretch_s >= ttft_s:  # all of this one's reading lies in it
            together = self._read_tokens - self._before_tokens
            self.rate.learn(now, stretch_s, together if together > 0 else 0)
        if stretch_s >= _STRETCH_S and stretch_s >= 2 * ttft_s:
            self._began, self._read_tokens, self._before_tokens = now, 0, unread_tokens

    def ahead_tokens(self, now: float, *, beside_highest: bool = False) -> float:
        """Return how much of prompts may be unread at a time; infinite while no prompt was read.

        An engine reads prompts in the order in which they came: what is unread is waited for by all who
        come later, and no priority or fair share can change the order any more. It is less of others'
        prompts beside the highest of several classes. What comes while an engine answers that has
        nothing else to do is under way, not ahead: else one that answers late could never show how much
        it reads at a time (Little's law).

        Where the oldest waits for longer than all this takes, the batch is full: then no more than a few
        short prompts are unread beside it. They may overtake it, for an engine can hold up one alone.
        """
        rate = self.rate.at(now)
        if rate is None:
            return math.inf
        whole_s = _AHEAD_S + self._answers_s(rate)
        ahead_s = _BESIDE_HIGHEST_S if beside_highest else whole_s
        ahead_tokens, sent = max(rate * ahead_s, _AHEAD_LEAST_TOKENS), self._sent
        while sent and not _unread(sent[0][1]):
            sent.popleft()
        if sent:
            sent_at, credit = sent[0]
            if now - sent_at > whole_s + credit.unread_tokens / rate:
                return min(ahead_tokens, credit.unread_tokens + _AHEAD_LEAST_TOKENS)
        return ahead_tokens

    def _answers_s(self, rate: float) -> float:
        """Return what a first token takes beside the reading, by the quickest."""
        seconds, tokens, _ = self._quickest
        return max(0.0, seconds - tokens / rate) if tokens else 0.0


def _unread(credit: Credit) -> bool:
    return credit.held and credit.read_at is None
