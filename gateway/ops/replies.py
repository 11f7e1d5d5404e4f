"""How the admin listener answers: plain, JSON, or a problem."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

import msgspec
from starlette.responses import Response

_HEADERS: Final = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def problem(
    status: HTTPStatus, code: str, detail: str, headers: dict[str, str] | None = None
) -> Response:
    """Return an error as RFC 9457 problem details; `code` is the machine's word for it."""
    body = {
        "type": "about:blank",
        "title": status.phrase,
        "status": status.value,
        "code": code,
        "detail": detail,
    }
    return reply(msgspec.json.encode(body), "application/problem+json", status, headers)


def json_reply(value: object) -> Response:
    """Return a value as JSON."""
    return reply(msgspec.json.encode(value), "application/json")


def reply(
    body: bytes,
    content_type: str,
    status: HTTPStatus = HTTPStatus.OK,
    headers: dict[str, str] | None = None,
) -> Response:
    """Return a reply that is not cached, not embedded and not sniffed."""
    every = {**_HEADERS, "content-type": content_type, **(headers or {})}
    return Response(body, status_code=status, headers=every)
