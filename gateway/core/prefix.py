"""What a prompt is to a prefix cache, and what is known of one: the values between those who route.

An engine keeps what it read of a prompt, and reads another that begins alike only from where they part.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class Blocks(Protocol):
    """The token ids of a prompt, in the blocks by which an engine caches them."""

    salt: str | None
    found: dict[object, int]  # by engine: blocks that it held when it was asked last
    has_keys: (
        bool  # its blocks differ from those of others with the same tokens: an adapter, a salt
    )

    def of(self, block_tokens: int) -> list[bytes] | None:
        """Return a digest of all up to its end for each block of so many tokens; None: not at hand."""


class Session(msgspec.Struct, frozen=True, gc=False):
    """What a client says that its request belongs to."""

    key: int  # of this process; tenants, adapters and models have keys apart
    at: float  # when the request came


class Prefix(msgspec.Struct, gc=False):
    """The beginnings of one prompt, each by a key that two prompts share only if all before it is alike.

    Tenants, adapters and models that have caches apart have keys apart.
    """

    keys: list[int]  # the longest first; none of a short prompt, which has a session then
    ends: tuple[int, ...]  # how long each of them is
    size: int  # of the whole prompt, in the unit of the ends
    prompt_tokens: int  # the same as `Need` has it
    output_tokens: int  # that the engine is expected to keep beside it
    home: int = 0  # alike for prompts that begin alike, in every process
    blocks: Blocks | None = None  # where its token ids are known, and asked for
    steers: bool = True  # vLLM lets us name the engine that takes it, where a server has several
    session: Session | None = None

    def tokens_before(self, place: int) -> int:
        """Return how many tokens the beginning at a place of `keys` has; 0 past the last place."""
        if place >= len(self.keys):
            return 0
        return self.prompt_tokens * self.ends[place] // self.size


class Sent(msgspec.Struct, gc=False):
    """What a backend was told of a prompt that was sent to it."""

    prefix: Prefix
    cached_tokens: int  # that it was thought to hold before
    known_tokens: int  # that it held by what was sent there, whatever that is worth
    new_keys: int  # that were new there
    rank: int | None = None  # of the engine that takes it, where a server has several
    work_tokens: int = 0  # what it still costs that engine
    by: object = None  # who counts it there
    session_tokens: int = 0  # of the prompt, that its session had there before


class KvEvents(msgspec.Struct, frozen=True, gc=False):
    """How well a backend's engines are followed by what they tell of their caches."""

    known: bool  # what they hold is known; else it is guessed
    engines: int  # that are listened to
    blocks: int  # that they hold, as far as is known
    losses: int  # times that blocks had to be forgotten, because messages were missed
    garbled: int  # messages that nobody could read
    strange: int  # events of kinds that are not known


class Held(Protocol):
    """What the prefix cache of one backend holds, as far as the gateway knows.

    The pool table owns it. Synchronous, and without side effects but for those named.
    """

    @property
    def kv_events(self) -> KvEvents | None:
        """How well it is told by its engines; None: nobody asks them."""

    def tokens(self, prefix: Prefix) -> int:
        """Return how many tokens of a prompt it holds; 0 up to `prompt_tokens`."""

    def sent(self, prefix: Prefix) -> Sent:
        """Note that a prompt was sent there."""

    def ended(self, sent: Sent, cached_tokens: int | None) -> None:
        """Note that a prompt was read; `cached_tokens` of it were found, if its reply tells."""

    def scraped(self, capacity_tokens: int | None, hits: float | None) -> None:
        """Take in how much the cache holds, and the engine's counter of tokens found, if it tells."""

    def unsent(self, sent: Sent) -> None:
        """Take that back: it ended before the engine was seen to read it."""

    def read(self, sent: Sent) -> None:
        """Note that the engine has read a prompt."""

    def over(self, sent: Sent) -> None:
        """Note that a request is there no more, however it ended."""

    def forget(self) -> None:
        """Note that it is empty: another process, or its cache was reset."""


class Holder(Protocol):
    """A backend, as far as prefixes are concerned."""

    @property
    def held(self) -> Held | None:
        """What its prefix cache holds; None: nobody asks."""
