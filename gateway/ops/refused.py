"""Why a request was refused before it reached a model, as `vllm-gateway explain` reads it.

Keys are added, never renamed or removed, within one `schema_version`.
"""

from __future__ import annotations

from typing import TypedDict

from gateway.ingress.early import Refused
from gateway.ops.explain import SCHEMA_VERSION, Book, SettingTold
from gateway.ops.moment import rfc3339


class RefusedTold(TypedDict):
    """One refused request. Key and tenant are null where it had no valid key."""

    schema_version: int
    id: str
    at: str
    state: str  # always refused
    sentence: str
    method: str
    path: str
    key_id: str | None
    tenant: str | None
    status: int
    code: str | None
    message: str
    setting: SettingTold | None


def refused_told(refused: Refused, book: Book) -> RefusedTold:
    """Return all that is kept of a refused request."""
    asked = f"{refused.method} {refused.path}".strip() or "a request"
    return RefusedTold(
        schema_version=SCHEMA_VERSION,
        id=refused.id,
        at=rfc3339(refused.wall_at),
        state="refused",
        sentence=f"{refused.id}: {asked} was refused: {refused.status} {refused.code}.",
        method=refused.method,
        path=refused.path,
        key_id=refused.key_id,
        tenant=refused.tenant,
        status=refused.status,
        code=refused.code,
        message=refused.message,
        setting=book.told(refused.setting),
    )
