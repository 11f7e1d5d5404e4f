"""The operators' listener: an app of its own, so that no route can be reached from the public side.

Guard (who, from where) -> the dashboard's files, or Router (the table of endpoints) -> handlers
"""

from __future__ import annotations

from functools import partial
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.access.failures import FailedKeys
from gateway.admin.desk import Desk
from gateway.admin.guard import Guard
from gateway.admin.page import page_routes
from gateway.admin.replies import phrase, problem
from gateway.admin.router import Router
from gateway.admin.table import TABLE


def admin_app(desk: Desk) -> Starlette:
    """Make the app of the admin listener."""
    config = desk.loaded().config
    failed = FailedKeys(
        config.limits.failed_keys, desk.clock.now, partial(desk.metrics.failed_key, "admin")
    )
    app = Starlette(
        routes=[*page_routes(), Route("/{path:path}", Router(desk, TABLE))],
        middleware=[
            Middleware(Guard, desk=desk, failed=failed, local_only=config.admin.listen.loopback)
        ],
        exception_handlers={HTTPException: _http_problem, Exception: _bug},
    )
    app.router.redirect_slashes = False  # a redirect would echo the Host header
    return app


async def _http_problem(request: Request, error: Exception) -> Response:
    """Answer what no endpoint sees: a body that did not arrive in time, a path that none can have."""
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    code = phrase(status).lower().replace(" ", "_")
    if status is HTTPStatus.NOT_FOUND:  # the path has a line end
        detail = "There is no such path here. GET /admin/openapi.json lists what there is."
    else:
        detail = "The request body did not arrive in time."
    return problem(status, code, detail)


async def _bug(request: Request, error: Exception) -> Response:
    """Answer a bug of ours; the server logs it."""
    detail = "Internal error. The gateway has logged it."
    return problem(HTTPStatus.INTERNAL_SERVER_ERROR, "bug", detail)
