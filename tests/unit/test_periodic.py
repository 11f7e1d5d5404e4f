"""Background work outlives a turn that fails, and fills neither a core nor the log with it."""

import asyncio
import contextlib

from gateway.core.aio import periodic


def turns_until(seconds, turn):
    async def story():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await periodic(turn, every_s=0.0, name="a task")

    asyncio.run(story())


def test_a_turn_that_fails_at_once_is_not_tried_again_at_once(caplog):
    tried = []

    async def turn():
        tried.append(1)
        raise ValueError("a bug")

    turns_until(0.3, turn)
    assert len(tried) == len(caplog.records) == 1


def test_a_turn_that_ends_well_is_followed_by_the_next(caplog):
    done = []

    async def turn():
        done.append(1)

    turns_until(0.3, turn)
    assert len(done) > 1
    assert not caplog.records
