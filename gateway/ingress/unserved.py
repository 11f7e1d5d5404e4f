"""What the public routes do not serve: unknown URLs, other methods, wrong keys; and preflights."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from gateway.core.addresses import Proxies
from gateway.core.errors import (
    AccessError,
    GatewayError,
    MethodNotAllowed,
    OriginNotAllowed,
    RequestError,
    UnknownUrl,
)
from gateway.core.types import Dialect
from gateway.ingress.cors import is_preflight
from gateway.ingress.handler import Handler
from gateway.ingress.hints import dialect_of, hint
from gateway.ingress.server import Ingress
from gateway.observe.redact import redact
from gateway.wire.calls import ENDPOINTS
from gateway.wire.replies import error_body, error_headers

_WEBSOCKET: Final = "sec-websocket-key"  # the reader drops `upgrade`
_SHOWN_CHARS: Final = 128  # of a path or an origin in an error


class WebSocketRefused(RequestError):
    """A WebSocket to a path that takes POST: 426, for which Codex goes on by POST at once (405: after 7 s)."""

    status = 426
    default_code = "websocket_not_served"


@dataclass(frozen=True, slots=True)
class Unserved:
    """The exception handlers of the public app."""

    handler: Handler
    ingress: Ingress

    async def unknown(self, request: Request, error: Exception) -> Response:
        """Answer what no route takes: preflights, other methods (405), WebSockets (426), unknown URLs (404)."""
        assert isinstance(error, HTTPException)
        if is_preflight(request.method, request.headers.raw):
            return await self._preflight(request)
        method, path = request.method, _path(request)
        refusal: GatewayError
        if _takes_post(request) and _WEBSOCKET in request.headers:
            refusal = WebSocketRefused("This gateway serves no WebSocket here; use POST over HTTP.")
        elif _takes_post(request):
            refusal = MethodNotAllowed(f"{method} is not allowed here; use POST.")
        elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            refusal = MethodNotAllowed(f"{method} is not allowed here; use GET.")
        else:
            shown = redact(path[:_SHOWN_CHARS])  # a key may have been pasted into it
            refusal = UnknownUrl(f"Unknown request URL: {method} {shown}. {hint(path)}")
        return await self.refuse(request, refusal)

    async def _preflight(self, request: Request) -> Response:
        cors = self.ingress.cors
        if cors is None:
            off = "Calls from web pages of other origins are off; the setting `cors.origins` allows them."
            return await self.refuse(request, MethodNotAllowed(off))
        headers = cors.preflight(request.headers.raw)
        if headers is None:
            origin = request.headers["origin"][:_SHOWN_CHARS]
            foreign = OriginNotAllowed(f"The origin {origin} is not in the setting `cors.origins`.")
            return await self.refuse(request, foreign)
        return Response(status_code=HTTPStatus.NO_CONTENT, headers=headers)

    async def refuse(self, request: Request, error: Exception) -> Response:
        """Answer one of our errors; it is counted, logged and kept to be explained."""
        assert isinstance(error, GatewayError)
        client = client_of(request, self.handler.settings.proxies)
        if isinstance(error, AccessError):
            error = self.handler.failed_keys.judge(error, client)
        headers = {name.decode(): value.decode() for name, value in error_headers(error)}
        if isinstance(error, MethodNotAllowed):
            headers["allow"] = "POST" if _takes_post(request) else "GET, HEAD"
        elif isinstance(error, WebSocketRefused):
            headers |= {"upgrade": "HTTP/1.1", "connection": "upgrade"}  # RFC 9110, 15.5.22
        request_id, path = request.state.request_id, _path(request)
        if (dialect := dialect_of(path)) is Dialect.MESSAGES:
            headers["request-id"] = request_id  # Anthropic's SDKs read this one
        self.handler.early.settle(error, request_id, (request.method, path), client)
        body = error_body(error, request_id, dialect)
        return Response(body, status_code=error.status, headers=headers)


def client_of(request: Request, proxies: Proxies) -> str | None:
    """Return the client's address, behind these proxies; None on a UNIX socket."""
    peer = request.client
    return proxies.client_of(peer.host if peer else None, request.headers.raw)


def _path(request: Request) -> str:
    raw: bytes = request.scope["raw_path"]
    return raw.decode("latin-1")


def _takes_post(request: Request) -> bool:
    return request.scope["raw_path"] in ENDPOINTS
