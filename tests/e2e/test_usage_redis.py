"""Usage that gateways count together on a real Redis, and limits of days and months that outlive its data."""

import asyncio
import contextlib
import time

import pytest

from gateway.core.aio import SystemClock
from gateway.core.asked import Caller
from gateway.core.limits import KeyLimits, Price, Taken
from gateway.limiting.limiter import Limiter
from gateway.store.onredis import redis_store
from gateway.store.shared import StoreUnavailable
from gateway.usage.accounts import Accounts
from gateway.usage.report import rows
from tests.limitercases import DAY_S, amounts, plan_of
from tests.redisserver import PROGRAMS, redis_server
from tests.stories.support import story
from tests.unit.test_usage import record

pytestmark = pytest.mark.e2e

OWN = KeyLimits(tokens_per_month=10_000, budget_per_day=5.0)
WHOLE = KeyLimits(tokens_per_day=12_000, concurrent_requests=9)


@pytest.fixture(params=PROGRAMS)
def server(request):
    while time.time() % DAY_S > DAY_S - 120:  # the day must not end meanwhile
        time.sleep(1)
    with redis_server(program=request.param) as server:
        yield server


class Gateway:
    """What one gateway limits and counts; it takes its turns when the test says so."""

    def __init__(self, server, state, replicas=1):
        clock, price = SystemClock(), Price(1, 1, 2)
        self.store = redis_store(server.url, clock)
        self.accounts = Accounts(clock, self.store.link, state, 10**6, lambda *_: price)
        self.limiter = Limiter(clock, self.store.link, lambda: replicas, self.accounts.spent)
        self.accounts.telling.on_telling.append(self.limiter.tell_owed)
        self.accounts.telling.on_learnt.append(self.limiter.recall)
        self.plans = {key: plan_of(OWN, key, "acme", WHOLE) for key in ("k", "l")}

    async def answers(self, key, tokens, times=1):
        """Answer requests that use so many tokens; returns how many fitted."""
        fitted, costs = 0, amounts(tokens, money=tokens / 1e6)
        for _ in range(times):
            taken = await self.limiter.take(self.plans[key], costs)
            if isinstance(taken, Taken):
                self.limiter.settle(taken, costs)
                made = record(tokens=(tokens, 0), received_at=SystemClock.now())
                made.caller = Caller(key, key, "acme")
                self.accounts.posted([made])
                fitted += 1
        return fitted

    async def used(self):
        """Return what is used, as Redis says: of the key's month and day (money in millionths), the tenant's day."""
        taken = await self.limiter.take(self.plans["k"], amounts())
        self.limiter.settle(taken, taken.costs)
        self.limiter.tell_owed()  # as it does once a second
        month, money, whole, _ = taken.used
        return (month, round(money * 1e6), whole) if taken.shared else None

    async def finds(self):
        """Ask Redis until it answers, as the heartbeat does."""
        while True:
            with contextlib.suppress(StoreUnavailable):
                return await self.store.holds()
            await asyncio.sleep(0.05)

    async def ends(self):
        await self.accounts.close()
        await self.store.close()


async def turns_until(gateways, *wanted):
    """Have all take turns until each finds that so much is used; then no turn changes it."""
    told = ()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(20):
            while not told or any(each != wanted for each in told):
                for each in gateways:
                    await each.accounts.turn()
                told = [await each.used() for each in gateways]
    for _ in range(3):
        assert told == [wanted] * len(gateways)
        for each in gateways:
            await each.accounts.turn()
        told = [await each.used() for each in gateways]


@story
async def test_two_gateways_count_together_and_again_what_redis_lost(tmp_path, server):
    gateways = [Gateway(server, tmp_path / str(n)) for n in range(2)]

    async def until_told(wanted):
        async with asyncio.timeout(20):  # a busy machine may keep Redis from answering in time
            while True:
                for each in gateways:
                    await each.accounts.turn()
                today = gateways[0].accounts.today()
                told = rows(await gateways[0].accounts.read([today]), ["tenant"], {})
                if told and told[0]["requests"] == wanted:
                    return told[0]

    now = SystemClock.now()
    for each in gateways:
        made = [record(f"r{n}", received_at=now, tokens=(10, 5)) for n in range(700)]
        each.accounts.posted(made)
    told = await until_told(1400)
    assert (told["input_tokens"], told["output_tokens"]) == (14_000, 7_000)
    assert told["money"] == pytest.approx(1400 * 20 / 1e6)
    assert await until_told(1400) == told
    server.ask("FLUSHALL")
    assert await until_told(1400) == told
    for each in gateways:
        await each.ends()


@pytest.mark.parametrize("lost", ["all", "its last minutes"])
@story
async def test_days_and_months_go_on_where_they_were_after_redis_lost(tmp_path, server, lost):
    gateways = [Gateway(server, tmp_path / str(n)) for n in range(3)]
    for n, each in enumerate(gateways, 1):
        assert await each.answers("k", 100 * n, 10) == 10
        await each.answers("l", 7)
        await each.accounts.turn()
    server.ask("SAVE")
    for each in gateways:
        await each.answers("k", 50)
    await turns_until(gateways, 6150, 6150, 6171)
    if lost == "all":
        server.ask("FLUSHALL")
    else:
        server.kill()
        server.start()  # with what it saved
    for each in gateways:
        await each.finds()
    # What is used before anybody noticed the loss counts once, too.
    assert await gateways[0].answers("k", 30, 2) == 2
    await turns_until(gateways, 6210, 6210, 6231)
    assert await gateways[1].answers("k", 3791) == 0
    assert await gateways[2].answers("k", 3790) == 1
    for each in gateways:
        await each.ends()


@story
async def test_a_gateway_that_begins_with_an_empty_redis_goes_on_from_its_ledger(tmp_path, server):
    before = Gateway(server, tmp_path)
    assert await before.answers("k", 6000) == 1
    await before.ends()
    server.ask("FLUSHALL")
    after = Gateway(server, tmp_path)
    await after.accounts.open()
    await after.finds()
    await after.used()  # a script that Redis does not know yet runs after the others
    assert await after.answers("k", 4001) == 0
    assert await after.answers("k", 4000) == 1
    await turns_until([after], 10_000, 10_000, 10_000)
    await after.ends()


@story
async def test_what_an_outage_used_counts_once_though_limiter_and_ledger_tell_it(tmp_path, server):
    gateways = [Gateway(server, tmp_path / str(n), replicas=2) for n in range(2)]
    for each in gateways:
        assert await each.answers("k", 1000) == 1
    await turns_until(gateways, 2000, 2000, 2000)
    server.kill()
    for each in gateways:
        assert await each.answers("k", 100, 5) == 5
        await each.accounts.turn()
    server.start()  # empty
    for each in gateways:
        await each.finds()
    await turns_until(gateways, 3000, 3000, 3000)
    for each in gateways:
        await each.ends()
