"""Each of ten incidents is named with its cause and the next step, where the command line and the dashboard ask."""

import asyncio
import shutil

import pytest

from tests import loopback
from tests.incidents.scenes import INCIDENTS, WITHIN_S
from tests.redisserver import PROGRAMS
from tests.stories.support import story


async def named(incident, admin_url):
    """Ask until the cause is named in time; return the verdict, and the problem that names it."""
    said = {}
    async with loopback.client(timeout=10) as http:
        try:
            async with asyncio.timeout(WITHIN_S):
                while True:
                    said = (await http.get(admin_url + "/admin/v1/overview")).json()
                    for problem in said["problems"]:
                        text = " ".join((problem["sentence"], problem["cause"], problem["next"]))
                        if problem["kind"] in incident.kinds and incident.named_in(text):
                            return said["verdict"], problem
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"it was not named in time: {said.get('problems')}") from None


@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda each: each.scene.__name__)
def test_the_cause_is_named(incident):
    if incident.scene.__name__ == "redis_gone" and not any(map(shutil.which, PROGRAMS)):
        pytest.skip("no redis-server here")

    async def check():
        async with incident.scene() as scene:
            await scene.plant()
            verdict, problem = await named(incident, scene.world.admin_url)
        if problem["severity"] != "note":
            assert verdict["state"] in ("degraded", "down")
        assert problem["next"]
        assert problem["since"]

    story(check, seconds=55.0)()
