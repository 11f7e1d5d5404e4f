"""What there is and how it is: the overview, pools, backends, replicas, metrics, liveness, readiness."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from operator import itemgetter
from typing import Annotated, Final, Literal

import msgspec
from pydantic import Field
from typing_extensions import TypedDict

from gateway.admin.condition import facts
from gateway.admin.desk import Desk
from gateway.admin.endpoint import Asked, Body, Listing, ProbeQuery, Problem, Query, Text
from gateway.admin.numbers import Between
from gateway.core.aio import periodic
from gateway.heal.orders import OrderRefused
from gateway.ingress.routes import Readiness
from gateway.ops.callers import Callers
from gateway.ops.overview import BackendOverview, Overview, PoolOverview, overview, pool_overviews
from gateway.ops.past import VerdictThen
from gateway.ops.series import SeriesTold, series_told
from gateway.ops.sharing import store_told

_GATHERED_S: Final = 2.0
_LAST_S: Final = 9_999_999_999  # since the epoch: in the year 2286
_ID = itemgetter("id")
_NAME = itemgetter("name")

Read = Asked[Query, Body]


class MeTold(TypedDict):
    """Who asks."""

    name: str
    role: Literal["viewer", "operator", "admin"]


async def get_me(desk: Desk, asked: Read) -> MeTold:
    """Answer who asks, so that the dashboard shows only what they may do."""
    return MeTold(name=asked.actor.name, role=asked.actor.role.value)  # type: ignore[typeddict-item]


async def gather(desk: Desk) -> None:
    """Add what the other workers have counted, and seen of callers, to what is known here."""
    desk.metrics.hear(await desk.fellows("counted"))
    desk.callers_elsewhere = msgspec.convert(await desk.fellows("callers"), list[Callers])


async def gather_always(desk: Desk) -> None:
    """Gather every two seconds, so that little is lost with a worker that dies. Cancel: ends."""
    if desk.workers > 1:
        await periodic(lambda: gather(desk), every_s=_GATHERED_S, name="counts of other workers")


async def get_metrics(desk: Desk, asked: Read) -> Text:
    """Answer every metric of all workers, in the format that is asked for."""
    await gather(desk)
    made, content_type = desk.metrics.pieces(asked.accept)
    body = bytearray()
    for piece in made:
        body += piece
        await asyncio.sleep(0)  # streams come first
    return Text(bytes(body), content_type)


async def get_overview(desk: Desk, asked: Read) -> Overview:
    """Answer all of it at once."""
    await gather(desk)
    known = facts(desk)
    await asyncio.sleep(0)  # streams come first
    return overview(known, desk.moment())


class VerdictQuery(Query):
    """Which moment `/verdict` is asked for."""

    at: Annotated[float, Between(0, _LAST_S)] = Field(
        description="A moment of the last hour, in seconds since the epoch."
    )


async def get_verdict(desk: Desk, asked: Asked[VerdictQuery, Body]) -> VerdictThen:
    """Answer what was wrong at a moment, as it was told then."""
    return desk.past.at(asked.query.at)


class SeriesQuery(Query):
    """How much of the last hour `/series` answers."""

    minutes: Annotated[int, Between(1, 60)] = Field(
        default=60, description="How many of the last minutes."
    )


async def get_series(desk: Desk, asked: Asked[SeriesQuery, Body]) -> SeriesTold:
    """Answer the last minutes of every pool and backend."""
    return await series_told(desk.series, asked.query.minutes)


async def get_pools(desk: Desk, asked: Read) -> Listing:
    """Answer every pool with its backends, in the order of the configuration."""
    return Listing(pool_overviews(facts(desk), desk.moment()), _NAME)


async def get_pool(desk: Desk, asked: Read) -> PoolOverview:
    """Answer one pool."""
    pools = {each["name"]: each for each in pool_overviews(facts(desk), desk.moment())}
    found = pools.get(asked.names["pool"])
    if found is None:
        raise unknown_pool(desk, asked.names["pool"])
    return found


async def get_backends(desk: Desk, asked: Read) -> Listing:
    """Answer every backend of every pool."""
    pools = pool_overviews(facts(desk), desk.moment())
    return Listing([each for pool in pools for each in pool["backends"]], _ID)


async def get_backend(desk: Desk, asked: Read) -> BackendOverview:
    """Answer one backend."""
    backend_id = asked.names["backend"]
    pools = pool_overviews(facts(desk), desk.moment())
    found = (each for pool in pools for each in pool["backends"] if each["id"] == backend_id)
    told = next(found, None)
    if told is None:
        raise unknown_backend(desk, backend_id)
    return told


async def get_replicas(desk: Desk, asked: Read) -> Listing:
    """Answer the workers, and the gateways that share the Redis; one alone shares nothing."""
    if desk.workers == 1 and desk.loaded().config.redis is None:
        return Listing([], _ID)
    return Listing(store_told(desk.replicas, desk.moment())["replicas"], _ID)


async def livez(desk: Desk, asked: Read) -> Text:
    """Answer that the process runs."""
    return Text(b"ok\n")


class ReadyQuery(ProbeQuery):
    """How much `/readyz` says."""

    flags = frozenset({"verbose"})
    verbose: str | None = Field(default=None, description="Also name each check.")


async def readyz(desk: Desk, asked: Asked[ReadyQuery, Body]) -> Text:
    """Answer whether new requests can be served."""
    state = await _whole(desk)
    text = "ok\n" if state.ready else "not ready\n"
    if asked.query.verbose is not None:
        text = state.text() + text
    status = HTTPStatus.OK if state.ready else HTTPStatus.SERVICE_UNAVAILABLE
    return Text(text.encode(), status=status)


async def _whole(desk: Desk) -> Readiness:
    """Return whether the gateway can serve, with all its workers.

    Until all have been ready once, it is not. Later one that starts again is only told of: the others serve.
    """
    state = desk.ready()
    if desk.workers == 1:
        return state
    ready = state.ready + sum(each is True for each in await desk.fellows("ready"))
    desk.all_were_ready |= ready == desk.workers
    check = ("workers", desk.all_were_ready, f"{ready} of {desk.workers} ready")
    return Readiness(state.ready and desk.all_were_ready, (*state.checks, check))


def unknown_backend(desk: Desk, backend_id: str) -> Problem:
    """Return the problem that there is no such backend, and which there are (404)."""
    known = ", ".join(sorted(desk.table.ids()))
    detail = f"There is no backend {backend_id[:200]}. Known backends: {known}."
    return Problem(HTTPStatus.NOT_FOUND, "backend_not_found", detail)


@contextmanager
def refusals(desk: Desk, backend_id: str) -> Iterator[None]:
    """Have it told as a problem that an order for a backend is refused (409), or that there is none (404)."""
    try:
        yield
    except KeyError:
        raise unknown_backend(desk, backend_id) from None
    except OrderRefused as error:
        raise Problem(HTTPStatus.CONFLICT, error.code, str(error)) from error


def unknown_pool(desk: Desk, pool: str) -> Problem:
    """Return the problem that there is no such pool, and which there are (404)."""
    detail = f"There is no pool {pool[:200]}. Known pools: {', '.join(desk.table.pools())}."
    return Problem(HTTPStatus.NOT_FOUND, "pool_not_found", detail)
