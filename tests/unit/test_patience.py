"""How long a request may wait: by the load of its pool, by its tenant's part in it, by its prompt."""

import math

import pytest

from gateway.admission.forecast import Drain
from gateway.admission.patience import Allowed, Patience, Quiet


def quiet(base_s=0.04, tokens_per_s=20_000, count=400):
    """Return what is learnt of short prompts, with a long one among ten."""
    learnt = Quiet()
    for each in range(count):
        tokens = 4000 if each % 10 == 9 else 0
        learnt.learn(base_s + tokens / tokens_per_s, tokens)
    return learnt


def pool(*, drain=1000.0, seconds=60, **demand):
    """Return the patience of a pool to which each tenant sends so many tokens a second."""
    patience = Patience()
    patience.first = quiet()
    for _ in range(2 * seconds):
        for tenant, per_s in demand.items():
            for _ in range(50):
                patience.came(tenant, per_s / 100)
        patience.tick(0.5, drain)
    return patience


def wait_s(patience, tenant="a", prompt_tokens=10, *, streams=True, **more):
    allowed = patience.allowed(prompt_tokens, streams=streams, **more)
    return patience.wait_s(patience.load(tenant), allowed)


def targets(patience, tenant="a"):
    """How many targets a tenant's request may wait."""
    return patience.wait_s(patience.load(tenant), Allowed(1.0, math.inf))


# --- what is quiet ----------------------------------------------------------------------------------


def test_a_quiet_first_token_is_the_quickest_tenth_and_what_a_prompt_adds():
    learnt = quiet()
    assert learnt.first_token_s(0) == pytest.approx(0.04, rel=0.1)
    assert learnt.first_token_s(4000) == pytest.approx(0.24, rel=0.1)


def test_a_few_slow_first_tokens_move_it_little():
    learnt = quiet()
    before = learnt.base_s
    for _ in range(10):
        learnt.learn(10.0, 0)
    assert learnt.base_s == pytest.approx(before, rel=0.05)


def test_a_pool_that_became_slower_is_known_after_a_while():
    learnt = quiet()
    for _ in range(2000):
        learnt.learn(0.4, 0)
    assert learnt.base_s == pytest.approx(0.4, rel=0.1)


# --- how long -----------------------------------------------------------------------------------------


def test_while_nothing_is_known_only_the_setting_bounds_the_wait():
    assert wait_s(Patience()) == math.inf
    assert wait_s(pool(drain=None, a=2000)) == math.inf


@pytest.mark.parametrize("per_s", [100, 900, 1000, 1040])
def test_a_queue_that_will_empty_absorbs_a_burst(per_s):
    assert wait_s(pool(a=per_s)) == math.inf


@pytest.mark.parametrize("per_s", [1060, 1090])
def test_where_it_may_grow_a_request_may_be_late_by_three_quarters_of_an_average_reply(per_s):
    patience = pool(a=per_s)
    assert wait_s(patience) == math.inf  # no reply was seen
    for seconds in [2.0, 6.0] * 100:
        patience.replied(seconds)
    assert wait_s(patience) == pytest.approx(3.0, rel=0.05)
    assert wait_s(patience, prompt_tokens=20_000) == pytest.approx(5 * 1.04, rel=0.1)


def test_it_waits_no_longer_where_a_little_more_comes_than_chance_explains():
    patience = pool(a=1110)
    assert wait_s(patience) > 10.0
    patience.replied(4.0)
    assert wait_s(patience) == 3.0


def test_replies_of_another_length_are_known_after_sixty():
    patience = pool(a=1070)
    patience.replied(25.0)
    for _ in range(60):
        patience.replied(2.0)
    assert wait_s(patience) == pytest.approx(0.75 * (2.0 + 23.0 / math.e**3), rel=0.05)


def test_who_waits_is_held_to_what_is_known_now():
    patience = pool(a=1070)
    patience.replied(25.0)
    allowed = patience.allowed(10, streams=True)
    before_s = patience.wait_s(1.07, allowed)
    for _ in range(200):
        patience.replied(2.0)
    assert (before_s, patience.wait_s(1.07, allowed)) == pytest.approx((18.75, 1.5), rel=0.01)


def test_where_it_may_grow_a_set_objective_is_kept_unless_replies_take_longer():
    patience = pool(a=1070)
    patience.replied(1.0)
    assert wait_s(patience, slo_s=2.0) == pytest.approx(1.96, rel=0.01)
    for _ in range(200):
        patience.replied(4.0)
    assert wait_s(patience, slo_s=2.0) == pytest.approx(3.0, rel=0.01)


def test_where_it_may_grow_who_came_again_as_told_has_its_turn():
    patience = pool(a=1070)
    patience.replied(2.0)
    assert wait_s(patience, returned=True) == math.inf


def test_of_few_requests_a_load_bounds_waits_only_where_it_is_hardly_chance():
    def few(tokens):
        patience = Patience()
        patience.first = quiet()
        patience.replied(2.0)
        for _ in range(60):
            patience.came("a", tokens)  # two a second: sixteen in the memory
            patience.tick(0.5, 1000.0)
        return patience

    assert not few(600).bounds_waits  # 1.2: chance up to 1.5
    assert wait_s(few(600)) == math.inf
    assert few(650).bounds_waits
    assert wait_s(few(650)) == 1.5


def test_the_more_comes_than_ends_the_shorter_is_the_wait_down_to_the_target():
    waits = [wait_s(pool(a=per_s)) for per_s in (1150, 1300, 1600, 2100, 4000)]
    assert waits == sorted(waits, reverse=True)
    assert waits[0] > 15 * waits[-1]
    assert waits[-2] == pytest.approx(waits[-1], rel=0.02)
    assert waits[-1] == pytest.approx(3 * 0.04, rel=0.1)


@pytest.mark.parametrize(("per_s", "worth"), [(1200, 6.3), (1300, 2.2), (1450, 1.0), (1600, 1.0)])
def test_a_load_little_over_the_drain_is_worth_a_wait_of_some_targets(per_s, worth):
    assert targets(pool(a=per_s)) == pytest.approx(worth, rel=0.05)


def test_after_few_requests_a_second_many_are_seen_within_seconds():
    patience = Patience()
    for _ in range(200):  # one each two seconds, and they stay for long
        patience.came("a", 250)
        for _ in range(4):
            patience.tick(0.5, 1000.0, memory_s=60.0)
    for _ in range(16):
        for _ in range(10):
            patience.came("a", 100)
        patience.tick(0.5, 1000.0, memory_s=60.0)
    assert patience.load("a") > 1.0  # of 2; with all that was before it is 0.4


def test_while_one_reply_takes_hours_everybody_is_told_how_long_to_wait():
    drain, patience = Drain(), Patience()
    patience.first = quiet()
    drain.follow({"m/b1": True})
    drain.passed(10.0, {"m/b1": 10_000}, held_tokens=100, token_s=10_000.0)
    for tick in range(5 * 3600):
        drain.passed(0.5, {"m/b1": 0}, held_tokens=100)
        for tenant in "abcdefg":
            patience.came(tenant, 100)
        patience.tick(0.5, drain.most_per_s, drain.probable_per_s, drain.memory_s)
        if tick > 120:
            assert wait_s(patience, "newcomer") == math.inf
            assert 0 < wait_s(patience, "a") < 1


def test_a_pool_that_was_idle_for_hours_is_looked_at_as_before():
    patience = Patience()
    patience.came("a", 100)
    for tick in range(18_000):
        patience.tick(6.0 if tick > 12_000 and tick % 100 == 0 else 0.5, None)
    for _ in range(20):
        for _ in range(10):
            patience.came("a", 100)
        patience.tick(0.5, 1000.0)
    assert patience.overloaded


@pytest.mark.parametrize(("requests_per_s", "seen"), [(20, True), (0.5, False)])
def test_few_requests_are_looked_at_for_as_long_as_they_stay_and_many_are_not(requests_per_s, seen):
    patience, owed = Patience(), 0.0
    for tick in range(246):
        load = 0.8 if tick < 240 else 6.0  # for three seconds
        owed += load * requests_per_s / 2
        while owed >= 1:
            owed -= 1
            patience.came("a", 1000)
        patience.tick(0.5, 1000.0 * requests_per_s, memory_s=60.0)
    assert patience.overloaded is seen


def test_a_long_prompt_may_be_as_late_again_as_it_takes_to_be_read():
    overloaded = pool(a=4000)
    assert wait_s(overloaded, prompt_tokens=20_000) == pytest.approx(1.04, rel=0.1)


def test_who_came_again_as_told_waits_longer():
    overloaded = pool(a=4000)
    again_s = wait_s(overloaded, returned=True)
    assert again_s == pytest.approx(10 * wait_s(overloaded))


def test_a_set_objective_leaves_what_the_first_token_itself_does_not_need():
    assert wait_s(pool(a=4000), slo_s=2.0) == pytest.approx(1.96, rel=0.01)


def test_what_is_no_stream_goes_by_whole_replies():
    overloaded = pool(a=4000)
    assert wait_s(overloaded, streams=False) == math.inf  # none was seen
    for _ in range(100):
        overloaded.whole.learn(5.0, 0)
    assert wait_s(overloaded, streams=False) == pytest.approx(15.0, rel=0.1)


# --- who pays -----------------------------------------------------------------------------------------


def test_a_tenant_that_asks_for_little_waits_as_if_the_pool_were_not_overloaded():
    flooded = pool(greedy=4000, calm=100)
    assert wait_s(flooded, "calm") == math.inf
    assert wait_s(flooded, "unheard of") == math.inf
    assert wait_s(flooded, "greedy") < 0.2


@pytest.mark.parametrize("asks", [100, 300, 370])
def test_a_tenant_that_asks_for_less_than_is_due_to_it_does_not_pay(asks):
    patience = pool(small=asks, greedy=5_000)  # 500 of 1,000 are due to each
    assert targets(patience, "small") == math.inf
    assert targets(patience, "greedy") == 1.0


def test_a_tenant_pays_more_the_nearer_it_comes_to_a_fair_share():
    waits = [wait_s(pool(greedy=4000, other=per_s), "other") for per_s in (200, 300, 350, 400, 500)]
    assert waits[0] == math.inf
    assert waits == sorted(waits, reverse=True)
    assert waits[-1] < 0.2


def test_what_some_leave_of_their_share_raises_the_share_of_the_rest():
    several = pool(greedy=4000, large=440, small=20)  # large could have 490
    assert several.load("large") < several.load("greedy")


def test_a_tenant_does_not_pay_for_a_drain_that_is_probably_more():
    patience = pool(greedy=4000, other=480)
    assert wait_s(patience, "other") < 1
    patience.tick(0.5, 1000.0, 1150.0)
    assert wait_s(patience, "other") == math.inf
    assert wait_s(patience, "greedy") < 1


def test_a_tenant_that_comes_no_more_is_forgotten():
    patience = pool(a=4000)
    for _ in range(240):
        patience.tick(0.5, 1000.0)
    assert patience.load("a") == pytest.approx(0, abs=1e-3)
    assert wait_s(patience) == math.inf


def test_of_few_requests_a_load_is_chance_up_to_a_higher_one():
    few = Patience()
    few.first = quiet()
    for _ in range(60):
        few.came("a", 700)  # two a second: sixteen in the memory
        few.tick(0.5, 1000.0)
    assert few.load("a") == pytest.approx(1.4, rel=0.01)
    assert wait_s(few) == math.inf
    assert wait_s(pool(a=1400)) < 1


def test_one_prompt_from_the_prefix_cache_tells_little_of_how_long_ones_are_read():
    learnt = quiet()
    before_s = learnt.first_token_s(20_000)
    learnt.learn(0.2, 20_000)
    assert learnt.first_token_s(20_000) == pytest.approx(before_s, rel=0.05)


def test_an_objective_that_a_prompt_cannot_keep_is_none_for_it():
    overloaded = pool(a=4000)
    assert wait_s(overloaded, prompt_tokens=20_000, slo_s=0.5) == wait_s(
        overloaded, prompt_tokens=20_000
    )
