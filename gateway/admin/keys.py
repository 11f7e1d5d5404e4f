"""API keys and tiers. A key's secret is in the answer that makes it, and nowhere else.

Where keys are kept is the business of their store: a file, or the Redis that replicas share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from math import inf
from typing import Any, Final, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from gateway.access.changes import created, revoked, rotated, updated
from gateway.access.keyerrors import (
    BadSettings,
    KeyStoreError,
    NoSuchKey,
    VersionConflict,
    WrongState,
)
from gateway.access.keystore import CreatedKey, KeyStore
from gateway.access.records import KeyKind, settings_told
from gateway.access.told import key_told, listed_told, values_told
from gateway.admin.desk import Desk
from gateway.admin.endpoint import (
    Asked,
    Body,
    DryRunBody,
    DryRunQuery,
    Listing,
    ListQuery,
    Problem,
    Query,
    Whole,
)
from gateway.config.keysettings import KeySettings
from gateway.config.units import MOST_S
from gateway.core.errors import ConfigError
from gateway.core.roles import Role
from gateway.store.shared import StoreUnavailable

_NOT_SETTINGS: Final = frozenset({"reason", "dry_run"})


class KeyBody(DryRunBody):
    """Settings of a key, in the words of the keys file; null takes one away, so that its tier or the default holds."""

    name: str | None = Field(default=None, description="Who the key is for.")
    tenant: str | None = Field(default=None, description="Who is billed. Default: the name.")
    owner: str | None = Field(default=None, description="Who answers for it.")
    role: Role | None = Field(default=None, description="Of a key of kind admin.")
    tier: str | None = Field(default=None, description="A name of `tiers`.")
    models: list[str] | None = Field(default=None, description="That it may use, as globs.")
    deny: list[str] | None = Field(default=None, description="That it may not use, as globs.")
    addresses: list[str] | None = Field(default=None, description="Of clients that may use it.")
    max_context: Whole | str | None = Field(default=None, description="Prompt plus output tokens.")
    max_output: Whole | str | None = Field(default=None, description="Output tokens of a reply.")
    priority: Whole | None = Field(default=None, description="Higher ones go first.")
    fallback: bool | None = Field(default=None, description="Whether another pool may answer.")
    parameters: dict[str, Any] | None = Field(default=None, description="As in the settings file.")
    limits: dict[str, Any] | None = Field(default=None, description="As in the settings file.")
    metadata: dict[str, str] | None = Field(default=None, description="Notes of yours.")
    expires: str | None = Field(default=None, description="A time in RFC 3339.")

    def told(self) -> dict[str, object]:
        """Return what is named, as the store takes it."""
        named = self.model_dump(mode="json", include=self.model_fields_set - _NOT_SETTINGS)
        return dict(named)


class NewKeyBody(KeyBody):
    """Settings of a new key."""

    name: str = Field(description="Who the key is for.")
    kind: KeyKind | None = Field(default=None, description="Default: inference.")


class RotateBody(DryRunBody):
    """How a key gets another secret."""

    grace_s: float = Field(
        default=86_400.0,
        ge=0,
        le=MOST_S,
        allow_inf_nan=False,
        description="How long the secret before it works. 0: no longer.",
    )


class KeyTold(TypedDict):
    """What is kept of a key, without its secrets. `settings` are those that it sets itself."""

    id: str
    kind: str
    name: str
    tenant: str
    owner: NotRequired[str]
    role: NotRequired[str]
    tier: NotRequired[str]
    metadata: NotRequired[dict[str, str]]
    state: str
    settings: dict[str, Any]
    created: NotRequired[str]
    changed: NotRequired[str]
    expires: NotRequired[str]
    revoked: NotRequired[str]
    not_after: NotRequired[str]
    previous_secret_until: str | None
    last_used: NotRequired[str | None]
    version: str


class ListedKey(KeyTold):
    """A key of the list. `effective`: what holds for it, of its own, its tier and the defaults."""

    ends: str | None
    effective: dict[str, Any]


class SecretTold(TypedDict):
    """A key that was made, or has another secret. `key` is shown this once; null in a dry run."""

    id: str
    key: str | None
    record: KeyTold


class ValueTold(TypedDict):
    """A value that holds; `origin` is key, tier or default."""

    value: Any
    origin: str


class EffectiveTold(TypedDict):
    """What holds for a key."""

    id: str
    tier: str | None
    settings: dict[str, ValueTold]


class TierTold(TypedDict):
    """A template of keys' settings."""

    name: str
    settings: dict[str, Any]


async def get_keys(desk: Desk, asked: Asked[ListQuery, Body]) -> Listing:
    """Answer every key, the oldest first, with what holds for it."""
    store = _store(desk)
    with _refusals():
        records, used_s = await store.list(), await store.uses()
    tiers, now = desk.loaded().config.tiers, desk.clock.wall()
    return Listing(
        records,
        lambda each: str(each.id),
        lambda each: listed_told(each, tiers, now, used_s.get(each.id)),
    )


async def get_key(desk: Desk, asked: Asked[Query, Body]) -> dict[str, Any]:
    """Answer one key."""
    store = _store(desk)
    with _refusals():
        record = await store.get(asked.names["key"])
        used_s = await store.last_use(record.id)
    return key_told(record, desk.clock.wall(), used_s)


async def get_effective(desk: Desk, asked: Asked[Query, Body]) -> EffectiveTold:
    """Answer what holds for a key, each value with its origin."""
    with _refusals():
        record = await _store(desk).get(asked.names["key"])
    values: Any = values_told(record, desk.loaded().config.tiers)
    return EffectiveTold(id=record.id, tier=record.tier, settings=values)


async def create(desk: Desk, asked: Asked[DryRunQuery, NewKeyBody]) -> SecretTold:
    """Make a key."""
    store, tiers, now = _store(desk), desk.loaded().config.tiers, desk.clock.wall()
    told = {name: value for name, value in asked.body.told().items() if value is not None}
    with _refusals():
        if asked.dry_run:
            return _secret(desk, created(told, (), b"", tiers, now), dry_run=True)
        return _secret(desk, await store.create(told))


async def update(desk: Desk, asked: Asked[DryRunQuery, KeyBody]) -> dict[str, Any]:
    """Change a key's settings; what is not named stays."""
    store, key_id, told = _store(desk), asked.names["key"], asked.body.told()
    tiers, now = desk.loaded().config.tiers, desk.clock.wall()
    with _refusals():
        if asked.dry_run:
            return key_told(updated(await store.get(key_id), told, tiers, now), now)
        return key_told(await store.update(key_id, told, _version(asked)), now)


async def rotate(desk: Desk, asked: Asked[DryRunQuery, RotateBody]) -> SecretTold:
    """Give a key another secret; its id, limits and usage stay."""
    store, key_id, grace_s = _store(desk), asked.names["key"], asked.body.grace_s
    with _refusals():
        if asked.dry_run:
            made = rotated(await store.get(key_id), grace_s, b"", desk.clock.wall())
            return _secret(desk, made, dry_run=True)
        return _secret(desk, await store.rotate(key_id, grace_s, _version(asked)))


async def revoke(desk: Desk, asked: Asked[DryRunQuery, DryRunBody]) -> dict[str, Any]:
    """End a key for good."""
    store, key_id, now = _store(desk), asked.names["key"], desk.clock.wall()
    with _refusals():
        if asked.dry_run:
            return key_told(revoked(await store.get(key_id), now), now)
        return key_told(await store.revoke(key_id, _version(asked)), now)


async def get_tiers(desk: Desk, asked: Asked[ListQuery, Body]) -> Listing:
    """Answer the templates of keys' settings."""
    return Listing(sorted(desk.loaded().config.tiers.items()), lambda each: str(each[0]), _tier)


async def subject(desk: Desk, names: Mapping[str, str]) -> Mapping[str, Any] | None:
    """Return what can be changed of a key; its version is its ETag."""
    store = desk.keys()
    if store is None:
        return None
    try:
        record = await store.get(names["key"])
    except (KeyStoreError, ConfigError, StoreUnavailable):
        return None
    return key_told(record, -inf)  # whatever the time does to its state is no change


def _store(desk: Desk) -> KeyStore:
    store = desk.keys()
    if store is None:
        detail = "Authentication is off (`keys: none`), so there are no keys."
        raise Problem(HTTPStatus.CONFLICT, "no_keys", detail)
    return store


@contextmanager
def _refusals() -> Iterator[None]:
    """Have it told as a problem that the store refuses a change (404, 409, 412, 422) or does not answer (503)."""
    try:
        yield
    except NoSuchKey as error:
        raise Problem(HTTPStatus.NOT_FOUND, "key_not_found", str(error)) from None
    except BadSettings as error:
        errors = [{"pointer": f"/{name}", "detail": why} for name, why in error.wrong]
        status = HTTPStatus.UNPROCESSABLE_ENTITY
        raise Problem(status, "bad_settings", str(error), errors=errors) from None
    except VersionConflict as error:
        raise Problem(HTTPStatus.PRECONDITION_FAILED, "changed_since", str(error)) from None
    except WrongState as error:
        raise Problem(HTTPStatus.CONFLICT, "wrong_state", str(error)) from None
    except KeyStoreError as error:
        raise Problem(HTTPStatus.CONFLICT, "keys_unusable", str(error)) from None
    except ConfigError as error:
        detail = f"The keys cannot be read or written: {'; '.join(error.findings[:5])}"
        raise Problem(HTTPStatus.CONFLICT, "keys_unusable", detail) from error
    except StoreUnavailable as error:
        detail = (
            "The store shared by the replicas does not respond, and may have made the change. Send the same again to"
            " this gateway: no second key is made of it."
        )
        raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, "store_unavailable", detail) from error


def _version(asked: Asked[Any, Any]) -> str | None:
    """Return the one version that the sender saw, for the store to compare; `*` and lists were compared here."""
    seen = (asked.if_match or "").strip()
    one = len(seen) > 1 and seen[0] == seen[-1] == '"' and "," not in seen
    return seen[1:-1] if one else None


def _secret(desk: Desk, made: CreatedKey, *, dry_run: bool = False) -> SecretTold:
    told: Any = key_told(made.record, desk.clock.wall())
    return SecretTold(id=made.id, key=None if dry_run else made.key, record=told)


def _tier(row: tuple[str, KeySettings]) -> TierTold:
    return TierTold(name=row[0], settings=settings_told(row[1]))
