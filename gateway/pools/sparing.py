"""Which backends a pool leaves out because their requests fail: `pools.ejection` over its members."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gateway.core.types import TrafficFailed
from gateway.pools.attribution import CLASS_OF, Failure, is_hard
from gateway.pools.backend import Backend
from gateway.pools.ejection import Probation, accusation, enough_left
from gateway.pools.facts import HealthState, Policy
from gateway.pools.health import eject


def after_failure(
    backend: Backend, members: Iterable[Backend], state: HealthState, failed: TrafficFailed, policy: Policy
) -> HealthState:  # fmt: skip
    """Note whose failure it was; return the state, of one that is ejected if its pool can spare it."""
    if CLASS_OF[failed.ending] is Failure.NACK:
        backend.limit.refused()
    if not is_hard(failed.ending):
        return state
    backend.tally.failed += 1
    peers = [each for each in members if each is not backend]
    found = accusation(state, backend.tally, (each.tally for each in peers), policy)
    if found is None or not enough_left(
        (backend.health, *(each.health for each in peers)), without=backend.health
    ):
        return state
    return eject(state, *found, failed.at, policy)


def leave_out(members: Sequence[Backend]) -> None:
    """Have those that are ejected left out, unless fewer than half of the pool would be left."""
    spares = enough_left(each.health for each in members)
    for backend in members:
        ejection = backend.health.ejection
        backend.kept_out = spares and ejection is not None
        on_probation = ejection is not None and ejection.probation
        backend.probation = (backend.probation or Probation()) if on_probation else None
