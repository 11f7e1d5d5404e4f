"""What the gateway that supervises tells the one that takes its place (decision 029), and what that makes of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gateway.heal import states
from gateway.heal.decisions import Cause, Sign, Tries
from gateway.heal.due import due
from gateway.heal.supervisor import Supervisor
from gateway.heal.unit import Unit
from gateway.launch.launcher import Incarnation


def unfinished(units: Iterable[Unit]) -> dict[str, str]:
    """Return operators' restarts that are due, with why they were ordered. Call it when no unit takes a step."""
    signs = {unit.id: due(unit) for unit in units}
    return {backend_id: sign.evidence for backend_id, sign in signs.items() if sign is not None}


def begun(supervisor: Supervisor) -> dict[str, Tries]:
    """Return how often a restart of what runs, or ran last, was begun: each may be claimed in the shared store."""
    found = {}
    for unit in supervisor.units.values():
        incarnation = unit.state.incarnation
        times = supervisor.history.of(unit.id).orders_for(incarnation).times
        if times:
            found[unit.id] = incarnation, times
    return found


def unproven(units: Iterable[Unit]) -> dict[str, Incarnation]:
    """Return what runs and has to give a token before it serves, by backend."""
    found = {unit.id: unit.state.incarnation for unit in units if states.unproven(unit.state)}
    return {backend_id: each for backend_id, each in found.items() if each is not None}


def take_up(
    supervisor: Supervisor, restarts: Mapping[str, str], tried: Mapping[str, Tries]
) -> None:
    """Have these restarts due, which operators ordered of the gateway before; `tried` is its `begun`.

    What it claimed nobody can claim again, so the next try counts as another one, whoever ordered it.
    """
    units, now = supervisor.units, supervisor.clock.now()
    for backend_id in tried.keys() & units.keys():
        record = supervisor.history.of(backend_id).after_orders(*tried[backend_id], now)
        supervisor.history = supervisor.history.after(backend_id, record)
    for backend_id in restarts.keys() & units.keys():
        units[backend_id].order(Sign(Cause.OPERATOR, restarts[backend_id]))
