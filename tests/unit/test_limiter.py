"""Limits in one process, and what replicas do when Redis is away."""

import re
from dataclasses import replace

import pytest

from gateway.core.asked import Caller
from gateway.core.limits import KeyLimits, OnOutage, Period, Rule, Scope
from gateway.limiting import scripts
from gateway.limiting.inparent import SharedLevels
from gateway.limiting.levels import Levels, Moment
from gateway.limiting.limiter import Closed
from gateway.limiting.plans import Plans
from gateway.limiting.rules import header_lines, month_of, over, refusal, resets_in_s, told
from gateway.limiting.standing import standing
from gateway.store.shared import StoreUnavailable
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


@pytest.fixture
def desk():
    desk = LimiterDesk()
    yield desk
    desk.close()


class TestMemory(LimiterCases):
    pass


class Away:
    """A Redis that does not answer."""

    def __init__(self, trouble):
        self.trouble, self.asked, self.posted = trouble, 0, []

    async def ask(self, *args, **more):
        self.asked += 1
        raise StoreUnavailable

    def post(self, *args):
        self.posted.append(args)


class Lossy:
    """What replicas share, over a link that loses what is posted: None, "unsent" or "unheard"."""

    trouble = ""

    def __init__(self, clock):
        self.shared, self.loses = SharedLevels(clock), None

    async def ask(self, script, keys, args, within_s=0.0, late=None):
        return self.shared.run(script.sha, keys, args)

    def post(self, script, keys, args, lost=None):
        if self.loses != "unsent":
            self.shared.run(script.sha, keys, args)
        if self.loses is not None and lost is not None:
            lost(self.loses == "unheard")


@pytest.mark.parametrize("loses", ["unsent", "unheard"])
def test_what_ends_while_redis_does_not_hear_it_is_told_when_it_does(loses):
    """What may have been done is not done twice: only its lease ends for sure."""
    desk = LimiterDesk(Lossy)
    link = desk.link
    desk.clock.at = 20_000.0 * DAY_S
    limits = KeyLimits(tokens_per_month=10_000, concurrent_requests=1)
    taken = desk.take(limits, input=100, output=4_000)
    assert taken.shared
    link.loses = loses
    desk.settle(taken, 100, 50)
    link.loses = None
    desk.run(desk.store._turn())
    again = desk.take(limits, input=1)
    assert fits(again)  # nothing runs any more
    assert used_of(again)[Rule.TOKENS_MONTH] == 151
    desk.close()


class Slow(Lossy):
    """What replicas share; what `TAKE` tells comes when nobody waits for it any more."""

    def __init__(self, clock):
        super().__init__(clock)
        self.slow, self.due = True, []

    async def ask(self, script, keys, args, within_s=0.0, late=None):
        reply = await super().ask(script, keys, args)
        if self.slow and script is scripts.TAKE:
            self.due.append((late, reply))
            raise StoreUnavailable
        return reply


@pytest.mark.parametrize("outage", [OnOutage.LOCAL, OnOutage.CLOSED])
def test_what_redis_lets_through_too_late_uses_up_nothing_but_the_request(outage):
    """What was refused costs nothing, and what was counted here meanwhile does not count twice."""
    desk = LimiterDesk(Slow)
    link = desk.link
    desk.starts_a_day()
    limits = KeyLimits(
        output_tokens_per_minute=10_000,
        budget_per_month=5.0,
        concurrent_requests=9,
        on_outage=outage,
    )
    found = [desk.take(limits, 10, 1000, money=1.0) for _ in range(3)]
    assert [fits(each) for each in found] == [outage is OnOutage.LOCAL] * 3
    for late, reply in link.due:
        late(reply)
    link.slow = False
    desk.passes(2)  # it is asked again
    again = desk.take(limits)
    assert again.shared
    assert (used_of(again)[Rule.OUTPUT], used_of(again)[Rule.BUDGET_MONTH]) == (0, 0)
    desk.close()


def test_what_redis_lets_through_once_it_hangs_no_more_does_not_run():
    """Nobody waited for it so long, and Redis did not hear that it ended."""
    desk = LimiterDesk(Slow)
    link = desk.link
    limits = KeyLimits(concurrent_requests=1, on_outage=OnOutage.CLOSED)
    link.loses = "unsent"
    assert isinstance(desk.take(limits), Closed)
    link.slow, link.loses = False, None
    desk.run(desk.store._turn())
    assert fits(desk.take(limits))
    desk.close()


def test_what_was_used_of_keys_that_rest_is_forgotten_once_it_counts_no_more(desk):
    """Tokens of an identity provider may bring a key for each user, or for each job."""
    short = KeyLimits(requests_per_minute=6, tokens_per_day=1000)
    long = KeyLimits(requests_per_minute=6, tokens_per_day=1000, tokens_per_month=1000)
    desk.starts_a_day()
    desk.take(long, 600, key="of the first day")
    for day in range(10):
        for number in range(2000):
            desk.take(short, 10, key=f"{day}-{number}")
        desk.clock.at += DAY_S
        desk.plans.clear()
    assert len(desk.store.levels.amounts) < 10_000  # of 40,000
    used = used_of(desk.take(long, key="of the first day"))
    assert (used[Rule.TOKENS_DAY], used[Rule.TOKENS_MONTH]) == (0, 600)


@pytest.mark.parametrize("trouble", ["", "it is away"])
def test_a_replica_without_redis_gives_out_its_share_and_says_so(trouble):
    away = Away(trouble)
    desk = LimiterDesk(lambda clock: away)
    desk.replicas = 3
    limits = KeyLimits(requests_per_minute=30, concurrent_requests=100)
    found = [desk.take(limits) for _ in range(11)]
    assert [fits(each) for each in found] == [True] * 10 + [False]
    assert (found[-1].why.most, found[-1].share_of) == (10, 3)
    assert away.asked == (0 if trouble else 1)  # none waits for one that is known to be away
    desk.clock.at += 1.5
    for _ in range(5):
        desk.take(limits, key="c")
    assert away.asked == (0 if trouble else 2)  # of one that is slow, one a second finds out
    desk.clock.at -= 1.5
    assert "its part of 3 replicas" in told(found[-1].why, share_of=found[-1].share_of)
    few = KeyLimits(requests_per_minute=1)
    assert fits(desk.take(few, key="b"))  # nobody is shut out
    desk.close()


def test_the_share_of_a_minute_empties_at_the_pace_of_the_share():
    """Else each of four replicas would let through a whole limit, minute for minute."""
    desk = LimiterDesk(lambda clock: Away("it is away"))
    desk.replicas = 4
    limits = KeyLimits(requests_per_minute=60, output_tokens_per_minute=6_000)
    found = []
    for _ in range(600):  # of ten minutes one a second; each gives back half of what it took
        found.append(desk.take(limits, output=10))
        if fits(found[-1]):
            desk.settle(found[-1], 0, 5)
        desk.clock.at += 1
    let_through = sum(map(fits, found))
    assert 15 * 10 <= let_through <= 15 * 11
    refused = next(each for each in found if not fits(each))
    assert 0 < refused.why.fits_in_s <= 4
    lines = header_lines(refused.plan, (15.0, 0), 0.0, refused.share_of)
    assert b"limit-requests: 60\r\nx-ratelimit-remaining-requests: 0\r\n" in lines
    assert b"reset-requests: 1m" in lines
    desk.close()


def test_what_fits_a_limit_and_not_a_replicas_part_of_it_may_come_again():
    desk = LimiterDesk(lambda clock: Away("it is away"))
    desk.replicas = 4
    limits = KeyLimits(output_tokens_per_minute=2_000)
    found = desk.take(limits, output=1_000)
    assert found.why.fits_in_s > 0
    text = told(found.why, share_of=found.share_of)
    assert "500 (its part of 4 replicas, which cannot agree now)" in text
    assert text.endswith("It fits when they agree again.")
    assert desk.take(limits, output=3_000).why.fits_in_s is None
    desk.close()


def test_what_a_key_has_used_is_not_known_where_a_limit_is_closed_without_redis():
    desk = LimiterDesk(lambda clock: Away("it is away"))
    desk.replicas = 2
    limits = {"requests_per_minute": 4, "tokens_per_day": 100}
    (closed, _) = desk.run(
        standing(desk.store, desk.plan(KeyLimits(**limits, on_outage=OnOutage.CLOSED)))
    )
    assert (closed["rule"], closed["limit"]) == ("requests_per_minute", 4)
    assert (closed["used"], closed["remaining"], closed["resets_in_s"]) == (None, None, None)
    own = KeyLimits(**limits)
    desk.take(own, key="b")
    (minute, _) = desk.run(standing(desk.store, desk.plan(own, key="b")))
    assert (minute["limit"], minute["used"], minute["remaining"]) == (4, 1, 1)  # its part is 2
    assert minute["resets_in_s"] == 30
    desk.close()


def test_each_rule_says_what_it_does_while_replicas_cannot_agree():
    away = Away("it is away")
    desk = LimiterDesk(lambda clock: away)
    desk.replicas = 2
    is_open = KeyLimits(requests_per_minute=4, on_outage=OnOutage.OPEN)
    assert [fits(desk.take(is_open)) for _ in range(6)] == [True] * 6
    closed = KeyLimits(4, 600, apart=((Rule.INPUT, OnOutage.CLOSED, False),))
    found = desk.take(closed, key="b")
    assert isinstance(found, Closed)
    assert found.limit.rule is Rule.INPUT
    shadow = KeyLimits(4, on_outage=OnOutage.CLOSED, shadow=True)
    assert all(fits(desk.take(shadow, key="c")) for _ in range(9))
    away.trouble = ""
    assert isinstance(desk.take(closed, key="b"), Closed)  # slow, and so not known
    assert away.asked == 1
    desk.close()


def test_what_is_open_while_replicas_cannot_agree_is_not_foreseen_to_refuse():
    """A gateway alone on its Redis knows of one replica, and is away from it all the same."""
    desk = LimiterDesk(lambda clock: Away("it is away"))
    is_open = KeyLimits(requests_per_minute=4, on_outage=OnOutage.OPEN)
    assert [fits(desk.take(is_open)) for _ in range(6)] == [True] * 6
    assert desk.run(desk.store.foresee(desk.plan(is_open), amounts())) is None
    desk.close()


def test_closed_lets_through_what_fits_while_redis_answers_and_always_in_a_gateway_alone(desk):
    limits = KeyLimits(requests_per_minute=2, on_outage=OnOutage.CLOSED)
    assert [fits(desk.take(limits)) for _ in range(3)] == [True, True, False]


def test_the_share_goes_on_from_what_was_used_when_redis_last_answered():
    class Link(Away):
        async def ask(self, *args, **more):
            if self.trouble:
                raise StoreUnavailable
            return "1 20000 24.0"

    link = Link("")
    desk = LimiterDesk(lambda clock: link)
    desk.replicas = 3
    limits = KeyLimits(requests_per_minute=30)
    assert fits(desk.take(limits))
    link.trouble = "it is away"
    assert [fits(desk.take(limits)) for _ in range(3)] == [True, True, False]
    desk.close()


@pytest.mark.parametrize("limits", [KeyLimits(30), KeyLimits(tokens_per_day=30)])
def test_a_redis_that_answers_now_and_then_lets_nobody_have_the_limit_again(limits):
    """It does not know what was used here: it never learns that of a minute, and is told later of a day."""

    class Link(Away):
        async def ask(self, *args, **more):
            if self.trouble:
                raise StoreUnavailable
            return "1 20000 1.0"

    link = Link("")
    desk = LimiterDesk(lambda clock: link)
    desk.starts_a_day()
    let_through = 0
    for _ in range(5):
        link.trouble = ""
        assert desk.take(limits, 1).shared
        link.trouble = "it is away"
        while fits(found := desk.take(limits, 1)):
            desk.settle(found, 1, 0)
            let_through += 1
    assert let_through == 29
    desk.close()


def test_redis_is_told_what_a_day_and_a_month_lost_to_an_outage():
    class Link(Away):
        async def ask(self, script, keys, args, **more):
            self.posted.append((script, keys, args))
            return "1"

    link = Link("it is away")
    desk = LimiterDesk(lambda clock: link)
    limits = KeyLimits(requests_per_minute=100, tokens_per_day=10_000)
    for _ in range(3):
        desk.settle(desk.take(limits, 10, 100), 10, 20)
    desk.run(desk.store._turn())
    assert link.posted == []
    link.trouble = ""
    desk.run(desk.store._turn())
    ((_, stores, (words,)),) = link.posted
    assert stores == ("gw1:{t:t}:key:k",)
    assert words.split()[2:] == [
        "3",
        "30.000000",
        "60.000000",
        "90.000000",
        "0.000000000",
        "1",
        "3d",
        "10000.000000",
        "1",
    ]
    desk.run(desk.store._turn())
    assert len(link.posted) == 1
    desk.close()


@pytest.mark.parametrize(("days", "used"), [(0, (1001, 1001)), (1, (1, 1001)), (40, (1, 1))])
def test_what_an_outage_used_counts_for_its_own_day_and_month(days, used):
    links = []

    def make_link(clock):
        links.append(Lossy(clock))
        return links[0]

    desk = LimiterDesk(make_link)
    desk.starts_a_day()
    limits = KeyLimits(tokens_per_day=10_000, tokens_per_month=10_000)
    links[0].trouble = "it is away"
    desk.settle(desk.take(limits, 100, 900), 100, 900)
    desk.passes(days * DAY_S)
    links[0].trouble = ""
    desk.run(desk.store.tell_owed())
    assert tuple(used_of(desk.take(limits, 1)).values()) == used
    desk.close()


def test_what_an_outage_used_is_not_raised_to_and_then_told_again():
    """A request may ask Redis after an outage, before Redis was told what that used."""
    spent = 0.0
    desk = LimiterDesk(Lossy)
    link = desk.link
    desk.starts_a_day()
    desk.store._spent = lambda rule, key_id: spent
    whole = KeyLimits(tokens_per_day=10_000)
    link.trouble = "it is away"
    desk.settle(desk.take(None, 100, 900, of_tenant=whole), 100, 900)
    link.trouble, spent = "", 1000.0
    assert used_of(desk.take(None, 1, key="other", of_tenant=whole)) == {Rule.TOKENS_DAY: 1}
    desk.run(desk.store.tell_owed())
    assert used_of(desk.take(None, 1, key="other", of_tenant=whole)) == {Rule.TOKENS_DAY: 1002}
    desk.run(desk.store.tell_owed())
    spent = 5000.0  # it is raised to what is known once nothing is owed
    desk.store.recall()
    assert used_of(desk.take(None, 1, key="other", of_tenant=whole)) == {Rule.TOKENS_DAY: 5001}
    desk.close()


def test_what_runs_is_told_anew_before_redis_is_asked_again():
    class Link(Away):
        async def ask(self, *args, **more):
            if self.trouble:
                raise StoreUnavailable
            return "1 20000 2.0"

    link = Link("it is away")
    desk = LimiterDesk(lambda clock: link)
    limits = KeyLimits(concurrent_requests=2)
    taken = desk.take(limits)
    link.trouble = ""
    assert fits(desk.take(limits))
    ((_, stores, (_, lease)),) = link.posted
    assert (stores, lease) == (("gw1:{t:t}:runs:key:k",), taken.lease)
    desk.close()


def why_of(rule, most, used, requested, wall=0.0, scope=Scope.KEY, **more):
    limits = replace(KeyLimits(**{rule.value: most}), **more)
    if scope is Scope.TENANT:
        plan = plan_of(None, "ci", "acme", limits)
    else:
        plan = plan_of(limits, "ci")
    costs = amounts()._replace(**{_field(plan): requested})
    return refusal(plan, costs, (used,), over(plan, costs, (used,)), wall)


def _field(plan):
    return amounts()._fields[plan.rules[0].amount]


@pytest.mark.parametrize(
    ("why", "text"),
    [
        (
            why_of(Rule.OUTPUT, 2000, 1900.4, 500),
            "The API key `ci` has reached its limit output_tokens_per_minute: 2,000; 1,901 used, 500"
            " requested. It fits in 12s.",
        ),
        (  # never less than what keeps it out: nine and one would fit
            why_of(Rule.REQUESTS, 10, 9.3, 1),
            "The API key `ci` has reached its limit requests_per_minute: 10; 10 used, 1 requested."
            " It fits in 2s.",
        ),
        (
            why_of(Rule.INPUT, 2000, 0, 5000),
            "The API key `ci` has reached its limit input_tokens_per_minute: 2,000; 0 used, 5,000"
            " requested. It can never fit: send a smaller request, or ask the operator for a higher limit.",
        ),
        (
            why_of(Rule.CONCURRENT, 4, 4, 1),
            "The API key `ci` has reached its limit concurrent_requests: 4; 4 running, 1 requested."
            " Retry when one of them has ended.",
        ),
        (
            why_of(Rule.TOKENS_DAY, 2000, 1900, 500, 20_000.0 * DAY_S + 39_600, Scope.TENANT),
            "The tenant `acme` has reached its limit tokens_per_day: 2,000; 1,900 used, 500"
            " requested. It fits in 13h0m0s.",
        ),
        (
            why_of(Rule.BUDGET_DAY, 20, 19.994, 0.012, 20_000.0 * DAY_S + 86_340),
            "The API key `ci` has reached its limit budget_per_day: 20.00 EUR; 19.99 EUR used, 0.012 EUR"
            " requested. It fits in 1m0s.",
        ),
    ],
)
def test_a_refusal_names_rule_limit_used_requested_and_when_it_fits(why, text):
    assert told(why, currency="EUR") == text


def test_headers_have_the_form_that_openai_gives_them():
    plan = plan_of(KeyLimits(60, None, 600))
    lines = header_lines(plan, (30.0, 900.0), 0.0).decode()
    assert lines == (
        "x-ratelimit-limit-requests: 60\r\nx-ratelimit-remaining-requests: 30\r\n"
        "x-ratelimit-reset-requests: 30s\r\nx-ratelimit-limit-tokens: 600\r\n"
        "x-ratelimit-remaining-tokens: 0\r\nx-ratelimit-reset-tokens: 1m30s\r\n"
        "x-ratelimit-limit-output-tokens: 600\r\n"
        "x-ratelimit-remaining-output-tokens: 0\r\nx-ratelimit-reset-output-tokens: 1m30s\r\n"
    )
    plan = plan_of(KeyLimits(60))
    assert re.search(r"reset-requests: 500ms", header_lines(plan, (0.5,), 0.0).decode())


def test_headers_tell_of_the_tightest_of_several_limits_and_of_none_in_shadow():
    tenant = KeyLimits(10, tokens_per_day=500, input_tokens_per_minute=1, shadow=False)
    plan = plan_of(KeyLimits(60, 600, shadow=True), of_tenant=tenant)
    lines = header_lines(plan, (1, 1, 8, 1, 400), 20_000.0 * DAY_S + 3600).decode()
    assert "limit-requests: 10\r\nx-ratelimit-remaining-requests: 2\r\n" in lines
    assert "x-ratelimit-limit-tokens: 1\r\nx-ratelimit-remaining-tokens: 0\r\n" in lines
    assert "60" not in lines.replace("60s", "")


@pytest.mark.parametrize(
    ("day", "month"),
    [(0, 1970 * 12), (19_782, 2024 * 12 + 1), (20_088, 2024 * 12 + 11), (20_089, 2025 * 12)],
)
def test_months_are_those_of_the_calendar(day, month):
    assert month_of(day) == month


def test_a_month_ends_with_its_last_day():
    assert resets_in_s(Period.MONTH, 20_088.0 * DAY_S + 1) == DAY_S - 1
    assert resets_in_s(Period.MONTH, 20_089.0 * DAY_S) == 31 * DAY_S


def test_a_clock_that_goes_back_empties_nothing():
    levels, plan = Levels(), plan_of(ALL)
    levels.put(plan, (5.0, 5.0, 5.0, 0), Moment.of(1000.0, 1000.0))
    assert levels.used(plan, Moment.of(900.0, 900.0)) == (5.0, 5.0, 5.0, 0)


@pytest.mark.parametrize("rule", [Rule.TOKENS_DAY, Rule.TOKENS_MONTH])
def test_what_was_used_while_the_clock_was_ahead_counts_until_the_present_day_or_month_ends(
    desk, rule
):
    desk.starts_a_day()
    limits = KeyLimits(**{rule.value: 1000})
    desk.clock.at += 90 * DAY_S
    assert fits(desk.take(limits, 900))
    desk.clock.at -= 90 * DAY_S
    assert not fits(desk.take(limits, 900))
    desk.clock.at += DAY_S if rule is Rule.TOKENS_DAY else 31 * DAY_S
    assert fits(desk.take(limits, 900))


def test_a_model_that_moves_to_another_pool_has_the_limits_of_that_pool():
    of_b = KeyLimits(models=(("b", KeyLimits(requests_per_minute=1)),))
    plans, caller = Plans({}), Caller("a", "a", "a", limits=of_b)
    assert plans.of(caller, "sql", "a") is None
    plan = plans.of(caller, "sql", "b")
    assert [each.most for each in plan.rules] == [1]
    assert plans.of(caller, "sql", "a") is None


def test_every_plan_of_a_key_is_made_once_and_anew_when_the_key_changes():
    plans = Plans({})
    caller = Caller("a", "a", "a", limits=ALL)
    assert plans.of(caller, "m", "m") is plans.of(caller, "m", "m")
    changed = replace(caller, limits=KeyLimits(7))
    assert plans.of(changed, "m", "m").rules[0].most == 7
    assert plans.of(replace(caller, limits=None), "m", "m") is None
