"""Each of ten incidents is named with its cause and the next step, where operators look."""

import shutil

import pytest

from tests.incidents.scenes import INCIDENTS, told_of
from tests.redisserver import PROGRAMS
from tests.stories.support import story

PATIENCE_S = 40.0


@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda each: each.play.__name__)
def test_the_cause_is_named(incident):
    if incident.play.__name__ == "redis_gone" and not any(map(shutil.which, PROGRAMS)):
        pytest.skip("no redis-server here")

    async def check():
        async with incident.play() as world:
            told = await told_of(incident, world, PATIENCE_S)
        if told.problem["severity"] != "note":
            assert told.state in ("degraded", "down")
        assert told.problem["next"]
        assert told.problem["since"]

    story(check, seconds=55.0)()
