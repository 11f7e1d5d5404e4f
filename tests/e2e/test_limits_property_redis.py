"""Three replicas on a real Redis: whatever they do, and whichever die, nobody gets more than the limits say."""

import asyncio
import time

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gateway.core.limits import KeyLimits, OnOutage, Taken
from gateway.limiting.limiter import RUNS_S, Limiter, Refused
from tests.limitercases import amounts, plan_of
from tests.redisserver import patient_store, redis_server, time_passes
from tests.storecases import HeldClock

pytestmark = pytest.mark.e2e

# Closed: a reply that is late lets nothing through, so a busy machine lets a test prove less, and never fail.
OWN = KeyLimits(30, 600, 300, 3, on_outage=OnOutage.CLOSED)
WHOLE = KeyLimits(40, concurrent_requests=4, on_outage=OnOutage.CLOSED)
KEYS = ("a", "b")
STEP_S = 9.0  # renewals come at least as often


class Replica:
    """One life of one gateway's limiter."""

    def __init__(self, server):
        self.clock = HeldClock()
        self.store = patient_store(server.url, self.clock)
        self.limiter = Limiter(self.clock, self.store.link, lambda: 3)
        self.running = []  # key, costs, and what was taken


class Replicas(RuleBasedStateMachine):
    server = None

    def __init__(self):
        super().__init__()
        self.server.ask("FLUSHALL")
        self.runner = asyncio.Runner()
        self.replicas = [Replica(self.server) for _ in range(3)]
        self.plans = {key: plan_of(OWN, key, "t", WHOLE) for key in KEYS}
        self.left = []  # of replicas that died: key, and when its lease ends
        self.renewed = {}  # by lease: when it was taken or renewed last, at the earliest
        self.used = {}
        self.passed_s, self.began = 0.0, time.monotonic()
        for each in self.replicas:
            self.runner.run(each.store.link.client.ping())

    def now(self):
        return self.passed_s + time.monotonic() - self.began

    def spend(self, key, costs, sign=1.0):
        for scope in (key, "t"):
            for name in ("requests", "input_tokens", "output_tokens"):
                place = scope, name
                self.used[place] = self.used.get(place, 0.0) + sign * getattr(costs, name)

    @rule(
        which=st.integers(0, 2),
        key=st.sampled_from(KEYS),
        prompt=st.integers(0, 400),
        output=st.integers(0, 200),
    )
    def take(self, which, key, prompt, output):
        replica, costs, now = self.replicas[which], amounts(prompt, output), self.now()
        found = self.runner.run(replica.limiter.take(self.plans[key], costs))
        if isinstance(found, Taken):
            assert found.shared
            self.renewed[found.lease] = now
            replica.running.append((key, costs, found))
            self.spend(key, costs)
        elif isinstance(found, Refused):
            assert found.why.used + found.why.requested > found.why.most

    @precondition(lambda self: any(each.running for each in self.replicas))
    @rule(place=st.integers(0, 50), part=st.floats(0, 1))
    def settle(self, place, part):
        every = [(each, one) for each in self.replicas for one in each.running]
        replica, one = every[place % len(every)]
        key, costs, taken = one
        actual = amounts(costs.input_tokens * part, costs.output_tokens * part)
        replica.running.remove(one)

        async def settle():
            replica.limiter.settle(taken, actual)

        self.runner.run(settle())
        self.spend(key, costs, -1.0)
        self.spend(key, actual)

    @rule(which=st.integers(0, 2))
    def dies(self, which):
        """It neither settles nor renews; another takes its place."""
        dead, self.replicas[which] = self.replicas[which], Replica(self.server)
        self.left += [(key, self.renewed[taken.lease] + RUNS_S) for key, _, taken in dead.running]
        self.runner.run(dead.store.close())
        self.runner.run(self.replicas[which].store.link.client.ping())

    @rule(steps=st.integers(1, 4))
    def passes(self, steps):
        for _ in range(steps):
            for each in self.replicas:
                self.runner.run(self.renew(each))
            self.passed_s += STEP_S
            time_passes(self.server, STEP_S)

    async def renew(self, replica):
        """Have a replica renew its leases, and wait until Redis knows."""
        self.renewed.update({taken.lease: self.now() for _, _, taken in replica.running})
        await replica.limiter.renew()
        leases = {(key, taken.lease) for key, _, taken in replica.running}
        deadline = time.monotonic() + 10
        with self.server.client() as client:
            while any(not self.is_fresh(client, *each) for each in leases):
                assert time.monotonic() < deadline, "leases are not renewed"
                await asyncio.sleep(0.005)

    def is_fresh(self, client, key, lease):
        score = client.zscore(f"gw1:{{t:t}}:runs:key:{key}", lease)
        return score is not None and score / 1000 - time.time() > RUNS_S - 2

    @invariant()
    def nothing_exceeds_a_limit_and_its_burst(self):
        minutes = self.now() / 60
        for scope, limits in [*((key, OWN) for key in KEYS), ("t", WHOLE)]:
            for name, most in [
                ("requests", limits.requests_per_minute),
                ("input_tokens", limits.input_tokens_per_minute),
                ("output_tokens", limits.output_tokens_per_minute),
            ]:
                if most is not None:
                    assert self.used.get((scope, name), 0.0) <= most * (minutes + 1) + 1e-3

    @invariant()
    def no_more_run_than_may(self):
        now = self.now()
        running = [key for each in self.replicas for key, _, _ in each.running]
        running += [key for key, ends in self.left if ends - 2 > now]  # they hold their places
        assert len(running) <= WHOLE.concurrent_requests
        assert all(running.count(key) <= OWN.concurrent_requests for key in KEYS)

    def teardown(self):
        for each in self.replicas:
            self.runner.run(each.store.close())
        time_passes(self.server, RUNS_S + 60)
        fresh = Replica(self.server)
        self.runner.run(fresh.store.link.client.ping())
        found = [self.runner.run(fresh.limiter.take(self.plans["a"], amounts())) for _ in range(4)]
        let = sum(isinstance(each, Taken) for each in found)
        assert let <= OWN.concurrent_requests
        # What the dead held is free.
        assert let == OWN.concurrent_requests or not all(
            isinstance(each, Taken | Refused) for each in found
        )
        self.runner.run(fresh.store.close())
        self.runner.close()


def test_three_replicas_of_which_some_die():
    with redis_server() as server:
        Replicas.server = server
        run_state_machine_as_test(
            Replicas,
            settings=settings(
                max_examples=12,
                stateful_step_count=25,
                deadline=None,
                suppress_health_check=[*HealthCheck],
            ),
        )
