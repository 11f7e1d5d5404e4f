"""What workers without Redis give out of a limit, from their first moment on."""

import asyncio
import os
import socket
from contextlib import ExitStack

from gateway.app import build
from gateway.config.load import load_config
from gateway.core.aio import start
from gateway.core.limits import Amounts, KeyLimits, Taken
from gateway.observe.outlet import Outlet
from gateway.store.group import Group, Place
from tests.limitercases import plan_of

SETTINGS = """
pools:
  m: {backends: [{url: "http://127.0.0.1:1"}]}
"""


def test_workers_that_have_not_heard_of_each_other_give_out_no_more_than_a_limit(tmp_path):
    path = tmp_path / "gateway.yaml"
    path.write_text(SETTINGS)
    (tmp_path / "keys.yaml").write_text("keys: []\n")
    address = f"vllm-gateway-test-{os.getpid()}"

    async def taken_of(count, limit):
        plan = plan_of(KeyLimits(concurrent_requests=limit))
        with ExitStack() as stack:
            parent = stack.enter_context(socket.socket(socket.AF_UNIX))
            parent.bind("\0" + address)
            parent.listen()
            found = []
            for number in range(1, count + 1):
                group = Group.join(Place(number, count, address, 0, 0))
                worker = build(load_config(path), path, Outlet(), group=group)
                limiter, cost = worker.handler.limiter, Amounts(1, 1, 1, 2, 0)
                takes = [await limiter.take(plan, cost) for _ in range(limit)]
                found.append(sum(isinstance(each, Taken) for each in takes))
                await worker.accounts.close()
                channel = start(group.channel.run(), name="channel")
                await group.channel.open.wait()
                channel.cancel()
                await asyncio.wait([channel])
            return found

    assert asyncio.run(taken_of(2, 6)) == [3, 3]
    assert asyncio.run(taken_of(4, 10)) == [2, 2, 2, 2]
