"""Usage that gateways count together on a real Redis."""

import asyncio
import time

import pytest

from gateway.core.aio import SystemClock
from gateway.core.limits import Price
from gateway.store.onredis import redis_store
from gateway.usage.accounts import Accounts
from gateway.usage.entries import day_told
from gateway.usage.report import rows
from tests.redisserver import redis_server
from tests.unit.test_usage import record

pytestmark = pytest.mark.e2e


def test_two_gateways_count_together_and_again_what_redis_lost(tmp_path):
    async def until(accounts, days, requests):
        for _ in range(200):  # a busy machine may keep Redis from answering in time
            for each in accounts:
                await each.turn()
            told = rows(await accounts[0]._shared.read(days), ["tenant"], {})
            if told and told[0]["requests"] == requests:
                return told[0]
            await asyncio.sleep(0.05)
        raise AssertionError(told)

    async def story():
        with redis_server() as server:
            stores = [redis_store(server.url, SystemClock()) for _ in range(2)]
            accounts = [
                Accounts(
                    SystemClock(), each.link, tmp_path / str(n), 10**6, lambda *_: Price(1, 1, 2)
                )
                for n, each in enumerate(stores)
            ]
            days = [day_told(time.time()), day_told(time.time() + 86_400)]  # it may end meanwhile
            now = SystemClock.now()
            for each in accounts:
                each.posted([record(f"r{n}", received_at=now, tokens=(10, 5)) for n in range(700)])
            told = await until(accounts, days, 1400)
            assert (told["input_tokens"], told["output_tokens"]) == (14_000, 7_000)
            assert told["money"] == pytest.approx(1400 * 20 / 1e6)
            assert await until(accounts, days, 1400) == told
            server.ask("FLUSHALL")
            assert await until(accounts, days, 1400) == told
            for each in accounts:
                await each.close()
            for each in stores:
                await each.close()

    asyncio.run(story())
