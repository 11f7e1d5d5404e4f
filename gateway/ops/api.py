"""The operators' listener: metrics, overview, why requests wait, operators' orders, liveness, readiness.

Its own Starlette app, so that no route can be reached from the public side. With a token configured
everything but /livez and /readyz asks for it. Bound to loopback, it answers only to names of this
machine: a web page must not read it through a name that it points here (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Final

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.access.failures import FailedKeys
from gateway.adapters.keepers import Adapters
from gateway.config.load import Loaded
from gateway.core.aio import Clock
from gateway.heal.orders import Orders
from gateway.ingress.early import Early
from gateway.ingress.routes import Readiness
from gateway.observe.metrics import Metrics
from gateway.ops.adapters import OrderAdapters
from gateway.ops.dryrun import Deciding
from gateway.ops.explain import Book
from gateway.ops.moment import Moment
from gateway.ops.operate import Operate
from gateway.ops.overview import Facts, overview
from gateway.ops.reasons import BadParameter, Reasons, bad_parameter
from gateway.ops.replies import json_reply, problem, reply
from gateway.pools.table import PoolTable
from gateway.rollout.rollouts import Rollout

_OPEN_PATHS: Final = frozenset({"/livez", "/readyz"})
_LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
_METHODS: Final = frozenset({"GET", "POST"})


def admin_app(  # noqa: PLR0913 - all that is shown
    *,
    table: PoolTable,
    metrics: Metrics,
    clock: Clock,
    loaded: Callable[[], Loaded],
    ready: Callable[[], Readiness],
    deciding: Deciding,
    early: Early,
    trial: Callable[[str], Rollout | None],
    orders: Orders,
    adapters: Adapters,
    file: Path | None = None,
) -> Starlette:
    """Make the app of the admin listener.

    `loaded` is asked each time, so that a reload shows; the token may change with it.
    """
    started_at = clock.now()
    reasons = Reasons(
        deciding, early, clock, lambda: Book(loaded(), file), draining=lambda: _draining(ready())
    )

    async def get_metrics(request: Request) -> Response:
        made, content_type = metrics.pieces(request.headers.get("accept", ""))
        body = bytearray()
        for piece in made:
            body += piece
            await asyncio.sleep(0)  # streams come first
        return reply(bytes(body), content_type)

    async def get_overview(request: Request) -> Response:
        facts = Facts(
            table=table,
            metrics=metrics,
            config=loaded().config,
            file=file,
            draining=_draining(ready()),
            started_at=started_at,
            gate=deciding.gate,
            units=orders.supervisor.units,
            holds=orders.supervisor.holds,
            trial=trial,
        )
        shown = overview(facts, Moment(clock.now(), clock.wall()))
        return json_reply(shown)

    async def livez(request: Request) -> Response:
        return reply(b"ok\n", "text/plain; charset=utf-8")

    async def readyz(request: Request) -> Response:
        state = ready()
        text = "ok\n" if state.ready else "not ready\n"
        if "verbose" in request.query_params:
            text = state.text() + text
        status = HTTPStatus.OK if state.ready else HTTPStatus.SERVICE_UNAVAILABLE
        return reply(text.encode(), "text/plain; charset=utf-8", status)

    def token() -> str | None:
        secret = loaded().config.admin.token
        return secret.get_secret_value() if secret is not None else None

    config = loaded().config
    failed = FailedKeys(config.limits.failed_keys, clock.now, partial(metrics.failed_key, "admin"))
    app = Starlette(
        routes=[
            Route("/metrics", get_metrics),
            Route("/admin/v1/overview", get_overview),
            *reasons.routes(),
            *Operate(orders).routes(),
            *OrderAdapters(adapters, table, clock.wall).routes(),
            Route("/livez", livez),
            Route("/readyz", readyz),
        ],
        middleware=[
            Middleware(Guard, token=token, failed=failed, local_only=config.admin.listen.loopback)
        ],
        exception_handlers={
            HTTPException: _http_problem,
            BadParameter: bad_parameter,
            Exception: _bug,
        },
    )
    app.router.redirect_slashes = False  # a redirect would echo the Host header
    return app


class Guard:
    """Refuses, before any route is looked up: foreign hosts 421, no token 401, odd methods 405.

    A POST has to be JSON, which no page of another site can send unasked (it is not a "simple"
    request), and must not come from such a page (403).
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: Callable[[], str | None],
        failed: FailedKeys,
        local_only: bool,
    ) -> None:
        self._app = app
        self._failed = failed
        self._token = token
        self._local_only = local_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a refusal, or pass the request on."""
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if self._local_only and not _is_local(headers.getlist("host")):
            return problem(
                HTTPStatus.MISDIRECTED_REQUEST,
                "unknown_host",
                "This listener accepts only the host names localhost, 127.0.0.1 and [::1].",
            )
        if scope["path"] not in _OPEN_PATHS and not self._may_read(headers):
            if wait_s := self._failed.count(scope["client"][0] if scope["client"] else None):
                return problem(
                    HTTPStatus.TOO_MANY_REQUESTS,
                    "too_many_failed_tokens",
                    "Too many requests without the admin token came from your address.",
                    {"retry-after": f"{wait_s:.0f}"},
                )
            return problem(
                HTTPStatus.UNAUTHORIZED,
                "unauthorized",
                "Send the admin token: Authorization: Bearer <admin.token>.",
                {"www-authenticate": "Bearer"},
            )
        if scope["method"] not in _METHODS:
            return problem(
                HTTPStatus.METHOD_NOT_ALLOWED,
                "method_not_allowed",
                "Use GET to read and POST to change something.",
                {"allow": "GET, POST"},
            )
        return _foreign(headers) if scope["method"] == "POST" else None

    def _may_read(self, headers: Headers) -> bool:
        token = self._token()
        if token is None:
            return True
        given = headers.getlist("authorization")
        if len(given) != 1:
            return False
        scheme, _, secret = given[0].partition(" ")
        matches = hmac.compare_digest(secret.strip().encode(), token.encode())
        return matches and scheme.lower() == "bearer"


def _foreign(headers: Headers) -> Response | None:
    """Return the refusal of a POST that a web page of another site may have made."""
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") or "origin" in headers:
        detail = "Requests from web pages of other sites are refused."
        return problem(HTTPStatus.FORBIDDEN, "foreign_origin", detail)
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        detail = "Send JSON, with content-type: application/json."
        return problem(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "not_json", detail)
    return None


async def _http_problem(request: Request, error: Exception) -> Response:
    """Answer what Starlette itself refuses: an unknown path, a method that it does not have."""
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    known = ", ".join(route.path for route in request.app.routes)
    code = status.phrase.lower().replace(" ", "_")
    timeout = status is HTTPStatus.REQUEST_TIMEOUT
    detail = "The request body did not arrive in time." if timeout else f"Known paths: {known}."
    return problem(status, code, detail, dict(error.headers or {}))


async def _bug(request: Request, error: Exception) -> Response:
    """Answer a bug of ours; the server logs it."""
    detail = "Internal error. The gateway has logged it."
    return problem(HTTPStatus.INTERNAL_SERVER_ERROR, "bug", detail)


def _is_local(hosts: list[str]) -> bool:
    """Whether the one Host header names this machine, with or without a port."""
    if len(hosts) != 1:
        return False
    host = hosts[0].lower()
    name, colon, port = host.rpartition(":")
    return host in _LOCAL_NAMES or (bool(colon) and port.isdecimal() and name in _LOCAL_NAMES)


def _draining(state: Readiness) -> bool:
    return any(name == "accepting" and not passed for name, passed, _ in state.checks)
