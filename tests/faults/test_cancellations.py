"""Ten thousand requests that end at any step: nothing is held afterwards, and each was settled once."""

import asyncio
import collections.abc
import json
import os
import random

from gateway.sim.server import SimConfig
from tests.abuse.support import descriptors, head
from tests.faults.world import FAST
from tests.stories.support import gateway, story

MANY = int(os.environ.get("FAULT_CANCELLATIONS", "10000"))
AT_ONCE = 25
# So few slots that some wait in the queue.
POOLS = (
    "pools: {m: {backends: [{url: <0>, max_in_flight: 4}, {url: <1>, max_in_flight: 4}],"
    " queue: {max_wait: 30s}}}"
)
SIMS = [FAST, SimConfig(model="m", decode_step_s=0.001)]
EXTRA = "limits: {connections_per_address: 5000}"


def request(world, chance):
    body = {
        "model": "m", "stream": chance.random() < 0.6, "max_tokens": chance.choice([1, 5, 30]),
        "messages": [{"role": "user", "content": "x" * chance.choice([1, 500])}],
    }  # fmt: skip
    data = json.dumps(body).encode()
    return head(key=world.key, length=len(data)) + data


async def settle(world, settled, count=None):
    await world.until(lambda: not world.process.ingress.live and world.in_flight() == 0, 10)
    await world.settled()
    await world.until(lambda: not world.process.ingress.connections, 10)
    await world.until(lambda: all(sim.engine.running == 0 for sim in world.sims), 10)
    world.process.ledger.post()
    assert "bug" not in settled
    if count is not None:
        assert sum(settled.values()) == count


def counting(world):
    settled = collections.Counter()
    world.process.ledger.on_posted.append(
        lambda records: settled.update(record.outcome.value for record in records)
    )
    return settled


def test_clients_that_leave_after_any_number_of_turns_of_the_loop_leave_nothing(measured, caplog):
    """The engines work in this loop, too, so a turn more is one step further on the way of a request."""
    chance = random.Random(1)

    async def check():
        async with gateway(*SIMS, pools=POOLS, extra=EXTRA) as world:
            settled = counting(world)
            before = descriptors()
            port = world.process.public_port

            async def client(turns):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(request(world, chance))
                for _ in range(turns):
                    await asyncio.sleep(0)
                if turns % 3:
                    writer.transport.abort()
                else:
                    writer.close()

            for _ in range(MANY // AT_ONCE):
                async with asyncio.TaskGroup() as group:
                    for _ in range(AT_ONCE):
                        group.create_task(client(chance.randrange(50)))
            await settle(world, settled)
            await world.until(lambda: descriptors() <= before + 16, 10)
            told = ", ".join(f"{count} {name}" for name, count in sorted(settled.items()))
            measured(f"{MANY} requests (seed 1): {told}")
            assert settled["client_gone"] > MANY // 20
            assert (await world.chat(max_tokens=1)).status_code == 200

    story(check, seconds=58)()
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


class Stepped(collections.abc.Coroutine):
    """A coroutine that does something when it waits for the n-th time."""

    def __init__(self, coro, at, act):
        self._coro, self._left, self._act = coro, at, act

    def send(self, value):
        return self._step(self._coro.send(value))

    def throw(self, *error):
        return self._step(self._coro.throw(*error))

    def close(self):
        self._coro.close()

    def __await__(self):
        return self

    def _step(self, waits_for):
        self._left -= 1
        if self._left == 0:
            self._act()
        return waits_for


def test_requests_that_are_cancelled_at_any_await_leave_nothing(measured, caplog):
    """The task of each request is cancelled as it waits for the n-th time, as a stop of the gateway does."""
    chance = random.Random(2)
    few = MANY // 10

    async def check():
        async with gateway(*SIMS, pools=POOLS, extra=EXTRA) as world:
            settled = counting(world)
            ingress = world.process.ingress
            handle, loop = ingress.story, asyncio.get_running_loop()
            cancelled = [0]

            def cancel(down):
                cancelled[0] += 1
                if down.task is not None:
                    down.task.cancel()

            def stepped(down):
                return Stepped(
                    handle(down), chance.randrange(1, 5), lambda: loop.call_soon(cancel, down)
                )

            ingress.story = stepped
            port = world.process.public_port

            async def client():
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(request(world, chance))
                got = await reader.read(100)
                writer.transport.abort()
                return got

            for _ in range(few // AT_ONCE):
                async with asyncio.TaskGroup() as group:
                    asked = [group.create_task(client()) for _ in range(AT_ONCE)]
                assert all(each.result().startswith(b"HTTP/1.1 ") for each in asked)
            ingress.story = handle
            await settle(world, settled, few)
            measured(f"{cancelled[0]} of {few} cancelled at one of their first four waits (seed 2)")
            assert cancelled[0] > few // 4
            assert (await world.chat(max_tokens=1)).status_code == 200

    story(check, seconds=58)()
    assert not [each for each in caplog.records if each.levelname == "ERROR"]
