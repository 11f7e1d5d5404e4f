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

    __slots__ = ("_added_tokens", "_old", "_old_tokens", "_young", "cache_tokens")

    def __init__(self) -> None:
        self.cache_tokens = UNKNOWN_CAPACITY_TOKENS  # of all the pool's caches
        self._young: dict[int, int] = {}  # how many prompts went on from a hash
        self._old: dict[int, int] = {}
        self._added_tokens = self._old_tokens = 0  # to the caches, in the time of either dict

    def __len__(self) -> int:
        """Return how many hashes are kept."""
        return len(self._young) + len(self._old)

    def sent(self, sent: SentPrompt) -> None:
        """Note a prompt that was sent."""
        prefix, young = sent.prefix, self._young
        self._added_tokens += prefix.prompt_tokens - sent.known_tokens + prefix.output_tokens
        keys, place = prefix.keys, sent.new_keys
        if place < len(keys):
            young[keys[place]] = young.get(keys[place], 0) + 1

    def tick(self, cache_tokens: int) -> None:
        """Begin another turn if the caches, which hold so many tokens, were filled; about twice a second."""
        self.cache_tokens = cache_tokens
        if self._added_tokens >= cache_tokens or len(self._young) > MOST_KEYS:
            self._old, self._young = self._young, {}
            self._old_tokens, self._added_tokens = self._added_tokens, 0

    def expected(self, key: int) -> float:
        """Return how many prompts will go on from a hash in the next turn; 0 where fewer than two did."""
        count = self._young.get(key, 0) + self._old.get(key, 0)
        if count < 2:
            return 0.0
        added_tokens = self._added_tokens + self._old_tokens
        # 0: others had sent them all before.
        return (count - 1) * self.cache_tokens / (added_tokens or 1)
