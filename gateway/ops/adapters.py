"""Adapters over HTTP: where each is, and operators' orders. What changes anything is a POST with a JSON body.

GET  /admin/v1/adapters                                    every adapter on every backend, or why it is not there
POST /admin/v1/backends/{pool}/{name}/adapters:load        {"adapter": "sql", "path": null, "reason": ""}
POST /admin/v1/backends/{pool}/{name}/adapters:unload      {"adapter": "sql", "reason": ""}
POST /admin/v1/backends/{pool}/{name}/adapters:release     {"adapter": "sql"}: the settings decide again
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from http import HTTPStatus

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.adapters.keepers import Adapters, OrderRefused
from gateway.adapters.memory import Order
from gateway.ops.operate import read_body, unknown_backend
from gateway.ops.replies import json_reply, problem
from gateway.pools.table import PoolTable


class Verb(Enum):
    """What can be ordered of an adapter on a backend."""

    LOAD = "load"
    UNLOAD = "unload"
    RELEASE = "release"


class AdapterBody(msgspec.Struct, forbid_unknown_fields=True):
    """What an order says; `path` null: as configured."""

    adapter: str
    path: str | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class OrderAdapters:
    """The handlers. `wall` returns the time, in seconds since the epoch."""

    adapters: Adapters
    table: PoolTable
    wall: Callable[[], float]

    def routes(self) -> list[Route]:
        """Return the routes of the handlers."""
        return [
            Route("/admin/v1/adapters", self.get_adapters),
            *(self._verb_route(verb) for verb in Verb),
        ]

    def _verb_route(self, verb: Verb) -> Route:
        async def post(request: Request) -> Response:
            return await self._give(request, verb)

        path = f"/admin/v1/backends/{{backend:path}}/adapters:{verb.value}"
        return Route(path, post, methods=["POST"])

    async def get_adapters(self, request: Request) -> Response:
        """Answer where each adapter is."""
        rows = [asdict(each) for each in self.adapters.told()]
        return json_reply({"object": "list", "data": rows})

    async def _give(self, request: Request, verb: Verb) -> Response:
        backend_id, body = request.path_params["backend"], await read_body(request, AdapterBody)
        order = None
        if verb is not Verb.RELEASE:
            order = Order(verb is Verb.LOAD, body.path, self.wall(), body.reason)
        try:
            said = self.adapters.order(backend_id, body.adapter, order)
        except KeyError:
            return unknown_backend(self.table, backend_id)
        except OrderRefused as error:
            return problem(HTTPStatus.CONFLICT, error.code, str(error))
        return json_reply(
            {"backend": backend_id, "adapter": body.adapter, "verb": verb.value, "sentence": said}
        )
