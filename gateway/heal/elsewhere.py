"""A backend whose server another gateway is about to stop gets no new requests here either."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final

from gateway.core.types import Phase
from gateway.heal.names import Names
from gateway.pools.facts import Tending
from gateway.pools.table import Backend, PoolTable

ELSEWHERE: Final = Tending(
    Phase.DRAINING, "restart", "another gateway restarts or stops its server, once its requests have ended"
)  # fmt: skip


def left_alone(backend: Backend) -> Tending | None:
    """Return what is shown of one that another gateway drains; None where none does, or what is done here is shown."""
    return ELSEWHERE if backend.health.tended == ELSEWHERE else None


def leave_alone(table: PoolTable, names: Names, drained: AbstractSet[str]) -> None:
    """Show which backends other gateways drain, by their names; what is done to one here is shown instead."""
    for backend in table:
        is_drained = names.of(backend) in drained
        if is_drained and backend.health.tended is None:
            table.tend(backend.id, ELSEWHERE)
        elif left_alone(backend) and not is_drained:
            table.tend(backend.id, None)
