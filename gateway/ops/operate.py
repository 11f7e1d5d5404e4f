"""Operators' orders over HTTP. What changes anything is a POST with a JSON body.

POST /admin/v1/backends/{pool}/{name}:drain       {"dry_run": false, "force": false, "reason": ""}
POST /admin/v1/backends/{pool}/{name}:undrain
POST /admin/v1/backends/{pool}/{name}:restart
GET  /admin/v1/backends/{pool}/{name}/logs?bytes=N
POST /admin/v1/restarts:hold                      {"pool": null, "for_s": 1800, "reason": ""}
POST /admin/v1/restarts:lift                      {"pool": null}
GET  /admin/v1/remedies                           what remedies changed of configured command lines
POST /admin/v1/backends/{pool}/{name}/remedies:drop
GET  /admin/v1/events?limit=N                     what supervision did and why, the newest first
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.core.events import Event
from gateway.heal.orders import OrderRefused, Orders, Touched, Verb
from gateway.heal.overrides import Override
from gateway.launch.launcher import LaunchError
from gateway.ops.moment import rfc3339
from gateway.ops.reasons import BadParameter, number
from gateway.ops.replies import json_reply, problem, reply
from gateway.pools.store import StoreUnavailable
from gateway.pools.table import PoolTable

_BODY_BYTES: Final = 16 * 1024
_LOG_BYTES: Final = 64 * 1024
_MOST_LOG_BYTES: Final = 1024 * 1024
_EVENTS: Final = 50
_MOST_EVENTS: Final = 1000


class OrderBody(msgspec.Struct, forbid_unknown_fields=True):
    """What an order says."""

    dry_run: bool = False
    force: bool = False
    reason: str = ""


class HoldBody(msgspec.Struct, forbid_unknown_fields=True):
    """Which restarts are held; `pool` null: all; `for_s` null: until lifted."""

    pool: str | None = None
    for_s: float | None = None
    reason: str = ""


Body = TypeVar("Body", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Operate:
    """The handlers."""

    orders: Orders

    def routes(self) -> list[Route]:
        """Return the routes of the handlers."""
        return [
            *(self._verb_route(verb) for verb in Verb),
            Route("/admin/v1/backends/{backend:path}/logs", self.get_logs),
            Route("/admin/v1/restarts:hold", self.post_hold, methods=["POST"]),
            Route("/admin/v1/restarts:lift", self.post_lift, methods=["POST"]),
            Route("/admin/v1/remedies", self.get_remedies),
            Route(
                "/admin/v1/backends/{backend:path}/remedies:drop",
                self.post_drop_remedies,
                methods=["POST"],
            ),
            Route("/admin/v1/events", self.get_events),
        ]

    def _verb_route(self, verb: Verb) -> Route:
        async def post(request: Request) -> Response:
            return await self._give(request, verb)

        path = f"/admin/v1/backends/{{backend:path}}:{verb.value}"
        return Route(path, post, methods=["POST"])

    async def _give(self, request: Request, verb: Verb) -> Response:
        backend_id, body = request.path_params["backend"], await read_body(request, OrderBody)
        try:
            touched = await self.orders.give(
                backend_id, verb, dry_run=body.dry_run, force=body.force, why=body.reason
            )
        except KeyError:
            return unknown_backend(self.orders.table, backend_id)
        except OrderRefused as error:
            return problem(HTTPStatus.CONFLICT, error.code, str(error))
        return json_reply(_told(touched, dry_run=body.dry_run))

    async def get_logs(self, request: Request) -> Response:
        """Answer the end of a backend's log, as plain text."""
        backend_id = request.path_params["backend"]
        most = number(request, "bytes", _LOG_BYTES, most=_MOST_LOG_BYTES)
        try:
            text = await self.orders.log(backend_id, most)
        except KeyError:
            return unknown_backend(self.orders.table, backend_id)
        except OrderRefused as error:
            return problem(HTTPStatus.CONFLICT, error.code, str(error))
        except LaunchError as error:
            return problem(HTTPStatus.BAD_GATEWAY, "log_unreadable", str(error))
        return reply(text.encode(), "text/plain; charset=utf-8")

    async def post_hold(self, request: Request) -> Response:
        """Hold automatic restarts."""
        body = await read_body(request, HoldBody)
        self._check_pool(body.pool)
        if body.for_s is not None and not 0 < body.for_s <= 30 * 86400:
            raise BadParameter("for_s must be more than 0 and at most 2592000 (30 days).")
        try:
            await self.orders.hold(body.pool, body.for_s, body.reason)
        except StoreUnavailable:
            return _no_store()
        return json_reply({"pool": body.pool, "held": True, "for_s": body.for_s})

    async def post_lift(self, request: Request) -> Response:
        """Let automatic restarts go on."""
        body = await read_body(request, HoldBody)
        self._check_pool(body.pool)
        try:
            await self.orders.lift(body.pool)
        except StoreUnavailable:
            return _no_store()
        return json_reply({"pool": body.pool, "held": False, "for_s": None})

    async def get_remedies(self, request: Request) -> Response:
        """Answer which remedies are in force."""
        rows = [_remedies(each, kept) for each, kept in sorted(self.orders.remedies().items())]
        return json_reply({"object": "list", "data": rows})

    async def post_drop_remedies(self, request: Request) -> Response:
        """Take a backend's remedies back, from its next start on."""
        backend_id = request.path_params["backend"]
        try:
            gone = self.orders.drop_remedies(backend_id)
        except KeyError:
            return unknown_backend(self.orders.table, backend_id)
        if gone is None:
            told = f"{backend_id} runs as configured: no remedy changed its command line."
        else:
            told = (
                f"Dropped {gone.told()}. The running server keeps it until its next start"
                f" (`vllm-gateway restart {backend_id}`)."
            )
        return json_reply({"backend": backend_id, "changed": gone is not None, "sentence": told})

    async def get_events(self, request: Request) -> Response:
        """Answer the newest events."""
        limit = number(request, "limit", _EVENTS, most=_MOST_EVENTS)
        kept = [*self.orders.supervisor.events.newest()]
        rows = [_event(each) for each in kept[:limit]]
        return json_reply({"object": "list", "data": rows, "has_more": len(kept) > limit})

    def _check_pool(self, pool: str | None) -> None:
        pools = self.orders.table.pools()
        if pool is not None and pool not in pools:
            raise BadParameter(f"There is no pool {pool[:200]}. Known pools: {', '.join(pools)}.")


def unknown_backend(table: PoolTable, backend_id: str) -> Response:
    """Answer that there is no such backend, and which there are (404)."""
    known = ", ".join(sorted(table.ids()))
    detail = f"There is no backend {backend_id[:200]}. Known backends: {known}."
    return problem(HTTPStatus.NOT_FOUND, "backend_not_found", detail)


async def read_body(request: Request, kind: type[Body]) -> Body:
    """Return the JSON body of a request.

    Raises:
        BadParameter: it is too large, or not what is expected.
    """
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > _BODY_BYTES:
            raise BadParameter(
                f"The body is larger than {_BODY_BYTES} bytes, the most that this listener reads."
            )
    try:
        return msgspec.json.decode(bytes(raw) or b"{}", type=kind)
    except msgspec.DecodeError as error:
        raise BadParameter(f"The body is not valid: {error}.") from error


def _told(touched: Touched, *, dry_run: bool) -> Mapping[str, Any]:
    return {
        "backend": touched.backend_id,
        "verb": touched.verb.value,
        "dry_run": dry_run,
        "changed": touched.changes and not dry_run,
        "would_change": touched.changes,
        "requests": touched.requests,
        "oldest_s": None if touched.oldest_s is None else round(touched.oldest_s, 1),
        "last": touched.last,
        "sentence": touched.sentence,
    }


def _remedies(backend_id: str, kept: Override) -> Mapping[str, Any]:
    return {
        "backend": backend_id,
        "args": kept.args,
        "env": kept.env,
        "on_trial": kept.on_trial,
        "failed_trials": kept.failed_trials,
        "applied": [
            {"remedy": each.remedy, "at": rfc3339(each.at), "why": each.why}
            for each in kept.applied
        ],
    }


def _event(event: Event) -> Mapping[str, str]:
    return {
        "at": rfc3339(event.at),
        "kind": event.kind.value,
        "backend": event.backend_id,
        "label": event.label,
        "detail": event.detail,
    }


def _no_store() -> Response:
    detail = "The store shared by the replicas does not respond; nothing was changed."
    return problem(HTTPStatus.SERVICE_UNAVAILABLE, "store_unavailable", detail)
