"""Requests that wait, and slots, as the queue sees them: no loop, no backends."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.admission.waiting import Waiting
from gateway.core.types import Ask, Call, Caller, Demand, Dialect, Endpoint, Need, Route, Slot

CALL = Call(Endpoint.CHAT, Dialect.CHAT, "m", stream=False, body=b"{}")


@dataclass(slots=True, eq=False)
class Request(Waiting):
    """One that has a name."""

    name: object = None


def request(
    name=None,
    tenant="a",
    priority=0,
    cost=100,
    size=10,
    deadline=60.0,
    returned=False,
    kind=None,
    came_at=0.0,
):
    """Make one; its kind is the adapter that it asks for."""
    ask = Ask(
        Route("m", "m", "m", adapter=kind),
        CALL,
        Demand(cost, exact=True),
        Caller(f"key-{tenant}", tenant, tenant, priority),
        Need(cost, 0),
        returned=returned,
    )
    return Request(ask, None, came_at, deadline, size, name=name)


def slot(backend_id, credit=None):
    """Make a slot that nobody gives back."""
    return Slot(backend_id, 0.0, 0, credit)


def offer(queue, waiting):
    """Queue a request if it may wait, as the gate does; else return the bound that forbids it."""
    full = queue.full(waiting)
    if full is None:
        queue.offer(waiting)
    return full
