"""What the keys file says of one key: its record, read with every finding, and written back.

- id: 7k2m9qxd
  name: ci-bot
  tenant: ci-bot            # who is billed; the name unless told
  digest: <HMAC-SHA-256 of the whole key under the pepper, hex>
  models: ["*"]             # globs over model and adapter names
  max_context: 32k          # optional, as are the rest
  max_output: 4096
  priority: 0
  parameters: {allow: [priority], max: {n: 4}}   # what it may ask for; see `config policy`
  fallback: false           # no other pool may answer in place of the one that it asks for
  created: "2026-11-21T09:30:00Z"
  expires: "2026-12-21T09:30:00Z"
  not_after: "..."          # replaced by a newer key; works until then
  revoked: "..."
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from gateway.config.parameters import ParametersConfig, overrides_of
from gateway.config.units import parse_tokens
from gateway.core.asked import Overrides
from gateway.core.errors import ConfigError

_ID: Final = re.compile(r"[a-z0-9]{8}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyInfo:
    """What may be told of a key. Times are wall time, seconds since the epoch."""

    id: str
    name: str
    tenant: str
    models: tuple[str, ...] = ("*",)
    max_context_tokens: int | None = None
    max_output_tokens: int | None = None
    priority: int = 0
    parameters: Overrides | None = None
    fallback: bool = True
    created_s: float | None = None
    expires_s: float | None = None
    revoked_s: float | None = None
    not_after_s: float | None = None  # replaced by a newer key; works until then

    @property
    def ends_s(self) -> float | None:
        """When it stops working by itself: at its expiry or the end of its grace."""
        ends = [each for each in (self.expires_s, self.not_after_s) if each is not None]
        return min(ends, default=None)

    def state(self, wall_now: float) -> str:
        """Return `active`, `replaced` (works until `not_after_s`), `expired` or `revoked`."""
        if self.revoked_s is not None:
            return "revoked"
        if self.ends_s is not None and self.ends_s <= wall_now:
            return "expired"
        return "active" if self.not_after_s is None else "replaced"


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """One key as the file holds it."""

    info: KeyInfo
    digest: bytes


def as_node(record: KeyRecord) -> CommentedMap:
    """Return a record as the file writes it; what is not set is left out."""
    info = record.info
    node = CommentedMap(id=info.id, name=info.name, tenant=info.tenant, digest=record.digest.hex())
    node["models"] = CommentedSeq(info.models)
    node["models"].fa.set_flow_style()
    if info.max_context_tokens is not None:
        node["max_context"] = info.max_context_tokens
    if info.max_output_tokens is not None:
        node["max_output"] = info.max_output_tokens
    if info.priority:
        node["priority"] = info.priority
    if info.parameters is not None:
        node["parameters"] = _spelled(info.parameters)
    if not info.fallback:
        node["fallback"] = False
    for field, at in (("created", info.created_s), ("expires", info.expires_s)):
        if at is not None:
            node[field] = timestamp(at)
    return node


def _spelled(parameters: Overrides) -> CommentedMap:
    node = CommentedMap()
    for field in ("allow", "deny"):
        if names := sorted(getattr(parameters, field)):
            node[field] = names
    if parameters.max:
        node["max"] = dict(parameters.max)
    for field in ("media", "unknown_fields"):
        if (value := getattr(parameters, field)) is not None:
            node[field] = value.value
    return node


def timestamp(wall: float) -> str:
    """Return a wall time as `2026-11-21T09:30:00Z`."""
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# --- reading --------------------------------------------------------------------------------------


def parse_records(path: Path, document: object) -> list[KeyRecord]:
    """Check the whole document; all findings at once."""
    if document is None:
        return []
    if not isinstance(document, CommentedMap):
        raise ConfigError([f"{path}:1:1: error: expected a mapping with version and keys"])
    findings: list[str] = []
    where = _Where(path, findings)
    where.unknown(document, ("version", "keys"))
    if document.get("version", 1) != 1:
        where.report(document, "version", "this gateway reads version 1")
    nodes = document.get("keys") or []
    if not isinstance(nodes, list):
        where.report(document, "keys", "expected a list of keys")
        nodes = []
    records: dict[str, KeyRecord] = {}
    for index, node in enumerate(nodes):
        record = _record(where, nodes, index, node)
        if record is None:
            continue
        if record.info.id in records:
            where.report(node, "id", f"the id {record.info.id} appears twice")
        records[record.info.id] = record
    if findings:
        raise ConfigError(findings)
    return list(records.values())


@dataclass(frozen=True, slots=True)
class _Where:
    """Collects findings with their place in the file."""

    path: Path
    findings: list[str]

    def report(self, node: Any, key: object, message: str) -> None:
        """Add a finding at a mapping's key or a list's index; else at the node itself."""
        line, column = node.lc.line, node.lc.col
        with suppress(KeyError, AttributeError, TypeError):
            place = node.lc.key if isinstance(node, CommentedMap) else node.lc.item
            line, column = place(key)
        self.findings.append(f"{self.path}:{line + 1}:{column + 1}: error: {message}")

    def unknown(self, node: CommentedMap, known: tuple[str, ...]) -> None:
        """Report every key that is not one of `known`."""
        for key in node:
            if key not in known:
                close = get_close_matches(str(key), known, n=1)
                hint = f"; did you mean {close[0]}?" if close else ""
                self.report(node, key, f"unknown setting {str(key)[:64]!r}{hint}")


def _record(where: _Where, nodes: Any, index: int, node: object) -> KeyRecord | None:
    """Check one entry of the list; None when it has findings."""
    if not isinstance(node, CommentedMap):
        where.report(nodes, index, "expected a mapping with id, name and digest")
        return None
    before = len(where.findings)
    where.unknown(node, tuple(_FIELDS))
    values: dict[str, Any] = {}
    for name, (target, parse) in _FIELDS.items():
        value = node.get(name)
        if value is None:
            if name in ("id", "name", "digest"):
                where.report(node, name, f"the key has no {name}")
            continue
        try:
            values[target] = parse(value)
        except ValueError as error:
            where.report(node, name, f"{name}: {error}")
    if len(where.findings) > before:
        return None
    digest = values.pop("digest")
    return KeyRecord(KeyInfo(**{"tenant": values["name"], **values}), digest)


def _matching(pattern: re.Pattern[str], what: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        # YAML reads an all-digit id as a number, and drops a leading zero from none that is quoted.
        if not isinstance(value, str):
            raise ValueError(f"expected {what}, in quotes")
        if not pattern.fullmatch(value):
            raise ValueError(f"expected {what}")
        return value

    return parse


def _words(value: object) -> tuple[str, ...]:
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, list) or not all(isinstance(each, str) for each in patterns):
        raise ValueError('expected a list of names or globs, such as ["qwen3-*"]')
    return tuple(patterns)


def _number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError("expected a whole number")
    return value


def _yes_or_no(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def _parameters(value: object) -> Overrides:
    try:
        return overrides_of(ParametersConfig.model_validate(value))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{where}: {first['msg']}" if where else first["msg"]) from None


def read_limit(value: object) -> int:
    """Return the tokens of `4096` or `32k`; ValueError when that is none, or nothing."""
    tokens = parse_tokens(value)
    if tokens < 1:
        raise ValueError("must be at least 1")
    return tokens


def _time(value: object) -> float:
    """Read ISO 8601; a time without a zone is UTC, a day begins at midnight."""
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day, tzinfo=UTC)
    if not isinstance(value, datetime):
        raise ValueError("expected a time such as 2026-11-21T09:30:00Z")
    return (value if value.tzinfo is not None else value.replace(tzinfo=UTC)).timestamp()


# Of a key's name and tenant; ValueError for another. A surrogate is an argument that was not UTF-8.
read_name = _matching(
    re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]{1,128}"), "a text of 1 to 128 characters on one line"
)

_FIELDS: Final[Mapping[str, tuple[str, Callable[[object], object]]]] = {
    "id": ("id", _matching(_ID, "8 lower-case letters or digits")),
    "name": ("name", read_name),
    "tenant": ("tenant", read_name),
    "digest": ("digest", lambda value: bytes.fromhex(_matching(_DIGEST, "64 hex digits")(value))),
    "models": ("models", _words),
    "max_context": ("max_context_tokens", read_limit),
    "max_output": ("max_output_tokens", read_limit),
    "priority": ("priority", _number),
    "parameters": ("parameters", _parameters),
    "fallback": ("fallback", _yes_or_no),
    "created": ("created_s", _time),
    "expires": ("expires_s", _time),
    "revoked": ("revoked_s", _time),
    "not_after": ("not_after_s", _time),
}
