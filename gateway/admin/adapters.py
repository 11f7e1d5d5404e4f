"""LoRA adapters: where each is, and operators' orders for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Final, Literal

from pydantic import Field
from typing_extensions import TypedDict

from gateway.adapters.memory import Order
from gateway.adapters.status import AdapterStatus
from gateway.admin.desk import Desk
from gateway.admin.endpoint import Asked, Body, DryRunBody, DryRunQuery, Listing, ListQuery
from gateway.admin.fleet import refusals

Verb = Literal["load", "unload", "release"]
VERBS: Final[Mapping[Verb, str]] = {
    "load": "Load an adapter on a backend and keep it there.",
    "unload": "Unload an adapter and keep it out.",
    "release": "End an order: the settings decide again.",
}


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
    verb: Verb
    sentence: str


async def get_adapters(desk: Desk, asked: Asked[AdaptersQuery, Body]) -> Listing:
    """Answer where each adapter is, or why it is not there."""
    only = asked.query.backend
    found = [each for each in desk.adapters.statuses() if only in (None, each.backend_id)]
    return Listing(found, _name, asdict)


async def give(
    desk: Desk, asked: Asked[DryRunQuery, AdapterBody], *, verb: Verb
) -> AdapterOrderTold:
    """Keep an adapter on a backend, or keep it out; or end such an order: the settings decide again."""
    backend_id, body, order = asked.names["backend"], asked.body, None
    if verb != "release":
        order = Order(verb == "load", body.path, desk.clock.wall(), body.reason)
    with refusals(desk, backend_id):
        said = desk.adapters.order(backend_id, body.adapter, order, dry_run=asked.dry_run)
    return AdapterOrderTold(backend=backend_id, adapter=body.adapter, verb=verb, sentence=said)


def _name(status: AdapterStatus) -> str:
    return f"{status.backend_id}#{status.adapter}"  # no name has a #
