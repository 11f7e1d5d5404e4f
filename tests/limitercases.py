"""What limits guarantee, in memory and on Redis: a form joins with a fixture `desk`."""

from dataclasses import replace

import pytest

from gateway.core.asked import Caller
from gateway.core.limits import Amounts, KeyLimits, Rule, Scope, Taken
from gateway.limiting.limiter import RUNS_S, Limiter, Refused
from gateway.limiting.plans import Plans
from tests.storecases import Desk

ALL = KeyLimits(60, 600, 300, 2)
DAY_S = 86_400


def amounts(input=0.0, output=0.0, money=0.0):
    return Amounts(1.0, input, output, input + output, money)


def plan_of(limits=None, key="k", tenant="t", of_tenant=None, model="m"):
    plans = Plans({} if of_tenant is None else {tenant: of_tenant})
    return plans.of(Caller(key, key, tenant, limits=limits), model, model)


class LimiterDesk(Desk):
    """A limiter, and the replicas that it thinks there are."""

    def __init__(self, make_link=lambda clock: None):
        self.replicas = 1
        self.plans = {}

        def make(clock):
            self.link = make_link(clock)
            return Limiter(clock, self.link, lambda: self.replicas)

        super().__init__(make)

    def plan(self, limits, **more):
        # A plan is compiled once for each key, as the gateway does.
        kept = limits, tuple(more.items())
        if kept not in self.plans:
            self.plans[kept] = plan_of(limits, **more)
        return self.plans[kept]

    def take(self, limits, input=0.0, output=0.0, money=0.0, **more):
        return self.run(self.store.take(self.plan(limits, **more), amounts(input, output, money)))

    def settle(self, taken, *actual):
        async def settle():
            self.store.settle(taken, Amounts() if actual == (None,) else amounts(*actual))

        self.run(settle())

    real_s = 0.0  # that passed for the store without the test's word

    def starts_a_day(self):
        self.clock.at = 20_000.0 * DAY_S  # the fourth of a month

    def close(self):
        self.runner.close()


def fits(found):
    return isinstance(found, Taken)


def used_of(found):
    plan = found.plan
    return {
        rule.limit.rule: round(used, 3) for rule, used in zip(plan.rules, found.used, strict=True)
    }


class LimiterCases:
    def test_a_minutes_worth_fits_at_once_and_the_rest_as_it_refills(self, desk):
        limits = KeyLimits(requests_per_minute=6)
        assert [fits(desk.take(limits)) for _ in range(8)] == [True] * 6 + [False] * 2
        desk.passes(11)
        assert [fits(desk.take(limits)) for _ in range(2)] == [True, False]
        desk.passes(600)
        assert [fits(desk.take(limits)) for _ in range(8)] == [True] * 6 + [False] * 2

    def test_what_fits_one_rule_and_not_another_takes_nothing_of_any(self, desk):
        assert fits(desk.take(ALL, 500, 0))
        for _ in range(100):
            found = desk.take(ALL, 200, 0)
            assert isinstance(found, Refused)
        assert found.why.limit.rule is Rule.INPUT
        assert (found.why.most, found.why.requested) == (600, 200)
        assert 490 - 10 * desk.real_s < found.why.used <= 500
        assert 8 - desk.real_s < found.why.fits_in_s <= 10
        assert used_of(found)[Rule.REQUESTS] <= 1
        assert fits(desk.take(ALL, 100, 0))

    def test_what_can_never_fit_says_so_whatever_else_is_reached(self, desk):
        desk.take(ALL, 600, 0)
        found = desk.take(ALL, 1, 301)
        assert (found.why.limit.rule, found.why.fits_in_s) == (Rule.OUTPUT, None)

    def test_what_was_not_used_is_given_back_and_what_was_more_is_charged(self, desk):
        taken = desk.take(ALL, 300, 300)
        assert not fits(desk.take(ALL, 0, 10))
        desk.settle(taken, 300, 100)
        taken = desk.take(ALL, 0, 195)
        assert fits(taken)
        desk.settle(taken, 0, 795)  # 900 used of 300
        desk.passes(100)
        assert not fits(desk.take(ALL, 0, 1))
        desk.passes(30)
        assert fits(desk.take(ALL, 0, 1))

    def test_what_was_given_back_can_be_charged_after_all(self, desk):
        """As a request that its engine refused, which no other pool took either."""
        limits = KeyLimits(requests_per_minute=2, tokens_per_day=1000, concurrent_requests=1)
        for _ in range(2):
            taken = desk.take(limits, 300, 300)
            desk.settle(taken, None)
            desk.settle(replace(taken, costs=Amounts()), 0, 0)
        found = desk.take(limits, 1000, 0)
        assert found.why.limit.rule is Rule.REQUESTS
        assert 1.9 < used_of(found)[Rule.REQUESTS] <= 2
        assert (used_of(found)[Rule.TOKENS_DAY], used_of(found)[Rule.CONCURRENT]) == (0, 0)

    def test_nothing_is_given_back_beyond_what_is_there(self, desk):
        taken = desk.take(ALL, 600, 0)
        desk.passes(60)
        desk.settle(taken, 0, 0)
        assert fits(desk.take(ALL, 600, 0))
        assert not fits(desk.take(ALL, 60, 0))

    def test_so_many_run_at_once_and_each_makes_room_when_it_ends(self, desk):
        one, two = desk.take(ALL), desk.take(ALL)
        found = desk.take(ALL)
        assert found.why.limit.rule is Rule.CONCURRENT
        assert (found.why.used, found.why.most) == (2, 2)
        desk.settle(one)
        three = desk.take(ALL)
        assert fits(three)
        assert not fits(desk.take(ALL))
        desk.settle(two)
        desk.settle(three)
        assert fits(desk.take(ALL))

    def test_a_look_at_what_is_used_takes_no_place(self, desk):
        limits = KeyLimits(concurrent_requests=2)
        one = desk.take(limits)
        for _ in range(3):
            looked = desk.run(desk.store.take(desk.plan(limits), Amounts()))
            assert used_of(looked) == {Rule.CONCURRENT: 1}
        assert [fits(desk.take(limits)) for _ in range(2)] == [True, False]
        desk.settle(one)
        assert fits(desk.take(limits))

    def test_what_runs_long_keeps_its_place(self, desk):
        desk.take(ALL)
        desk.take(ALL)
        for _ in range(8):
            desk.passes(RUNS_S / 3)
            desk.run(desk.store.renew())
        assert not fits(desk.take(ALL))

    def test_keys_do_not_share(self, desk):
        limits = KeyLimits(requests_per_minute=1)
        assert fits(desk.take(limits, key="a"))
        assert not fits(desk.take(limits, key="a"))
        assert fits(desk.take(limits, key="b"))

    def test_what_is_told_as_used_includes_the_request(self, desk):
        assert list(used_of(desk.take(ALL, 100, 50)).values()) == [1, 100, 50, 1]

    def test_keys_of_a_tenant_share_what_it_has(self, desk):
        whole = KeyLimits(requests_per_minute=3)
        found = [desk.take(None, key=key, of_tenant=whole) for key in "abab"]
        assert [fits(each) for each in found] == [True, True, True, False]
        assert found[-1].why.limit.scope is Scope.TENANT
        assert fits(desk.take(None, key="c", tenant="u", of_tenant=whole))

    def test_a_refusal_by_the_tenant_takes_nothing_of_the_key(self, desk):
        own, whole = KeyLimits(requests_per_minute=2), KeyLimits(requests_per_minute=3)
        assert fits(desk.take(own, key="a", of_tenant=whole))
        for _ in range(2):
            assert fits(desk.take(own, key="b", of_tenant=whole))
        for _ in range(5):
            assert not fits(desk.take(own, key="a", of_tenant=whole))
        desk.passes(20)  # a third of each comes back
        taken = desk.take(own, key="a", of_tenant=whole)
        assert fits(taken)
        assert taken.used[0] < 1.5  # of the key: its own first one, by a third emptied

    def test_a_key_may_have_less_of_some_models(self, desk):
        few = KeyLimits(requests_per_minute=1)
        limits = KeyLimits(requests_per_minute=3, models=(("big-*", few),))
        assert fits(desk.take(limits, model="big-1"))
        found = desk.take(limits, model="big-2")
        assert (found.why.limit.scope, found.why.limit.models) == (Scope.KEY_MODEL, "big-*")
        assert fits(desk.take(limits, model="small"))
        assert fits(desk.take(limits, model="small"))
        assert desk.take(limits, model="small").why.limit.scope is Scope.KEY

    def test_a_days_tokens_are_there_again_the_next_day_and_not_before(self, desk):
        desk.starts_a_day()
        limits = KeyLimits(tokens_per_day=1000)
        assert fits(desk.take(limits, 600, 300))
        desk.passes(DAY_S - 7200)
        found = desk.take(limits, 100, 1)
        assert (found.why.limit.rule, found.why.used) == (Rule.TOKENS_DAY, 900)
        assert 7100 < found.why.fits_in_s <= 7200
        assert fits(desk.take(limits, 100, 0))
        desk.passes(7200)
        assert fits(desk.take(limits, 1000, 0))

    def test_a_budget_counts_the_smallest_amounts(self, desk):
        desk.starts_a_day()
        limits = KeyLimits(budget_per_month=0.00001)
        assert sum(fits(desk.take(limits, money=4e-7)) for _ in range(60)) in (25, 26, 27)

    def test_a_glob_of_models_is_no_place_for_what_runs(self, desk):
        limits = KeyLimits(
            concurrent_requests=5, models=(("runs", KeyLimits(requests_per_minute=3)),)
        )
        taken = [desk.take(limits, model="runs") for _ in range(4)]
        assert [fits(each) for each in taken] == [True] * 3 + [False]

    def test_a_months_money_lasts_until_the_next_month(self, desk):
        desk.starts_a_day()
        limits = KeyLimits(budget_per_month=10.0)
        assert fits(desk.take(limits, money=9.5))
        found = desk.take(limits, money=0.75)
        assert (found.why.limit.rule, found.why.most) == (Rule.BUDGET_MONTH, 10)
        assert DAY_S < found.why.fits_in_s <= 31 * DAY_S
        desk.passes(DAY_S)
        assert not fits(desk.take(limits, money=0.75))
        desk.passes(found.why.fits_in_s - DAY_S + 1)
        assert fits(desk.take(limits, money=0.75))
        assert desk.take(limits, money=10.5).why.fits_in_s is None

    def test_what_was_taken_yesterday_is_not_given_back_to_today(self, desk):
        desk.starts_a_day()
        limits = KeyLimits(tokens_per_day=1000)
        late = desk.take(limits, 0, 800)
        desk.passes(DAY_S)
        assert fits(desk.take(limits, 0, 900))
        desk.settle(late, 0, 0)
        assert not fits(desk.take(limits, 0, 200))

    def test_a_rule_in_shadow_counts_and_tells_and_refuses_nothing(self, desk):
        limits = KeyLimits(requests_per_minute=1, shadow=True)
        assert desk.take(limits).shadowed == ()
        found = desk.take(limits)
        assert fits(found)
        assert found.shadowed == (0,)
        assert 0.5 < found.used[0] <= 1  # it took nothing, as if it had been refused

    def test_a_limit_that_was_tried_in_shadow_shuts_nobody_out_for_longer_than_a_minute(self, desk):
        tried, held = (KeyLimits(requests_per_minute=6, shadow=each) for each in (True, False))
        for _ in range(5):  # minutes at ten times the limit
            assert all(fits(desk.take(tried)) for _ in range(60))
            desk.passes(60)
        assert fits(desk.take(held))

    def test_a_rule_in_shadow_marks_as_many_as_it_would_refuse(self, desk):
        tried, held = (KeyLimits(requests_per_minute=6, shadow=each) for each in (True, False))
        marked = refused = 0
        for _ in range(10 * 12):  # ten minutes at twice the limit
            marked += bool(desk.take(tried, key="a").shadowed)
            refused += not fits(desk.take(held, key="b"))
            desk.passes(5)
        assert marked == pytest.approx(refused, abs=3)

    def test_what_passed_a_rule_in_shadow_gives_it_nothing_back_and_charges_it_nothing(self, desk):
        limits = KeyLimits(input_tokens_per_minute=600, concurrent_requests=9, shadow=True)
        taken = [desk.take(limits, 600) for _ in range(3)]
        assert [each.shadowed for each in taken] == [(), (0,), (0,)]
        desk.settle(taken[1], 0)
        desk.settle(taken[2], 6000)
        looked = desk.run(desk.store.take(desk.plan(limits), Amounts()))
        used = used_of(looked)
        assert 590 - 10 * desk.real_s < used[Rule.INPUT] <= 600
        assert used[Rule.CONCURRENT] == 1

    def test_a_limit_that_was_lowered_shuts_its_key_out_for_no_longer_than_a_minute(self, desk):
        before, now = KeyLimits(requests_per_minute=60), KeyLimits(requests_per_minute=6)
        assert all(fits(desk.take(before)) for _ in range(60))
        desk.passes(1)
        found = desk.take(now)
        assert not fits(found)
        assert found.why.fits_in_s <= 10
        desk.passes(60)
        assert fits(desk.take(now))

    @pytest.mark.parametrize(("before", "now", "left"), [(600, 6, 1.6), (6, 600, 61)])
    def test_what_ends_under_a_limit_of_before_empties_no_minute_of_the_one_in_force(
        self, desk, before, now, left
    ):
        """As a stream that a reload outlived: neither its limit nor the pace of that counts any more."""
        old, new = (KeyLimits(output_tokens_per_minute=each) for each in (before, now))
        runs = desk.take(old, output=5)
        assert fits(desk.take(new, output=now - 5))
        desk.passes(6)
        desk.settle(runs, 0, 4)
        assert not fits(desk.take(new, output=2 * left))
        assert fits(desk.take(new, output=0.9 * left))
