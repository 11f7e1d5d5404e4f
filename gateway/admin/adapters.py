"""LoRA adapters: where each is, and operators' orders for them."""

from __future__ import annotations

from dataclasses import asdict
from http import HTTPStatus
from typing import Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from gateway.adapters.keepers import AdapterStatus, OrderRefused
from gateway.adapters.memory import Order
from gateway.admin.desk import Desk
from gateway.admin.endpoint import Asked, Body, DryRunBody, DryRunQuery, Listing, ListQuery, Problem
from gateway.admin.fleet import unknown_backend


class AdaptersQuery(ListQuery):
    """Which adapters are listed."""

    backend: str | None = Field(default=None, description="Only on this backend: POOL/NAME.")


class AdapterBody(DryRunBody):
    """Which adapter an order is about."""

    adapter: str = Field(description="Its model name.")
    path: str | None = Field(default=None, description="On the backend. Null: as configured.")


class AdapterOrderTold(TypedDict):
    """What follows from an order."""

    backend: str
    adapter: str
    verb: Literal["load", "unload", "release"]
    sentence: str


async def get_adapters(desk: Desk, asked: Asked[AdaptersQuery, Body]) -> Listing:
    """Answer where each adapter is, or why it is not there."""
    only = asked.query.backend
    found = [each for each in desk.adapters.statuses() if only in (None, each.backend_id)]
    return Listing(found, _row, _name)


async def load(desk: Desk, asked: Asked[DryRunQuery, AdapterBody]) -> AdapterOrderTold:
    """Load an adapter, and keep it there."""
    return _give(desk, asked, "load", _order(desk, asked, keep=True))


async def unload(desk: Desk, asked: Asked[DryRunQuery, AdapterBody]) -> AdapterOrderTold:
    """Unload an adapter, and keep it out."""
    return _give(desk, asked, "unload", _order(desk, asked, keep=False))


async def release(desk: Desk, asked: Asked[DryRunQuery, AdapterBody]) -> AdapterOrderTold:
    """End an order: the settings decide again."""
    return _give(desk, asked, "release", None)


def _order(desk: Desk, asked: Asked[DryRunQuery, AdapterBody], *, keep: bool) -> Order:
    return Order(keep, asked.body.path, desk.clock.wall(), asked.body.reason)


def _give(
    desk: Desk,
    asked: Asked[DryRunQuery, AdapterBody],
    verb: Literal["load", "unload", "release"],
    order: Order | None,
) -> AdapterOrderTold:
    backend_id, adapter = asked.names["backend"], asked.body.adapter
    try:
        said = desk.adapters.order(backend_id, adapter, order, dry_run=asked.dry_run)
    except KeyError:
        raise unknown_backend(desk, backend_id) from None
    except OrderRefused as error:
        raise Problem(HTTPStatus.CONFLICT, error.code, str(error)) from error
    return AdapterOrderTold(backend=backend_id, adapter=adapter, verb=verb, sentence=said)


def _row(status: AdapterStatus) -> dict[str, Any]:
    return asdict(status)


def _name(status: AdapterStatus) -> str:
    return f"{status.backend_id}#{status.adapter}"  # no name has a #
