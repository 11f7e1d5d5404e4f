"""How much those streams have yet to write that began after the last scrape. Pure.

The scrape does not show what these hold. But all streams of a backend write at about one pace, and it is
known when each got its first token. Of replies that are no streams it is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_WEIGHT: Final = 0.1  # of the newest gap: the pace follows the last ten streams or so


@dataclass(slots=True)
class Writing:
    """The streams of one backend that got their first token since the last scrape, as sums."""

    gap_s: float | None = None  # between two tokens of a stream; None while none has ended
    _count: int = 0
    _output_tokens: int = 0  # expected, whole
    _began_sum: float = 0.0  # of the times of their first tokens

    def wrote(self, gap_s: float) -> None:
        """Learn from a stream that ended: it got a token each `gap_s`."""
        known = self.gap_s
        self.gap_s = gap_s if known is None else known + _WEIGHT * (gap_s - known)

    def begins(self, now: float, output_tokens: int) -> None:
        """Note a first token, of a stream that is expected to write so many."""
        self._count += 1
        self._output_tokens += output_tokens
        self._began_sum += now

    def ends(self, began: float | None, output_tokens: int) -> None:
        """Note the end of a stream that began then, since the last scrape; None: it is not among these."""
        if began is None:
            return
        self._count -= 1
        self._output_tokens -= output_tokens
        self._began_sum -= began

    def scraped(self) -> None:
        """Begin anew: a scrape shows what all of them hold."""
        self._count, self._output_tokens, self._began_sum = 0, 0, 0.0

    def left_tokens(self, now: float) -> float:
        """Return how much of their outputs they have yet to write; 0 while the pace is not known."""
        if not self.gap_s or not self._count:
            return 0.0
        written = (self._count * now - self._began_sum) / self.gap_s
        return max(0.0, self._output_tokens - max(0.0, written))
