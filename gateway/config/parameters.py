"""Settings of the parameter policy: what of the table in `wire.parameters` is different here.

The same section stands at the top (all pools), in a pool and in a key's record; the narrowest that
names a parameter decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Final

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from gateway.config.units import SHOWN_CHARS, Section, setting
from gateway.core.asked import Media, Overrides, UnknownFields
from gateway.core.types import Call
from gateway.wire.parameters import Policy, effective, judge
from gateway.wire.table import TABLE, Rule

if TYPE_CHECKING:
    from gateway.config.models import Config


class PrefixRouting(Enum):
    """Whether the choice of a backend knows what its prefix cache holds."""

    APPROXIMATE = "approximate"
    PRECISE = "precise"
    OFF = "off"


class PrefixCache(Enum):
    """Who shares the prefix cache of an engine."""

    SHARED = "shared"
    PER_TENANT = "per_tenant"


class Resume(Enum):
    """Whether a stream may go on at another backend."""

    EXACT = "exact"
    TEXT = "text"
    OFF = "off"


_ALLOWABLE: Final = [row.name for row in TABLE.values() if row.rule in (Rule.DENY, Rule.MAX)]
_COUNTED: Final = [row.name for row in TABLE.values() if row.rule is Rule.MAX]


def _known(name: str, known: Sequence[str]) -> None:
    if name not in known:
        close = get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else "see `vllm-gateway config policy`"
        raise PydanticCustomError(
            "bad_parameter",
            "{name} is no parameter that this can change; {hint}",
            {"name": name[:SHOWN_CHARS], "hint": hint},
        )


def check_allow(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names when each is a row that can be allowed; ValueError otherwise."""
    for name in names:
        _known(name, _ALLOWABLE)
    return tuple(names)


def check_deny(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names when each is a field, or a part of content that can be denied; ValueError otherwise."""
    for name in names:
        row = TABLE.get(name)
        if row is not None and "." not in name and name not in (row.fields or (name,)):
            raise PydanticCustomError(
                "bad_parameter",
                "{name} is no field of a body; name one of: {fields}",
                {"name": name, "fields": ", ".join(row.fields)},
            )
    return tuple(names)


def check_max(limits: Mapping[str, int]) -> dict[str, int]:
    """Return the limits when each is of a row with a number; ValueError otherwise."""
    for name in limits:
        _known(name, _COUNTED)
    return dict(limits)


class ParametersConfig(Section):
    """Changes to the table that `vllm-gateway config policy` prints."""

    allow: Annotated[tuple[str, ...], AfterValidator(check_allow)] = setting(
        (), "Rows of the table that pass here: priority, content.uuid, n, ..."
    )
    deny: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=64)], ...], AfterValidator(check_deny)
    ] = setting((), "Fields that are refused here, known or not: tools, logprobs, ...")
    max: Annotated[dict[str, Annotated[int, Field(ge=0)]], AfterValidator(check_max)] = setting(
        {}, "Other limits than the table's, by row: {n: 8, tools: 64}."
    )
    media: Media | None = setting(
        None,
        "Addresses of images, audio and video: public (data: and public hosts), data (data: only) or"
        " any. Default: public.",
    )
    unknown_fields: UnknownFields | None = setting(
        None, "Fields that no API knows: pass (they are counted) or refuse. Default: pass."
    )


def overrides_of(section: ParametersConfig) -> Overrides:
    """Return a section as the policy takes it."""
    return Overrides(
        allow=frozenset(section.allow),
        deny=frozenset(section.deny),
        max=tuple(section.max.items()),
        media=section.media,
        unknown_fields=section.unknown_fields,
    )


_MOST_MADE: Final = 10_000


class Policies:
    """The policy of every pool, and of every key that changes it. Made anew with each configuration."""

    def __init__(self, config: Config) -> None:
        everywhere = ("parameters", overrides_of(config.parameters))
        self._layers: dict[str | None, list[tuple[str, Overrides]]] = {None: [everywhere]}
        self._layers |= {
            name: [everywhere, (f"pools.{name}.parameters", overrides_of(pool.parameters))]
            for name, pool in config.pools.items()
        }
        self._made: dict[tuple[str | None, Overrides | None], Policy] = {}

    def judge(self, call: Call, pool: str, key: Overrides | None) -> None:
        """Let a request to a pool, by a key with these overrides, pass or refuse it.

        Raises:
            RequestError: see `wire.parameters.judge`.
        """
        policy = self._made.get((pool, key)) or self.of(pool, key)
        if call.asked.facts or policy.denied:
            judge(call, policy)

    def of(self, pool: str | None, key: Overrides | None) -> Policy:
        """Return the policy for requests by a key with these overrides: to a pool, or to any (None)."""
        policy = self._made.get((pool, key))
        if policy is None:
            if len(self._made) >= _MOST_MADE:  # many are of keys that are gone
                self._made.clear()
            layers = self._layers[pool]
            if key is not None:
                layers = [*layers, ("the key's parameters", key)]
            policy = self._made[pool, key] = effective(layers)
        return policy
