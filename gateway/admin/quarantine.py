"""Requests in quarantine: which there are, and an operator's order to lift one."""

from __future__ import annotations

from collections import Counter
from http import HTTPStatus
from operator import itemgetter

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
    """Answer which requests are refused by any worker, the newest first."""
    found = await _all_kept(desk)
    found.sort(key=itemgetter("until"), reverse=True)
    return Listing(found, itemgetter("id"))


async def lift(desk: Desk, asked: Asked[DryRunQuery, DryRunBody]) -> LiftedTold:
    """Have all workers forget one, so that it may be sent again."""
    name = asked.names["id"]
    if asked.dry_run:
        known = await is_kept(desk, name)
    else:
        known = any([desk.quarantine.lift(name), *await desk.fellows("lift", name)])
    if not known:
        detail = f"No request in quarantine is called {name[:40]}."
        raise Problem(HTTPStatus.NOT_FOUND, "not_in_quarantine", detail)
    return LiftedTold(id=name, lifted=not asked.dry_run)


async def is_kept(desk: Desk, name: str) -> bool:
    """Return whether any worker has a request in quarantine."""
    return any(each["id"] == name for each in await _all_kept(desk))


def kept(desk: Desk) -> list[SuspectTold]:
    """Return what this process has in quarantine."""
    moment = desk.moment()
    return [_told(each, moment) for each in desk.quarantine]


async def _all_kept(desk: Desk) -> list[SuspectTold]:
    """Return what the workers have; each tells how often it refused it itself."""
    found = {each["id"]: each for each in kept(desk)}
    for rows in await desk.fellows("quarantine"):
        for row in rows:
            known = found.setdefault(row["id"], row)
            if known is not row:
                known["refused"] = dict(Counter(known["refused"]) + Counter(row["refused"]))
    return [*found.values()]


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
