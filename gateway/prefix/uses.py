"""How often prompts of one pool go on in different ways from where a known beginning ends (decision 043).

What many prompts share is worth reading at one backend more: all who come later find it there. What only the next
turn of one conversation shares is not. The two are told apart by where prompts stop being known: many do at the end of
the same system prompt, and each turn of a conversation where no other does.

Counted are turns of the caches, not seconds: after one, a cache has been filled with other prompts.
"""

from __future__ import annotations

from gateway.core.prefix import SentPrompt
from gateway.prefix.approximate import MOST_KEYS, UNKNOWN_CAPACITY_TOKENS


class Uses:
    """The uses of beginnings in one pool, in two dicts: of this turn of its caches, and of the last."""

    __slots__ = ("_old", "_old_turned", "_turned", "_young", "caches")

    def __init__(self) -> None:
        self.caches = 1  # of the pool: as many full ones are a turn
        self._young: dict[int, int] = {}  # how many prompts went on from a hash
        self._old: dict[int, int] = {}
        self._turned = self._old_turned = 0.0  # full caches, sent in the time of either dict

    def __len__(self) -> int:
        """Return how many hashes are kept."""
        return len(self._young) + len(self._old)

    def sent(self, sent: SentPrompt, capacity_tokens: int | None) -> None:
        """Note that a prompt was sent to a backend whose cache holds so many tokens."""
        prefix, young = sent.prefix, self._young
        added_tokens = prefix.prompt_tokens - sent.known_tokens + prefix.output_tokens
        self._turned += added_tokens / (capacity_tokens or UNKNOWN_CAPACITY_TOKENS)
        keys, place = prefix.keys, sent.new_keys
        if place < len(keys):
            young[keys[place]] = young.get(keys[place], 0) + 1
        if self._turned >= self.caches or len(young) > MOST_KEYS:
            self._old, self._young = young, {}
            self._old_turned, self._turned = self._turned, 0.0

    def expected(self, key: int) -> float:
        """Return how many prompts will go on from a hash in the next turn; 0 where fewer than two did."""
        count = self._young.get(key, 0) + self._old.get(key, 0)
        if count < 2:
            return 0.0
        return (count - 1) * self.caches / (self._turned + self._old_turned)
