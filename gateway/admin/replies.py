"""How the admin listener answers: plain, JSON, or a problem."""

from __future__ import annotations

import asyncio
import gzip
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Final, NotRequired

import msgspec
from starlette.responses import Response
from typing_extensions import TypedDict

PROBLEM: Final = "application/problem+json"
_HEADERS: Final = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}

_LARGE: Final = 64 * 1024  # bytes of a body that are worth packing
_GZIP: Final = re.compile(r"(?:^|[ ,])gzip(?! *; *q=0(?:\.0*)? *(?:,|$))", re.IGNORECASE)

# RFC 9110 renamed these; what they are called may not depend on the version of Python.
_RENAMED: Final = {413: "Content Too Large", 422: "Unprocessable Content"}


def phrase(status: HTTPStatus) -> str:
    """Return what a status is called (RFC 9110)."""
    return _RENAMED.get(status, status.phrase)


class FieldProblem(TypedDict):
    """What is wrong with one field; `pointer` is RFC 6901, or the name of a parameter."""

    pointer: str
    detail: str


class ProblemDetails(TypedDict):
    """An error as RFC 9457 describes it; `code` is the machine's word for it."""

    type: str
    title: str
    status: int
    code: str
    detail: str
    errors: NotRequired[list[FieldProblem]]


def problem(
    status: HTTPStatus,
    code: str,
    detail: str,
    headers: Mapping[str, str] | None = None,
    errors: Sequence[Mapping[str, str]] = (),
) -> Response:
    """Return an error as RFC 9457 problem details."""
    told: dict[str, object] = {
        "type": "about:blank",
        "title": phrase(status),
        "status": status.value,
        "code": code,
        "detail": detail,
    }
    if errors:
        told["errors"] = list(errors)
    return reply(msgspec.json.encode(told), PROBLEM, status, headers)


def json_reply(value: object, headers: Mapping[str, str] | None = None) -> Response:
    """Return a value as JSON."""
    return reply(msgspec.json.encode(value), "application/json", headers=headers)


def reply(
    body: bytes,
    content_type: str,
    status: HTTPStatus = HTTPStatus.OK,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return a reply that is not cached, not embedded and not sniffed."""
    every = {**_HEADERS, "content-type": content_type, **(headers or {})}
    return Response(body, status_code=status, headers=every)


async def packed(response: Response, accepted: str) -> Response:
    """Return a large reply packed, if the `Accept-Encoding` of who asks names gzip.

    It is done beside the loop, as the last hour of 500 pools takes a tenth of a second. Cancel: it is dropped.
    """
    body = bytes(response.body)
    if len(body) < _LARGE or not _GZIP.search(accepted):
        return response
    small = await asyncio.to_thread(gzip.compress, body, compresslevel=1)
    headers = {**response.headers, "content-encoding": "gzip", "vary": "accept-encoding"}
    del headers["content-length"]  # it is that of the large body
    return Response(small, response.status_code, headers)
