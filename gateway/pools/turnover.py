"""How long requests stay on a backend. Pure.

By Little's law a pool drains as much as it holds, over the time for which it holds that on average. This is
known from a few ends, where a rate of ends needs many seconds of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Ends(NamedTuple):
    """What was given back since the last look."""

    tokens: int
    token_s: float  # each of these, times the seconds for which it was held


@dataclass(slots=True)
class Turnover:
    """What one backend was given, and gave back. Its pool's forecast looks at it, about twice a second."""

    _tokens: int = 0  # given back since the last look
    _taken: float = 0.0  # the same, each times the moment when it was taken

    def give_back(self, tokens: int, taken_at: float) -> None:
        """Note that a request of so many tokens is held no more."""
        self._tokens += tokens
        self._taken += tokens * taken_at

    def ends(self, ended_at: float) -> Ends:
        """Return what was given back since the last look, as if it had been at `ended_at`."""
        found = Ends(self._tokens, self._tokens * ended_at - self._taken)
        self._tokens, self._taken = 0, 0.0
        return found
