"""Prefix caching: the hashes of a prompt, and the interface of an index that knows a backend's cache.

An engine keeps the KV cache of prompts that it has read. A later prompt that begins alike is read only
from where the two differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec


class BlockShape(NamedTuple):
    """How an engine cuts prompts into blocks: the tokens of one, and those behind it that its hash covers, too."""

    tokens: int
    ahead: int = 0  # with it, a block is found only before the same tokens


class Blocks(Protocol):
    """The token ids of a prompt, cut into the blocks that an engine caches."""

    salt: str | None
    found: dict[object, int]  # by engine: blocks that it held at the last look-up
    # Its blocks differ from those of others with the same tokens: an adapter, a salt.
    has_keys: bool

    def of(self, shape: BlockShape) -> list[bytes] | None:
        """Return one digest for each block of this shape, of all up to its end; None: not computed."""


class Session(msgspec.Struct, frozen=True, gc=False):
    """The session that a client names in its request."""

    key: int  # made with a random seed; tenants, adapters and models never share one
    at: float  # when the request came


class Prefix(msgspec.Struct, gc=False):
    """Hashes of how one prompt begins: each covers all bytes from the start up to one end.

    Two prompts share a hash only if all up to that end is the same. Tenants, adapters and models with
    separate caches never share one.
    """

    # The hashes, the longest first; none for a short prompt that has only a session.
    keys: list[int]
    ends: tuple[int, ...]  # bytes that each hash covers
    size: int  # bytes of the whole prompt
    prompt_tokens: int  # as in `Need`
    output_tokens: int  # expected; the engine caches them too
    home: int = 0  # hash of the first bytes, the same in every process: for rendezvous hashing
    blocks: Blocks | None = None  # set with `prefix: precise`, once its token ids are known
    # vLLM lets us name the engine that takes it, where a server has several.
    takes_rank: bool = True
    session: Session | None = None

    def tokens_before(self, place: int) -> int:
        """Return how many tokens the hash at a place of `keys` covers; 0 past the last place."""
        if place >= len(self.keys):
            return 0
        return self.prompt_tokens * self.ends[place] // self.size


class SentPrompt(msgspec.Struct, gc=False):
    """One prompt that was sent to a backend, and what its index expected then."""

    prefix: Prefix
    cached_tokens: int  # expected to be cached there
    # Tokens that were sent there before; `cached_tokens` is this times the index's trust.
    known_tokens: int
    new_keys: int  # hashes that were new there
    most_tokens: int | None = None  # that may have been cached there; None: all of the prompt
    rank: int | None = None  # the engine that takes it, where a server has several
    work_tokens: int = 0  # tokens of work that it still costs that engine
    by: object = None  # the index that counts these
    counted: bool = False  # the index compares it with what the engine finds, or has done so
    session_tokens: int = 0  # of the prompt, that its session sent there before
    session_before: int = 0  # all that its session had sent there last
    expected: Sequence[bytes] = ()  # blocks that its index did not expect or know before

    @property
    def surely_read_tokens(self) -> int:
        """How much of the prompt the engine had to read, whatever is not known of its cache."""
        return 0 if self.most_tokens is None else self.prefix.prompt_tokens - self.most_tokens


class KvEvents(msgspec.Struct, frozen=True, gc=False):
    """How well the gateway follows the KV events of a backend's engines."""

    known: bool  # the events tell what is cached; else the approximate index counts
    engines: int  # that the gateway is subscribed to
    blocks: int  # cached, by the events
    losses: int  # times that the picture was dropped: messages were missed, or the engine restarted
    garbled: int  # messages that could not be decoded
    strange: int  # events of an unknown kind


class PrefixIndex(Protocol):
    """What the gateway knows of one backend's prefix cache.

    The pool table owns it. All methods are synchronous. The calls for one prompt are, in this order:
    `sent`, `read` at its first token, `over` when its slot is given back, `unsent` after that if there was
    no first token, and `ended` when its request is settled.
    """

    @property
    def kv_events(self) -> KvEvents | None:
        """How well KV events are followed; None: this kind of index uses none."""

    def __len__(self) -> int:
        """Return how many hashes of beginnings or blocks it keeps."""

    def tokens(self, prefix: Prefix) -> int:
        """Return how many tokens of a prompt are expected to be cached: 0 to `prompt_tokens`."""

    def longest(self, prefix: Prefix) -> int:
        """Return the place of the longest hash of a prompt that was sent there; the number of them if none was."""

    def sent(self, prefix: Prefix) -> SentPrompt:
        """Note that a prompt was sent there."""

    def ended(
        self, sent: SentPrompt, cached_tokens: int | None, prompt_tokens: int | None = None
    ) -> None:
        """Note that a prompt was read. `cached_tokens` of `prompt_tokens` is what the reply reports; None: nothing."""

    def scraped(self, capacity_tokens: int | None, hits: float | None) -> None:
        """Take in a scrape: how much the cache holds, and the engine's counter of cache hits in tokens."""

    def unsent(self, sent: SentPrompt) -> None:
        """Undo `sent`: the request ended before its first token."""

    def read(self, sent: SentPrompt) -> None:
        """Note the first token: the engine has read the prompt."""

    def over(self, sent: SentPrompt) -> None:
        """Note that a request has left the backend, however it ended."""

    def forget(self) -> None:
        """Note that the cache is empty: the process restarted, or its cache was reset."""


class HasPrefixIndex(Protocol):
    """A backend, as the prefix code sees it."""

    @property
    def prefix_index(self) -> PrefixIndex | None:
        """What is known of its prefix cache; None: nothing needs to be."""
