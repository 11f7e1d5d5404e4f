"""The rows of keys and tiers."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from gateway.admin import keys
from gateway.admin.endpoint import DryRunBody, DryRunQuery, Endpoint, ListQuery, Method
from gateway.core.roles import Role

_KEYS: Final = "/admin/v1/keys"
_ANY: Final = {
    HTTPStatus.CONFLICT: "no_keys, keys_unusable",
    HTTPStatus.SERVICE_UNAVAILABLE: "store_unavailable",
}
_ONE: Final = {**_ANY, HTTPStatus.NOT_FOUND: "key_not_found"}
_SETTINGS: Final = {HTTPStatus.UNPROCESSABLE_ENTITY: "bad_settings"}

KEYS: Final = (
    Endpoint(
        method=Method.GET, path=_KEYS, name="keys", role=Role.VIEWER,
        does="List the keys, the oldest first, without their secrets.", handler=keys.get_keys,
        answer=keys.ListedKey, rows=True, query=ListQuery, refusals=_ANY, verb="keys list",
    ),
    Endpoint(
        method=Method.POST, path=_KEYS, name="create_key", role=Role.ADMIN,
        does="Make a key. The answer shows it this once.", handler=keys.create,
        answer=keys.SecretTold, query=DryRunQuery, body=keys.NewKeyBody,
        refusals={**_ANY, **_SETTINGS}, verb="keys create",
    ),
    Endpoint(
        method=Method.GET, path=f"{_KEYS}/{{key}}", name="key", role=Role.VIEWER,
        does="Read what is kept of one key, without its secret.", handler=keys.get_key,
        answer=keys.KeyTold, subject=keys.subject, refusals=_ONE, verb="keys show",
    ),
    Endpoint(
        method=Method.PATCH, path=f"{_KEYS}/{{key}}", name="update_key", role=Role.ADMIN,
        does="Change a key's settings; what is not named stays.", handler=keys.update,
        answer=keys.KeyTold, query=DryRunQuery, body=keys.KeyBody, subject=keys.subject,
        refusals={**_ONE, **_SETTINGS}, verb="keys update",
    ),
    Endpoint(
        method=Method.GET, path=f"{_KEYS}/{{key}}/effective", name="effective_key", role=Role.VIEWER,
        does="Read what holds for a key, and whether it, its tier or a default says so.",
        handler=keys.get_effective, answer=keys.EffectiveTold, refusals=_ONE,
        verb="keys effective",
    ),
    Endpoint(
        method=Method.POST, path=f"{_KEYS}/{{key}}:rotate", name="rotate_key", role=Role.ADMIN,
        does="Give a key another secret. Its id, limits and usage stay.", handler=keys.rotate,
        answer=keys.SecretTold, query=DryRunQuery, body=keys.RotateBody, subject=keys.subject,
        refusals={**_ONE, HTTPStatus.CONFLICT: "wrong_state, no_keys, keys_unusable"},
        verb="keys rotate",
    ),
    Endpoint(
        method=Method.POST, path=f"{_KEYS}/{{key}}:revoke", name="revoke_key", role=Role.ADMIN,
        does="End a key for good.", handler=keys.revoke, answer=keys.KeyTold, query=DryRunQuery,
        body=DryRunBody, subject=keys.subject, refusals=_ONE, verb="keys revoke",
    ),
    Endpoint(
        method=Method.GET, path="/admin/v1/tiers", name="tiers", role=Role.VIEWER,
        does="List the templates of keys' settings.", handler=keys.get_tiers,
        answer=keys.TierTold, rows=True, query=ListQuery,
    ),
)  # fmt: skip
