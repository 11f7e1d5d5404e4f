"""What became of requests, why they waited, and what would become of one now. Nothing is changed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from operator import itemgetter
from typing import Annotated, Any, ClassVar, Final, cast

from pydantic import BeforeValidator, Field

from gateway.admin.condition import callers_seen
from gateway.admin.desk import Desk
from gateway.admin.endpoint import Asked, Body, Listing, ListQuery, Problem, Query
from gateway.admin.numbers import Between
from gateway.admin.quarantine import kept
from gateway.admission.decisions import KEPT, Decision
from gateway.core.channel import Answers
from gateway.core.errors import EndpointNotServed, ModelNotFound
from gateway.core.types import Endpoint, Outcome
from gateway.ingress.early import KEPT as REFUSALS_KEPT
from gateway.observe.ended import KEPT as ENDED_KEPT
from gateway.observe.ended import TROUBLED_KEPT
from gateway.ops.dryrun import DryRun, UnknownKey, Wish, dry_run
from gateway.ops.explain import Summary, Told, summary, told
from gateway.ops.explained import RequestExplained, explained
from gateway.ops.refused import RefusedTold, refused_told
from gateway.ops.requests import (
    Filter,
    Place,
    RequestState,
    RequestTold,
    Seen,
    cursor_of,
    newest,
    place_at,
    place_of,
    request_told,
)
from gateway.ops.trials import sides_told

MOST_REQUESTS: Final = 100  # of a page that has no limit
MOST_DECISIONS: Final = 50  # likewise
_DECISIONS_A_TURN: Final = 50  # that are told another worker, before streams get their turn
_MOST_TOKENS: Final = 1_000_000_000
_NOT_KEPT: Final = (
    f"No record of this request. The gateway keeps the last {KEPT} requests that waited or were "
    f"shed since it started, and the last {REFUSALS_KEPT} that it refused before that; a request "
    "that was served at once leaves no record here."
)
_NOT_SEEN: Final = (
    f"No record of this request. The gateway keeps those under way, the last {ENDED_KEPT} that ended well "
    f"and the last {TROUBLED_KEPT} that did not, since it started."
)

Tokens = Annotated[int, Between(0, _MOST_TOKENS)]


class RouteQuery(Query):
    """The request of a dry run."""

    model: str = Field(min_length=1, description="As a client would send it.")
    tokens: Tokens = Field(default=0, description="Of its prompt.")
    output: Tokens = Field(default=0, description="Stated limit of output tokens. 0: none.")
    key: str | None = Field(default=None, description="Id of its API key.")
    endpoint: Endpoint = Endpoint.CHAT
    stream: bool = Field(default=False, description="Whether it is streamed.")


def _flag(value: object) -> object:
    """Return a flag as true where it is named without a value."""
    return True if value == "" else value


class RequestsQuery(ListQuery):
    """Which requests."""

    flags: ClassVar[frozenset[str]] = frozenset({"errors"})

    key: str | None = Field(default=None, description="Id of its API key.")
    tenant: str | None = None
    model: str | None = Field(default=None, description="As asked for.")
    pool: str | None = None
    backend: str | None = Field(default=None, description="Of the last attempt: POOL/NAME.")
    outcome: Outcome | None = None
    state: RequestState | None = None
    errors: Annotated[bool, BeforeValidator(_flag)] = Field(
        default=False, description="Only those that ended, and not well."
    )


async def get_requests(desk: Desk, asked: Asked[RequestsQuery, Body]) -> Listing:
    """Answer the requests that are under way or ended lately, of all workers, the newest first."""
    query, moment = asked.query, desk.moment()
    if query.limit is None:
        query = query.model_copy(update={"limit": MOST_REQUESTS})
    found: list[Seen | RequestTold] = [*await requests_seen(desk, query)]
    for rows in await desk.fellows("requests", query.model_dump(mode="json")):
        found += rows
    found.sort(key=_place, reverse=True)

    def tell(each: Seen | RequestTold) -> RequestTold:
        return request_told(each, moment) if isinstance(each, Seen) else each

    return Listing(found, lambda each: cursor_of(_place(each)), tell, begins_after=query.after)


async def requests_seen(desk: Desk, query: RequestsQuery) -> list[Seen]:
    """Return the requests of this process that come on a page of the list, and the first of the next.

    Raises:
        Problem: the cursor is none (404).
    """
    before = _before(query)
    wanted = Filter(**query.model_dump(exclude={"limit", "after"}))
    found = await newest(desk.requests, wanted, before)
    return found if query.limit is None else found[: query.limit + 1]


def _before(query: ListQuery) -> Place | None:
    """Return the place that a page ends before; None: it begins with the newest.

    Raises:
        Problem: the cursor is none (404).
    """
    if query.after is None:
        return None
    try:
        return place_at(query.after)
    except ValueError:
        detail = "`after` is no `last_id` of this list. Begin again without it."
        raise Problem(HTTPStatus.NOT_FOUND, "unknown_cursor", detail) from None


def _place(each: Seen | RequestTold) -> tuple[int, str]:
    return place_of(each.record) if isinstance(each, Seen) else place_at(each["cursor"])


async def get_request(desk: Desk, asked: Asked[Query, Body]) -> RequestExplained:
    """Answer one request in full, whichever worker has it, or 404."""
    request_id = asked.names["request_id"]
    found = request_explained(desk, request_id)
    if found is not None:
        return found
    for told_there in await desk.fellows("request", request_id):
        return cast("RequestExplained", told_there)
    raise Problem(HTTPStatus.NOT_FOUND, "request_not_found", _NOT_SEEN)


def request_explained(desk: Desk, request_id: str) -> RequestExplained | None:
    """Return a request of this process in full; None: it has none."""
    seen = desk.requests.get(request_id)
    if seen is None:
        return None
    decision, refused = desk.deciding.gate.decisions.get(request_id), desk.early.get(request_id)
    pool = seen.record.pool
    canary = sides_told(pool, desk.trial(pool)) if pool else None
    return explained(seen, desk.book(), desk.moment(), decision, refused, canary)


async def get_decisions(desk: Desk, asked: Asked[ListQuery, Body]) -> Listing:
    """Answer the newest decisions of all workers in short."""
    query, moment = asked.query, desk.moment()
    if query.limit is None:
        query = query.model_copy(update={"limit": MOST_DECISIONS})
    found: list[tuple[Place, Decision | Summary]] = [*_decisions(desk, query)]
    for rows in await desk.fellows("decisions", query.model_dump(mode="json")):
        found += [(place_at(cursor), told_there) for cursor, told_there in rows]
    found.sort(key=itemgetter(0), reverse=True)

    def tell(each: tuple[Place, Decision | Summary]) -> Summary:
        return summary(each[1], moment) if isinstance(each[1], Decision) else each[1]

    return Listing(found, lambda each: cursor_of(each[0]), tell, begins_after=query.after)


def _decisions(desk: Desk, query: ListQuery) -> list[tuple[Place, Decision]]:
    """Return the decisions of this process that come on a page, and the first of the next."""
    before = _before(query)
    every = ((_decided(each), each) for each in desk.deciding.gate.decisions)
    found = [each for each in every if before is None or each[0] < before]
    found.sort(key=itemgetter(0), reverse=True)  # a clock may have been set back
    return found if query.limit is None else found[: query.limit + 1]


def _decided(decision: Decision) -> Place:
    return int(decision.wall_at * 1e6), decision.id


async def get_decision(desk: Desk, asked: Asked[Query, Body]) -> Told | RefusedTold:
    """Answer one decision in full, whichever worker made it, or 404."""
    request_id = asked.names["request_id"]
    found = decision_told(desk, request_id)
    if found is not None:
        return found
    for told_there in await desk.fellows("decision", request_id):
        return cast("Told | RefusedTold", told_there)
    raise Problem(HTTPStatus.NOT_FOUND, "decision_not_found", _NOT_KEPT)


def decision_told(desk: Desk, request_id: str) -> Told | RefusedTold | None:
    """Return a decision of this process in full; None: it has none."""
    decision = desk.deciding.gate.decisions.get(request_id)
    if decision is not None:
        return told(decision, desk.book(), desk.moment())
    refused = desk.early.get(request_id)
    if refused is not None:
        return refused_told(refused, desk.book())
    return None


async def get_route(desk: Desk, asked: Asked[RouteQuery, Body]) -> DryRun:
    """Answer what would happen to a request now; 404 for a model or key that is not there."""
    query = asked.query
    wish = Wish(
        model=query.model,
        prompt_tokens=query.tokens,
        output_tokens=query.output or None,
        key_id=query.key,
        endpoint=query.endpoint,
        stream=query.stream,
    )
    try:
        here = desk.deciding, desk.book(), desk.moment()
        run = await dry_run(wish, *here, draining=desk.draining())
    except (ModelNotFound, EndpointNotServed) as error:
        code = error.code or "not_found"
        raise Problem(HTTPStatus.NOT_FOUND, code, error.message) from error
    except UnknownKey as error:
        raise Problem(HTTPStatus.NOT_FOUND, "key_not_found", str(error)) from error
    run["canary"] = sides_told(run["pool"], desk.trial(run["pool"]))
    return run


def answers_to_workers(desk: Desk) -> Answers:
    """Return what a worker answers those of the same gateway about itself and its own requests."""

    async def requests(query: Mapping[str, Any]) -> list[RequestTold]:
        moment = desk.moment()
        found = await requests_seen(desk, RequestsQuery.model_validate(query))
        return [request_told(each, moment) for each in found]

    async def decisions(query: Mapping[str, Any]) -> list[tuple[str, Summary]]:
        moment, rows = desk.moment(), []
        for place, each in _decisions(desk, ListQuery.model_validate(query)):
            rows.append((cursor_of(place), summary(each, moment)))
            if len(rows) % _DECISIONS_A_TURN == 0:
                await asyncio.sleep(0)
        return rows

    def at_once(answer: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
        async def answered(*args: Any) -> Any:
            return answer(*args)

        return answered

    return {
        "requests": requests,
        "decisions": decisions,
        "request": at_once(partial(request_explained, desk)),
        "decision": at_once(partial(decision_told, desk)),
        "counted": at_once(desk.metrics.tell),
        "callers": at_once(partial(callers_seen, desk)),
        "ready": at_once(lambda: desk.ready().ready),
        "quarantine": at_once(partial(kept, desk)),
        "lift": at_once(desk.quarantine.lift),
        "deaths": at_once(desk.quarantine.heard),
    }
