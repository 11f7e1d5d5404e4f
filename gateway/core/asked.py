"""Who asks, what a request asks for beyond the ordinary, and what a key may.

`wire` measures a body into an `Asked`, `wire.parameters` judges it once the model and so the pool
are known.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from functools import lru_cache

import msgspec

from gateway.core.limits import KeyLimits


class Media(Enum):
    """Which addresses of images, audio and video may be sent; each includes those before it."""

    DATA = "data"  # data: only, so the engine fetches nothing
    PUBLIC = "public"  # http and https to hosts that are not literally internal
    ANY = "any"


class UnknownFields(Enum):
    """What happens to fields that neither vLLM nor the OpenAI API knows."""

    PASS = "pass"
    REFUSE = "refuse"


class Fact(msgspec.Struct, frozen=True, gc=False):
    """One measured thing that a row of the table limits: how much of it, and where in the body."""

    row: str
    value: float
    path: str


class Asked(msgspec.Struct, frozen=True, gc=False):
    """What a body asks for: facts, and how many of its fields are unknown."""

    facts: tuple[Fact, ...] = ()
    unknown: int = 0


NOTHING_ASKED = Asked()


@dataclass(frozen=True, slots=True)
class Overrides:
    """What one place of the configuration (all pools, one pool, one key) says of parameters."""

    allow: frozenset[str] = frozenset()
    deny: frozenset[str] = frozenset()
    max: tuple[tuple[str, int], ...] = ()
    media: Media | None = None
    unknown_fields: UnknownFields | None = None


ALL_MODELS = ("*",)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: one authenticated key. `models` and `denied` are globs over the names clients use."""

    key_id: str
    name: str
    tenant: str
    priority: int = 0
    models: tuple[str, ...] = ALL_MODELS
    max_context_tokens: int | None = None
    max_output_tokens: int | None = None
    parameters: Overrides | None = None
    falls_back: bool = True  # another pool may answer when the asked one cannot
    limits: KeyLimits | None = None
    denied: tuple[str, ...] = ()
    # Networks of the clients that may use the key; None: any.
    addresses: tuple[str, ...] | None = None

    def may_use(self, model: str) -> bool:
        """Whether a model or adapter name matches one of the caller's globs, and none that is denied.

        Case matters.
        """
        return _matches(self.models, model) and not self.denies(model)

    def denies(self, name: str) -> bool:
        """Whether a name matches one of the globs that are denied."""
        return bool(self.denied) and _matches(self.denied, name)


@lru_cache(maxsize=4096)
def _matches(patterns: tuple[str, ...], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
