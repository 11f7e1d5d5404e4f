"""Operators' orders for backends and their restarts, what remedies changed, and what was done and why."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from gateway.admin.desk import Desk
from gateway.admin.endpoint import (
    Asked,
    Body,
    DryRunBody,
    DryRunQuery,
    Listing,
    ListQuery,
    Problem,
    Query,
    Text,
)
from gateway.admin.fleet import refusals, unknown_pool
from gateway.admin.numbers import Between
from gateway.core.bounds import LOG_BYTES, LONGEST_HOLD_S, MOST_LOG_BYTES
from gateway.core.events import Event
from gateway.heal.orders import Verb
from gateway.heal.overrides import Override
from gateway.launch.launcher import LaunchError
from gateway.ops.moment import rfc3339, rounded
from gateway.store.shared import StoreUnavailable


class OrderBody(DryRunBody):
    """An order for a backend."""

    force: bool = Field(
        default=False, description="Also if it is the last one that serves, or restarts already."
    )


class LogsQuery(Query):
    """How much of a log."""

    bytes: Annotated[int, Between(0, MOST_LOG_BYTES)] = Field(
        default=LOG_BYTES, description="At most, from its end."
    )


class PoolBody(DryRunBody):
    """Which pool's restarts."""

    pool: str | None = Field(default=None, description="Null: of all pools.")
    for_s: float | None = Field(
        default=None,
        gt=0,
        le=LONGEST_HOLD_S,
        allow_inf_nan=False,
        description="How long, at most 30 days. Null: until it is lifted.",
    )


class OrderTold(TypedDict):
    """What an order does, or would do."""

    backend: str
    verb: Literal["drain", "undrain", "restart"]
    dry_run: bool
    changed: bool
    would_change: bool
    requests: int
    oldest_s: float | None
    last: bool
    sentence: str


class HoldTold(TypedDict):
    """Whether automatic restarts are on hold."""

    pool: str | None
    held: bool
    for_s: float | None
    others: list[str | None]  # holds that last beside it, of what it is about; null: of all pools


class AppliedRemedy(TypedDict):
    """One change of a command line."""

    remedy: str
    at: str
    why: str


class RemedyTold(TypedDict):
    """What remedies changed of a backend's command line."""

    backend: str
    args: dict[str, Any]
    env: dict[str, Any]
    on_trial: bool
    failed_trials: int
    applied: list[AppliedRemedy]


class DroppedTold(TypedDict):
    """What came of dropping a backend's remedies."""

    backend: str
    changed: bool
    sentence: str


class EventTold(TypedDict):
    """One thing that happened to a backend, or to all."""

    id: str
    at: str
    kind: str
    backend: str
    label: str
    detail: str


async def give(desk: Desk, asked: Asked[DryRunQuery, OrderBody], *, verb: Verb) -> OrderTold:
    """Drain a backend, put it back into service, or restart it."""
    backend_id, body = asked.names["backend"], asked.body
    with refusals(desk, backend_id):
        touched = await desk.orders.give(
            backend_id, verb, dry_run=asked.dry_run, force=body.force, why=body.reason
        )
    return OrderTold(
        backend=touched.backend_id,
        verb=touched.verb.value,
        dry_run=asked.dry_run,
        changed=touched.changes and not asked.dry_run,
        would_change=touched.changes,
        requests=touched.requests,
        oldest_s=rounded(touched.oldest_s, 1),
        last=touched.last,
        sentence=touched.sentence,
    )


async def get_logs(desk: Desk, asked: Asked[LogsQuery, Body]) -> Text:
    """Answer the end of a backend's log, as plain text."""
    backend_id = asked.names["backend"]
    try:
        with refusals(desk, backend_id):
            text = await desk.orders.log(backend_id, asked.query.bytes)
    except LaunchError as error:
        raise Problem(HTTPStatus.BAD_GATEWAY, "log_unreadable", str(error)) from error
    return Text(text.encode())


async def hold(desk: Desk, asked: Asked[DryRunQuery, PoolBody], *, lifts: bool) -> HoldTold:
    """Hold automatic restarts, or let them go on (`lifts`)."""
    pool, for_s = asked.body.pool, asked.body.for_s
    if pool is not None and pool not in desk.table.pools():
        raise unknown_pool(desk, pool)
    try:
        if not asked.dry_run and lifts:
            await desk.orders.lift(pool)
        elif not asked.dry_run:
            await desk.orders.hold(pool, for_s, asked.body.reason)
    except StoreUnavailable:
        detail = "The store shared by the replicas does not respond; nothing was changed."
        raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, "store_unavailable", detail) from None
    others = _others(desk, pool)
    held = not lifts or None in others  # a hold of all pools holds this one, too
    return HoldTold(pool=pool, held=held, for_s=None if lifts else for_s, others=others)


async def get_remedies(desk: Desk, asked: Asked[ListQuery, Body]) -> Listing:
    """Answer which remedies are in force."""
    remedies = desk.orders.supervisor.overrides.kept
    return Listing(sorted(remedies.items()), lambda each: str(each[0]), _remedy)


async def drop_remedies(desk: Desk, asked: Asked[DryRunQuery, DryRunBody]) -> DroppedTold:
    """Take a backend's remedies back, from its next start on."""
    backend_id = asked.names["backend"]
    with refusals(desk, backend_id):
        gone = desk.orders.drop_remedies(backend_id, dry_run=asked.dry_run)
    if gone is None:
        told = f"{backend_id} runs as configured: no remedy changed its command line."
    else:
        verb = "Would drop" if asked.dry_run else "Dropped"
        told = (
            f"{verb} {gone.told()}. The running server keeps it until its next start"
            f" (`vllm-gateway restart {backend_id}`)."
        )
    changed = gone is not None and not asked.dry_run
    return DroppedTold(backend=backend_id, changed=changed, sentence=told)


async def get_events(desk: Desk, asked: Asked[ListQuery, Body]) -> Listing:
    """Answer the newest events."""
    return Listing([*desk.orders.supervisor.events.newest()], lambda each: str(each.number), _event)


def _others(desk: Desk, pool: str | None) -> list[str | None]:
    supervisor = desk.orders.supervisor
    every = supervisor.holds.keys() | {
        of or None for of in supervisor.intent.holds if supervisor.intent.holds_now(of)
    }
    return sorted((of for of in every if of != pool and None in (of, pool)), key=str)


def _remedy(row: tuple[str, Override]) -> RemedyTold:
    backend_id, kept = row
    return RemedyTold(
        backend=backend_id,
        args=dict(kept.args),
        env=dict(kept.env),
        on_trial=kept.on_trial,
        failed_trials=kept.failed_trials,
        applied=[
            AppliedRemedy(remedy=each.remedy, at=rfc3339(each.at), why=each.why)
            for each in kept.applied
        ],
    )


def _event(event: Event) -> EventTold:
    return EventTold(
        id=str(event.number),
        at=rfc3339(event.at),
        kind=event.kind.value,
        backend=event.backend_id,
        label=event.label,
        detail=event.detail,
    )
