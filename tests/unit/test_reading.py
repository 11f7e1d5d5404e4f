"""How much of prompts may be unread: by what an engine reads together, not by how long one takes alone."""

import pytest

from gateway.core.types import Credit
from gateway.pools.reading import Reading

PROMPT = 128
WHOLE = pytest.approx(5_000, rel=0.02)  # the rate fades a little
ANSWERS_S = 0.05  # an engine that answers so late, and reads as much as comes


def sent(tokens=PROMPT):
    return Credit(tokens, 64, unread_tokens=tokens)


def served(reading, count, at):
    """Have an engine with nothing else to do read `count` prompts in one step."""
    reading.comes(at, Credit(PROMPT, 64, read_at=0), 0)
    now = at + ANSWERS_S
    for left in reversed(range(count)):
        reading.first_token(now, now - at, PROMPT, left * PROMPT, (count - left - 1) * PROMPT)


def test_a_few_short_prompts_go_together_whatever_one_takes():
    reading = Reading()
    assert reading.ahead_tokens(0.0) == float("inf")
    served(reading, 1, 0.0)
    assert reading.ahead_tokens(1.0) == 512


def test_the_first_prompt_counts_on_a_machine_that_has_run_for_years_and_after_a_pause_of_years():
    reading, year = Reading(), 365 * 86_400.0
    for now in (10 * year, 20 * year):
        served(reading, 1, now)
        assert reading.ahead_tokens(now + 1) == 512


def test_an_engine_that_answers_late_shows_how_much_it_reads_at_a_time():
    reading = Reading()
    served(reading, 1, 0.0)
    for turn in range(1, 8):
        served(reading, int(reading.ahead_tokens(float(turn)) // PROMPT), float(turn))
    assert 100 * PROMPT < reading.ahead_tokens(8.0) < 10_000 * PROMPT


@pytest.mark.parametrize("count", [1, 5, 50])
def test_what_a_saturated_engine_reads_is_not_taken_for_more(count):
    reading, per_s = Reading(), 10_000
    now = PROMPT / per_s
    reading.first_token(now, now, PROMPT, 0, 0)  # alone
    reading.comes(now, Credit(PROMPT, 64, read_at=0), 0)
    for number in range(400):  # one after the other, `count` at a time before it
        now += PROMPT / per_s
        left_tokens = min(count, 400 - number) * PROMPT
        reading.first_token(now, count * PROMPT / per_s, PROMPT, left_tokens, (count - 1) * PROMPT)
    assert reading.rate.at(now) == pytest.approx(per_s, rel=0.02)
    assert reading.ahead_tokens(now) <= per_s * 0.05 + count * PROMPT


def test_less_is_ahead_beside_the_highest_class():
    reading = Reading()
    reading.rate.learn(0.0, 1.0, 100_000)
    assert reading.ahead_tokens(0.0) == WHOLE
    assert reading.ahead_tokens(0.0, beside_highest=True) == 1_500


def test_a_prompt_is_overdue_by_what_it_waits_beyond_its_own_reading():
    reading = Reading()
    assert reading.overdue_s(1.0) == 0.0
    credit = sent(1000)
    reading.comes(1.0, credit, 1000)
    assert reading.overdue_s(9.0) == 0.0  # nobody knows how long it takes
    reading.rate.learn(1.0, 1.0, 10_000)
    assert reading.overdue_s(1.05) == 0.0
    assert reading.overdue_s(1.4) == pytest.approx(0.3, abs=0.001)
    credit.held = False  # its client has left
    assert reading.overdue_s(1.4) == 0.0


def queued(count, age_s):
    """Return what may be unread after the oldest of `count` prompts has waited for so long."""
    reading = Reading()
    reading.rate.learn(0.0, 1.0, 100_000)  # so 0.05 s of reading is 5,000 tokens
    credits = [sent() for _ in range(count)]
    for place, credit in enumerate(credits, start=1):
        reading.comes(1.0, credit, place * PROMPT)
    return reading, credits, 1.0 + age_s


def test_behind_a_prompt_that_waits_for_longer_than_all_take_only_a_few_go():
    reading, _, now = queued(count=3, age_s=0.05)
    assert reading.ahead_tokens(now) == WHOLE
    reading, _, now = queued(count=3, age_s=0.06)
    assert reading.ahead_tokens(now) == PROMPT + 512
    assert reading.ahead_tokens(now, beside_highest=True) == PROMPT + 512


def test_a_long_prompt_has_the_time_that_it_takes():
    reading = Reading()
    reading.rate.learn(0.0, 1.0, 100_000)
    reading.comes(1.0, sent(4_000), 4_000)
    assert reading.ahead_tokens(1.08) == WHOLE
    assert reading.ahead_tokens(1.1) == 4_000 + 512


@pytest.mark.parametrize("tokens", [PROMPT, 4_000, 4_900, 40_000])
def test_beside_a_prompt_that_is_held_up_alone_there_is_room_for_a_few_short_ones(tokens):
    reading = Reading()
    reading.rate.learn(0.0, 1.0, 100_000)
    reading.comes(1.0, sent(tokens), tokens)
    assert reading.ahead_tokens(1.04) == WHOLE  # it is being read
    assert reading.ahead_tokens(9.0) == tokens + 512
    assert reading.ahead_tokens(9.0, beside_highest=True) == tokens + 512


def test_a_prompt_that_a_later_one_overtook_holds_up_nobody():
    reading, credits, _ = queued(count=1, age_s=1.0)
    later = sent()
    reading.comes(1.5, later, 2 * PROMPT)
    assert reading.ahead_tokens(2.0) == PROMPT + 512
    later.read_at = 7
    reading.first_token(2.0, 0.5, PROMPT, PROMPT, PROMPT)
    assert reading.ahead_tokens(2.0) > 5_000
    assert credits[0].read_at is None  # it waits still


@pytest.mark.parametrize("left", ["read", "gone"])
def test_what_was_read_or_left_is_not_waited_for(left):
    reading, (first, second), now = queued(count=2, age_s=1.0)
    if left == "read":
        first.read_at = second.read_at = 7
    else:
        first.held = second.held = False
    assert reading.ahead_tokens(now) == WHOLE


def test_a_reply_that_is_no_stream_tells_nothing_of_a_queue():
    reading = Reading()
    reading.rate.learn(0.0, 1.0, 100_000)
    whole = Credit(PROMPT, 64, unread_tokens=PROMPT, read_at=3)
    reading.comes(1.0, whole, 0)
    assert reading.ahead_tokens(9.0) == WHOLE


def test_no_more_prompts_are_remembered_than_one_engine_ever_has():
    reading, _, now = queued(count=5_000, age_s=1.0)
    assert len(reading._sent) == 1024
    assert reading.ahead_tokens(now) == PROMPT + 512


# --- what was found cached is not read ------------------------------------------------------------


def turns(reading, count, *, cached, hits=0.0, begin=0.0):
    """Have chats of 8,000 tokens read one after the other, at 10,000 tokens/s; scrape every second."""
    now, scrape_at = begin, begin
    for _ in range(count):
        if now >= scrape_at:
            reading.scraped(now, hits, 0)
            scrape_at += 1.0
        sent_at = now
        reading.comes(now, Credit(8_000, 64, unread_tokens=8_000), 8_000)
        hits += cached
        now += (8_000 - cached) / 10_000
        reading.first_token(now, now - sent_at, 8_000, 0, 0)
        now += 0.1
    for later in (1.0, 2.0):
        reading.scraped(now + later, hits, 0)
    return hits, now + 2.0


def test_cached_prompts_show_no_faster_reading_where_the_engine_counts_them():
    reading = Reading()
    hits, now = turns(reading, 20, cached=0)
    assert reading.rate.at(now) == pytest.approx(10_000, rel=0.02)
    _, now = turns(reading, 200, cached=7_500, hits=hits, begin=now)
    assert reading.rate.at(now) <= 10_000
    assert reading.ahead_tokens(now) <= 2 * 8_000  # of which 1,000 are read


def test_what_was_read_together_counts_though_some_was_cached():
    reading = Reading()
    _, now = turns(reading, 100, cached=4_000)
    assert 7_000 < reading.rate.at(now) <= 10_001  # 4,000 tokens every 0.5 s, in 0.4 s


def test_a_counter_that_goes_back_is_another_process():
    reading = Reading()
    _, now = turns(reading, 20, cached=0, hits=50_000.0)
    # One from a cache whose hits nobody can count any more.
    reading.comes(now, Credit(8_000, 64, unread_tokens=8_000), 8_000)
    reading.first_token(now + 0.01, 0.01, 8_000, 0, 0)
    before = reading.rate.at(now)
    for later in (1.0, 2.0, 3.0):
        reading.scraped(now + later, 0.0, 0)
    assert reading.rate.at(now + 3.0) <= before


# --- when a measurement counts --------------------------------------------------------------------


def test_a_measurement_counts_after_a_scrape_that_was_asked_for_later():
    reading = Reading()
    reading.scraped(0.0, 0.0, 0)
    reading.first_token(0.8, 0.8, 8_000, 0, 0)
    reading.scraped(1.0, 0.0, 0)  # it may have been asked for before
    assert reading.ahead_tokens(1.0) == float("inf")
    reading.scraped(2.0, 0.0, 0)
    assert reading.rate.at(2.0) == pytest.approx(10_000, rel=0.02)


def test_without_scrapes_a_measurement_counts_at_once():
    reading = Reading()
    reading.first_token(0.8, 0.8, 8_000, 0, 0)
    assert reading.rate.at(0.8) == pytest.approx(10_000)
    reading.scraped(1.0, 0.0, 0)
    reading.first_token(1.4, 0.4, 8_000, 0, 0)
    assert reading.rate.at(1.4) == pytest.approx(10_000, rel=0.02)
    reading.unseen()
    assert reading.rate.at(1.4) == pytest.approx(20_000, rel=0.02)
    reading.first_token(3.0, 0.2, 8_000, 0, 0)
    assert reading.rate.at(3.0) == pytest.approx(40_000, rel=0.02)


# --- who is read in time shows that more may be unread --------------------------------------------


def quick():
    """Return the reading of an engine that answered one prompt of 1,000 tokens, after 50 ms."""
    reading = Reading()
    reading.first_token(0.05, 0.05, 1_000, 0, 0)
    return reading


def test_beside_a_prompt_that_was_as_quick_as_any_a_second_one_is_tried():
    reading = quick()
    assert reading.ahead_tokens(0.05) == 2_000
    reading.first_token(1.2, 0.2, 1_000, 0, 1_000)
    assert reading.ahead_tokens(1.2) == 1_200  # it waited for the first, all of its time
    reading.first_token(5.0, 0.05, 1_000, 0, 0)
    assert reading.ahead_tokens(5.0) == 1_200
    reading.first_token(12.0, 0.05, 1_000, 0, 0)
    assert reading.ahead_tokens(12.0) == 2_000


def test_who_waited_for_nobody_doubles_what_may_be_unread_and_who_waited_too_long_takes_two_fifths():
    reading = quick()
    reading.first_token(1.0, 0.05, 100, 0, 9_900)
    assert reading.ahead_tokens(1.0) == 20_000
    reading.first_token(2.0, 0.07, 100, 0, 9_900)  # neither
    assert reading.ahead_tokens(2.0) == 20_000
    for now in (3.0, 3.01, 3.1):  # all of them were sent before the first of them was late
        reading.first_token(now, 0.3, 100, 0, 19_900)
        assert reading.ahead_tokens(now) == 12_000
    reading.first_token(3.5, 0.3, 100, 0, 19_900)
    assert reading.ahead_tokens(3.5) == 7_200


def test_who_waits_for_a_long_step_waits_for_no_other_prompt():
    reading = quick()
    for gap_s in (0.02, 0.5, 0.06):  # one client read slowly
        reading.wrote(gap_s, 0.02)
    for _ in range(8):
        reading.wrote(0.06, 0.02)
    reading.first_token(1.0, 0.05 + 2 * 0.04, 100, 0, 9_900)
    assert reading.ahead_tokens(1.0) == 20_000
    reading.wrote(0.02, 0.02)
    reading.first_token(2.0, 0.05 + 2 * 0.04, 100, 0, 9_900)
    assert reading.ahead_tokens(2.0) == 12_000


def test_where_one_more_prompt_had_to_wait_beside_one_in_time_it_need_not():
    """Of three of 171 tokens at a time, the third would be one over the least that may be unread."""
    reading = Reading()
    reading.first_token(0.05, 0.05, 171, 0, 0)
    reading.first_token(1.0, 0.07, 171, 0, 171)
    assert reading.ahead_tokens(1.0) >= 3 * 171


def test_thousands_of_prompts_a_second_show_how_fast_they_are_read():
    reading = Reading()
    for number in range(9_001):
        now = number / 3_000
        if number % 3_000 == 0:
            reading.scraped(now, 0.0, 0)
        reading.first_token(now, 0.01, 500, 0, 0)
    assert reading.rate.at(3.0) >= 50_000


def test_others_need_not_wait_for_a_long_prompt_because_it_was_read_in_time():
    reading = Reading()
    reading.first_token(0.02, 0.02, 400, 0, 0)
    reading.first_token(2.0, 1.0, 20_000, 0, 100)
    assert reading.ahead_tokens(2.0) <= 2 * (100 + 1_010)  # 20,000 tokens/s: 1,000 in 50 ms


def test_less_is_ahead_beside_the_highest_class_where_much_was_read_in_time():
    reading = quick()
    reading.first_token(1.0, 0.05, 100, 0, 9_900)
    assert reading.ahead_tokens(1.0, beside_highest=True) < 0.35 * reading.ahead_tokens(1.0)
    assert reading.ahead_tokens(1.0, beside_highest=True) > 0.1 * reading.ahead_tokens(1.0)


def test_a_prompt_that_was_cached_as_a_whole_shows_how_long_an_answer_takes():
    reading = Reading()
    reading.first_token(1.0, 0.05, 0, 0, 0)
    reading.rate.learn(1.0, 1.0, 100_000)
    assert reading.ahead_tokens(1.0) == 10_000  # 5,000 under way, 5,000 ahead
