"""What is kept of one key: its record, read with every finding, and written back.

- id: k7m2q9xd
  name: ci-bot
  tenant: ci-bot            # who is billed; the name unless told
  owner: ann@example.org    # optional, as are the rest
  kind: inference           # or admin (with a role), or metrics; neither may use a model
  tier: gold                # a template of the settings below: `tiers` of the configuration
  digest: <HMAC-SHA-256 of the whole key under the pepper, hex>
  previous: {digest: <that of the secret before a rotation>, not_after: "2026-11-23T09:30:00Z"}
  models: ["*"]             # what `config.keysettings` has; else the tier's, else the default
  limits: {requests_per_minute: 60, concurrent_requests: 4}
  metadata: {cost-center: "17"}
  created: "2026-11-21T09:30:00Z"
  changed: "2026-11-21T09:30:00.000Z"
  expires: "2026-12-21T09:30:00Z"
  revoked: "..."
  not_after: "..."          # replaced by a key of another id, as older versions did it
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from difflib import get_close_matches
from enum import Enum
from functools import cached_property
from typing import Any, Final

from pydantic import ValidationError

from gateway.access.keyerrors import BadSettings
from gateway.config.keylimits import limits_told
from gateway.config.keysettings import TIER_NAME, KeySettings
from gateway.config.parameters import ParametersConfig
from gateway.core.roles import Role

ID_CHARS: Final = 8
_ID: Final = re.compile(rf"[a-z0-9]{{{ID_CHARS}}}")
_ROLES: Final = [each for each in Role if each is not Role.METRICS]  # that is a kind
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


class KeyKind(Enum):
    """What a key opens."""

    INFERENCE = "inference"  # the models, and nothing of the admin API
    ADMIN = "admin"  # the admin API, as its role allows; no model
    METRICS = "metrics"  # /metrics, and nothing else


@dataclass(frozen=True, slots=True)
class Secret:
    """One text that proves to hold a key. `not_after_s`: it was replaced, and works until then."""

    digest: bytes = field(repr=False)
    not_after_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class KeyRecord:
    """One key as it is kept; never changed. Times are wall time, seconds since the epoch."""

    id: str
    name: str
    tenant: str
    secrets: tuple[Secret, ...]  # the newest first
    owner: str | None = None
    kind: KeyKind = KeyKind.INFERENCE
    role: Role | None = None  # of kind `admin`
    tier: str | None = None
    own: KeySettings = field(default_factory=KeySettings)
    metadata: Mapping[str, str] = field(default_factory=dict)
    created_s: float | None = None
    changed_s: float | None = None
    expires_s: float | None = None
    revoked_s: float | None = None
    not_after_s: float | None = None  # replaced by a key of another id; works until then

    @property
    def ends_s(self) -> float | None:
        """When it stops working by itself."""
        ends = [each for each in (self.expires_s, self.not_after_s) if each is not None]
        return min(ends, default=None)

    @cached_property
    def version(self) -> str:
        """What changes with every change of the record."""
        text = json.dumps(as_node(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def state(self, wall_now: float) -> str:
        """Return `active`, `rotating` (two secrets work), `replaced` (ends soon), `expired` or `revoked`."""
        if self.revoked_s is not None:
            return "revoked"
        if self.ends_s is not None and self.ends_s <= wall_now:
            return "expired"
        if self.not_after_s is not None:
            return "replaced"
        return "rotating" if len(self.live(wall_now)) > 1 else "active"

    def live(self, wall_now: float) -> tuple[Secret, ...]:
        """Return its secrets that were not replaced for good."""
        return tuple(
            each for each in self.secrets if each.not_after_s is None or wall_now < each.not_after_s
        )


# --- writing --------------------------------------------------------------------------------------


def as_node(record: KeyRecord) -> dict[str, Any]:
    """Return a record as it is written; what is not set is left out."""
    current, *before = record.secrets
    node: dict[str, Any] = {"id": record.id, **identity_told(record)}
    node["digest"] = current.digest.hex()
    for each in before[:1]:
        until = timestamp(each.not_after_s or 0.0)
        node["previous"] = {"digest": each.digest.hex(), "not_after": until}
    return node | settings_told(record.own) | times_told(record)


def identity_told(record: KeyRecord) -> dict[str, Any]:
    """Return whose key it is and what for, as it is written; what is not set is left out."""
    told = {
        "name": record.name,
        "tenant": record.tenant,
        "owner": record.owner,
        "kind": None if record.kind is KeyKind.INFERENCE else record.kind.value,
        "role": None if record.role is None else record.role.value,
        "tier": record.tier,
        "metadata": dict(record.metadata) or None,
    }
    return {name: value for name, value in told.items() if value is not None}


def times_told(record: KeyRecord) -> dict[str, str]:
    """Return what happened to it, and when it ends, as it is written; what is not set is left out."""
    told = {}
    for name in ("created", "changed", "expires", "revoked", "not_after"):
        if (at := getattr(record, f"{name}_s")) is not None:
            told[name] = timestamp(at, exact=name == "changed")
    return told


def settings_told(settings: KeySettings) -> dict[str, Any]:
    """Return what is set, as it is written."""
    told: dict[str, Any] = {}
    for name in KeySettings.model_fields:
        value = getattr(settings, name)
        if value is None:
            continue
        if isinstance(value, ParametersConfig):
            value = value.model_dump(mode="json", exclude_unset=True)
        elif name == "limits":
            value = limits_told(value)
        told[name] = [*value] if isinstance(value, tuple) else value
    return told


def timestamp(wall: float, *, exact: bool = False) -> str:
    """Return a wall time as `2026-11-21T09:30:00Z`; exact: with milliseconds."""
    at = datetime.fromtimestamp(wall, UTC)
    text = at.isoformat(timespec="milliseconds" if exact else "seconds")
    return text.replace("+00:00", "Z")


# --- reading --------------------------------------------------------------------------------------


def read_record(node: Mapping[str, Any]) -> KeyRecord:
    """Check one record.

    Raises:
        BadSettings: with every finding.
    """
    values, findings = read_fields(node, _FIELDS)
    findings += [
        (name, f"the key has no {name}")
        for name in ("id", "name", "digest")
        if node.get(name) is None
    ]
    if findings:
        raise BadSettings(findings)
    secrets = [Secret(values.pop("digest"))]
    if (previous := values.pop("previous", None)) is not None:
        secrets.append(previous)
    return KeyRecord(**{"tenant": values["name"], **values}, secrets=tuple(secrets))


def read_fields(
    node: Mapping[str, Any], known: Mapping[str, Reader]
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return what fields and settings are set in a mapping, and what is wrong with it."""
    values: dict[str, Any] = {}
    findings = []
    settings = {}
    names = (*known, *KeySettings.model_fields)
    for name, value in node.items():
        if name not in names:
            close = get_close_matches(str(name), names, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            findings.append((str(name)[:64], f"unknown setting {str(name)[:64]!r}{hint}"))
        elif name not in known:
            settings[name] = value
        elif value is not None:
            target, parse = known[name]
            try:
                values[target] = parse(value)
            except ValueError as error:
                findings.append((name, f"{name}: {error}"))
    try:
        values["own"] = KeySettings.model_validate(settings)
    except ValidationError as error:
        for each in error.errors(include_url=False):
            inside = ".".join(str(part) for part in each["loc"])
            findings.append((str(each["loc"][0]), f"{inside}: {each['msg']}"))
    return values, findings


def _matching(pattern: re.Pattern[str], what: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        # YAML reads an all-digit id as a number, and drops a leading zero from none that is quoted.
        if not isinstance(value, str):
            raise ValueError(f"expected {what}, in quotes")
        if not pattern.fullmatch(value):
            raise ValueError(f"expected {what}")
        return value

    return parse


def _digest(value: object) -> bytes:
    return bytes.fromhex(_matching(_DIGEST, "64 hex digits")(value))


def _previous(value: object) -> Secret:
    if not isinstance(value, Mapping) or set(value) != {"digest", "not_after"}:
        raise ValueError("expected a mapping with digest and not_after")
    return Secret(_digest(value["digest"]), _time(value["not_after"]))


def _kind(value: object) -> KeyKind:
    return KeyKind(_one_of(KeyKind, value))


def _role(value: object) -> Role:
    return Role(_one_of(_ROLES, value))


def _one_of(words: Iterable[Enum], value: object) -> object:
    known = [each.value for each in words]
    if value not in known:
        raise ValueError(f"expected one of {', '.join(known)}")
    return value


def _metadata(value: object) -> Mapping[str, str]:
    if not isinstance(value, Mapping) or len(value) > 32:
        raise ValueError("expected a mapping of at most 32 names to texts")
    return {_named(name): _note(text) for name, text in value.items()}


def _time(value: object) -> float:
    """Read ISO 8601; a time without a zone is UTC, a day begins at midnight."""
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day, tzinfo=UTC)
    if not isinstance(value, datetime):
        raise ValueError("expected a time such as 2026-11-21T09:30:00Z")
    wall = (value if value.tzinfo is not None else value.replace(tzinfo=UTC)).timestamp()
    timestamp(wall)  # at the edges of time it can be read, and not written
    return wall


# Of a key's name and tenant; ValueError for another. A surrogate is an argument that was not UTF-8.
read_name = _matching(
    re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]{1,128}"), "a text of 1 to 128 characters on one line"
)
_named = _matching(re.compile(r"[A-Za-z0-9._/-]{1,64}"), "a name of letters, digits and . _ / -")
_note = _matching(
    re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]{0,256}"), "a text of at most 256 characters"
)
_tier = _matching(re.compile(TIER_NAME), "the name of a tier")

Reader = tuple[str, Callable[[object], object]]

# What a change may name, beside the settings; and what only a new key may.
CHANGEABLE: Final[Mapping[str, Reader]] = {
    "name": ("name", read_name),
    "tenant": ("tenant", read_name),
    "owner": ("owner", read_name),
    "role": ("role", _role),
    "tier": ("tier", _tier),
    "metadata": ("metadata", _metadata),
    "expires": ("expires_s", _time),
}
OF_A_NEW_KEY: Final[Mapping[str, Reader]] = {**CHANGEABLE, "kind": ("kind", _kind)}
_FIELDS: Final[Mapping[str, Reader]] = {
    **OF_A_NEW_KEY,
    "id": ("id", _matching(_ID, "8 lower-case letters or digits")),
    "digest": ("digest", _digest),
    "previous": ("previous", _previous),
    "created": ("created_s", _time),
    "changed": ("changed_s", _time),
    "revoked": ("revoked_s", _time),
    "not_after": ("not_after_s", _time),
}
