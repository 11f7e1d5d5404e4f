"""Room for request bodies: never more than there is, and everybody gets it in the end."""

import asyncio

from hypothesis import example, given
from hypothesis import strategies as st

from gateway.config.limits import LimitsConfig
from gateway.ingress.bodies import UNTOLD_BYTES, Bodies

MIB = 1 << 20
# Its key, its length in MiB, and whether it tells it.
BODY = st.tuples(st.sampled_from("abc"), st.integers(1, 6), st.booleans())


async def serve(bodies, limits, body, steps):
    """Take the room of one body as it comes, and give it back after a few turns of the loop."""
    key, size, told = body
    hold = await bodies.take(key, size * MIB if told else None, limits, 60)
    assert bodies.held_bytes <= limits.all_bodies
    for _ in range(steps):
        await asyncio.sleep(0)
    if size * MIB > hold.size:
        await bodies.widen(hold, limits.max_body, 60)
        assert size * MIB <= hold.size
    assert bodies.held_bytes <= limits.all_bodies
    for _ in range(steps):
        await asyncio.sleep(0)
    hold.release()


@example([("a", 6, False)] * 3 + [("b", 4, True), ("b", 3, False)], 8, 2)
@given(st.lists(BODY, max_size=40), st.integers(6, 24), st.integers(0, 3))
def test_no_mix_of_bodies_comes_to_a_standstill(several, room, steps):
    limits = LimitsConfig(bodies=f"{room}MiB", max_body="6MiB")

    async def check():
        bodies = Bodies()
        async with asyncio.timeout(5), asyncio.TaskGroup() as group:
            for each in several:
                group.create_task(serve(bodies, limits, each, steps))
        assert bodies.held_bytes == 0

    assert UNTOLD_BYTES == MIB  # else bodies of 1 MiB would have to grow, too
    asyncio.run(check())
