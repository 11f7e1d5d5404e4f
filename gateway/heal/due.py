"""Restarts that are due pass on to who has the backend next: another process, or a new unit after a reload."""

from __future__ import annotations

from gateway.heal.decisions import Sign
from gateway.heal.states import Draining, Replacing
from gateway.heal.supervised import Supervised
from gateway.launch.command import CommandLauncher


def due(unit: Supervised) -> Sign | None:
    """Return the operator's restart that is ordered, or begun and not carried out; None where there is none.

    A service manager goes on by itself with what it was asked for; a command ends with the process that runs it.
    """
    state, launcher = unit.state, unit.launcher
    alone = launcher.launches or isinstance(launcher, CommandLauncher)
    asked = isinstance(state, Replacing) and state.claimed and not alone
    begun = isinstance(state, Draining | Replacing) and not asked
    return unit.ordered or (unit.carried_out if begun else None)


def take_over(heir: Supervised, before: Supervised) -> None:
    """Have a unit go on with the server of the unit before: its order, and the requests that it carries."""
    heir.carriers += [each for each in before.carriers if each.in_flight]
    if (order := due(before)) is not None:
        heir.order(order)
