"""Whatever happens in whatever order, nobody gets more than the limits say, and nothing is held for ever."""

import asyncio

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.core.limits import Amounts, KeyLimits, Taken
from gateway.limiting.limiter import Limiter
from tests.limitercases import amounts, plan_of
from tests.storecases import HeldClock

OWN = KeyLimits(
    30, 600, 300, 3, tokens_per_day=4000, models=(("big", KeyLimits(10, concurrent_requests=1)),)
)
WHOLE = KeyLimits(40, concurrent_requests=4, budget_per_day=2.0)
DAY_S = 86_400.0
KEYS = [(key, model) for key in ("a", "b") for model in ("big", "small")]


class Limits(RuleBasedStateMachine):
    """Two keys of one tenant and two models, over one process that holds all."""

    def __init__(self):
        super().__init__()
        self.clock = HeldClock()
        self.limiter = Limiter(self.clock, None, lambda: 1)
        self.plans = {each: plan_of(OWN, each[0], "t", WHOLE, each[1]) for each in KEYS}
        self.running = []  # what was taken, in order
        self.began = self.clock.at
        self.used = {}  # by key or tenant or key and model, and rule: what was truly used
        self.days = {}

    def scopes(self, key, model):
        yield key, OWN
        if model == "big":
            yield (key, model), OWN.models[0][1]
        yield "t", WHOLE

    def spend(self, who, costs, sign=1.0):
        day = int(self.clock.at // DAY_S)
        for scope, _ in self.scopes(*who):
            for name, amount in zip(Amounts._fields, costs, strict=True):
                self.used[scope, name] = self.used.get((scope, name), 0.0) + sign * amount
                self.days[scope, name, day] = self.days.get((scope, name, day), 0.0) + sign * amount

    @rule(
        who=st.sampled_from(KEYS),
        prompt=st.integers(0, 700),
        output=st.integers(0, 350),
        money=st.floats(0, 2.5),
    )
    def take(self, who, prompt, output, money):
        costs = amounts(prompt, output, money)
        before = self.limiter.levels.used(self.plans[who], self.limiter._moment())
        found = asyncio.run(self.limiter.take(self.plans[who], costs))
        if isinstance(found, Taken):
            self.running.append((who, costs, found))
            self.spend(who, costs)
        else:
            after = self.limiter.levels.used(self.plans[who], self.limiter._moment())
            assert after == before
            assert found.why.used + found.why.requested > found.why.most

    @precondition(lambda self: self.running)
    @rule(place=st.integers(0, 50), part=st.floats(0, 1))
    def settle(self, place, part):
        who, costs, taken = self.running.pop(place % len(self.running))
        actual = amounts(costs.input_tokens * part, costs.output_tokens * part, costs.money * part)
        today = int(self.clock.at // DAY_S)
        self.limiter.settle(taken, actual)
        if today == taken.day:  # what was taken on another day stays with that
            self.spend(who, [a - b for a, b in zip(actual, costs, strict=True)])

    @rule(seconds=st.sampled_from([0.1, 1.0, 7.0, 61.0, 20_000.0]))
    def passes(self, seconds):
        self.clock.at += seconds

    @rule()
    def goes_back(self):
        """The machine's clock is wrong for a moment; what was taken stays taken."""
        self.clock.at -= 0.05
        asyncio.run(self.limiter.take(self.plans["a", "small"], amounts(10_000)))
        self.clock.at += 0.05

    @invariant()
    def nothing_exceeds_a_limit_and_its_burst(self):
        minutes = (self.clock.at - self.began) / 60
        for scope, limits in [
            *((key, OWN) for key in "ab"),
            *(((key, "big"), OWN.models[0][1]) for key in "ab"),
            ("t", WHOLE),
        ]:
            for name, most in [
                ("requests", limits.requests_per_minute),
                ("input_tokens", limits.input_tokens_per_minute),
                ("output_tokens", limits.output_tokens_per_minute),
            ]:
                if most is not None:
                    assert self.used.get((scope, name), 0.0) <= most * (minutes + 1) + 1e-3
            for name, most in [("tokens", limits.tokens_per_day), ("money", limits.budget_per_day)]:
                day = int(self.clock.at // DAY_S)
                if most is not None:
                    assert self.days.get((scope, name, day), 0.0) <= most + 1e-3
            runs = sum(
                scope in [each for each, _ in self.scopes(*who)] for who, _, _ in self.running
            )
            assert limits.concurrent_requests is None or runs <= limits.concurrent_requests

    @invariant()
    def what_runs_is_what_was_taken_and_not_settled(self):
        leases = {lease for each in self.limiter.levels.running.values() for lease in each}
        assert leases == {taken.lease for _, _, taken in self.running}


TestLimits = Limits.TestCase
TestLimits.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
