"""What is seen of one backend, by a launcher that a reload may replace."""

import asyncio

import pytest

from gateway.core.aio import SystemClock
from gateway.heal.observed import Observed, Timing
from gateway.launch.launcher import Incarnation, Runs, Seen
from gateway.pools.table import Backend


class Sees:
    """A launcher that sees a server run."""

    def __init__(self, **more):
        self.seen = Seen(Incarnation("one"), Runs.RUNNING, **more)

    async def look(self):
        return self.seen


def test_what_a_launcher_saw_says_nothing_of_the_settings_that_another_one_has():
    changed, as_before = Sees(outdated=True), Sees(outdated=False)
    backend = Backend("m", "b1", "http://127.0.0.1:1")
    observed = Observed(backend, None, changed, SystemClock(), Timing())
    asyncio.run(observed.look(None))
    assert observed.outdated
    observed.launcher = as_before
    assert not observed.outdated
    asyncio.run(observed.look(None))
    assert not observed.outdated


@pytest.mark.parametrize(("ago_s", "age_s"), [(3600.0, 3600.0), (-5.0, 0.0), (None, 0.0)])
def test_its_age_is_that_of_the_process_where_the_launcher_tells_it(ago_s, age_s):
    clock = SystemClock()
    began_at = None if ago_s is None else clock.wall() - ago_s
    backend = Backend("m", "b1", "http://127.0.0.1:1")
    observed = Observed(backend, None, Sees(began_at=began_at), clock, Timing())
    for _ in range(2):
        asyncio.run(observed.look(None))
        assert clock.now() - observed.since == pytest.approx(age_s, abs=5.0)
