"""Requests in quarantine: which there are, and an operator's order to lift one."""

from __future__ import annotations

from http import HTTPStatus

from typing_extensions import TypedDict

from gateway.admin.desk import Desk
from gateway.admin.endpoint import Asked, Body, DryRunBody, DryRunQuery, Listing, ListQuery, Problem
from gateway.ops.moment import Moment
from gateway.pools.quarantine import Suspect


class DeathTold(TypedDict):
    """A backend that died while the request was being worked on."""

    at: str
    backend: str


class SuspectTold(TypedDict):
    """One request in quarantine. Nothing of its body is kept but a keyed hash."""

    id: str
    pool: str
    body_bytes: int
    until: str
    deaths: list[DeathTold]
    refused: dict[str, int]  # by tenant


class LiftedTold(TypedDict):
    """What came of lifting one."""

    id: str
    lifted: bool


async def get_all(desk: Desk, asked: Asked[ListQuery, Body]) -> Listing:
    """Answer which requests are refused, the newest first."""
    moment = desk.moment()
    return Listing(
        [*desk.quarantine][::-1], lambda each: _told(each, moment), lambda each: each.of.id
    )


async def lift(desk: Desk, asked: Asked[DryRunQuery, DryRunBody]) -> LiftedTold:
    """Forget one, so that it may be sent again."""
    name = asked.names["id"]
    if asked.dry_run:
        known = any(each.of.id == name for each in desk.quarantine)
    else:
        known = desk.quarantine.lift(name)
    if not known:
        detail = f"No request in quarantine is called {name[:40]}."
        raise Problem(HTTPStatus.NOT_FOUND, "not_in_quarantine", detail)
    return LiftedTold(id=name, lifted=not asked.dry_run)


def _told(suspect: Suspect, moment: Moment) -> SuspectTold:
    return SuspectTold(
        id=suspect.of.id,
        pool=suspect.pool,
        body_bytes=suspect.of.body_bytes,
        until=moment.told(suspect.until),
        deaths=[
            DeathTold(at=moment.told(each.at), backend=each.end.backend_id)
            for each in suspect.deaths
        ],
        refused=dict(suspect.refused),
    )
