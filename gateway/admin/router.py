"""Serves the table: finds the row of a request, reads what it takes, and answers what its handler returns.

role (403) -> query and body (400) -> handler -> JSON, a page of a list, text, or a problem
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.admin.changes import Changes, etag
from gateway.admin.desk import Desk
from gateway.admin.endpoint import (
    Actor,
    Asked,
    Body,
    Endpoint,
    Listing,
    ListQuery,
    Page,
    Problem,
    Query,
    Text,
    bad_parameter,
    pattern_of,
)
from gateway.admin.replays import HEADER
from gateway.admin.replies import json_reply, packed, problem, reply
from gateway.config.explain import in_words
from gateway.core.bounds import MOST_ROWS
from gateway.core.roles import Role

_LIST: Final = "GET /admin/openapi.json lists what there is."
_MODELS: Final = "This is the admin listener; models are served at the other address, `listen`."
_ROWS_A_TURN: Final = 50  # of a list, before streams get their turn


class Router:
    """An ASGI app. Anything but a problem that a handler raises is a bug, and left to the caller."""

    def __init__(self, desk: Desk, table: Sequence[Endpoint]) -> None:
        self._desk = desk
        self._changes = Changes(desk)
        self._rows = [(pattern_of(each.path), each) for each in table]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive)
        try:
            response = await self._answer(request)
        except Problem as error:
            response = problem(error.status, error.code, error.detail, error.headers, error.errors)
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        endpoint, names = self._find(request.method, request.scope["path"])
        actor: Actor | None = request.scope["state"]["actor"]
        if endpoint.role is not None:
            await self._check_role(endpoint, actor, names)
        if endpoint.body is not None:
            _is_json(request)
        query, raw = _query(request, endpoint), await _raw(request, endpoint)
        asked: Asked[Any, Any] = Asked(
            actor=actor or Actor("anybody", Role.METRICS, ""),
            names=names,
            query=query,
            body=_body(raw, endpoint),
            accept=request.headers.get("accept", ""),
            if_match=request.headers.get("if-match"),
        )
        if not endpoint.changes:
            served = await self._served(endpoint, asked)
            return await packed(served, request.headers.get("accept-encoding", ""))
        return await self._changes.carry_out(
            endpoint,
            asked,
            request.headers.get(HEADER),
            _fingerprint(request, raw),
            lambda: self._served(endpoint, asked),
        )

    async def _served(self, endpoint: Endpoint, asked: Asked[Any, Any]) -> Response:
        """Return what the handler answers."""
        seen = None  # before the answer: a change in between is then noticed by `If-Match`
        if endpoint.subject is not None and not endpoint.changes:
            seen = await endpoint.subject(self._desk, asked.names)
        answer = await endpoint.handler(self._desk, asked)
        if isinstance(answer, Text):
            return reply(answer.body, answer.content_type, answer.status)
        if isinstance(answer, Listing):
            answer = await _page(answer, endpoint, asked.query)
        return json_reply(answer, {} if seen is None else {"etag": etag(seen)})

    async def _check_role(
        self, endpoint: Endpoint, actor: Actor | None, names: Mapping[str, str]
    ) -> None:
        """Check the role; who asks for a change without it is kept in the audit log.

        Raises:
            Problem: it does not suffice (403).
        """
        assert endpoint.role is not None
        if actor is not None and actor.role.includes(endpoint.role):
            return
        if actor is not None and endpoint.changes:
            await self._changes.refused(endpoint, actor, names)
        has = "nobody" if actor is None else f"{actor.name}, whose role is {actor.role.value}"
        raise Problem(
            HTTPStatus.FORBIDDEN,
            "role_needed",
            f"This needs the role {endpoint.role.value}, and you are {has}. See `admin.tokens`.",
        )

    def _find(self, method: str, path: str) -> tuple[Endpoint, Mapping[str, str]]:
        """Return the row of a request and the names in its path; HEAD is GET, whose body is not written.

        Raises:
            Problem: there is none (404), or only of other methods (405).
        """
        allowed: list[str] = []
        for pattern, endpoint in self._rows:
            found = pattern.fullmatch(path)
            if found is None:
                continue
            if method in endpoint.methods:
                return endpoint, found.groupdict()
            allowed += endpoint.methods
        if not allowed:
            detail = (
                f"There is no {path[:200]} here. {_MODELS if path.startswith('/v1/') else _LIST}"
            )
            raise Problem(HTTPStatus.NOT_FOUND, "not_found", detail)
        allow = ", ".join(dict.fromkeys(allowed))
        raise Problem(
            HTTPStatus.METHOD_NOT_ALLOWED,
            "method_not_allowed",
            f"{path[:200]} is asked with {allow}.",
            headers={"allow": allow},
        )


def _is_json(request: Request) -> None:
    """Check that a change says it is JSON, which no page of another site can send unasked.

    Raises:
        Problem: it is something else (415).
    """
    media, _, _ = request.headers.get("content-type", "").partition(";")
    if media.strip().lower() != "application/json":
        detail = "Send JSON, with content-type: application/json."
        raise Problem(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "not_json", detail)


def _query(request: Request, endpoint: Endpoint) -> Query:
    """Return what a query asks for.

    Raises:
        Problem: that is not what the endpoint takes, or something is asked twice (400).
    """
    model, given = endpoint.query, dict[str, str]()
    for name, text in request.query_params.multi_items():
        if not text and name not in model.flags:
            continue
        if given.setdefault(name, text) != text and name in model.model_fields:
            raise bad_parameter(f"The query parameter {name[:50]} is given twice.")
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise _unfit(error, "query parameter", model) from None


async def _raw(request: Request, endpoint: Endpoint) -> bytes:
    """Return the body of a request.

    Raises:
        Problem: it is too large (400).
    """
    raw = bytearray()
    if endpoint.body is None:
        return b""
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > endpoint.body_bytes:
            raise bad_parameter(
                f"The body is larger than {endpoint.body_bytes} bytes, the most that is read here."
            )
    return bytes(raw) or b"{}"


def _body(raw: bytes, endpoint: Endpoint) -> Body | None:
    """Return what a body says.

    Raises:
        Problem: that is not what is expected (400).
    """
    if endpoint.body is None:
        return None
    try:
        return endpoint.body.model_validate_json(raw)
    except ValidationError as error:
        raise _unfit(error, "body", endpoint.body) from None


def _fingerprint(request: Request, raw: bytes) -> bytes:
    seen = request.headers.get("if-match")
    asked = f"{request.method} {request.scope['path']}?{request.url.query}\n{seen}\n".encode()
    return hashlib.sha256(asked + raw).digest()


def _unfit(error: ValidationError, what: str, model: type[BaseModel]) -> Problem:
    """Return the problem of something that is not as the model says; the input is not repeated."""
    wrong = error.errors(include_url=False, include_input=False)
    found = [
        {"pointer": _pointer(each["loc"], what), "detail": in_words(each) or each["msg"]}
        for each in wrong
    ]
    first = found[0]
    name = first["pointer"].removeprefix("/") or "it"
    said = f"{name}{'' if in_words(wrong[0]) else ':'} {first['detail']}."
    if wrong[0]["type"] == "extra_forbidden" and len(wrong[0]["loc"]) == 1:
        said += f" Known are: {', '.join(model.model_fields) or 'none'}."
    return Problem(
        HTTPStatus.BAD_REQUEST,
        "bad_parameter",
        f"The {what} is not valid: {said}",
        errors=found[:20],
    )


def _pointer(loc: tuple[str | int, ...], what: str) -> str:
    if what == "body":
        return "".join(f"/{part}" for part in loc)
    return str(loc[0]) if loc else ""


async def _page(listing: Listing, endpoint: Endpoint, query: BaseModel) -> Page[Any]:
    """Return a part of a list; other tasks run while it is made.

    Raises:
        Problem: the list has no row `after` (404).
    """
    assert isinstance(query, ListQuery)
    items, begin = listing.items, 0
    if query.after != listing.begins_after:
        places = (place for place, each in enumerate(items) if listing.name(each) == query.after)
        found = next(places, None)
        if found is None:
            raise Problem(
                HTTPStatus.NOT_FOUND,
                "unknown_cursor",
                "The list no longer has the row `after`. Begin again without it.",
            )
        begin = found + 1
    most = query.limit
    if most is None:
        most = endpoint.most if endpoint.most is not None else MOST_ROWS
    shown = items[begin : begin + most]
    rows = []
    for place, each in enumerate(shown, start=1):
        rows.append(listing.tell(each))
        if place % _ROWS_A_TURN == 0:
            await asyncio.sleep(0)
    return Page(
        object="list",
        data=rows,
        has_more=len(items) > begin + len(shown),
        first_id=listing.name(shown[0]) if shown else None,
        last_id=listing.name(shown[-1]) if shown else None,
    )
