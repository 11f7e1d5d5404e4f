"""Following an engine's KV events over real sockets: losses, ends, new starts, and nonsense."""

import asyncio
import contextlib

import pytest
import zmq.asyncio

from gateway.core.aio import SystemClock
from gateway.core.prefix import BlockShape
from gateway.prefix.follower import Follower
from gateway.prefix.mirror import prefix_digests
from gateway.watch.kvevents import Subscriber
from gateway.wire.kvsources import Source
from tests.kvengine import SIZE, Engine
from tests.ports import free_port
from tests.stories.fakeevents import Publisher
from tests.stories.support import story

PROMPT = ([1] * (4 * SIZE), None, None)
OTHER = ([2] * (4 * SIZE), None, None)


@contextlib.asynccontextmanager
async def following(publisher, *, replays=True, clock=None):
    """Follow a publisher; yield the follower."""
    context, follower = zmq.asyncio.Context(), Follower()
    replay = f"tcp://127.0.0.1:{publisher.replay_port}" if replays else None
    source = Source(f"tcp://127.0.0.1:{publisher.port}", replay)
    subscriber = Subscriber(context, source, follower, clock or SystemClock())
    async with asyncio.TaskGroup() as group:
        task = group.create_task(subscriber.run())
        try:
            yield follower
        finally:
            task.cancel()
    assert not follower.knows
    context.destroy(linger=0)


@contextlib.asynccontextmanager
async def publisher_of(engine=None, **more):
    publisher = Publisher(engine, **more)
    try:
        yield publisher
    finally:
        await publisher.close()


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def held(follower, prompt):
    return follower.mirror.held(prefix_digests(prompt[0], BlockShape(SIZE), *prompt[1:]))


@story
async def test_who_comes_late_learns_what_is_there_and_then_follows():
    async with publisher_of() as publisher:
        publisher.engine.read(PROMPT)
        async with following(publisher) as follower:
            await until(lambda: follower.knows)
            assert follower.whole
            assert held(follower, PROMPT) == publisher.engine.held(*PROMPT) == 3
            await publisher.send(publisher.engine.read(OTHER))
            await until(lambda: held(follower, OTHER) == 3)
            assert publisher.replays == 1


@story
async def test_a_gap_is_filled_by_a_replay():
    async with publisher_of() as publisher, following(publisher) as follower:
        await until(lambda: follower.knows)
        await publisher.send(publisher.engine.read(PROMPT), lost=True)
        assert held(follower, PROMPT) == 0
        await publisher.send(publisher.engine.read(OTHER))
        await until(lambda: held(follower, OTHER) == 3)
        assert held(follower, PROMPT) == 3
        assert follower.whole
        assert follower.losses == 0


@story
async def test_without_a_replay_a_gap_forgets_what_was_known():
    async with publisher_of(replays=False) as publisher, following(publisher, replays=False) as follower:  # fmt: skip
        await publish_until_seen(publisher, follower)
        await publisher.send(publisher.engine.read(PROMPT))
        await until(lambda: held(follower, PROMPT) == 3)
        await publisher.send(publisher.engine.clear(), lost=True)
        await publisher.send(publisher.engine.read(OTHER))
        await until(lambda: held(follower, OTHER) == 3)
        assert held(follower, PROMPT) == 0
        assert (follower.knows, follower.whole, follower.losses) == (True, False, 1)


async def publish_until_seen(publisher, follower):
    """Publish until the subscription has reached the publisher."""
    token = 100
    while not follower.knows:
        token += 1
        await publisher.send(publisher.engine.read(([token] * (SIZE + 1), None, None)))
        await asyncio.sleep(0.01)


@story
async def test_a_replay_that_never_answers_is_done_without():
    async with publisher_of() as publisher:
        publisher.is_silent = True
        publisher.engine.read(PROMPT)
        async with following(publisher) as follower:
            await until(lambda: publisher.replays == 1)
            assert not follower.knows
            async with asyncio.timeout(10):
                await publish_until_seen(publisher, follower)
            assert not follower.whole


@story
@pytest.mark.parametrize("replays", [True, False])
async def test_another_process_at_the_same_address_has_an_empty_cache(replays):
    ports = {"port": free_port(), "replay_port": free_port()}
    async with publisher_of(replays=replays, **ports) as publisher:
        async with following(publisher, replays=replays) as follower:
            if not replays:
                await publish_until_seen(publisher, follower)
            await until(lambda: follower.knows)
            await publisher.send(publisher.engine.read(PROMPT))
            await until(lambda: held(follower, PROMPT) == 3)
            await publisher.close()
            await until(lambda: not follower.knows)
            async with publisher_of(publisher.engine.restarted(), replays=replays, **ports) as second:  # fmt: skip
                if replays:
                    await until(lambda: follower.knows)
                    await second.send(second.engine.read(OTHER))
                else:
                    await publish_until_seen(second, follower)
                    await second.send(second.engine.read(OTHER))
                await until(lambda: held(follower, OTHER) == 3)
                assert held(follower, PROMPT) == 0
                assert follower.losses == 1


@story
async def test_nonsense_is_counted_and_survived():
    async with publisher_of() as publisher, following(publisher) as follower:
        await until(lambda: follower.knows)
        await publisher.send_raw(b"one frame")
        await publisher.send_raw(b"", b"short", b"")
        await publisher.send_raw(b"", b"\0" * 8, b"no batch")
        publisher.engine.publish({"type": "Later"})  # takes the number of the nonsense
        await publisher.send(publisher.engine.read(PROMPT))
        await until(lambda: held(follower, PROMPT) == 3)
        assert follower.garbled == 3
        assert not follower.whole


class SlowMachine:
    """A clock by which everything takes long."""

    def __init__(self, step_s=0.9):
        self.at, self.step_s = 0.0, step_s

    def now(self):
        self.at += self.step_s
        return self.at


@story
async def test_a_burst_of_messages_never_holds_the_loop_for_long():
    async with publisher_of(replays=False) as publisher:
        slow = SlowMachine(0.002)
        async with following(publisher, replays=False, clock=slow) as follower:
            await publish_until_seen(publisher, follower)
            for token in range(1000, 1200):
                await publisher.send(publisher.engine.read(([token] * (SIZE + 1), None, None)))
            most = 0
            while follower.seen < publisher.engine.sent:
                before = follower.seen
                await asyncio.sleep(0)
                most = max(most, follower.seen - before)
            assert most < 5


@story
async def test_who_reads_more_slowly_than_an_engine_writes_knows_nothing_until_all_is_read():
    async with publisher_of(replays=False) as publisher:
        async with following(publisher, replays=False, clock=SlowMachine()) as follower:
            await publish_until_seen(publisher, follower)
            seen = set()
            for token in range(1000, 1500):
                messages = publisher.engine.read(([token] * (SIZE + 1), None, None))
                await publisher.send(messages)
            while follower.seen < publisher.engine.sent:
                seen.add(follower.knows)
                await asyncio.sleep(0)
            assert False in seen
            await until(lambda: follower.knows)
            assert follower.losses == 0


@story
async def test_thousands_of_messages_are_replayed():
    engine = Engine()
    for token in range(3000):
        engine.read(([token] * (SIZE + 1), None, None))
    async with publisher_of(engine) as publisher, following(publisher) as follower:
        await until(lambda: follower.knows)
        assert len(follower.mirror) == 3000
        assert follower.whole


@story
async def test_a_replay_whose_end_did_not_fit_the_engines_queue_is_requested_again():
    engine = Engine()
    for token in range(1_300):
        engine.read(([token] * (SIZE + 1), None, None))
    async with publisher_of(engine, most=600) as publisher, following(publisher) as follower:
        await until(lambda: follower.knows)
        assert len(follower.mirror) == 1_300
        assert follower.whole
        assert (publisher.replays, follower.losses) == (3, 0)
