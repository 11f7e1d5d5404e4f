"""What is seen of one backend, by a launcher that a reload may replace."""

import asyncio

from gateway.core.aio import SystemClock
from gateway.heal.observed import Observed, Timing
from gateway.launch.launcher import Incarnation, Runs, Seen
from gateway.pools.table import Backend


class Sees:
    """A launcher that sees a server run."""

    def __init__(self, *, outdated):
        self.seen = Seen(Incarnation("one"), Runs.RUNNING, outdated=outdated)

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
