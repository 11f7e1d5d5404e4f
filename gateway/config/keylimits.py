"""How limits of keys, tiers and tenants are written, and the prices that budgets count by.

limits:
  requests_per_minute: 60
  output_tokens_per_minute: {limit: 20k, on_outage: open}   # one rule of its own
  tokens_per_day: 2M
  budget_per_month: 50
  models: {"qwen3-*": {concurrent_requests: 4}}
  on_outage: local     # local | open | closed, for each rule without its own, those of `models` too
  shadow: true         # count and report, refuse nothing; for the same rules
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field, PlainSerializer, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from gateway.config.units import Section, parse_tokens, setting
from gateway.core.limits import KeyLimits, OnOutage, Price, Rule

_MONEY: Final = frozenset({Rule.BUDGET_DAY, Rule.BUDGET_MONTH})
_NAMES: Final = {rule.value: rule for rule in Rule}
_EXAMPLE: Final = "expected a mapping such as {requests_per_minute: 60}"


def limits_told(limits: KeyLimits) -> dict[str, Any]:
    """Return limits as they are written."""
    apart = {rule: (on_outage, shadow) for rule, on_outage, shadow in limits.apart}
    written: dict[str, Any] = {}
    for name, rule in _NAMES.items():
        most = getattr(limits, name)
        if most is None:
            continue
        written[name] = most
        if rule in apart:
            on_outage, shadow = apart[rule]
            written[name] = {"limit": most, **_manner_told(on_outage, shadow)}
    if limits.models:
        written["models"] = {glob: limits_told(each) for glob, each in limits.models}
    written |= _manner_told(limits.on_outage, limits.shadow)
    return written or {"models": {}}  # an empty mapping is refused as no limits


def _manner_told(on_outage: OnOutage | None, shadow: bool | None) -> dict[str, Any]:
    written = {} if on_outage is None else {"on_outage": on_outage.value}
    return written if shadow is None else {**written, "shadow": shadow}


def read_limits(value: object) -> KeyLimits:
    """Return limits as they are written, such as `{requests_per_minute: 60}`; ValueError for others."""
    return _read(value, nested=False)


def _read(value: object, *, nested: bool) -> KeyLimits:
    if not isinstance(value, Mapping) or not value:
        raise ValueError(_EXAMPLE)
    known = [*_NAMES, "on_outage", "shadow", *(() if nested else ("models",))]
    if unknown := sorted(str(name) for name in value if name not in known):
        raise ValueError(f"unknown limit {unknown[0][:64]!r}; there are {', '.join(known)}")
    found: dict[str, Any] = {
        "on_outage": _outage(value["on_outage"]) if "on_outage" in value else None,
        "shadow": _flag(value["shadow"]) if "shadow" in value else None,
    }
    apart: list[tuple[Rule, OnOutage | None, bool | None]] = []
    for name, rule in _NAMES.items():
        most = value.get(name)
        if isinstance(most, Mapping):
            if unknown := sorted(set(map(str, most)) - {"limit", "on_outage", "shadow"}):
                raise ValueError(f"{name}: unknown setting {unknown[0][:64]!r}")
            own = most.get("on_outage"), most.get("shadow")
            apart.append(
                (
                    rule,
                    None if own[0] is None else _outage(own[0]),
                    None if own[1] is None else _flag(own[1]),
                )
            )
            most = most.get("limit", "")
        if name in value:
            found[name] = _most(rule, most)
    models = value.get("models", {})
    if not isinstance(models, Mapping):
        raise ValueError("models: expected a mapping of globs, such as {qwen3-*: {...}}")
    globs = tuple((str(glob), _read(each, nested=True)) for glob, each in models.items())
    return KeyLimits(**found, apart=tuple(apart), models=globs)


def _most(rule: Rule, value: object) -> float:
    try:
        return read_money(value) if rule in _MONEY else read_limit(value)
    except ValueError as error:
        # Most rules do not count tokens, so the words of `parse_tokens` would mislead.
        own = isinstance(error, PydanticCustomError) and error.context
        problem = f"{own['value']} is not a count" if own else str(error)
        raise ValueError(
            f"{rule.value}: {problem}; write it like {'2.50' if rule in _MONEY else '60 or 100k'}"
        ) from None


def _outage(value: object) -> OnOutage:
    try:
        return OnOutage(value)
    except ValueError:
        raise ValueError("on_outage: expected local, open or closed") from None


def _flag(value: object) -> bool:
    if value in ("true", "false"):
        return value == "true"
    if not isinstance(value, bool):
        raise ValueError("shadow: expected true or false")
    return value


def read_limit(value: object) -> int:
    """Return the tokens of `4096` or `32k`; ValueError when that is none, or nothing."""
    tokens = parse_tokens(value)
    if tokens < 1:
        raise ValueError("must be at least 1")
    return tokens


def read_money(value: object) -> float:
    """Return an amount of money; ValueError when it is none, or nothing."""
    try:
        amount = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        amount = math.nan
    if not 0 < amount < math.inf:
        raise ValueError("must be an amount of money above 0")
    return amount


# --- in gateway.yaml ------------------------------------------------------------------------------


def _limits_in_file(value: object) -> KeyLimits:
    if isinstance(value, KeyLimits):
        return value
    try:
        return read_limits(value)
    except ValueError as error:
        raise PydanticCustomError("bad_limits", "{why}", {"why": str(error)}) from None


_COUNT: Final = {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}]}
_AMOUNT: Final = {"type": "number", "exclusiveMinimum": 0}
_HOW: Final = {
    "on_outage": {
        "enum": [each.value for each in OnOutage],
        "description": "While Redis, or the parent of workers, does not answer. local: each gives out"
        " its share. open: nothing is refused. closed: everything is, with 503. Default: local.",
    },
    "shadow": {
        "type": "boolean",
        "description": "Count and tell what would be refused, and refuse nothing. Default: false.",
    },
}


def _schema() -> dict[str, Any]:
    apart: dict[str, Any] = {
        "type": "object",
        "properties": {name: {} for name in ("limit", *_HOW)},
        "required": ["limit"],
        "additionalProperties": False,
    }
    rules: dict[str, Any] = {
        name: {"anyOf": [_AMOUNT if rule in _MONEY else _COUNT, apart]}
        for name, rule in _NAMES.items()
    }
    models = {
        "type": "object",
        "description": "The same over the models that a glob matches: {GLOB: {...}}.",
        "additionalProperties": {"type": "object", "minProperties": 1},
    }
    return {
        "type": "object",
        "properties": {**rules, "models": models, **_HOW},
        "minProperties": 1,
        "additionalProperties": False,
    }


Limits = Annotated[
    KeyLimits,
    PlainValidator(_limits_in_file),
    PlainSerializer(limits_told),
    WithJsonSchema(_schema()),
]


class TenantConfig(Section):
    """One tenant: the customer that keys name."""

    limits: Limits = Field(
        description="Limits of all its keys together, written as those of a key."
    )


Cost = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class PriceConfig(Section):
    """What a million tokens of a model cost."""

    input: Cost = setting(0.0, "A million tokens of prompts.")
    cached_input: Cost | None = setting(
        None, "A million tokens of prompts that were cached. Default: as `input`."
    )
    output: Cost = setting(0.0, "A million tokens of output.")

    def price(self) -> Price:
        """Return the price, with the default of `cached_input` filled in."""
        cached = self.input if self.cached_input is None else self.cached_input
        return Price(self.input, cached, self.output)


class PricesConfig(Section):
    """What tokens cost, for budgets and usage."""

    currency: Annotated[str | None, Field(max_length=16)] = setting(
        None, "The currency, a label such as EUR."
    )
    models: dict[str, PriceConfig] = setting(
        {}, "Prices by model, as globs; the first that matches counts. Others are free."
    )
