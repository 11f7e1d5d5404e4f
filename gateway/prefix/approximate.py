"""What one backend's prefix cache holds, by what was sent there; two sets of keys and a doubt.

    young    sent, or found again, since it was empty; when it stands for as many tokens as the
             cache holds, it becomes the old one
    old      the young one before

So a beginning is kept for one to two times the cache. Keys are in a set with all shorter ones of the
same prompt, so the longest that is held is found by bisection.
"""

from __future__ import annotations

from bisect import bisect_left
from math import exp
from typing import Final

from gateway.core.prefix import KvEvents, Prefix, Sent

UNKNOWN_CAPACITY_TOKENS: Final = 250_000  # an 8B model on a GPU of 48 GiB
MOST_KEYS: Final = 1 << 15  # in either set, of about 75 bytes

_MEMORY_TOKENS: Final = 100_000  # expected; what was before them weighs 1/e
_TELLING_TOKENS: Final = 4_000  # expected in all; less tells nothing
_RESET_RATIO: Final = 0.1  # found of what was expected, at most: it is not there


class Approximate:
    """One backend's prefix cache as it probably is. See `core.prefix.Held`."""

    __slots__ = (
        "_expected",
        "_found",
        "_hits",
        "_old",
        "_told",
        "_young",
        "_young_tokens",
        "capacity_tokens",
        "trust",
    )

    def __init__(self) -> None:
        self.capacity_tokens: int | None = None
        self.trust = 1.0  # how much of what was expected is found
        self._young: set[int] = set()
        self._old: set[int] = set()
        self._young_tokens = 0
        self._expected = self._found = 0.0  # tokens, the older the less
        self._hits: float | None = None  # the engine's counter at the last scrape
        self._told = False  # replies tell what was found, so the counter is not needed

    def __len__(self) -> int:
        """Return how many beginnings are kept."""
        return len(self._young) + len(self._old)

    @property
    def kv_events(self) -> KvEvents | None:
        """Nothing: no engine is asked."""
        return None

    # --- asked and told of prompts ---

    def tokens(self, prefix: Prefix) -> int:
        """Return how many tokens of a prompt it probably holds."""
        keys = prefix.keys
        if not keys:
            return 0
        shortest = keys[-1]
        if shortest in self._young:
            place = bisect_left(keys, True, key=self._young.__contains__)
            if place and shortest in self._old:
                place = min(place, bisect_left(keys, True, key=self._old.__contains__))
        elif shortest in self._old:
            place = bisect_left(keys, True, key=self._old.__contains__)
        else:
            return 0
        return int(self.trust * prefix.tokens_before(place))

    def sent(self, prefix: Prefix) -> Sent:
        """Note that a prompt was sent there: it holds it from now on."""
        keys, young, old = prefix.keys, self._young, self._old
        place = new = bisect_left(keys, True, key=young.__contains__)
        if new and keys[-1] in old:
            new = min(new, bisect_left(keys, True, key=old.__contains__))
        known_tokens = prefix.tokens_before(new)
        if place:
            young.update(keys)
        self._young_tokens += _new_tokens(prefix, place)
        most = self.capacity_tokens or UNKNOWN_CAPACITY_TOKENS
        if self._young_tokens > most or len(young) > MOST_KEYS:
            self._old, self._young, self._young_tokens = young, set(), 0
        return Sent(prefix, int(self.trust * known_tokens), known_tokens, new)

    def unsent(self, sent: Sent) -> None:
        """Take that back: it ended before the engine was seen to read it."""
        if sent.new_keys:
            new = sent.prefix.keys[: sent.new_keys]
            self._young.difference_update(new)
            self._old.difference_update(new)
            left = self._young_tokens - _new_tokens(sent.prefix, sent.new_keys)
            self._young_tokens = max(0, left)

    def read(self, sent: Sent) -> None:
        """Keep what is known: it is there since it was sent."""

    def over(self, sent: Sent) -> None:
        """Keep what is known: the engine does too."""

    def forget(self) -> None:
        """Note that it is empty: another process, or its cache was reset."""
        self._young, self._old, self._young_tokens = set(), set(), 0

    # --- what was found ---

    def ended(self, sent: Sent, cached_tokens: int | None) -> None:
        """Note that a prompt was read; `cached_tokens` of it were found, if its reply tells."""
        if cached_tokens is not None:
            self._told = True
        expected = sent.known_tokens
        if not expected or (not self._told and self._hits is None):
            return
        kept = exp(-expected / _MEMORY_TOKENS)
        self._expected = kept * self._expected + expected
        self._found = kept * self._found + min(cached_tokens or 0, expected)
        if self._expected >= _TELLING_TOKENS:
            self.trust = min(1.0, self._found / self._expected)
            if self.trust < _RESET_RATIO:
                self.forget()

    def scraped(self, capacity_tokens: int | None, hits: float | None) -> None:
        """Take in how much the cache holds, and the engine's counter of tokens found, if it tells.

        A token is counted as found when its request is let in, and as expected when that has ended. So
        what is found may run ahead; it never gets credit for more than what is expected and as much again.
        """
        self.capacity_tokens = capacity_tokens
        before, self._hits = self._hits, hits
        if not self._told and hits is not None and before is not None and hits > before:
            most = 2 * max(self._expected, _TELLING_TOKENS)
            self._found = min(self._found + hits - before, most)


def _new_tokens(prefix: Prefix, place: int) -> int:
    """Return how many tokens a prompt and its output add to a cache that holds it up to a place."""
    return prefix.prompt_tokens - prefix.tokens_before(place) + prefix.output_tokens
