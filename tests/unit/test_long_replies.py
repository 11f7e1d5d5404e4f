"""Few places and long replies: nothing ends for a while, and yet all have their turn in time."""

import asyncio
import random

import pytest

from gateway.core.errors import Overloaded
from tests.gatehouse import held, passes, turns
from tests.unit.test_gate import ONE, house, single


@held
@pytest.mark.parametrize(
    ("places", "reply_s", "comes_at"),
    [(8, 25.0, 22.0), (4, 20.0, 11.0), (8, 5.0, 4.0), (2, 28.0, 27.0)],
)
async def test_of_replies_that_end_together_those_who_wait_have_the_next_places(
    places, reply_s, comes_at
):
    world = house(backends=[single(ONE, places)])
    first = await world.guests(places)
    await passes(comes_at)
    crowd = await world.guests(2 * places)  # half of them are next, half come after those
    await passes(reply_s - comes_at)
    for each in first:
        each.end()
    await turns()
    assert sum(each.inside for each in crowd) == places
    await passes(reply_s)
    refused = [each.refusal.message for each in crowd if each.refusal]
    for each in crowd:
        if each.inside:
            each.end()
    await turns()
    assert sum(each.inside for each in crowd) == places, refused


@held
@pytest.mark.parametrize(
    ("places", "reply_s", "max_wait_s", "clients"), [(4, 25.0, 30.0, 8), (8, 52.0, 120.0, 24)]
)
async def test_a_fixed_number_of_clients_that_have_their_turns_in_time_are_not_refused(
    places, reply_s, max_wait_s, clients
):
    rng = random.Random(5)
    queue = {"max_wait": f"{max_wait_s:g}s", "tenant_share": 1.0}
    world = house(backends=[single(ONE, places)], queue=queue)
    served, refused, end = 0, [], world.loop.time() + 900

    async def client():
        nonlocal served
        while world.loop.time() < end:
            guest = world.guest(wait_s=max_wait_s)
            try:
                await guest.task
            except Overloaded as error:
                refused.append(error.message)
                await asyncio.sleep(error.retry_after_s)
                continue
            served += 1
            await asyncio.sleep(reply_s * rng.uniform(0.95, 1.05))
            guest.end()

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    assert served > 100
    assert len(refused) <= 0.05 * served, refused[0]


@held
@pytest.mark.parametrize(
    ("places", "reply_s", "seed", "lost"),
    [
        (32, 25.0, 0, 0.01),
        (32, 25.0, 1, 0.01),
        (16, 40.0, 0, 0.03),
        (8, 40.0, 1, 0.03),
        (8, 40.0, 2, 0.03),
        (4, 30.0, 1, 0.03),
    ],
)
async def test_of_workers_twice_as_many_as_places_few_requests_fail(places, reply_s, seed, lost):
    """Each does as OpenAI's SDKs do: it comes again once when it is told to."""
    rng = random.Random(seed)
    queue = {"max_wait": "60s", "tenant_share": 1.0}
    world = house(backends=[single(ONE, places)], queue=queue)
    served, failed, end = 0, 0, world.loop.time() + 1200

    async def reads_one(*, returned):
        guest = world.guest(wait_s=60.0, stream=True, tokens=300, returned=returned)
        await guest.task
        await asyncio.sleep(0.25)
        guest.read()
        await asyncio.sleep(reply_s * rng.uniform(0.8, 1.2) - 0.25)
        guest.end()

    async def worker():
        nonlocal served, failed
        await asyncio.sleep(rng.uniform(0, reply_s))
        while world.loop.time() < end:
            try:
                try:
                    await reads_one(returned=False)
                except Overloaded as error:
                    await asyncio.sleep(error.retry_after_s)
                    await reads_one(returned=True)
                served += 1
            except Overloaded:
                failed += 1
            await asyncio.sleep(rng.expovariate(1 / (0.2 * reply_s)))

    async with asyncio.TaskGroup() as group:
        for _ in range(2 * places):
            group.create_task(worker())
    assert served > 0.9 * places * 1200 / reply_s
    assert failed <= lost * served
