"""Who may come near the admin listener at all, before any route is looked up.

Bound to loopback, it answers only to names of this machine: a web page must not read it through a name
that it points here (DNS rebinding), and must not change anything.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Iterator
from functools import lru_cache
from http import HTTPStatus
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.access.failures import FailedKeys
from gateway.access.keys import KeyRing, check_address
from gateway.access.records import KeyKind
from gateway.admin.desk import Desk
from gateway.admin.endpoint import Actor
from gateway.admin.page import assets
from gateway.admin.replies import problem
from gateway.config.process import AdminConfig
from gateway.core.addresses import Proxies
from gateway.core.errors import GatewayError
from gateway.core.roles import ON_THIS_MACHINE, Role
from gateway.ops.upgrading import Upgrades

log = logging.getLogger(__name__)

OPEN_PATHS: Final = frozenset({"/livez", "/readyz"})
_LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
_READ: Final = frozenset({"GET", "HEAD", "OPTIONS"})
UPGRADE: Final = "/admin/v1/upgrade"
_SOCKET: Final = "UNIX socket"


class Guard:
    """Refuses foreign hosts (421), no token (401), changes by pages of other sites (403).

    Of whom it lets pass, `scope["state"]["actor"]` tells who it is; nobody on a path that is open to all.
    The desk is asked each time, because a reload may change the tokens, the keys and the trusted proxies.
    """

    def __init__(self, app: ASGIApp, desk: Desk, failed: FailedKeys, *, local_only: bool) -> None:
        self._app = app
        self._desk = desk
        self._failed = failed
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
        peer = scope["client"][0] if scope["client"] else None
        address = _proxies(self._desk.loaded().config.trusted_proxies).client_of(peer, headers.raw)
        actor = self._actor(headers, address)
        path = scope["path"]
        if actor is None and path not in OPEN_PATHS and path not in assets():
            return self._no_token(address)
        scope.setdefault("state", {})["actor"] = actor
        if scope["method"] in _READ:
            return None
        return _foreign(headers) or _not_now(path, self._desk.upgrades)

    def _no_token(self, address: str | None) -> Response:
        if wait_s := self._failed.count(address):
            return problem(
                HTTPStatus.TOO_MANY_REQUESTS,
                "too_many_failed_tokens",
                "Too many requests without the admin token came from your address.",
                {"retry-after": f"{wait_s:.0f}"},
            )
        log.warning(
            "%s sent no valid token to the admin listener",
            address or _SOCKET,
            extra={"event": "admin_refused", "client": address},
        )
        return problem(
            HTTPStatus.UNAUTHORIZED,
            "unauthorized",
            "This is the admin listener. Send its token: Authorization: Bearer <admin.token>.",
            {"www-authenticate": "Bearer"},
        )

    def _actor(self, headers: Headers, address: str | None) -> Actor | None:
        """Return who asks; None: nobody who is known."""
        tokens = list(_tokens(self._desk.loaded().config.admin))
        where = address or _SOCKET
        if not tokens:
            return Actor(ON_THIS_MACHINE, Role.ADMIN, where)
        given = headers.getlist("authorization")
        if len(given) != 1:
            return None
        scheme, _, secret = given[0].partition(" ")
        sent = secret.encode("latin-1").strip()  # the bytes that came: a token is sent as UTF-8
        found = [each for each in tokens if hmac.compare_digest(sent, each[2].encode())]
        if scheme.lower() != "bearer":
            return None
        if found:
            name, role, _ = found[0]
            return Actor(name, role, where)
        return self._holder(given[0], address)

    def _holder(self, authorization: str, address: str | None) -> Actor | None:
        """Return the holder of a key of kind `admin` or `metrics`; None: it is none of those."""
        ring = self._desk.deciding.keys()
        if not isinstance(ring, KeyRing):
            return None
        try:
            holder = ring.identify(authorization.encode(), None, None, self._desk.clock.wall())
            check_address(holder.caller, address)
        except GatewayError:  # also when the keys are not known yet
            return None
        record = holder.record
        roles = {KeyKind.ADMIN: record.role or Role.VIEWER, KeyKind.METRICS: Role.METRICS}
        role = roles.get(record.kind)
        return None if role is None else Actor(f"key {record.id}", role, address or _SOCKET)


@lru_cache(maxsize=1)
def _proxies(trusted: tuple[str, ...]) -> Proxies:
    return Proxies(trusted)


def _tokens(admin: AdminConfig) -> Iterator[tuple[str, Role, str]]:
    """Yield the name, role and secret of every token."""
    if admin.token is not None:
        yield "admin.token", Role.ADMIN, admin.token.get_secret_value()
    for each in admin.tokens:
        yield each.name, each.role, each.token.get_secret_value()


def _foreign(headers: Headers) -> Response | None:
    """Return the refusal of a change that a web page of another site may have made.

    The dashboard may: its browser says that page and listener are the same site, or names this very host.
    """
    site, origins = headers.get("sec-fetch-site"), headers.getlist("origin")
    if site == "same-origin":
        return None
    own = [f"{scheme}://{headers.get('host')}" for scheme in ("http", "https")]
    if site in (None, "none") and all(each in own for each in origins):
        return None
    detail = "Requests from web pages of other sites are refused."
    return problem(HTTPStatus.FORBIDDEN, "foreign_origin", detail)


def _not_now(path: str, upgrading: Upgrades) -> Response | None:
    """Return the refusal of an order that would be lost, as a new process takes over right now."""
    if not upgrading.under_way or path == UPGRADE:
        return None
    detail = "A new process of this gateway is taking over. Give the order again in a few seconds."
    return problem(HTTPStatus.CONFLICT, "upgrading", detail, {"retry-after": "5"})


def _is_local(hosts: list[str]) -> bool:
    """Whether the one Host header names this machine, with or without a port."""
    if len(hosts) != 1:
        return False
    host = hosts[0].lower()
    name, colon, port = host.rpartition(":")
    return host in _LOCAL_NAMES or (bool(colon) and port.isdecimal() and name in _LOCAL_NAMES)
