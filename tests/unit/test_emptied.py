"""A backend is empty when nobody carries a request of it any more, or nobody waits longer."""

import asyncio

import pytest

from gateway.config.models import Config
from gateway.core.aio import SystemClock
from gateway.heal.emptied import carried_as, emptied
from gateway.heal.following import told_of
from gateway.heal.names import Names
from gateway.pools.backend import Backend
from gateway.pools.table import PoolTable
from gateway.store.replicas import Told
from tests.storecases import HeldClock


@pytest.mark.parametrize(("patience_s", "asked"), [(30.0, 4), (0.0, 0)])
def test_what_other_workers_carry_is_waited_for_as_long_as_there_is_patience(patience_s, asked):
    table, clock, answers = PoolTable(SystemClock()), SystemClock(), []

    def carried(backend_id, since):
        answers.append((backend_id, since <= clock.now()))
        return len(answers) < 4

    table.carried_elsewhere = carried
    backend = Backend("m", "b1", "http://h:1", None)
    asyncio.run(emptied(backend, table, clock, patience_s))
    assert answers == [("m/b1", True)] * asked


@pytest.mark.parametrize("moved", [False, True])
def test_streams_at_the_server_that_had_its_name_before_are_not_waited_for(moved):
    def pools(port):
        backend = {"name": "b1", "url": f"http://h:{port}"}
        return Config.model_validate({"pools": {"m": {"backends": [backend]}}}).pools

    clock = HeldClock()
    here, worker = PoolTable(clock), PoolTable(clock)
    here.apply(pools(1))
    worker.apply(pools(1))
    former = here.get("m/b1")
    worker.take("m/b1", clock.now())
    for table in (here, worker) if moved else ():
        table.apply(pools(2))
    told = told_of(worker, Names("here"), Told(), {}).in_flight
    here.carried_elsewhere = lambda name, since: bool(told.get(name))
    assert here.carried_elsewhere(carried_as(here, here.get("m/b1")), 0.0) is not moved
    assert here.carried_elsewhere(carried_as(here, former), 0.0)
