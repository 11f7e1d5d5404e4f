"""What one engine's prefix cache holds, from its KV events, with the approximate index as a fallback.

An engine reports a block once it has computed it. Blocks of prompts that were sent since count as cached
already. So a burst of prompts that begin alike goes to one backend instead of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from gateway.core.prefix import BlockShape, KvEvents, Prefix, SentPrompt
from gateway.prefix.approximate import ApproximateIndex
from gateway.prefix.follower import Follower
from gateway.prefix.mirror import MOST_BLOCKS, Mirror, prefix_digests

_SPARE: Final = 1.25  # an engine may have more blocks than it says that tokens fit


class PromptBlocks:
    """The token ids of one prompt, cut into blocks as engines do. See `core.prefix.Blocks`.

    Only digests are kept, for the shapes of blocks that the constructor was given.
    """

    __slots__ = ("_digests", "_prompt_tokens", "found", "has_keys", "salt")

    def __init__(
        self,
        tokens: Sequence[int],
        adapter: str | None,
        salt: str | None,
        shapes: Iterable[BlockShape],
    ) -> None:
        self.salt = salt
        self.has_keys = salt is not None or adapter is not None
        self.found: dict[object, int] = {}
        self._prompt_tokens = len(tokens)
        self._digests = {each: prefix_digests(tokens, each, adapter, salt) for each in shapes}

    def __len__(self) -> int:
        """Return the tokens of the prompt."""
        return self._prompt_tokens

    def of(self, shape: BlockShape) -> list[bytes] | None:
        """Return the digests of its blocks; None for a shape that was not computed."""
        return self._digests.get(shape)


class PreciseIndex:
    """One engine's prefix cache by its KV events. See `core.prefix.PrefixIndex`.

    `watch.engine_events` sets `follower` while it reads the engine's events; None otherwise.
    """

    __slots__ = ("_salted", "follower", "guess")

    def __init__(self) -> None:
        self.guess = ApproximateIndex()
        self.follower: Follower | None = None
        self._salted = False  # a prompt with a salt was sent there

    @property
    def knows(self) -> bool:
        """Whether the events show what is cached now."""
        return self.follower is not None and self.follower.knows

    @property
    def kv_events(self) -> KvEvents:
        """How well the engine is followed."""
        found = self.follower
        if found is None:
            return KvEvents(known=False, engines=0, blocks=0, losses=0, garbled=0, strange=0)
        counts = (len(found.mirror), found.losses, found.garbled, found.strange)
        return KvEvents(found.knows, 1, *counts)

    def __len__(self) -> int:
        """Return how many hashes it keeps: of blocks that events told of, and of the guess beside them."""
        return len(self.guess) + self.kv_events.blocks

    def tokens(self, prefix: Prefix) -> int:
        """Return how many tokens of a prompt are cached, or will be soon."""
        blocks, follower = prefix.blocks, self.follower
        if blocks is None or follower is None or not follower.knows:
            return self.guess.tokens(prefix)
        mirror = follower.mirror
        unsure = not mirror.tells_keys and (blocks.has_keys or self._salted)
        if mirror.shape is None or unsure:  # events do not say whose the blocks are
            return self.guess.tokens(prefix)
        digests = blocks.of(mirror.shape)
        if digests is None:
            return self.guess.tokens(prefix)
        count = blocks.found[mirror] = mirror.held(digests, blocks.found.get(mirror, 0))
        told = min(count * mirror.shape.tokens, prefix.prompt_tokens)
        return told if follower.whole else max(told, self.guess.tokens(prefix))

    def longest(self, prefix: Prefix) -> int:
        """Return the place of the longest hash of a prompt that was sent there; the number of them if none was."""
        return self.guess.longest(prefix)

    def sent(self, prefix: Prefix) -> SentPrompt:
        """Note that a prompt was sent there: its blocks count as cached from now on."""
        cached_tokens, sent = self.tokens(prefix), self.guess.sent(prefix)
        blocks, mirror = prefix.blocks, self._mirror
        if blocks is not None:
            sent.cached_tokens = cached_tokens
            if sent.most_tokens is not None:
                sent.most_tokens = max(sent.most_tokens, cached_tokens)
            self._salted = self._salted or blocks.salt is not None
            if mirror is not None and mirror.shape is not None:
                sent.expected = mirror.expect(blocks.of(mirror.shape) or ())
        return sent

    def unsent(self, sent: SentPrompt) -> None:
        """Undo `sent`: the request ended before its first token."""
        self.guess.unsent(sent)
        if self._mirror is not None:
            self._mirror.expect_no_more(sent.expected)

    def ended(
        self, sent: SentPrompt, cached_tokens: int | None, prompt_tokens: int | None = None
    ) -> None:
        """Note that a prompt was read. `cached_tokens` is what the reply reports; None: nothing."""
        self.guess.ended(sent, cached_tokens, prompt_tokens)

    def read(self, sent: SentPrompt) -> None:
        """Note the first token: the blocks of this prompt are not looked up any more."""
        self.guess.read(sent)
        sent.prefix.blocks, sent.expected = None, ()

    def over(self, sent: SentPrompt) -> None:
        """Note that a request has left; the engine keeps the prompt cached."""
        self.guess.over(sent)

    def scraped(self, capacity_tokens: int | None, hits: float | None) -> None:
        """Take in a scrape: how much the cache holds, and the engine's counter of cache hits in tokens."""
        self.guess.scraped(capacity_tokens, hits)
        mirror = self._mirror
        if mirror is not None:
            blocks = MOST_BLOCKS
            if capacity_tokens and mirror.shape is not None:
                blocks = int(capacity_tokens / mirror.shape.tokens * _SPARE) + 1
            mirror.most_blocks = min(blocks, MOST_BLOCKS)

    def forget(self) -> None:
        """Note that the cache is empty. The mirror stays: the engine's own events clear it."""
        self.guess.forget()
        if self._mirror is not None:
            self._mirror.expect_nothing()

    @property
    def _mirror(self) -> Mirror | None:
        return None if self.follower is None else self.follower.mirror
