"""Why requests wait, over HTTP: decisions that were made, and dry runs. Read-only.

GET /admin/v1/decisions?limit=N          those queued or shed, in short, the newest first
GET /admin/v1/decisions/{request_id}     one of them, or one refused before it reached a model
GET /admin/v1/route?model=M&tokens=N     what would happen to such a request now
    &output=N&key=ID&endpoint=chat&stream=1
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.admission.decisions import KEPT
from gateway.core.aio import Clock
from gateway.core.errors import EndpointNotServed, ModelNotFound
from gateway.core.types import Endpoint
from gateway.ingress.early import KEPT as REFUSALS_KEPT
from gateway.ingress.early import Early
from gateway.ops.dryrun import Deciding, UnknownKey, Wish, dry_run
from gateway.ops.explain import Book, summary, told
from gateway.ops.moment import Moment
from gateway.ops.refused import refused_told
from gateway.ops.replies import json_reply, problem

_TOLD: Final = 50  # decisions in a list, unless told
_AT_A_TIME: Final = 50  # of them, before streams get their turn
_MOST_TOKENS: Final = 1_000_000_000
_NOT_KEPT: Final = (
    f"No record of this request. The gateway keeps the last {KEPT} requests that waited or were "
    f"shed since it started, and the last {REFUSALS_KEPT} that it refused before that; a request "
    "that was served at once leaves no record here."
)


class BadParameter(Exception):
    """A query parameter that cannot be read; the words are for its sender."""


async def bad_parameter(request: Request, error: Exception) -> Response:
    """Answer a `BadParameter`."""
    return problem(HTTPStatus.BAD_REQUEST, "bad_parameter", str(error))


@dataclass(frozen=True, slots=True)
class Reasons:
    """The handlers. `book` and `draining` are asked each time."""

    deciding: Deciding
    early: Early
    clock: Clock
    book: Callable[[], Book]
    draining: Callable[[], bool]

    def routes(self) -> list[Route]:
        """Return the routes of the handlers."""
        return [
            Route("/admin/v1/decisions", self.get_decisions),
            Route("/admin/v1/decisions/{request_id}", self.get_decision),
            Route("/admin/v1/route", self.get_route),
        ]

    async def get_decisions(self, request: Request) -> Response:
        """Answer the newest decisions in short."""
        limit = number(request, "limit", _TOLD, most=KEPT)
        kept, moment = [*self.deciding.gate.decisions], self._moment()
        rows = []
        for place, decision in enumerate(kept[:limit], start=1):
            rows.append(summary(decision, moment))
            if place % _AT_A_TIME == 0:
                await asyncio.sleep(0)
        return json_reply({"object": "list", "data": rows, "has_more": len(kept) > limit})

    async def get_decision(self, request: Request) -> Response:
        """Answer one decision in full, or 404."""
        request_id = request.path_params["request_id"]
        decision = self.deciding.gate.decisions.get(request_id)
        if decision is not None:
            return json_reply(told(decision, self.book(), self._moment()))
        refused = self.early.get(request_id)
        if refused is not None:
            return json_reply(refused_told(refused, self.book()))
        return problem(HTTPStatus.NOT_FOUND, "decision_not_found", _NOT_KEPT)

    async def get_route(self, request: Request) -> Response:
        """Answer what would happen to a request now; 404 for a model or key that is not there."""
        wish, draining = _wish(request), self.draining()
        try:
            run = dry_run(wish, self.deciding, self.book(), self._moment(), draining=draining)
        except (ModelNotFound, EndpointNotServed) as error:
            return problem(HTTPStatus.NOT_FOUND, error.code or "not_found", error.message)
        except UnknownKey as error:
            return problem(HTTPStatus.NOT_FOUND, "key_not_found", str(error))
        return json_reply(run)

    def _moment(self) -> Moment:
        return Moment(self.clock.now(), self.clock.wall())


def _wish(request: Request) -> Wish:
    query = request.query_params
    known = [each.value for each in Endpoint]
    endpoint = query.get("endpoint") or Endpoint.CHAT.value
    if not query.get("model"):
        raise BadParameter("Name the model: ?model=NAME.")
    if endpoint not in known:
        raise BadParameter(f"endpoint must be one of {', '.join(known)}.")
    return Wish(
        model=query["model"],
        prompt_tokens=number(request, "tokens", 0),
        output_tokens=number(request, "output", 0) or None,
        key_id=query.get("key") or None,
        endpoint=Endpoint(endpoint),
        stream=query.get("stream") in ("1", "true"),
    )


def number(request: Request, name: str, default: int, *, most: int = _MOST_TOKENS) -> int:
    """Return a whole number of the query, or the default when it is not there.

    Raises:
        BadParameter: it is no such number.
    """
    text = request.query_params.get(name)
    if not text:
        return default
    if not (text.isascii() and text.isdecimal()) or len(text) > 10 or int(text) > most:
        raise BadParameter(f"{name} must be a whole number of at most {most}.")
    return int(text)
