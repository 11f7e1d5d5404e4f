"""The dashboard and the runbooks: files served from memory at `/`, `/dashboard/...` and `/runbooks/...`.

Anybody may load them: they hold no data. What the page shows, it asks of the API with a token of its user.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.admin.replies import reply
from gateway.admin.runbookpages import runbook_pages

FOLDER: Final = "/dashboard/"
_FILES: Final = Path(__file__).parents[1] / "dashboard"
_PAGE: Final = "index.html"
# The page runs and loads what is in these files, and nothing else: no inline script, no other host, and
# no text that a script could turn into markup (trusted types).
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_TYPES: Final[Mapping[str, str]] = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "LICENSE": "text/plain; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file; `etag` changes with its content."""

    body: bytes
    content_type: str
    etag: str


@cache
def assets() -> Mapping[str, Asset]:
    """Return every file by the path that it is served at."""
    found = {}
    for file in sorted(_FILES.rglob("*")):
        name = file.relative_to(_FILES).as_posix()
        if content_type := _TYPES.get(file.name.rpartition(".")[2]):
            found["/" if name == _PAGE else FOLDER + name] = _asset(file.read_bytes(), content_type)
    for path, page in runbook_pages():
        found[path] = _asset(page.encode(), _TYPES["html"])
    return found


def _asset(body: bytes, content_type: str) -> Asset:
    return Asset(body, content_type, f'"{hashlib.sha256(body).hexdigest()[:16]}"')


def page_routes() -> list[Route]:
    """Return the routes of the dashboard and the runbooks: GET and HEAD, and nothing else."""
    return [Route(path, _serve, methods=["GET"]) for path in assets()]


async def _serve(request: Request) -> Response:
    asset = assets()[request.scope["path"]]
    # A browser asks each time whether its copy is current, so that an upgrade shows at once.
    headers = {"etag": asset.etag, "cache-control": "no-cache", "content-security-policy": _POLICY}
    if request.headers.get("if-none-match") == asset.etag:
        return reply(b"", asset.content_type, HTTPStatus.NOT_MODIFIED, headers)
    return reply(asset.body, asset.content_type, headers=headers)
