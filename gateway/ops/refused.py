"""Why a request was refused before it reached a model, as `vllm-gateway explain` reads it.

Keys are added, never renamed or removed, within one `schema_version`.
"""

from __future__ import annotations

from gateway.ingress.early import Refused, RefusedRequest
from gateway.ops.explain import SCHEMA_VERSION, Book, SettingTold
from gateway.ops.moment import rfc3339


class RefusedTold(RefusedRequest):
    """One refused request, as people read it."""

    schema_version: int
    at: str
    state: str  # always refused
    sentence: str
    setting: SettingTold | None


def refused_told(refused: Refused, book: Book) -> RefusedTold:
    """Return all that is kept of a refused request."""
    request = refused.request
    asked = f"{request['method']} {request['path']}".strip() or "a request"
    ending = f"{request['status']} {request['code']}"
    return {
        **request,
        "schema_version": SCHEMA_VERSION,
        "at": rfc3339(refused.wall_at),
        "state": "refused",
        "sentence": f"{request['id']}: {asked} was refused: {ending}.",
        "setting": book.told(refused.setting),
    }
