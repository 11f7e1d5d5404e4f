"""Usage that gateways count together on a real Redis, and limits of days and months that outlive its data."""

import asyncio
import contextlib
import functools
import pathlib
import re
import time

import pytest

from gateway.core.aio import SystemClock
from gateway.core.limits import KeyLimits
from gateway.store.scripts import SCAN
from gateway.usage.entries import Sums
from gateway.usage.report import rows
from tests.limitedgateway import LimitedGateway
from tests.limitercases import DAY_S, plan_of
from tests.redisserver import PROGRAMS, PatientLink, patient_store, redis_server
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


PLANS = {key: plan_of(OWN, key, "acme", WHOLE) for key in ("k", "l")}


class Gateway(LimitedGateway):
    """Two keys of one tenant."""

    def __init__(self, server, state, replicas=1):
        super().__init__(server.url, state, replicas)

    async def answers(self, key, tokens, times=1):
        return await super().answers(PLANS[key], tokens, times)

    async def used(self):
        """Return what is used of the key's month and day (money in millionths), and of the tenant's day."""
        while (used := await super().used(PLANS["k"])) is None:  # the machine may be busy
            await asyncio.sleep(0.1)
        return used[0], round(used[1] * 1e6), used[2]


async def turns_until(gateways, *wanted):
    """Have all take turns until each finds that so much is used; then no turn changes it."""
    late, told = sum(each.late for each in gateways), ()

    def right():
        """What Redis was too late to answer may count twice, and nothing else."""
        pairs = [zip(wanted, each, strict=True) for each in told]
        return told and all(least <= used <= least + late for each in pairs for least, used in each)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(20):
            while not right():
                for each in gateways:
                    await each.accounts.turn()
                told = [await each.used() for each in gateways]
    for _ in range(3):
        assert right(), (wanted, late, told)
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


@story
async def test_usage_is_told_by_a_user_who_has_the_rights_that_are_documented(tmp_path, server):
    text = (pathlib.Path(__file__).parents[2] / "deploy/OPERATIONS.md").read_text()
    (user,) = re.findall(r"`ACL (SETUSER gateway [^`]*)`", text)
    server.ask("ACL", *user.replace("PASSWORD", "s3cret").split())
    gateway = LimitedGateway(server.url.replace("//", "//gateway:s3cret@"), tmp_path)
    gateway.accounts.posted([record(received_at=SystemClock.now(), tokens=(10, 5))])
    async with asyncio.timeout(20):
        while not (await gateway.accounts.read([gateway.accounts.today()])).sums:
            await gateway.accounts.turn()
    await gateway.finds()
    assert gateway.store.link.trouble == ""
    assert server.ask("TTL", f"gw1:{{usage}}:{gateway.accounts.today()}") > 399 * DAY_S
    await gateway.ends()


class MeasuringLink(PatientLink):
    """Notes how much one call had Redis read: 60,000 fields at once take longer than a call may."""

    largest = 0

    async def ask(self, script, *args, **more):
        reply = await super().ask(script, *args, **more)
        if script is SCAN:
            self.largest = max(self.largest, len(reply[1]))
        return reply


@story
async def test_a_day_of_many_keys_is_read_and_the_link_goes_on(tmp_path, server):
    measured = functools.partial(patient_store, link=MeasuringLink)
    gateway = LimitedGateway(server.url, tmp_path, store=measured)
    await gateway.accounts.open()
    today, places = gateway.accounts.today(), 10_000
    with server.client() as client, client.pipeline(transaction=False) as pipe:
        for n in range(places):
            named = f'["tenant-{n}","key_{n:08d}","llama-3-70b",""'
            kinds = ("requests", "input", "cached", "output", "money", "of a later version")
            fields = {f'{named},"{kind}"]': n for kind in kinds}
            pipe.hset(f"gw1:{{usage}}:{today}", mapping=fields)
        pipe.execute()
    await gateway.finds()
    for _ in range(2):
        read = (await gateway.accounts.read([today])).sums
        assert len(read) == places
        assert read[today, "tenant-7", "key_00000007", "llama-3-70b", ""] == Sums(7, 7, 7, 7, 7)
        assert gateway.store.link.trouble == ""
    assert 0 < gateway.store.link.largest < 5_000
    await gateway.ends()


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
    assert await gateways[2].answers("k", 3790 - sum(each.late for each in gateways)) == 1
    for each in gateways:
        await each.ends()


@pytest.mark.parametrize("by", ["each", "one"])
@story
async def test_limits_go_on_where_they_were_after_redis_lost_them_alone(tmp_path, server, by):
    """As when one node of a cluster comes back empty, and the ledgers are counted at another one."""
    gateways = [Gateway(server, tmp_path / str(n)) for n in range(2)]
    for each in gateways:
        assert await each.answers("k", 450, 10) == 10
    await turns_until(gateways, 9000, 9000, 9000)
    for each in gateways:
        for _ in range(10):  # all have read the month, and do so no more
            await each.accounts.turn()
        await each.used()
    server.ask("DEL", *PLANS["k"].stores)
    asked = gateways if by == "each" else gateways[:1]
    fitted = sum([await each.answers("k", 10) for each in asked])
    assert fitted == len(asked)  # who notices it has been let through
    used = 9000 + 10 * fitted
    await turns_until(gateways, used, used, used)
    assert sum([await each.answers("k", 1000) for each in gateways]) == 0
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
    await gateways[0].used()  # a request comes before the limiter told what it owes
    await turns_until(gateways, 3000, 3000, 3000)
    for each in gateways:
        await each.ends()
