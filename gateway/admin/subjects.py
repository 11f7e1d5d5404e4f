"""What can be changed of each resource, as it is now: its digest is the ETag, and the audit log shows it.

Only what orders change is in it, so that an ETag stays the same while a backend merely lives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.admin.desk import Desk
from gateway.admin.quarantine import is_kept
from gateway.heal.intent import Mark
from gateway.ops.moment import rfc3339


async def backend(desk: Desk, names: Mapping[str, str]) -> Mapping[str, Any] | None:
    """Return what operators order of a backend; None: there is none."""
    backend_id = names["backend"]
    found = desk.table.get(backend_id)
    if found is None:
        return None
    supervisor = desk.orders.supervisor
    unit = supervisor.units.get(backend_id)
    remedies = supervisor.overrides.kept.get(backend_id)
    orders = desk.adapters.memory.orders(backend_id)
    return {
        "drained": found.health.held is not None,
        "why": supervisor.intent.why(Mark.DRAINED, backend_id),
        "suspended": unit is not None and unit.suspended,
        "restarting": unit is not None and unit.under_way,
        "remedies": None if remedies is None else remedies.told(),
        "adapters": {
            name: {"keep": order.keep, "path": order.path} for name, order in sorted(orders.items())
        },
    }


async def holds(desk: Desk, names: Mapping[str, str]) -> Mapping[str, Any]:
    """Return which pools' automatic restarts are on hold, and until when."""
    return {
        pool or "all pools": "until it is lifted" if hold.until is None else rfc3339(hold.until)
        for pool, hold in sorted(desk.orders.supervisor.intent.holds.items())
    }


async def suspect(desk: Desk, names: Mapping[str, str]) -> Mapping[str, Any] | None:
    """Return that a request is in quarantine; None: it is not."""
    return {"quarantined": True} if await is_kept(desk, names["id"]) else None
