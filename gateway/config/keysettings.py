"""What a key may do: the settings that stand in its record, and in the tier that it belongs to."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, StringConstraints, WithJsonSchema
from pydantic_core import PydanticCustomError

from gateway.config.keylimits import Limits, read_limit
from gateway.config.parameters import ParametersConfig
from gateway.config.units import SHOWN_CHARS, Section, setting

TIER_NAME: Final = r"^[a-zA-Z0-9][a-zA-Z0-9._-]{0,63}$"
TierName = Annotated[str, StringConstraints(pattern=TIER_NAME)]


def _words(value: object) -> tuple[str, ...]:
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, list | tuple) or not all(isinstance(it, str) for it in patterns):
        raise ValueError('expected a list of names or globs, such as ["qwen3-*"]')
    if not all(each.strip() for each in patterns):
        raise ValueError("an empty glob matches no model")
    return tuple(patterns)


def _networks(value: object) -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list | tuple):
        raise ValueError("expected a list of addresses or networks, such as [10.0.0.0/8]")
    found = []
    for each in listed:
        try:
            found.append(str(ipaddress.ip_network(each)))
        except ValueError:
            raise ValueError(
                f"`{str(each)[:SHOWN_CHARS]}` is no address and no network such as 10.0.0.0/8"
            ) from None
    return tuple(found)


def _number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError("expected a whole number")
    return value


def _yes_or_no(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def _by(reader: Callable[[object], object]) -> Callable[[object], object]:
    """Return a validator that reports what a reader finds wrong in the reader's own words."""

    def read(value: object) -> object:
        try:
            return None if value is None else reader(value)
        except PydanticCustomError:
            raise
        except ValueError as error:
            raise PydanticCustomError("bad_value", "{why}", {"why": str(error)}) from None

    return read


def _written(*forms: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [*forms, {"type": "null"}]})


_LIST: Final = _written({"type": "array", "items": {"type": "string"}}, {"type": "string"})
_TOKENS: Final = _written(
    {"type": "integer", "minimum": 1}, {"type": "string", "examples": ["32k"]}
)


class KeySettings(Section):
    """What a key may do. What is not set comes from its tier, else it is the default."""

    models: Annotated[tuple[str, ...] | None, BeforeValidator(_by(_words)), _LIST] = setting(
        None, "Models and adapters that it may use, as globs. Default: all."
    )
    deny: Annotated[tuple[str, ...] | None, BeforeValidator(_by(_words)), _LIST] = setting(
        None, "Models and adapters that it may not use, as globs, whatever `models` says."
    )
    addresses: Annotated[tuple[str, ...] | None, BeforeValidator(_by(_networks)), _LIST] = setting(
        None,
        "Addresses of clients that may use it: single ones, or networks such as 10.0.0.0/8. Behind"
        " a proxy see `trusted_proxies`. Default: any.",
    )
    max_context: Annotated[int | None, BeforeValidator(_by(read_limit)), _TOKENS] = setting(
        None, "Largest prompt plus output, in tokens. Default: what the model takes."
    )
    max_output: Annotated[int | None, BeforeValidator(_by(read_limit)), _TOKENS] = setting(
        None, "Most output tokens of a reply. Default: no limit of its own."
    )
    priority: Annotated[int | None, BeforeValidator(_by(_number))] = setting(
        None, "Requests with a higher one go first. Default: 0."
    )
    parameters: ParametersConfig | None = setting(
        None, "What its requests may ask for, beyond what the pool says."
    )
    fallback: Annotated[bool | None, BeforeValidator(_by(_yes_or_no))] = setting(
        None, "Whether another pool may answer where the asked one cannot. Default: true."
    )
    limits: Limits | None = setting(
        None, "What it may use, such as {requests_per_minute: 60}. Default: no limit."
    )
