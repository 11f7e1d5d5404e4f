"""Workers of one gateway know which prompts the others sent where."""

import asyncio
import contextlib
import functools
import os
import signal

import httpx2
import pytest

from tests.stories.served import runs, served
from tests.stories.support import FAST
from tests.stories.support import story as story_within
from tests.stories.test_workers import TWO, agree, client, in_state, order, page, workers

pytestmark = pytest.mark.timeout(180)
story = functools.partial(story_within, seconds=170.0)  # processes start, and a machine may be busy
GROUPS = 8


async def ask(http, group, question):
    system = f"You are helper number {group}. " + f"Rule {group}: be kind to trains. " * 60
    body = {
        "model": "m",
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": f"Question {question}"},
        ],
        "max_tokens": 2,
    }
    reply = await http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text


@contextlib.asynccontextmanager
async def client_of(world, pids, number):
    """A client whose one connection a certain worker has: the other one stands still while it is made."""
    other = pids[3 - number]
    async with client(world, limits=httpx2.Limits(max_connections=1)) as http:
        os.kill(other, signal.SIGSTOP)
        try:
            assert (await http.get("/livez")).status_code == 200
        finally:
            os.kill(other, signal.SIGCONT)
        yield http


async def shared(world, result):
    """Return how many hashes were told, heard or dropped in all workers."""
    lines = (await page(world, "/metrics")).splitlines()
    name = f'gateway_prefix_shared_hashes_total{{result="{result}"}} '
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


def asked(sim):
    return [each for each in sim.requests if b"be kind" in each.body]


async def drain(world, name, verb, phase):
    ordered = await order(world, f"backends/m/{name}:{verb}", {"reason": "test"})
    assert ordered.status_code < 300, ordered.text
    await agree(world, lambda told: in_state(told, name)["phase"] == phase)


@story
async def test_a_prompt_that_one_worker_sent_is_sent_to_the_same_backend_by_the_other():
    async with served(FAST, FAST, extra=TWO) as world:
        pids = await workers(world)
        b1, b2 = world.sims
        async with client_of(world, pids, 1) as one, client_of(world, pids, 2) as other:
            # Not where they would go by themselves: some of new prompts go to either backend.
            await drain(world, "b1", "drain", "draining")
            for group in range(GROUPS):
                await ask(one, group, "first")
            await drain(world, "b1", "undrain", "ready")
            async with asyncio.timeout(60):
                while await shared(world, "heard") < GROUPS:
                    await asyncio.sleep(0.05)
            for group in range(GROUPS):
                await ask(other, group, "second")
            assert (len(asked(b1)), len(asked(b2))) == (0, 2 * GROUPS)
        assert all(map(runs, pids.values()))
        assert await shared(world, "dropped") == 0
