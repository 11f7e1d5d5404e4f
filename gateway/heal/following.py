"""What a worker does that does not lead: it follows the one that leads, restarts nothing, and saves nothing.

    drains             holds in the store, as operators ordered them
    what is worked on  told by the leader with its heartbeat: a server that it drains, starts or gave up

While no leader is heard of, probes alone decide.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from gateway.core.aio import periodic
from gateway.core.traffic import Queued
from gateway.core.types import Phase
from gateway.heal.emptied import carried_as
from gateway.heal.intent import Mark
from gateway.heal.names import Names
from gateway.pools.facts import Tending
from gateway.pools.health import Order
from gateway.pools.table import Backend, PoolTable
from gateway.store.replicas import BEAT_S, Replicas, Told
from gateway.store.shared import LIFTED, SharedStore, StoreUnavailable


class Following:
    """See the module. One task."""

    def __init__(
        self, table: PoolTable, store: SharedStore, names: Names, replicas: Replicas
    ) -> None:
        self._table = table
        self._store = store
        self._names = names
        self._replicas = replicas
        self._tended: frozenset[str] = frozenset()

    async def run(self) -> None:
        """Follow until cancelled; then what is worked on is left to the probes."""
        try:
            await periodic(self.turn, every_s=BEAT_S / 2, name="following")
        finally:
            self._tend({})

    async def turn(self) -> None:
        """Take over what is new."""
        leader = self._replicas.leader()
        self._tend({} if leader is None else leader.tends)
        with contextlib.suppress(StoreUnavailable):  # what was ordered stays
            self._order(await self._store.holds())

    def _order(self, holds: Mapping[str | None, float]) -> None:
        for backend in self._table:
            end = holds.get(Mark.DRAINED.scope(self._names.of(backend)))
            if end is not None:
                order = Order.RESUME if end == LIFTED else Order.DRAIN
                if (backend.health.held is not None) is (order is Order.RESUME):
                    self._table.order(backend.id, order)

    def _tend(self, tends: Mapping[str, tuple[str, str, str]]) -> None:
        """Show what is worked on; after a reload, another backend may have the name of one that was shown so."""
        before, self._tended = self._tended, frozenset(tends)
        for backend in self._table:
            told = tends.get(backend.id)
            if told is None and backend.id not in before:
                continue
            tending = None if told is None else Tending(Phase(told[0]), *told[1:])
            if backend.health.tended != tending:
                self._table.tend(backend.id, tending)


def told_of(
    table: PoolTable,
    names: Names,
    told: Told,
    queues: Mapping[str, Queued],
    going: Iterable[Backend] = (),
) -> Told:
    """Return what a replica tells, with its backends; it drains and stops those that are `going`."""
    tended = {each.id: each.health.tended for each in table}
    carried = Counter[str]()  # also by servers that a reload took away
    for each in (*table, *table.leaving()):
        carried[carried_as(table, each)] += each.in_flight
    return msgspec.structs.replace(
        told,
        in_flight=dict(+carried),
        queued={pool: queued for pool, queued in queues.items() if queued.requests},
        phases={each.id: each.phase.value for each in table},
        tends={
            backend_id: (found.phase.value, found.reason, found.detail)
            for backend_id, found in tended.items()
            if found is not None
        },
        drains=tuple(names.of(each) for each in going),
        carries={names.of(each): each.in_flight for each in table},
    )
