"""What one index learned since it last told other gateways, as sums: the order of what came in between is lost.

A prompt that is sent is one append here, whatever happens to the news later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MOST_NEWS: Final = 4096  # hashes; what is more is dropped, and counted


class News:
    """News of one engine's cache. Who hears them takes out what is `gone`, then adds the `keys`."""

    __slots__ = ("_sent", "_size", "dropped", "expected_tokens", "forgot", "gone", "prompts", "tokens")  # fmt: skip

    def __init__(self) -> None:
        self.gone: list[int] = []  # hashes that were taken back
        self.tokens = 0  # that the prompts add to the cache
        self.prompts = 0  # of which something was expected to be cached, and have been read
        self.expected_tokens = 0  # of these
        self.forgot = False  # the cache was lost before any of this
        self.dropped = 0
        self._sent: list[tuple[Sequence[int], int]] = []  # a prompt's hashes, and how many are news
        self._size = 0  # of all of them

    def __bool__(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self.tokens or self._sent or self.gone or self.expected_tokens or self.forgot)

    @property
    def keys(self) -> list[int]:
        """Hashes that were sent, and were not among the young ones."""
        return [key for keys, count in self._sent for key in keys[:count]]

    @keys.setter
    def keys(self, keys: Sequence[int]) -> None:
        self._sent, self._size = [(keys, len(keys))] if keys else [], len(keys)

    def sent(self, keys: Sequence[int], count: int) -> None:
        """Note so many of a prompt's hashes; who does adds its `tokens` itself."""
        self._size += count
        if self._size <= MOST_NEWS:
            self._sent.append((keys, count))
        else:
            self._size -= count
            self.dropped += count

    def unsent(self, keys: Sequence[int], tokens: int) -> None:
        """Note that a prompt was taken back."""
        self.tokens -= tokens
        if not keys:
            return
        gone = {*keys}
        self.keys = [each for each in self.keys if each not in gone]
        if len(self.gone) + len(keys) <= MOST_NEWS:
            self.gone += keys
        else:
            self.dropped += len(keys)

    def forget(self) -> None:
        """Note that the cache was lost. What was expected stays expected."""
        self.keys, self.gone, self.tokens, self.forgot = [], [], 0, True
