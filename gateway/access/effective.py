"""What holds for a key: its own settings over those of its tier over the defaults, each with its origin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from gateway.access.records import KeyRecord, settings_told
from gateway.config.keysettings import KeySettings
from gateway.config.parameters import ParametersConfig, overrides_of
from gateway.core.asked import Caller
from gateway.core.limits import limits_over

Tiers = Mapping[str, KeySettings]

_ONE_BY_ONE: Final = ("limits", "parameters")  # mappings, of which a key may change a part
_DEFAULTS: Final[Mapping[str, object]] = {
    "models": ["*"],
    "deny": [],
    "addresses": [],
    "max_context": None,
    "max_output": None,
    "priority": 0,
    "fallback": True,
}


class Origin(Enum):
    """Who sets a value."""

    KEY = "key"
    TIER = "tier"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Value:
    """A value that holds, as it is written."""

    value: Any
    origin: Origin


def effective(record: KeyRecord, tier: KeySettings | None) -> dict[str, Value]:
    """Return what holds, by setting; what stands inside a mapping is named like `limits.requests_per_minute`."""
    holds = dict(_flat(merged(record.own, tier or KeySettings())))
    own = dict(_flat(record.own))
    found = {name: Value(value, Origin.DEFAULT) for name, value in _DEFAULTS.items()}
    return found | {
        name: Value(value, Origin.KEY if name in own else Origin.TIER)
        for name, value in holds.items()
    }


def lost_tiers(records: Iterable[KeyRecord], tiers: Tiers) -> list[str]:
    """Return which keys have a tier that is not there, in sentences."""
    known = f"it has {', '.join(tiers)}" if tiers else "there is none"
    return [
        f"the key {each.id} ({each.name}) has the tier `{each.tier}`, which `tiers` lacks; {known}"
        for each in records
        if each.tier is not None and each.tier not in tiers
    ]


def _flat(settings: KeySettings) -> Iterator[tuple[str, Any]]:
    for name, value in settings_told(settings).items():
        if name in _ONE_BY_ONE:
            yield from ((f"{name}.{inner}", each) for inner, each in value.items())
        else:
            yield name, value


def merged(own: KeySettings, wide: KeySettings) -> KeySettings:
    """Return a key's settings over those of its tier. Limits and parameters go one by one."""
    told = {name: getattr(own, name) for name in KeySettings.model_fields}
    told["limits"] = limits_over(own.limits, wide.limits)
    told["parameters"] = _parameters(own.parameters, wide.parameters)
    return wide.model_copy(update={name: it for name, it in told.items() if it is not None})


def _parameters(
    own: ParametersConfig | None, wide: ParametersConfig | None
) -> ParametersConfig | None:
    """What a key names, its tier does not decide."""
    if own is None or wide is None:
        return own or wide
    named = {*own.allow, *own.deny, *own.max}
    left = {
        "allow": tuple(name for name in wide.allow if name not in named),
        "deny": tuple(name for name in wide.deny if name not in named),
        "max": {name: most for name, most in wide.max.items() if name not in named},
    }
    said = {name: getattr(own, name) for name in own.model_fields_set}
    kept = {name: it for name, it in left.items() if name in wide.model_fields_set}
    return wide.model_copy(update=kept | said)


def caller_of(record: KeyRecord, tier: KeySettings | None) -> Caller:
    """Return who holds a key, as the data path sees it."""
    holds = merged(record.own, tier or KeySettings())
    return Caller(
        key_id=record.id,
        name=record.name,
        tenant=record.tenant,
        priority=holds.priority or 0,
        models=("*",) if holds.models is None else holds.models,
        denied=holds.deny or (),
        addresses=holds.addresses or None,
        parameters=None if holds.parameters is None else overrides_of(holds.parameters),
        max_context_tokens=holds.max_context,
        max_output_tokens=holds.max_output,
        falls_back=holds.fallback is not False,
        limits=holds.limits,
    )
