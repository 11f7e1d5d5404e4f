import pytest

from gateway.core.types import LoadSample
from gateway.pools.limit import CEILING, START, UNSEEN, Limit, Sign, late, unreserved
from gateway.pools.rate import Rate


def sample(running=0, waiting=0, preemptions=0.0):
    return LoadSample(0.0, running, waiting, 0.1, preemptions=preemptions)


def used(limit, now, count=1):
    """Let `count` quiet windows pass in which the whole limit was used."""
    for second in range(count):
        assert limit.observe(now + second, sample(limit.value), limit.value) is None
    return limit


def at(value, **settings):
    """Return a limit that has seen one congestion and now stands at `value`."""
    limit = Limit(**settings)
    limit.refused()
    assert limit.observe(0.0, sample(), 100) is Sign.REFUSED
    limit.value = value
    return limit


def first_tokens(limit, now, in_time=0, too_late=0):
    for _ in range(in_time):
        limit.first_token(now, 0.5, 0)
    for _ in range(too_late):
        limit.first_token(now, 9.0, 0)


# --- growth ---------------------------------------------------------------------------------------


def test_no_engine_is_throttled_at_the_start():
    assert Limit().value == START >= 1024  # vLLM's largest default of max_num_seqs


def test_a_first_burst_on_a_small_engine_is_cut_to_what_it_runs():
    limit = Limit()
    limit.observe(1.0, sample(16, 84), 100)
    assert limit.observe(2.0, sample(16, 84), 100) is Sign.WAITING
    assert limit.value == 50  # not below half in one step
    for second in range(3, 6):
        limit.observe(float(second), sample(16, 34), 50)
    assert limit.value <= 25


def test_it_opens_fast_until_the_first_congestion():
    limit = Limit()
    limit.value = 32
    assert used(limit, 0.0, count=6).value >= 128  # vLLM's smallest default of max_num_seqs


def test_a_fixed_limit_is_start_and_ceiling():
    limit = Limit(fixed=200)
    assert limit.value == 200
    assert used(limit, 0.0, count=5).value == 200


def test_without_a_fixed_limit_there_is_still_a_ceiling():
    assert used(Limit(), 0.0, count=30).value == CEILING


def test_a_lowered_fixed_limit_holds_at_once():
    limit = used(Limit(), 0.0, count=5)
    limit.fix(7)
    assert limit.value == 7


@pytest.mark.parametrize(("fixed", "value"), [(100, 100), (None, START)])
def test_a_raised_fixed_limit_holds_at_once_where_only_it_held_it(fixed, value):
    limit = Limit(fixed=2)
    limit.fix(fixed)
    assert limit.value == value


def test_a_raised_fixed_limit_is_grown_into_where_the_engine_held_it_lower():
    limit = Limit(fixed=100)
    limit.refused()
    limit.observe(0.0, sample(), 100)
    limit.fix(200)
    assert limit.value == 90


def test_a_fixed_limit_that_comes_or_goes_holds_at_once_without_metrics_too():
    limit = Limit()
    limit.observe(0.0, None, 0)
    limit.fix(32)
    assert limit.value == 32
    limit.fix(None)
    assert limit.value == UNSEEN


def test_settings_that_stay_do_not_move_a_limit():
    limit = used(Limit(), 0.0, count=5)
    before = limit.value
    assert before > START
    limit.fix(None)
    assert limit.value == before


def test_a_limit_that_is_not_half_used_stays_where_it_is():
    limit = Limit()
    for second in range(100):
        limit.observe(float(second), sample(), START // 2 - 1)
    assert limit.value == START


def test_after_the_first_congestion_it_grows_by_one_a_window():
    assert used(at(50), 1.0, count=3).value == 53


def test_a_failed_scrape_is_no_sign_of_room():
    limit = at(100)
    limit.observe(1.0, None, 100)
    assert limit.value == 100


def test_what_shows_no_metrics_is_held_low_until_it_does():
    limit = Limit()
    for second in range(3):
        assert limit.observe(float(second), None, 5) is None
        assert limit.value == UNSEEN
    limit.observe(3.0, sample(), 5)
    assert limit.value == START


def test_what_shows_metrics_only_after_a_sign_is_not_trusted_with_more():
    limit = Limit()
    limit.observe(0.0, None, 5)
    first_tokens(limit, 1.0, too_late=20)
    assert limit.observe(1.0, None, 16) is Sign.LATE
    limit.observe(2.0, sample(), 3)
    assert limit.value == 8


def test_a_fixed_limit_holds_without_metrics_too():
    limit = Limit(fixed=200)
    limit.observe(0.0, None, 5)
    assert limit.value == 200


def test_first_tokens_in_time_speak_for_a_backend_without_metrics():
    limit = Limit()
    limit.observe(0.0, None, 0)
    for second in range(1, 4):
        first_tokens(limit, float(second), in_time=10)
        limit.observe(float(second), None, limit.value)
    assert limit.value == 34  # 16, 21, 27, 34


# --- congestion -----------------------------------------------------------------------------------


def test_a_queue_in_one_scrape_only_holds_the_limit():
    limit = Limit()
    assert limit.observe(1.0, sample(20, 12), START) is None
    assert limit.value == START


def test_a_queue_in_two_scrapes_running_cuts_to_the_share_that_runs():
    limit = at(40)
    limit.observe(1.0, sample(30, 10), 40)
    assert limit.observe(2.0, sample(30, 10), 40) is Sign.WAITING
    assert limit.value == 30


def test_a_queue_that_cleared_in_between_does_not_cut():
    limit = at(40)
    for second, waiting in enumerate([10, 0, 10, 0, 10]):
        assert limit.observe(float(second), sample(30, waiting), 10) is None


def test_a_few_waiting_behind_a_large_batch_are_the_normal_turn_of_prompts():
    limit = at(200)
    for second in range(5):
        running = 200 - second % 2  # for what a step can read it is now more, now fewer
        assert limit.observe(float(second), sample(running, 20), 200 + second) is None


def test_a_batch_that_is_full_is_the_limit_however_few_wait():
    limit = at(1024)
    assert limit.observe(1.0, sample(64, 3), 67) is None
    assert limit.observe(2.0, sample(64, 0), 64) is None  # nobody happened to wait
    assert limit.observe(3.0, sample(64, 3), 67) is Sign.WAITING
    assert limit.value == 64
    for second in range(4, 63):
        assert limit.observe(float(second), sample(64), 64) is None
        assert limit.value == 64
    limit.observe(63.0, sample(64), 64)
    assert limit.value == 65  # once a minute it is tried whether it holds more
    limit.observe(64.0, sample(64, 1), 65)
    assert limit.value == 65  # it does not grow while anybody waits
    assert limit.observe(65.0, sample(64, 1), 65) is Sign.WAITING
    assert limit.value == 64


def test_a_batch_that_ran_more_before_is_not_full():
    limit = at(1024)
    limit.observe(1.0, sample(80), 80)
    for second in range(2, 9):
        assert limit.observe(float(second), sample(64, 3), 67) is None


def test_a_batch_that_others_fill_too_is_judged_by_its_queue():
    limit = at(1024)
    for second in range(5):
        assert limit.observe(float(second), sample(64, 3), 30) is None


def test_a_process_that_restarted_may_run_another_number():
    limit = at(1024, slow_start_s=0.0)
    limit.observe(1.0, sample(80), 80)
    limit.restarted(2.0)
    limit.observe(3.0, sample(64, 3), 67)
    assert limit.observe(4.0, sample(64, 3), 67) is Sign.WAITING
    assert limit.value == 64


def test_no_cut_takes_more_than_half():
    limit = at(100)
    limit.observe(1.0, sample(1, 99), 100)
    limit.observe(2.0, sample(1, 99), 100)
    assert limit.value == 50


def test_preemptions_since_the_last_scrape_cut_by_a_tenth():
    limit = at(100)
    assert limit.observe(2.0, sample(100, preemptions=6.0), 100) is Sign.PREEMPTED
    assert limit.value == 90


def test_where_the_size_of_the_cache_is_known_a_preemption_is_the_rooms_business():
    limit = at(100)
    for count in (5.0, 6.0):
        seen = LoadSample(0.0, 100, 0, 0.1, 10_000, preemptions=count)
        assert limit.observe(count, seen, 100) is None
    assert limit.value >= 100


def test_preemptions_before_the_first_scrape_and_a_restarted_counter_are_no_sign():
    limit = Limit()
    for second, count in enumerate([500.0, 500.0, 3.0, 3.0]):
        assert limit.observe(float(second), sample(preemptions=count), 10) is None


def test_an_admission_503_cuts_once():
    limit = at(100)
    limit.refused()
    assert limit.observe(1.0, sample(100), 100) is Sign.REFUSED
    assert limit.value == 90
    assert limit.observe(2.0, sample(100), 90) is None


@pytest.mark.parametrize(
    ("in_time", "too_late", "sign"),
    [(8, 1, None), (9, 1, None), (8, 2, Sign.LATE), (90, 10, None), (89, 11, Sign.LATE)],
)
def test_first_tokens_cut_when_more_than_a_tenth_of_at_least_ten_is_late(in_time, too_late, sign):
    limit = at(100)
    first_tokens(limit, 20.0, in_time, too_late)
    assert limit.observe(20.0, sample(100), 100) is sign


def test_few_first_tokens_are_gathered_over_windows_until_they_make_a_verdict():
    limit = at(100)
    seen = []
    for second in range(20, 25):
        first_tokens(limit, float(second), in_time=1, too_late=1)
        seen.append(limit.observe(float(second), sample(50), 60))
    assert seen == [None, None, None, None, Sign.LATE]


def test_a_cut_goes_from_what_was_in_flight_not_from_an_unused_limit():
    limit = at(100)
    limit.refused()
    limit.observe(1.0, sample(), 60)
    assert limit.value == 54


def test_a_503_of_something_else_does_not_close_a_backend():
    limit = Limit()
    limit.observe(0.0, sample(), 1)
    limit.refused()
    assert limit.observe(1.0, sample(), 1) is Sign.REFUSED
    assert limit.value == 16
    limit.value = 5
    limit.refused()
    limit.observe(2.0, sample(), 5)
    assert limit.value == 5  # and no cut makes it more


def test_what_others_do_to_a_backend_we_do_not_use_costs_us_nothing():
    limit = at(100)
    limit.observe(1.0, sample(10, 50), 0)
    limit.observe(2.0, sample(10, 50), 0)
    assert limit.value == 100


def test_one_burst_is_punished_once_however_long_it_takes_to_leave():
    limit = at(100)
    limit.refused()
    limit.observe(1.0, sample(100, 40), 100)
    for second in range(2, 60):  # nothing ends, the engine's queue stays
        assert limit.observe(float(second), sample(100, 40), 100) is None
    assert limit.value == 90


def test_once_a_cut_has_worked_the_next_sign_counts_again():
    limit = at(100)
    limit.refused()
    limit.observe(1.0, sample(), 100)
    limit.refused()
    assert limit.observe(2.0, sample(), 90) is Sign.REFUSED
    assert limit.value == 81


def test_first_tokens_cut_to_the_share_that_came_in_time():
    limit = at(100)
    first_tokens(limit, 20.0, in_time=14, too_late=6)
    limit.observe(20.0, sample(), 100)
    assert limit.value == 70


def test_late_first_tokens_of_requests_from_before_the_cut_are_not_held_against_it():
    limit = at(100)
    limit.refused()
    limit.observe(10.0, sample(), 100)
    first_tokens(limit, 15.0, too_late=30)  # sent at 6.0
    assert limit.observe(15.0, sample(), 80) is None


def test_while_first_tokens_still_come_late_the_limit_does_not_grow():
    limit = at(100)
    limit.refused()
    limit.observe(10.0, sample(), 100)
    first_tokens(limit, 12.0, too_late=1)  # sent before the cut
    limit.observe(12.0, sample(), 90)
    first_tokens(limit, 20.0, in_time=3, too_late=1)  # too few for a verdict
    limit.observe(20.0, sample(), 90)
    assert limit.value == 90


# --- slow start and reserve -----------------------------------------------------------------------


def test_a_restarted_backend_is_given_a_tenth_and_then_evenly_more():
    limit = Limit(fixed=100, ready_at=1000.0)
    assert [limit.effective(1000.0 + s) for s in (-5, 0, 30, 60, 600)] == [10, 10, 55, 100, 100]


def test_a_restarted_backend_takes_at_least_one_request():
    assert Limit(fixed=3, ready_at=0.0).effective(0.0) == 1


@pytest.mark.parametrize("settings", [{"ready_at": None}, {"ready_at": 0.0, "slow_start_s": 0.0}])
def test_a_backend_that_was_up_or_has_no_slow_start_is_used_in_full(settings):
    assert Limit(fixed=100, **settings).effective(0.0) == 100


def test_a_cold_backend_is_not_cut_for_being_slow_while_it_starts():
    limit = at(100, ready_at=0.0)
    first_tokens(limit, 30.0, too_late=20)
    assert limit.observe(30.0, sample(), 50) is None


def test_a_reserve_is_the_last_tenth():
    assert [unreserved(50, reserves) for reserves in (0, 1, 2)] == [50, 45, 40]


def test_one_place_is_reserved_where_a_tenth_is_less_and_none_of_few():
    assert unreserved(5, 1) == unreserved(4, 1) == 4


# --- how late is late -----------------------------------------------------------------------------


def test_a_long_prompt_may_take_the_time_to_read_it():
    assert late(3.0, 100, 2.5, 1000.0)
    assert not late(3.0, 1000, 2.5, 1000.0)
    assert late(3.6, 1000, 2.5, 1000.0)


def test_without_a_known_rate_the_objective_stands_alone():
    assert late(2.6, 100_000, 2.5, None)
    assert not late(2.5, 100_000, 2.5, None)


def test_the_best_reading_rate_is_kept_through_congestion():
    rate = Rate()
    assert rate.at(0.0) is None
    rate.learn(0.0, 1.0, 1000)
    for second in range(60):
        rate.learn(float(second), 10.0, 1000)
    assert rate.at(60.0) == pytest.approx(1000.0, rel=0.1)


def test_a_rate_that_no_longer_holds_fades():
    rate = Rate()
    rate.learn(0.0, 1.0, 1000)
    assert rate.at(600.0) == pytest.approx(500.0)


def test_a_rate_is_not_slow_because_nothing_was_measured_for_long():
    rate = Rate()
    rate.learn(0.0, 1.0, 1000)
    assert rate.at(8 * 3600.0) == 250.0


def test_after_a_long_rest_one_measurement_tells_what_is_true_now():
    slower, as_before = Rate(), Rate()
    for each, now_tokens in ((slower, 50), (as_before, 1000)):
        each.learn(0.0, 1.0, 1000)
        each.learn(8 * 3600.0, 1.0, now_tokens)
    assert slower.at(8 * 3600.0) == 50.0
    assert as_before.at(8 * 3600.0) == 1000.0


def test_a_short_prompt_after_a_long_rest_does_not_make_a_server_slow():
    reading = Rate(telling_tokens=512)
    reading.learn(0.0, 1.0, 20_000)
    after_s = 8 * 3600.0
    reading.learn(after_s, 0.05, 30)
    assert reading.at(after_s) == 5000.0
    reading.learn(after_s, 2.0, 2000)  # so many tell
    assert reading.at(after_s) == 1000.0


def test_after_weeks_of_rest_the_pace_is_known_although_each_scrape_tells_of_nothing():
    reading = Rate(telling_tokens=512)
    reading.learn(0.0, 1.0, 20_000)
    for day in range(1, 30):
        reading.learn(86_400.0 * day, 10.0, 0)
    assert reading.at(86_400.0 * 30) == 5000.0


def test_a_rate_that_is_seen_each_half_an_hour_stays_known():
    rate = Rate()
    for hour in range(24):
        rate.learn(1800.0 * hour, 1.0, 1000)
    assert rate.at(1800.0 * 23) == 1000.0


def test_a_cached_prompt_may_at_most_double_the_rate():
    rate = Rate()
    rate.learn(0.0, 1.0, 1000)
    rate.learn(0.0, 0.01, 30_000)
    assert rate.at(0.0) == pytest.approx(2000.0)


def test_a_slow_engine_is_judged_by_its_own_speed():
    """A CPU engine reads 50 tokens a second: 300 tokens in 6 s are in time, in 20 s they are not."""
    limit = at(10)
    limit.reading.first_token(100.0, 6.0, 300, 0, 0)
    for _ in range(20):
        limit.first_token(100.0, 6.0, 300)
    assert limit.observe(100.0, sample(), 10) is None
    for _ in range(20):
        limit.first_token(200.0, 20.0, 300)
    assert limit.observe(200.0, sample(), 10) is Sign.LATE


# --- time between tokens --------------------------------------------------------------------------


def streams(limit, now, gap_s, count=20):
    for _ in range(count):
        limit.token_gap(now, now - 1.0, gap_s)


def test_streams_slower_than_their_objective_cut_the_limit():
    limit = Limit(gap_objective_s=0.08)
    streams(limit, 10.0, 0.02)
    limit.observe(10.0, LoadSample(10.0, 5, 0, 0.1), 32)
    before = limit.value
    streams(limit, 11.0, 0.2)
    assert limit.observe(11.0, LoadSample(11.0, 5, 0, 0.1), before) is Sign.SLOW
    assert limit.value < before


def test_an_engine_that_is_always_slow_is_not_slow_for_its_load():
    limit = Limit(gap_objective_s=0.08)
    for second in range(5):
        streams(limit, 10.0 + second, 0.3)
        assert limit.observe(10.0 + second, LoadSample(10.0 + second, 5, 0, 0.1), 20) is None


def test_a_few_slow_streams_are_no_sign():
    limit = Limit(gap_objective_s=0.08)
    streams(limit, 10.0, 0.02, count=19)
    streams(limit, 10.0, 0.5, count=1)
    assert limit.observe(10.0, LoadSample(10.0, 5, 0, 0.1), 20) is None


def test_streams_that_began_before_the_last_cut_are_not_judged_again():
    limit = Limit(gap_objective_s=0.08)
    streams(limit, 10.0, 0.02)
    limit.cut_at = 10.5
    for _ in range(20):
        limit.token_gap(11.0, 10.0, 0.5)
    assert limit.observe(11.0, LoadSample(11.0, 5, 0, 0.1), 20) is None


def test_what_came_while_we_stood_still_ourselves_is_not_held_against_the_backend():
    limit = Limit(gap_objective_s=0.08)
    streams(limit, 10.0, 0.02)
    streams(limit, 30.0, 1.0)
    first_tokens(limit, 30.0, too_late=20)
    limit.forgive(30.0)
    assert limit.observe(30.5, LoadSample(30.5, 5, 0, 0.1), 200) is None
    streams(limit, 30.6, 1.0)  # began before, ended since
    assert limit.observe(31.5, LoadSample(31.5, 5, 0, 0.1), 200) is None


def test_after_slow_streams_it_opens_fast_again_when_none_follow():
    limit = Limit(gap_objective_s=0.08)
    streams(limit, 10.0, 0.02)
    limit.observe(10.0, sample(5), 100)
    streams(limit, 11.0, 0.5)
    assert limit.observe(11.0, sample(5), 100) is Sign.SLOW
    assert used(limit, 12.0, count=10).value < 110  # at first one by one
    assert used(limit, 30.0, count=20).value > 200


def test_a_gauge_that_misses_those_who_just_ended_still_shows_a_full_batch():
    limit = at(1024)
    limit.observe(1.0, sample(64), 64)
    assert limit.observe(2.0, sample(61, 5), 69) is None
    assert limit.observe(3.0, sample(62, 5), 69) is Sign.WAITING
    assert limit.value == 64


def test_it_does_not_grow_while_anybody_waits_in_the_engine():
    limit = at(64)
    limit.observe(1.0, sample(100, 2), 64)
    assert limit.value == 64
    limit.observe(2.0, sample(100), 64)
    assert limit.value > 64


def tries_of(limit, *, seconds, beside_highest=False):
    """Return when an engine that runs 64 at a time was tried with more."""
    tried = []
    limit.observe(0.0, sample(64), 64)
    for second in range(1, seconds):
        waiting, before = max(0, limit.value - 64), limit.value
        limit.observe(
            float(second), sample(64, waiting), limit.value, beside_highest=beside_highest
        )
        if limit.value > before:
            tried.append(second)
    return tried


def test_a_full_batch_is_rarely_tried_with_more_while_the_highest_priority_comes():
    tried = tries_of(at(1024), seconds=1200, beside_highest=True)
    assert 900 < min(tried) < 1000
    assert len(tries_of(at(1024), seconds=900)) == 3


def test_a_batch_that_is_found_again_is_believed_twice_as_long():
    tried = tries_of(at(1024), seconds=1000)
    gaps = [after - before for before, after in zip(tried, tried[1:], strict=False)]
    assert gaps
    assert all(after > 1.5 * before for before, after in zip(gaps, gaps[1:], strict=False))


def test_a_batch_that_is_full_never_raises_the_limit():
    limit = at(95)
    limit.observe(1.0, sample(100), 95)
    limit.value = 95
    limit.observe(2.0, sample(94, 1), 95)
    assert limit.observe(3.0, sample(94, 1), 95) is Sign.WAITING
    assert limit.value <= 95


def test_a_queue_that_was_seen_last_forbids_no_growth_when_metrics_are_gone():
    limit = at(20)
    limit.observe(1.0, sample(10, 5), 20)
    for second in range(2, 40):
        first_tokens(limit, float(second), in_time=20)
        limit.observe(float(second), None, limit.value)
    assert limit.value > 20
