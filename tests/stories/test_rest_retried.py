"""The rest of a stream that broke off meets small trouble on its way: it is not lost for it."""

import asyncio

from tests.stories.support import gateway, story
from tests.stories.test_resume import SIM, anonymous, read


async def warmed(world):
    """Have each backend used, so that a connection to it rests; return what a whole stream says."""
    async with asyncio.TaskGroup() as group:
        both = [group.create_task(read(world)) for _ in range(4)]
    assert all(any(each.body for each in sim.requests) for sim in world.sims)
    await world.settled()
    await world.rested()
    return both[0].result()


def test_a_rest_that_met_a_dead_idle_connection_is_sent_on_a_fresh_one():
    @story
    async def check():
        async with gateway(SIM, SIM, access=True) as world:
            whole = await warmed(world)
            resumed = await read(world, fault="reset_after:7", others=["keepalive_close@1"])
            assert anonymous(resumed) == anonymous(whole)
            await world.settled()
            told = world.access_lines()[-1]
            assert (told["outcome"], told["attempts"], told["resumed"]) == ("ok", 3, 1)

    check()
