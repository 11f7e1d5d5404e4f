"""How many tokens a request used, and who counted them."""

from __future__ import annotations

from enum import Enum

import msgspec


class UsageSource(Enum):
    """Where token counts come from, best first."""

    UPSTREAM = "upstream"  # the backend's own usage object
    COUNTED = "counted"  # exact prompt count, stream events counted
    ESTIMATED = "estimated"  # the prompt by its size, stream events counted

    __hash__ = object.__hash__  # members are single objects; Enum's own hash is a call into Python


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    source: UsageSource
    cached_tokens: int | None = None
