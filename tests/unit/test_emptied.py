"""A backend is empty when nobody carries a request of it any more, or nobody waits longer."""

import asyncio

import pytest

from gateway.core.aio import SystemClock
from gateway.heal.emptied import emptied
from gateway.pools.backend import Backend
from gateway.pools.table import PoolTable


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
