"""What all units of one supervisor use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gateway.core.aio import Clock
from gateway.core.events import Events
from gateway.heal.autopsy import Autopsy
from gateway.heal.decisions import Restart, Setback
from gateway.heal.held import HeldAdapters
from gateway.heal.names import Names
from gateway.heal.observed import Timing
from gateway.heal.overrides import Overrides
from gateway.heal.usual import UsualTimes
from gateway.pools.table import PoolTable
from gateway.store.shared import SharedStore


@dataclass(frozen=True, slots=True)
class Shared:
    """What all units use."""

    table: PoolTable
    clock: Clock
    store: SharedStore
    events: Events
    overrides: Overrides
    usual: UsualTimes
    held: HeldAdapters
    autopsy: Autopsy
    timing: Timing
    names: Names
    came_to: Callable[[Setback, Restart], None]  # told of orders that came to no start
    on_hold: Callable[[str], bool]  # whether an operator holds automatic restarts of a pool
