"""What a prompt is to a prefix cache, and what is known of one: the values between those who route.

An engine keeps what it read of a prompt, and reads another that begins alike only from where they part.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class Prefix(msgspec.Struct, gc=False):
    """The beginnings of one prompt, each by a key that two prompts share only if all before it is alike.

    Tenants, adapters and models that have caches apart have keys apart.
    """

    keys: list[int]  # the longest first
    shares: tuple[float, ...]  # how much of the prompt each beginning is, likewise; 0..1
    prompt_tokens: int  # of the whole, as in `Need`
    output_tokens: int  # that the engine is expected to keep beside it
    home: int = 0  # alike for prompts that begin alike, in every process


class Sent(msgspec.Struct, gc=False):
    """What a backend was told of a prompt that was sent to it."""

    prefix: Prefix
    cached_tokens: int  # that it was thought to hold before
    new_keys: int  # that were new there


class Held(Protocol):
    """What the prefix cache of one backend holds, as far as the gateway knows.

    The pool table owns it. Synchronous, and without side effects but for those named.
    """

    def tokens(self, prefix: Prefix) -> int:
        """Return how many tokens of a prompt it holds; 0 up to `prompt_tokens`."""

    def sent(self, prefix: Prefix) -> Sent:
        """Note that a prompt was sent there."""

    def unsent(self, sent: Sent) -> None:
        """Take that back: it ended before the engine was seen to read it."""

    def forget(self) -> None:
        """Note that it is empty: another process, or its cache was reset."""
