"""What one backend's prefix cache holds, by what its engine tells of it; the guess where that is silent.

An engine tells of a block when it has computed it. What was sent there since, and is computed soon, is
expected; so a burst of prompts that begin alike goes to one place, and not to all at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Final

from gateway.core.prefix import Blocks, KvEvents, Prefix, Sent
from gateway.prefix.approximate import Approximate
from gateway.prefix.beginnings import Holder
from gateway.prefix.follower import Follower
from gateway.prefix.mirror import MOST_BLOCKS, Mirror, prefix_digests

_SPARE: Final = 1.25  # an engine may have more blocks than it says that tokens fit


class PromptBlocks:
    """The token ids of one prompt, cut into blocks as an engine does it, see `core.prefix.Blocks`."""

    __slots__ = ("_adapter", "_digests", "_tokens", "salt")

    def __init__(self, tokens: Sequence[int], adapter: str | None, salt: str | None) -> None:
        self.salt = salt
        self._adapter = adapter
        self._tokens = array("I", tokens)
        self._digests: dict[int, list[bytes]] = {}  # by the size of the blocks

    def __len__(self) -> int:
        """Return the tokens of the prompt."""
        return len(self._tokens)

    @property
    def has_keys(self) -> bool:
        """Whether its blocks differ from those of others with the same tokens."""
        return self.salt is not None or self._adapter is not None

    def of(self, block_tokens: int) -> list[bytes]:
        """Return the digests of its blocks of so many tokens."""
        digests = self._digests.get(block_tokens)
        if digests is None:
            digests = prefix_digests(self._tokens, block_tokens, self._adapter, self.salt)
            self._digests[block_tokens] = digests
        return digests


def block_sizes(backends: Iterable[Holder]) -> set[int]:
    """Return the sizes of blocks, in tokens, that the engines of a pool tell of; none if none does."""
    sizes: set[int] = set()
    for backend in backends:
        if isinstance(backend.held, Precise):
            sizes |= backend.held.block_sizes
    return sizes


class Precise:
    """One backend's prefix cache as its engines tell it, see `core.prefix.Held`.

    `followers` has one for each engine of the server, by its data-parallel rank. Who reads their events
    puts them there.
    """

    __slots__ = ("_salted", "followers", "guess")

    def __init__(self) -> None:
        self.guess = Approximate()
        self.followers: dict[int, Follower] = {}
        self._salted = False  # a prompt with a salt was sent there

    @property
    def knows(self) -> bool:
        """Whether every engine tells what it holds."""
        return bool(self.followers) and all(each.knows for each in self.followers.values())

    @property
    def kv_events(self) -> KvEvents:
        """How well its engines are followed."""
        followers = self.followers.values()
        return KvEvents(
            known=self.knows,
            engines=len(followers),
            blocks=sum(len(each.mirror) for each in followers),
            losses=sum(each.losses for each in followers),
            garbled=sum(each.garbled for each in followers),
            strange=sum(each.strange for each in followers),
        )

    @property
    def block_sizes(self) -> set[int]:
        """The sizes of the blocks that its engines tell of, in tokens; none while it does not know."""
        sizes = {each.mirror.block_tokens for each in self.followers.values() if each.knows}
        return {size for size in sizes if size is not None}

    def tokens(self, prefix: Prefix) -> int:
        """Return how many tokens of a prompt it holds, or is expected to."""
        blocks = prefix.blocks
        told = None if blocks is None else self._told(blocks)
        if told is None:
            return self.guess.tokens(prefix)
        told = min(told, prefix.prompt_tokens)
        if all(each.whole for each in self.followers.values()):
            return told
        return max(told, self.guess.tokens(prefix))

    def sent(self, prefix: Prefix) -> Sent:
        """Note that a prompt was sent there: its engine is expected to hold it."""
        cached_tokens, sent = self.tokens(prefix), self.guess.sent(prefix)
        blocks = prefix.blocks
        if blocks is not None:
            sent.cached_tokens = cached_tokens
            self._salted = self._salted or blocks.salt is not None
            for mirror in self._mirrors():
                mirror.expect(blocks.of(mirror.block_tokens or 1))
        return sent

    def unsent(self, sent: Sent) -> None:
        """Take that back: it ended before the engine was seen to read it."""
        self.guess.unsent(sent)
        blocks = sent.prefix.blocks
        if blocks is not None:
            for mirror in self._mirrors():
                mirror.expect_no_more(blocks.of(mirror.block_tokens or 1))

    def ended(self, sent: Sent, cached_tokens: int | None) -> None:
        """Note that a prompt was read; `cached_tokens` of it were found, if its reply tells."""
        self.guess.ended(sent, cached_tokens)

    def scraped(self, capacity_tokens: int | None, hits: float | None) -> None:
        """Take in how much the cache holds, and the engine's counter of tokens found, if it tells."""
        self.guess.scraped(capacity_tokens, hits)
        for mirror in self._mirrors():
            blocks = MOST_BLOCKS
            if capacity_tokens and mirror.block_tokens:
                blocks = int(capacity_tokens / mirror.block_tokens * _SPARE) + 1
            mirror.most_blocks = min(blocks, MOST_BLOCKS)

    def forget(self) -> None:
        """Note that it is empty: what its engines hold now they tell themselves."""
        self.guess.forget()
        for mirror in self._mirrors():
            mirror.expect_nothing()

    def _told(self, blocks: Blocks) -> int | None:
        """Return how many tokens its engines hold by what they tell; None while that is not known."""
        most = None
        for follower in self.followers.values():
            mirror = follower.mirror
            if not follower.knows or mirror.block_tokens is None:
                return None
            if not mirror.tells_keys and (blocks.has_keys or self._salted):
                return None  # whose blocks these are nobody says
            most = max(most or 0, mirror.held(blocks.of(mirror.block_tokens)) * mirror.block_tokens)
        return most

    def _mirrors(self) -> list[Mirror]:
        return [each.mirror for each in self.followers.values() if each.mirror.block_tokens]
