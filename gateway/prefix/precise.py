"""What one backend's prefix cache holds, by what its engine tells of it; the guess where that is silent.

An engine tells of a block when it has computed it. What was sent there since, and is computed soon, is
expected; so a burst of prompts that begin alike goes to one place, and not to all at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from gateway.core.prefix import KvEvents, Prefix, Sent
from gateway.prefix.approximate import Approximate
from gateway.prefix.follower import Follower
from gateway.prefix.mirror import MOST_BLOCKS, Mirror, prefix_digests

_SPARE: Final = 1.25  # an engine may have more blocks than it says that tokens fit


class PromptBlocks:
    """The token ids of one prompt, cut into blocks as engines do it, see `core.prefix.Blocks`.

    Only the digests are kept, of blocks of the sizes that were asked for.
    """

    __slots__ = ("_digests", "_prompt_tokens", "found", "has_keys", "salt")

    def __init__(
        self, tokens: Sequence[int], adapter: str | None, salt: str | None, sizes: Iterable[int]
    ) -> None:
        self.salt = salt
        self.has_keys = salt is not None or adapter is not None
        self.found: dict[object, int] = {}
        self._prompt_tokens = len(tokens)
        self._digests = {size: prefix_digests(tokens, size, adapter, salt) for size in sizes}

    def __len__(self) -> int:
        """Return the tokens of the prompt."""
        return self._prompt_tokens

    def of(self, block_tokens: int) -> list[bytes] | None:
        """Return the digests of its blocks of so many tokens; None of a size that nobody asked for."""
        return self._digests.get(block_tokens)


class Precise:
    """The prefix cache of one engine as it tells of it itself, see `core.prefix.Held`.

    `follower` is put there by who reads its events; None while nobody does.
    """

    __slots__ = ("_salted", "follower", "guess")

    def __init__(self) -> None:
        self.guess = Approximate()
        self.follower: Follower | None = None
        self._salted = False  # a prompt with a salt was sent there

    @property
    def knows(self) -> bool:
        """Whether its engine tells what it holds."""
        return self.follower is not None and self.follower.knows

    @property
    def kv_events(self) -> KvEvents:
        """How well its engine is followed."""
        found = self.follower
        if found is None:
            return KvEvents(known=False, engines=0, blocks=0, losses=0, garbled=0, strange=0)
        counts = (len(found.mirror), found.losses, found.garbled, found.strange)
        return KvEvents(found.knows, 1, *counts)

    def tokens(self, prefix: Prefix) -> int:
        """Return how many tokens of a prompt it holds, or is expected to."""
        blocks, follower = prefix.blocks, self.follower
        if blocks is None or follower is None or not follower.knows:
            return self.guess.tokens(prefix)
        mirror = follower.mirror
        unsure = not mirror.tells_keys and (blocks.has_keys or self._salted)
        if mirror.block_tokens is None or unsure:  # whose blocks they are nobody says
            return self.guess.tokens(prefix)
        digests = blocks.of(mirror.block_tokens)
        if digests is None:
            return self.guess.tokens(prefix)
        count = blocks.found[mirror] = mirror.held(digests, blocks.found.get(mirror, 0))
        told = min(count * mirror.block_tokens, prefix.prompt_tokens)
        return told if follower.whole else max(told, self.guess.tokens(prefix))

    def sent(self, prefix: Prefix) -> Sent:
        """Note that a prompt was sent there: its engine is expected to hold it."""
        cached_tokens, sent = self.tokens(prefix), self.guess.sent(prefix)
        blocks, mirror = prefix.blocks, self._mirror
        if blocks is not None:
            sent.cached_tokens = cached_tokens
            self._salted = self._salted or blocks.salt is not None
            if mirror is not None and mirror.block_tokens is not None:
                mirror.expect(blocks.of(mirror.block_tokens) or ())
        return sent

    def unsent(self, sent: Sent) -> None:
        """Take that back: it ended before the engine was seen to read it."""
        self.guess.unsent(sent)
        blocks, mirror = sent.prefix.blocks, self._mirror
        if blocks is not None and mirror is not None and mirror.block_tokens is not None:
            mirror.expect_no_more(blocks.of(mirror.block_tokens) or ())

    def ended(self, sent: Sent, cached_tokens: int | None) -> None:
        """Note that a prompt was read; `cached_tokens` of it were found, if its reply tells."""
        self.guess.ended(sent, cached_tokens)

    def read(self, sent: Sent) -> None:
        """Note that the engine has read a prompt: its blocks are asked for no more."""
        sent.prefix.blocks = None

    def over(self, sent: Sent) -> None:
        """Keep what is known: the engine does too."""

    def scraped(self, capacity_tokens: int | None, hits: float | None) -> None:
        """Take in how much the cache holds, and the engine's counter of tokens found, if it tells."""
        self.guess.scraped(capacity_tokens, hits)
        mirror = self._mirror
        if mirror is not None:
            blocks = MOST_BLOCKS
            if capacity_tokens and mirror.block_tokens:
                blocks = int(capacity_tokens / mirror.block_tokens * _SPARE) + 1
            mirror.most_blocks = min(blocks, MOST_BLOCKS)

    def forget(self) -> None:
        """Note that it is empty: what its engine holds now it tells itself."""
        self.guess.forget()
        if self._mirror is not None:
            self._mirror.expect_nothing()

    @property
    def _mirror(self) -> Mirror | None:
        return None if self.follower is None else self.follower.mirror
