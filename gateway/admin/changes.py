"""How a change is carried out, whatever it changes: once, in turn, on what its sender saw, and on the record.

    Idempotency-Key (replay, 409, 422) -> turn -> If-Match (412) -> handler -> audit -> reply with its ETag

A change waits for the one before it, so that what it compared is still so. Upgrades take minutes and have
a turn of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec
from starlette.responses import Response

from gateway.admin import replays
from gateway.admin.desk import Desk
from gateway.admin.endpoint import Actor, Asked, Endpoint, Problem, Subject
from gateway.admin.replays import Replays
from gateway.admin.replies import problem
from gateway.observe.redact import redact

_TURN_S: Final = 10.0
_NOT_AUDITED: Final = frozenset({"reason", "dry_run"})
_ORDER_BYTES: Final = 4096
# Of what was refused, who asked is worth a line; what was no valid request is not.
_REFUSED: Final = frozenset(
    {HTTPStatus.FORBIDDEN, HTTPStatus.CONFLICT, HTTPStatus.PRECONDITION_FAILED}
)

Answer = Callable[[], Awaitable[Response]]


def etag(subject: Subject) -> str:
    """Return the ETag of a resource: it changes with what an operator may change of it.

    What has a version of its own, has that.
    """
    if "version" in subject:
        return f'"{subject["version"]}"'
    digest = hashlib.blake2b(msgspec.json.encode(subject, order="sorted"), digest_size=9)
    return f'"{digest.hexdigest()}"'


class Changes:
    """See the module. One owner of the turn, and of what may be replayed."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._replays = Replays(desk.clock.now)
        self._turn = asyncio.Lock()

    async def carry_out(
        self,
        endpoint: Endpoint,
        asked: Asked[Any, Any],
        key: str | None,
        fingerprint: bytes,
        answer: Answer,
    ) -> Response:
        """Return the answer to a change, or to the request before with its Idempotency-Key and `fingerprint`.

        Raises:
            Problem: it is not carried out, or not anew.
        """
        if key is None:
            return await self._in_turn(endpoint, asked, answer)
        who = asked.actor.name
        before = self._replays.begin(who, key, fingerprint)
        if before is not None:
            return _again(before)
        response = None
        try:
            response = await self._in_turn(endpoint, asked, answer)
        finally:
            self._replays.end(who, key, response)
        return response

    async def refused(self, endpoint: Endpoint, actor: Actor, names: Mapping[str, str]) -> None:
        """Keep that somebody asked for a change without the role for it."""
        told = _entry(endpoint, names, {}, HTTPStatus.FORBIDDEN, "role_needed")
        await self._desk.audit.note(self._desk.clock.wall(), actor, told)

    async def _in_turn(
        self, endpoint: Endpoint, asked: Asked[Any, Any], answer: Answer
    ) -> Response:
        async with self._my_turn(endpoint):
            before = await self._subject(endpoint, asked.names)
            try:
                _check(asked.if_match, before)
                response = await answer()
            except Problem as error:
                response = problem(
                    error.status, error.code, error.detail, error.headers, error.errors
                )
            after = await self._subject(endpoint, asked.names)
            status = HTTPStatus(response.status_code)
            done = status < HTTPStatus.MULTIPLE_CHOICES
            if not asked.dry_run and (done or status in _REFUSED):
                code = "" if done else msgspec.json.decode(response.body)["code"]
                told = _entry(
                    endpoint, asked.names, asked.body.model_dump(mode="json"), status, code
                )
                told |= {"before": before, "after": after}
                if done and not told["target"]:
                    told["target"] = str(msgspec.json.decode(response.body).get("id", ""))
                await self._desk.audit.note(self._desk.clock.wall(), asked.actor, told)
        if after is not None and done:
            response.headers["etag"] = etag(after)
        return response

    @contextlib.asynccontextmanager
    async def _my_turn(self, endpoint: Endpoint) -> AsyncIterator[None]:
        """Hold the turn.

        Raises:
            Problem: the changes before this one take too long (503).
        """
        if endpoint.alone:
            yield
            return
        try:
            async with asyncio.timeout(_TURN_S):
                await self._turn.acquire()
        except TimeoutError:
            detail = "Another change is still being carried out. Nothing was changed."
            raise Problem(
                HTTPStatus.SERVICE_UNAVAILABLE, "busy", detail, headers={"retry-after": "5"}
            ) from None
        try:
            yield
        finally:
            self._turn.release()

    async def _subject(self, endpoint: Endpoint, names: Mapping[str, str]) -> dict[str, Any] | None:
        """Return what the change may change, as it is now; None: that is not there, or cannot be told."""
        told = None if endpoint.subject is None else await endpoint.subject(self._desk, names)
        return None if told is None else dict(told)


def _check(if_match: str | None, subject: Subject | None) -> None:
    """Compare what the sender saw with what there is.

    Raises:
        Problem: it is another (412).
    """
    if if_match is None:
        return
    tags = [each.strip() for each in if_match.split(",")]
    if subject is not None and (tags == ["*"] or etag(subject) in tags):
        return
    if subject is None:
        detail = "There is no version here that If-Match could be compared with."
    else:
        detail = (
            f"It was changed since; its ETag is {etag(subject)} now. Read it again, then decide."
        )
    raise Problem(HTTPStatus.PRECONDITION_FAILED, "changed_since", detail)


def _entry(
    endpoint: Endpoint,
    names: Mapping[str, str],
    body: Mapping[str, Any],
    status: HTTPStatus,
    code: str,
) -> dict[str, Any]:
    order = {name: value for name, value in body.items() if name not in _NOT_AUDITED}
    if len(msgspec.json.encode(order)) > _ORDER_BYTES:
        order = {"left_out": f"more than {_ORDER_BYTES} bytes"}
    return {
        "action": endpoint.name,
        "target": redact(" ".join(names.values())),
        "order": order,
        "reason": str(body.get("reason", "")),
        "status": status.value,
        "code": code,
        "before": None,
        "after": None,
    }


def _again(response: Response) -> Response:
    """Return an answer as it was, with a header that says so."""
    headers = {**response.headers, replays.REPLAYED: "true"}
    del headers["content-length"]
    return Response(response.body, response.status_code, headers)
