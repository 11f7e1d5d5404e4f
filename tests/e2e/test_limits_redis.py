"""The limits of keys that replicas share on a real Redis."""

import asyncio
import contextlib
import itertools
import signal
import sys
import time
from collections import Counter
from dataclasses import replace

import pytest

from gateway.core.aio import SystemClock, start
from gateway.core.limits import KeyLimits, OnOutage, Rule, Taken
from gateway.limiting.limiter import RUNS_S, Limiter
from gateway.limiting.rules import NOTHING, day_of, month_of
from gateway.process import reload
from gateway.sim.config import SimConfig
from gateway.store import scripts
from gateway.store.link import Link
from gateway.store.onredis import redis_store
from gateway.store.scripts import BUDGET_S
from gateway.store.shared import StoreUnavailable
from tests import keyfiles as keys
from tests.faults.toxic import BLACKHOLE, HARMLESS, Toxic, toxic
from tests.limitercases import (
    ALL,
    DAY_S,
    LimiterCases,
    LimiterDesk,
    amounts,
    fits,
    plan_of,
    used_of,
)
from tests.redisserver import PROGRAMS, connected, patient_store, redis_server, time_passes
from tests.stories.support import gateway, story

pytestmark = pytest.mark.e2e


class SharedDesk(LimiterDesk):
    def __init__(self, server):
        self.server = server
        self.taken_on = {}
        self.began = time.monotonic()
        super().__init__(self.make_link)

    def make_link(self, clock):
        return patient_store(self.server.url, clock).link

    days = months = 0  # that passed for the test, and not for the server

    @property
    def real_s(self):
        return time.monotonic() - self.began

    def starts_a_day(self):
        while time.time() % DAY_S > DAY_S - 30:  # the server's own day must not end meanwhile
            time.sleep(1)
        super().starts_a_day()

    def passes(self, seconds):
        before = day_of(self.clock.at)
        super().passes(seconds)
        # What was posted is there then, and so is a script that the server did not know.
        for _ in range(2):
            self.run(self.link.ask(scripts.HOLDS, ["gw1:x"], []))
        after = day_of(self.clock.at)
        months = month_of(after) - month_of(before)
        time_passes(self.server, seconds, after - before, months)
        self.days, self.months = self.days + after - before, self.months + months

    def finds_redis_again(self):
        """Ask until Redis answers: what was posted before it was killed finds the connection closed."""
        answer = None
        while answer is None:
            with contextlib.suppress(StoreUnavailable):
                answer = self.run(self.link.ask(scripts.HOLDS, ["gw1:x"], []))

    def settle(self, taken, *actual):
        # The server thinks that it was taken today.
        super().settle(
            replace(taken, day=taken.day - (self.days - self.taken_on[taken.lease])), *actual
        )

    def take(self, *args, **more):
        taken = super().take(*args, **more)
        if isinstance(taken, Taken):
            assert taken.shared
            self.taken_on[taken.lease] = self.days
        return taken

    def close(self):
        self.run(self.link.close())
        super().close()


@pytest.fixture(scope="module", params=PROGRAMS)
def server(request):
    with redis_server(program=request.param) as server:
        yield server


@pytest.fixture
def desk(server):
    server.ask("FLUSHALL")
    desk = SharedDesk(server)
    desk.run(desk.link.client.ping())  # the first call waits for no connection
    yield desk
    desk.close()


class TestRedis(LimiterCases):
    def test_replicas_share_what_there_is(self, desk):
        other = SharedDesk(desk.server)
        other.run(other.link.client.ping())
        limits = KeyLimits(requests_per_minute=10, concurrent_requests=100)
        found = [fits(each.take(limits)) for _ in range(6) for each in (desk, other)]
        assert found.count(True) == 10
        other.close()

    def test_what_a_killed_replica_ran_makes_room_within_its_lease(self, desk):
        other = SharedDesk(desk.server)
        other.run(other.link.client.ping())
        assert fits(other.take(ALL))
        assert fits(desk.take(ALL))
        assert not fits(desk.take(ALL))
        other.close()  # it never settles
        desk.passes(RUNS_S / 2)
        desk.run(desk.store.renew())
        assert not fits(desk.take(ALL))
        desk.passes(RUNS_S / 2)
        assert fits(desk.take(ALL))
        assert not fits(desk.take(ALL))

    def test_a_clock_that_was_wrong_shuts_nobody_out(self, desk):
        limits = KeyLimits(input_tokens_per_minute=600, concurrent_requests=1)
        assert fits(desk.take(limits, input=600))
        with desk.server.client() as client:
            stamp, used = client.hget("gw1:{t:t}:key:k", "1m").split()
            client.hset("gw1:{t:t}:key:k", "1m", f"{int(stamp) + 3_600_000} {used}")
            runs = "gw1:{t:t}:runs:key:k"
            client.zincrby(runs, 3_600_000, client.zrange(runs, 0, 0)[0])
        assert not fits(desk.take(limits, input=10))
        desk.run(asyncio.sleep(1.2))
        assert fits(desk.take(limits, input=10))

    def test_a_day_that_a_wrong_clock_named_ends_with_the_present_one(self, desk):
        desk.starts_a_day()
        limits = KeyLimits(tokens_per_day=600)
        assert fits(desk.take(limits, input=600))
        key = "gw1:{t:t}:key:k"
        with desk.server.client() as client:
            (field,) = (each for each in client.hkeys(key) if each.endswith("d"))
            stamp, used = client.hget(key, field).split()
            client.hset(key, field, f"{int(stamp) + 30} {used}")
        assert not fits(desk.take(limits, input=10))
        desk.passes(DAY_S)
        assert fits(desk.take(limits, input=10))

    def test_what_ends_while_redis_is_full_runs_no_more(self, desk):
        taken = desk.take(ALL, 100, 100)
        desk.server.ask("CONFIG", "SET", "maxmemory", 1)
        try:
            desk.settle(taken, 50, 50)
            for _ in range(2):  # what was posted is there then
                desk.run(desk.link.ask(scripts.HOLDS, ["gw1:x"], []))
            assert desk.server.ask("ZCARD", "gw1:{t:t}:runs:key:k") == 0
        finally:
            desk.server.ask("CONFIG", "SET", "maxmemory", 0)
        assert used_of(desk.take(ALL))[Rule.OUTPUT] <= 50

    def test_what_ends_just_as_it_is_renewed_for_the_first_time_runs_no_more(self, desk):
        taken = desk.take(ALL)
        desk.run(desk.store.renew())  # the Redis before the one that is meant knew all scripts
        desk.settle(taken)
        desk.server.kill()
        desk.server.start()
        desk.finds_redis_again()
        desk.settle(desk.take(ALL))
        taken = desk.take(ALL)

        async def both():  # with one batch, and only the other scripts are known to this Redis
            await desk.store.renew()
            desk.store.settle(taken, amounts())

        desk.run(both())
        desk.passes(0)
        assert desk.server.ask("ZCARD", "gw1:{t:t}:runs:key:k") == 0

    def test_keys_that_rest_leave_nothing_behind(self, desk):
        desk.settle(desk.take(ALL, 100, 100), 100, 100)
        desk.passes(62)
        assert list(desk.server.ask("KEYS", "*")) == []


async def replica_of(server):
    """Return the limiter of one of three replicas, and its link."""
    link = patient_store(server.url, SystemClock()).link
    await link.client.ping()
    return Limiter(SystemClock(), link, lambda: 3), link


@story
async def test_three_replicas_under_load_let_through_what_the_limit_says_within_a_hundredth():
    """What Redis says went by is the time, so that a busy machine changes nothing."""
    rate, attempts, counts = 200, 3000, Counter()
    limits, costs = KeyLimits(requests_per_minute=60 * rate), amounts()
    with redis_server() as server:
        seconds, microseconds = server.ask("TIME")
        began_ms = int(seconds) * 1000 + int(microseconds) // 1000
        # The minute is used up.
        server.ask("HSET", "gw1:{t:t}:key:k", "0m", f"{began_ms} {60 * rate}")

        async def caller(limiter, plan):
            while True:
                counts["asked"] += 1
                found = await limiter.take(plan, costs)
                if isinstance(found, Taken):
                    counts["let"] += 1
                    counts["local"] += not found.shared
                    limiter.settle(found, costs)
                    continue
                if counts["asked"] >= attempts:  # and nothing is left that fits
                    return
                await asyncio.sleep(0.02)  # 24 of them ask a thousand times a second

        replicas = [await replica_of(server) for _ in range(3)]
        async with asyncio.TaskGroup() as group:
            for limiter, _ in replicas:
                plan = plan_of(limits)
                for _ in range(8):
                    group.create_task(caller(limiter, plan))
        ended_ms, used = map(float, server.ask("HGET", "gw1:{t:t}:key:k", "0m").split())
        for _, link in replicas:
            await link.close()
    passed_s = (ended_ms - began_ms) / 1000
    allowed = rate * passed_s
    print(f"{counts['asked'] / passed_s:.0f} requests/s, {counts['let']} let of {allowed:.1f}")
    assert counts["local"] == 0
    assert counts["let"] == pytest.approx(allowed + used - 60 * rate, abs=0.1)  # each counts once
    assert counts["let"] == pytest.approx(allowed, rel=0.01)


@story
async def test_three_replicas_never_run_more_at_once_than_the_limit_and_all_of_it():
    limits, most, counts = KeyLimits(concurrent_requests=10), 0, Counter()
    with redis_server() as server:

        async def caller(limiter, plan):
            nonlocal most
            for _ in range(150):
                found = await limiter.take(plan, amounts())
                counts[fits(found)] += 1
                if fits(found):
                    counts["running"] += 1
                    most = max(most, counts["running"])
                    assert found.shared
                    await asyncio.sleep(0.005)
                    counts["running"] -= 1
                    limiter.settle(found, amounts())

        replicas = [await replica_of(server) for _ in range(3)]
        async with asyncio.TaskGroup() as group:
            for limiter, _ in replicas:
                for _ in range(8):
                    group.create_task(caller(limiter, plan_of(limits)))
        for _, link in replicas:
            await link.close()
    assert most == 10
    assert counts[False] > 0


@story
async def test_what_a_replica_ran_that_is_killed_makes_room_within_thirty_seconds():
    holder = """
import asyncio, sys
from gateway.core.aio import SystemClock
from gateway.core.limits import Amounts, KeyLimits, Taken
from gateway.limiting.limiter import Limiter
from gateway.store.onredis import redis_store
from tests.limitercases import plan_of
from tests.redisserver import connected

async def main():
    clock = SystemClock()
    store = redis_store(sys.argv[1], clock)
    await connected(store.link.client)
    limiter, plan = Limiter(clock, store.link, lambda: 2), plan_of(KeyLimits(concurrent_requests=3))
    while isinstance(await limiter.take(plan, Amounts(1.0)), Taken):
        pass
    print("holds all", flush=True)
    await limiter.run()

asyncio.run(main())
"""
    with redis_server() as server:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", holder, server.url, stdout=asyncio.subprocess.PIPE
        )
        assert await process.stdout.readline() == b"holds all\n"
        limiter, link = await replica_of(server)
        plan = plan_of(KeyLimits(concurrent_requests=3))
        assert not fits(await limiter.take(plan, amounts()))
        process.kill()
        await process.wait()
        found = await limiter.take(plan, amounts())
        assert (found.why.used, found.why.most) == (3, 3)  # nobody has given them back
        time_passes(server, RUNS_S)
        assert [fits(await limiter.take(plan, amounts())) for _ in range(4)] == [True] * 3 + [False]
        await link.close()


class CountingLink(Link):
    """Counts who waits for Redis, and who gets no reply; and how long anybody would wait."""

    waited = in_vain = longest_s = 0

    async def ask(self, script, keys, args, within_s=BUDGET_S, late=None):
        self.waited += 1
        self.longest_s = max(self.longest_s, within_s)
        try:
            return await super().ask(script, keys, args, within_s, late)
        except StoreUnavailable:
            self.in_vain += 1
            raise


async def first_taken(limiter, limits, costs):
    """Take what costs so much for a key that Redis answers for in time, which a busy machine may keep it from.

    Returns the plan, and what was taken.
    """
    for number in itertools.count():
        plan = plan_of(limits, f"k{number}")
        taken = await limiter.take(plan, costs)
        if isinstance(taken, Taken):
            if taken.shared:
                return plan, taken
            limiter.settle(taken, costs)
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("fault", ["SIGSTOP", "CLIENT PAUSE", "SIGKILL"])
@story
async def test_of_a_hundred_requests_less_than_one_waits_for_a_redis_that_answers_no_more(fault):
    """So whatever a wait costs, 50 ms at most, the 99th percentile does not have it."""
    callers, each_sends = 8, 1000
    with redis_server() as server:
        client = redis_store(server.url, SystemClock()).link.client
        link = CountingLink(client, SystemClock())
        await connected(client)
        limiter = Limiter(SystemClock(), link, lambda: 2)
        plan, _ = await first_taken(limiter, KeyLimits(10**6), amounts())
        match fault:
            case "SIGSTOP":
                server.signal(signal.SIGSTOP)
            case "CLIENT PAUSE":
                server.ask("CLIENT", "PAUSE", 60_000, "ALL")
            case "SIGKILL":
                server.kill()
        link.waited, outcomes = 0, Counter()

        async def caller():
            for _ in range(each_sends):
                taken = await limiter.take(plan, amounts())
                outcomes[fits(taken)] += 1
                limiter.settle(taken, amounts())
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            for _ in range(callers):
                group.create_task(caller())
        assert outcomes == {True: callers * each_sends}
        assert link.in_vain == link.waited
        assert callers <= link.waited < outcomes[True] / 100
        await link.close()


def test_a_redis_that_hangs_leaves_each_replica_its_share():
    async def story():
        with redis_server() as server:
            client = redis_store(server.url, SystemClock()).link.client
            link = CountingLink(client, SystemClock())
            limiter = Limiter(SystemClock(), link, lambda: 2)
            await connected(client)
            plan, _ = await first_taken(limiter, KeyLimits(20), amounts())
            server.signal(signal.SIGSTOP)
            found = [await limiter.take(plan, amounts()) for _ in range(12)]
            assert sum(isinstance(each, Taken) for each in found) in (9, 10)
            assert link.longest_s <= 0.05
            server.signal(signal.SIGCONT)
            await link.close()

    asyncio.run(story())


@story
async def test_what_ends_while_redis_hangs_is_told_when_it_answers_again():
    with redis_server() as server:
        store = redis_store(server.url, SystemClock())
        limiter = Limiter(SystemClock(), store.link, lambda: 1)
        limits = KeyLimits(tokens_per_month=1_000_000, concurrent_requests=1)
        await connected(store.link.client)
        plan, taken = await first_taken(limiter, limits, amounts(100, 4_096))
        turns = start(limiter.run(), name="leases")
        server.signal(signal.SIGSTOP)
        for _ in range(4):  # then nobody waits for it any more
            with contextlib.suppress(StoreUnavailable):
                await store.holds()
        limiter.settle(taken, amounts(100, 30_000))
        server.signal(signal.SIGCONT)
        async with asyncio.timeout(20):
            while server.ask("ZCARD", f"gw1:{{t:t}}:runs:key:{plan.key_id}"):
                with contextlib.suppress(StoreUnavailable):
                    await store.holds()
                await asyncio.sleep(0.1)
        while not (found := await limiter.take(plan, NOTHING)).shared:
            await asyncio.sleep(0.1)
        assert found.used[0] == 30_100
        turns.cancel()
        await asyncio.wait([turns])
        await store.close()


@story
async def test_a_replica_that_loses_redis_gives_out_no_more_than_its_share():
    """The others still have all that Redis knows, so both together let through a share more at most."""
    limit, count = 60, 3
    with redis_server() as server:
        async with toxic(f"http://127.0.0.1:{server.port}") as proxy:
            through = f"redis://{proxy.url.removeprefix('http://')}/0"
            stores = [redis_store(url, SystemClock()) for url in (server.url, server.url, through)]
            limiters = [Limiter(SystemClock(), each.link, lambda: count) for each in stores]
            plan = plan_of(KeyLimits(limit))
            for each in stores:
                await connected(each.link.client)
            began = time.monotonic()
            before = [await each.take(plan, amounts()) for each in limiters for _ in range(4)]
            proxy.up = proxy.down = BLACKHOLE
            proxy.reset()
            lost = [await limiters[2].take(plan, amounts()) for _ in range(limit)]
            others = [
                await each.take(plan, amounts()) for _ in range(limit) for each in limiters[:2]
            ]
            refilled = limit / 60 * (time.monotonic() - began)
            assert not any(each.shared for each in lost if fits(each))
            assert 0 < sum(map(fits, lost)) <= limit / count + refilled
            # One of the others that was slow to hear gives out of its own share, too: that is not counted.
            shared = sum(fits(each) and each.shared for each in [*before, *others])
            assert 0 < shared <= limit + refilled
            proxy.up = proxy.down = HARMLESS
            async with asyncio.timeout(20):  # it finds its way back, and goes by what Redis knows
                while (await limiters[2].take(plan, amounts())).share_of != 1:
                    with contextlib.suppress(StoreUnavailable):  # as the heartbeat looks
                        await stores[2].holds()
                    await asyncio.sleep(0.05)
            for each in stores:
                await each.close()


@pytest.mark.parametrize(("outage", "latency_s"), [(OnOutage.LOCAL, 0.08), (OnOutage.CLOSED, 0.15)])
@story
async def test_what_a_slow_redis_lets_through_too_late_is_not_paid_for(outage, latency_s):
    """Who waited no longer was refused, or is counted here: a budget has nothing else of it."""
    with redis_server() as server:
        async with toxic(f"http://127.0.0.1:{server.port}") as proxy:
            # Whoever asks waits no longer than usual, but a busy machine drops no reply on the way.
            url = f"redis://{proxy.url.removeprefix('http://')}/0"
            store = patient_store(url, SystemClock(), link=Link)
            limiter = Limiter(SystemClock(), store.link, lambda: 1)
            limits = KeyLimits(budget_per_month=1000.0, on_outage=outage)
            await connected(store.link.client)
            plan, taken = await first_taken(limiter, limits, amounts(1, 1, 1.0))

            async def until_counted(money):
                """Wait until Redis has counted so much, and no more nor less."""
                place = f"gw1:{{t:t}}:key:{plan.key_id}", "4y"
                async with asyncio.timeout(20):
                    while float(server.ask("HGET", *place).split()[1]) != money:
                        with contextlib.suppress(StoreUnavailable):
                            await store.holds()
                        await asyncio.sleep(0.05)

            limiter.settle(taken, amounts())
            await until_counted(0)
            proxy.down = Toxic(latency_s=latency_s)
            async with asyncio.TaskGroup() as group:
                asking = []
                for _ in range(20):  # most come in the middle of another one's round trip
                    asking.append(group.create_task(limiter.take(plan, amounts(10, 10, 1.0))))
                    await asyncio.sleep(0.03)
            proxy.down = HARMLESS
            found = [each.result() for each in asking]
            shared = sum(isinstance(each, Taken) and each.shared for each in found)
            assert shared < len(found)
            await until_counted(shared)
            await store.close()


@story
async def test_no_outcome_changes_with_what_befalls_the_redis():
    with redis_server() as server:
        async with gateway(SimConfig(model="m", speed=0), extra=f"redis: {server.url}") as world:
            folder = world.path.parent
            many = keys.create(
                folder / "keys.yaml", name="many", limits=KeyLimits(100_000, concurrent_requests=9)
            )
            few = keys.create(folder / "keys.yaml", name="few", limits=KeyLimits(2))
            assert (await reload(world.process)).done

            async def codes(made, count):
                headers = {"authorization": f"Bearer {made.key}"}
                return [
                    (await world.chat(headers=headers, max_tokens=2)).status_code
                    for _ in range(count)
                ]

            assert await codes(few, 4) == [200, 200, 429, 429]
            faults = [
                lambda: server.ask("CLIENT", "PAUSE", 600, "ALL"),
                lambda: server.signal(signal.SIGSTOP),
                lambda: server.signal(signal.SIGCONT),
                server.kill,
                server.start,
            ]
            for befall in faults:
                befall()
                assert set(await codes(many, 100)) == {200}
                if (
                    befall != server.start
                ):  # it came back empty: what it knew of this minute is lost
                    assert (await codes(few, 1)) == [429]
            await world.until(lambda: not world.process.store.trouble)
            await codes(many, 1)
            await world.until(
                lambda: server.ask("ZCARD", f"gw1:{{t:many}}:runs:key:{many.id}") == 0
            )
