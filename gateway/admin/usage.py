"""What was used, by day, tenant, key, model and adapter."""

from __future__ import annotations

from http import HTTPStatus
from operator import itemgetter
from typing import Final

from pydantic import Field

from gateway.admin.desk import Desk
from gateway.admin.endpoint import Asked, Body, Listing, ListQuery, Problem
from gateway.usage.report import PLACES, days_between

_BY = ",".join(PLACES)
_UNKNOWN: Final = "Redis, or a ledger, cannot be read, and this gateway alone knows of no such usage. Ask again later."


class UsageQuery(ListQuery):
    """Which usage, and how it is added up."""

    after: str | None = Field(  # longer than of other lists: an id has five names
        default=None, max_length=4000, description="`last_id` of the page before this one."
    )
    first: str | None = Field(
        default=None, max_length=10, description="First day in UTC, as 2026-11-01. Default: today."
    )
    last: str | None = Field(default=None, max_length=10, description="Last day. Default: today.")
    by: str = Field(
        default=_BY,
        max_length=100,
        description="What to group by: any of day, tenant, key, model, adapter, with commas.",
    )
    tenant: str | None = Field(default=None, description="Only this tenant.")
    key: str | None = Field(default=None, description="Only the key with this id.")
    model: str | None = Field(default=None, description="Only this model: the pool that answered.")


async def get_usage(desk: Desk, asked: Asked[UsageQuery, Body]) -> Listing:
    """Answer usage of some days, grouped as asked."""
    query, today = asked.query, desk.accounts.today()
    by = [each for each in query.by.split(",") if each]
    unknown = [each for each in by if each not in PLACES]
    if unknown:
        raise _wrong(f"There is no group {unknown[0][:50]!r}; there are {', '.join(PLACES)}.")
    try:
        days = days_between(query.first or query.last or today, query.last or today)
    except ValueError as error:
        raise _wrong(f"{error}.") from None
    named = {"tenant": query.tenant, "key": query.key, "model": query.model}
    only = {name: value for name, value in named.items() if value is not None}
    found = await desk.usage.of(days, by, only, first_page=query.after is None)
    if not found.rows and not found.complete:
        raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, "store_unavailable", _UNKNOWN)
    return Listing(found.rows, itemgetter("id"))


def _wrong(detail: str) -> Problem:
    return Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "bad_usage_query", detail)
