import pytest

from gateway.core.types import Exclusion, LoadSample, Need
from gateway.pools.elsewhere import NOTHING, UnderWay
from gateway.pools.room import Room

CAPACITY = 10_000


def scrape(at, usage, *, running=1, waiting=0, capacity=CAPACITY):
    return LoadSample(at, running, waiting, usage, capacity)


def room(usage=0.1, at=0.0, **more):
    """Return the room of a busy backend after one scrape at `at`."""
    room = Room()
    room.observe(scrape(at, usage, **more))
    return room


def admits(room, need, now=0.0):
    return room.verdict(Need(need, 0), now) is None


# --- what fits ------------------------------------------------------------------------------------


def test_a_request_goes_in_up_to_the_stop_ratio_and_waits_over_it():
    busy = room(0.5)
    assert busy.verdict(Need(4000, 0), 0.0) is None
    assert busy.verdict(Need(4001, 0), 0.0) is Exclusion.NO_KV_ROOM


def test_what_was_sent_since_the_scrape_counts_in_full():
    busy = room(0.5)
    busy.take(2000, 500)
    assert admits(busy, 1500)
    assert not admits(busy, 1501)


def test_a_prompt_that_is_still_being_read_counts_in_full_over_further_scrapes():
    busy = room(0.1)
    busy.take(5000, 100)
    busy.observe(scrape(1.0, 0.2))
    assert busy.projection(1.0).tokens == 2000 + 5100


def test_once_read_and_scraped_only_a_quarter_of_the_expected_output_is_added():
    busy = room(0.1)
    credit = busy.take(5000, 100)
    busy.first_token(credit, 0.0)
    assert busy.projection(0.5).tokens == 1000 + 5100  # the scrape is from before
    busy.observe(scrape(1.0, 0.6))
    assert busy.projection(1.0).tokens == 6000 + 25


def test_of_streams_that_began_since_the_scrape_counts_what_they_wrote_and_half_of_what_is_left():
    busy = room(0.1)
    busy.writing.wrote(0.01)
    credit = busy.take(5000, 100)
    assert busy.projection(0.5).tokens == 1000 + 5100  # it is not read yet
    busy.first_token(credit, 0.5)
    assert busy.projection(0.5).tokens == 1000 + 5000 + 50
    assert busy.projection(0.9).tokens == 1000 + 5000 + 40 + 30
    assert busy.projection(2.0).tokens == 1000 + 5100  # no more than was expected


def test_short_replies_leave_room_for_others_between_two_scrapes():
    """Replies of half a second, one after the other: a scrape a second shows none of them."""
    busy = room(0.0)
    busy.writing.wrote(0.005)
    for number in range(90):
        busy.first_token(busy.take(20, 100), 0.005 * number)
    assert admits(busy, 120, 0.45)


def test_of_a_stream_with_several_choices_the_pace_of_one_tells_nothing():
    busy = room(0.1)
    busy.writing.wrote(0.01)
    credit = busy.take(100, 400, sequences=4)
    busy.first_token(credit, 0.0)
    assert busy.projection(0.5).tokens == 1000 + 500
    busy.give_back(credit)
    assert busy.projection(0.5).tokens == 1000


def test_what_ended_since_the_scrape_leaves_nothing_to_write():
    busy = room(0.1)
    busy.writing.wrote(0.01)
    one, other = busy.take(100, 100), busy.take(100, 100)
    busy.first_token(one, 0.0)
    busy.first_token(other, 0.5)
    busy.give_back(one)
    assert busy.projection(0.5).tokens == 1000 + 150
    busy.observe(scrape(1.0, 0.1))
    busy.give_back(other)
    busy.peak.calm = False
    assert busy.projection(1.0).tokens == 1000 - 150


def test_of_a_request_that_does_not_stream_the_next_scrape_is_taken_to_show_the_prompt():
    busy = room(0.1)
    busy.take(5000, 100, streams=False)
    busy.observe(scrape(1.0, 0.6))
    assert busy.projection(1.0).tokens == 6000 + 25


def test_what_ended_since_the_scrape_is_free_again():
    busy = room(0.1)
    credit = busy.take(5000, 1000)
    busy.first_token(credit, 0.0)
    busy.observe(scrape(1.0, 0.65))
    busy.give_back(credit)
    assert busy.projection(1.0).tokens == 6500 - 5500


def test_a_request_that_came_and_went_between_scrapes_leaves_no_trace():
    busy = room(0.3)
    for read in (True, False):
        credit = busy.take(3000, 500)
        if read:
            busy.first_token(credit, 0.0)
        busy.give_back(credit)
        busy.first_token(credit, 0.0)
        busy.give_back(credit)
    assert busy.sequences == 0
    assert busy.projection(0.0).tokens == 3000
    busy.observe(scrape(1.0, 0.3))
    assert busy.projection(1.0).tokens == 3000


def test_shared_prompts_do_not_starve_a_backend_whose_usage_stays_low():
    """Ten requests on one prefix of 1,000 tokens: usage stays low and room for more is found."""
    busy = room(0.0)
    for _ in range(6):
        busy.first_token(busy.take(1000, 100), 0.0)
    busy.observe(scrape(1.0, 0.15))
    for _ in range(10):
        assert admits(busy, 1100, 1.0)
        busy.take(1000, 100)


def test_little_credit_proves_no_sharing():
    busy = room(0.0)
    busy.first_token(busy.take(1000, 1000), 0.0)  # may just have ended early
    busy.observe(scrape(1.0, 0.01))
    assert not admits(busy, 9000, 1.0)


# --- what is unread -------------------------------------------------------------------------------


@pytest.mark.parametrize("scraped", [False, True])
def test_a_prompt_is_unread_from_the_taking_to_its_first_token(scraped):
    busy = room(0.1)
    one, other = busy.take(3000, 10), busy.take(500, 10)
    assert busy.unread_tokens == 3500
    if scraped:
        busy.observe(scrape(1.0, 0.2))
        assert busy.unread_tokens == 3500
    busy.first_token(one, 0.0)
    busy.first_token(one, 0.0)
    assert busy.unread_tokens == 500
    busy.first_token(other, 0.0)
    assert busy.unread_tokens == 0


@pytest.mark.parametrize("order", ["end", "read end", "end read", "read end end read"])
def test_a_prompt_that_ends_read_or_not_is_unread_no_more(order):
    busy = room(0.1)
    credit = busy.take(3000, 10)
    for step in order.split():
        busy.first_token(credit, 0.0) if step == "read" else busy.give_back(credit)
    assert busy.unread_tokens == 0


def test_nobody_sees_when_a_prompt_that_does_not_stream_is_read_so_it_never_counts_as_unread():
    busy = room(0.1)
    credit = busy.take(3000, 10, streams=False)
    assert busy.unread_tokens == 0
    busy.give_back(credit)
    assert busy.unread_tokens == 0


# --- the reserve ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("reserves", "most"), [(0, 4000), (1, 3000), (2, 2000)])
def test_each_reserve_is_a_tenth_of_the_cache(reserves, most):
    busy = room(0.5)
    assert busy.verdict(Need(most, 0), 0.0, reserves=reserves) is None
    assert busy.verdict(Need(most + 1, 0), 0.0, reserves=reserves) is Exclusion.NO_KV_ROOM


def test_an_idle_backend_keeps_no_reserve():
    """Else a request of a lower class over the stop ratio would never go in."""
    assert room(0.0, running=0).verdict(Need(CAPACITY, 0), 0.0, reserves=2) is None


def test_of_an_unknown_capacity_nothing_is_kept():
    assert room(None, capacity=None).verdict(Need(10**6, 0), 0.0, reserves=2) is None


# --- shares ---------------------------------------------------------------------------------------


def test_a_tenant_holds_much_when_it_has_over_one_and_a_half_even_shares():
    busy = room(0.1)
    for tenant in "bcd":
        busy.take(500, 500, tenant=tenant)
    busy.take(1000, 700, tenant="a")  # 4,700 in all: an even share is 1,175
    assert not busy.shares.holds_much("a")
    more = busy.take(0, 400, tenant="a")
    assert busy.shares.holds_much("a")
    assert not any(busy.shares.holds_much(tenant) for tenant in ("b", "new"))
    busy.give_back(more)
    assert not busy.shares.holds_much("a")


def test_a_tenant_that_is_alone_holds_its_share():
    busy = room(0.1)
    credit = busy.take(5000, 0, tenant="a")
    assert not busy.shares.holds_much("a")
    other = busy.take(100, 0, tenant="b")
    assert busy.shares.holds_much("a")
    busy.give_back(other)
    assert not busy.shares.holds_much("a")
    busy.give_back(credit)
    assert busy.shares.by_tenant == {}


# --- idle, never ----------------------------------------------------------------------------------


def test_an_idle_backend_takes_whatever_it_can_hold():
    idle = room(0.0, running=0)
    assert admits(idle, CAPACITY)
    assert idle.verdict(Need(CAPACITY + 1, 0), 0.0) is Exclusion.TOO_LARGE


def test_a_backend_that_others_use_is_not_idle():
    assert not admits(room(0.3, running=2), 9500)


def test_a_request_over_the_stop_ratio_waits_for_a_busy_backend():
    busy = room(0.0, running=0)
    busy.take(10, 10)
    assert busy.verdict(Need(9500, 0), 0.0) is Exclusion.NO_KV_ROOM


def test_what_can_never_fit_is_told_even_while_it_is_closed():
    assert room(0.95).verdict(Need(CAPACITY + 1, 0), 0.0) is Exclusion.TOO_LARGE


def test_without_a_kv_cache_nothing_is_too_large_for_it():
    busy = room(0.0, capacity=0)
    busy.take(CAPACITY, 0)
    assert admits(busy, CAPACITY)
    assert busy.asked(Need(50_000, 0, sequences=2)) == 50_000
    assert busy.projection(0.0).tokens is None


def test_a_cache_of_which_a_scrape_says_nothing_is_as_large_as_before_and_one_that_is_gone_is_none():
    busy = room(0.1)
    busy.observe(scrape(1.0, 0.1, capacity=None))
    assert busy.capacity_tokens == CAPACITY
    busy.observe(scrape(2.0, 0.0, capacity=0))
    assert busy.capacity_tokens is None


@pytest.mark.parametrize(("tokens", "asked"), [(5000, 5000), (6000, 6000), (50_000, 6000)])
def test_a_batch_asks_for_no_more_than_a_nearly_idle_backend_has(tokens, asked):
    assert room(0.2).asked(Need(tokens, 0, sequences=2)) == asked


def test_a_batch_larger_than_the_cache_holds_no_more_than_all_of_it():
    busy = room(0.0, running=0)
    batch = busy.take(50_000, 4000, streams=False, tenant="t")
    assert busy.projection(0.0).tokens == CAPACITY
    busy.observe(scrape(1.0, 0.8))
    busy.take(500, 0)  # believed to take 0.8 of it: what waits in the engine proves no sharing
    assert busy.projection(1.0).tokens == 8000 + 400
    busy.give_back(batch)
    assert busy.shares.by_tenant == {"": 500}


def test_of_an_unknown_capacity_a_batch_asks_for_all_of_it():
    assert Room().asked(Need(50_000, 0, sequences=2)) == 50_000


# --- unknown --------------------------------------------------------------------------------------


def test_stale_metrics_count_all_that_is_in_flight_against_the_last_capacity():
    busy = room(0.0)
    busy.first_token(busy.take(5000, 1000), 0.0)
    busy.observe(scrape(1.0, 0.55))
    assert admits(busy, 3000, 4.5)
    assert not admits(busy, 3001, 4.5)


def test_what_prompts_were_seen_to_share_is_known_while_metrics_are_stale():
    busy = room(0.0)
    for credit in [busy.take(1500, 500) for _ in range(30)]:
        busy.first_token(credit, 0.0)
    busy.observe(scrape(1.0, 0.5))  # of 52,500 tokens: nine tenths are shared
    assert admits(busy, 1000, 4.5)
    assert busy.projection(4.5).tokens == 6000


def test_a_missing_usage_is_unknown_not_none():
    busy = room(None)
    busy.take(5000, 1000)
    assert not admits(busy, 3001)


def test_a_stale_backend_without_work_of_ours_takes_whatever_it_can_hold():
    assert admits(room(0.95), CAPACITY, 100.0)


@pytest.mark.parametrize("usage", [None, 0.1])
def test_without_a_capacity_only_the_concurrency_limit_speaks(usage):
    busy = room(usage, capacity=None)
    busy.take(10**6, 0)
    assert admits(busy, 10**6)
    assert busy.projection(0.0).tokens is None


def test_without_a_capacity_the_usage_still_closes():
    assert room(0.92, capacity=None).verdict(Need(1, 0), 0.0) is Exclusion.KV_FULL


def test_the_last_capacity_told_is_kept():
    busy = room(0.5)
    busy.observe(scrape(1.0, 0.5, capacity=None))
    assert busy.projection(1.0).tokens == 5000


def test_before_the_first_scrape_the_limit_alone_speaks():
    new = Room()
    new.take(10, 10)
    assert admits(new, 10**6)


# --- hysteresis and the engine's queue ------------------------------------------------------------


def test_it_closes_at_stop_and_opens_again_only_below_resume():
    one = room(0.9)
    verdicts = []
    for second, usage in enumerate([0.85, 0.8, 0.85, 0.79, 0.85]):
        one.observe(scrape(3.0 * (second + 1), usage))
        verdicts.append(one.verdict(Need(1, 0), 3.0 * (second + 1)))
    closed, admit = Exclusion.KV_FULL, None
    assert verdicts == [closed, closed, closed, admit, admit]


def test_it_stays_closed_for_the_dwell_time_and_is_filled_up_to_the_resume_ratio_meanwhile():
    one = room(0.95)
    one.observe(scrape(1.0, 0.1))
    assert not one.open
    assert admits(one, 7000, 1.0)
    assert one.verdict(Need(7001, 0), 1.0) is Exclusion.KV_FULL
    one.observe(scrape(2.0, 0.1))
    assert one.open
    assert admits(one, 8000, 2.0)


def test_a_closed_backend_takes_work_again_once_enough_has_ended_whatever_the_next_scrape_shows():
    """Where replies are short, all that filled it has ended long before it may open."""
    one = room(0.1)
    credits = [one.take(1000, 0, streams=False) for _ in range(9)]
    one.observe(scrape(2.0, 0.95))
    one.give_back(credits.pop())
    assert one.verdict(Need(1, 0), 2.1) is Exclusion.KV_FULL
    for credit in credits:
        one.give_back(credit)
    assert not one.open
    one.take(10, 10)  # else it is idle for all that we know, and takes anything
    assert admits(one, 7000, 2.5)


def test_while_it_dwells_open_a_full_backend_takes_nothing_all_the_same():
    one = room(0.95)
    one.observe(scrape(2.0, 0.1))
    one.observe(scrape(3.0, 0.95))
    assert one.open
    assert one.verdict(Need(1, 0), 3.0) is Exclusion.KV_FULL


def test_a_stale_usage_closes_nothing():
    one = room(0.95)
    one.take(10, 10)
    assert one.verdict(Need(100, 0), 3.0) is Exclusion.KV_FULL
    assert admits(one, 100, 3.1)


@pytest.mark.parametrize(
    ("running", "waiting", "verdict"),
    [
        (8, 3, None),
        (8, 4, Exclusion.ENGINE_QUEUED),
        (200, 99, None),
        (200, 100, Exclusion.ENGINE_QUEUED),
    ],
)
def test_a_long_queue_in_the_engine_saturates_until_the_next_scrape(running, waiting, verdict):
    one = room(0.1, running=running, waiting=waiting)
    assert one.verdict(Need(1, 0), 0.0) is verdict
    one.observe(scrape(1.0, 0.1))
    assert admits(one, 1, 1.0)


def test_those_who_have_begun_since_are_in_the_queue_of_the_engine_no_more():
    one = Room()
    first, second = one.take(100, 100), one.take(100, 100)
    one.observe(scrape(0.0, 0.1, running=8, waiting=5))
    one.first_token(first, 0.1)
    assert one.verdict(Need(1, 0), 0.1) is Exclusion.ENGINE_QUEUED
    one.first_token(second, 0.2)
    assert admits(one, 1, 0.2)
    one.observe(scrape(1.0, 0.1, running=8, waiting=4))
    assert one.verdict(Need(1, 0), 1.0) is Exclusion.ENGINE_QUEUED


# --- where all that runs is known -----------------------------------------------------------------


def streaming(usage=0.5, *, calm=True, running=2):
    """Return a room with two streams of 2,000 and 4,000 tokens that are half written, at 0.0."""
    busy = Room(stop_ratio=0.95)
    busy.writing.wrote(0.01)
    for output in (2000, 4000):
        busy.first_token(busy.take(0, output), -output / 2 * 0.01)
    busy.observe(scrape(0.0, usage, running=running))
    busy.peak.calm = calm
    return busy


def fits(busy, prompt, output):
    return busy.verdict(Need(prompt, output, streams=True), 0.0) is None


def test_what_is_let_in_never_takes_the_cache_over_the_stop_ratio():
    # When the first ends, both hold 5,000, and 32 in half-empty blocks. The scrape shows 1,968 more than is known.
    busy = streaming()
    assert busy.projection(0.0).tokens == 7000
    assert fits(busy, 1484, 1000)  # which ends with the first
    assert not fits(busy, 1485, 1000)
    assert fits(busy, 4454, 10)  # gone before they have grown
    assert not fits(busy, 4455, 10)


def test_in_an_overload_or_beside_strangers_its_whole_need_counts():
    # Projected: 5,000 in use, and a quarter of 6,000 to come.
    for busy in (streaming(calm=False), streaming(running=4)):
        assert busy.projection(0.0).tokens == 6500
        assert fits(busy, 2990, 10)
        assert not fits(busy, 2991, 10)


def test_after_preemptions_less_is_let_in():
    busy = streaming(0.3)
    assert fits(busy, 6000, 10)
    for at, count in ((0.1, 1.0), (0.2, 2.0)):
        busy.observe(LoadSample(at, 2, 0, 0.3, CAPACITY, preemptions=count))
    assert busy.verdict(Need(6000, 10, streams=True), 0.2) is Exclusion.NO_KV_ROOM


def test_what_streams_wrote_beyond_what_was_expected_counts_as_the_scrape_shows_it():
    busy = Room(stop_ratio=0.95)
    busy.writing.wrote(0.01)
    for _ in range(10):
        busy.first_token(busy.take(100, 100), -20.0)  # 2,000 are written of 100
    busy.observe(LoadSample(0.0, 10, 0, 0.7, 30_000))
    assert busy.verdict(Need(7_000, 10, streams=True), 0.0) is None
    assert busy.verdict(Need(8_000, 10, streams=True), 0.0) is Exclusion.NO_KV_ROOM


def test_outputs_that_have_just_begun_are_no_prompts_that_share():
    busy, now = Room(stop_ratio=0.95), 0.0
    busy.writing.wrote(0.01)
    busy.observe(scrape(now, 0.0, running=0, capacity=30_000))
    taken = []
    while busy.verdict(Need(40, 1000, streams=True), now) is None and len(taken) < 200:
        taken.append(busy.take(40, 1000))
        busy.first_token(taken[-1], now)
        now += 0.02
        if len(taken) % 10 == 0:
            held = sum(40 + 16 + int((now - each.began_at) / 0.01) for each in taken)
            busy.observe(LoadSample(now, len(taken), 0, held / 30_000, 30_000))
    assert 25 <= len(taken) <= 30  # whole needs of 28 are 29,568 with their blocks


def test_one_that_its_engine_has_lost_fills_nothing():
    busy = Room(stop_ratio=0.95)
    busy.writing.wrote(0.01)
    busy.first_token(busy.take(100, 100), -480.0)
    for _ in range(13):
        busy.first_token(busy.take(1000, 200), -1.0)
    busy.observe(LoadSample(0.0, 14, 0, 0.5, 30_000))
    assert busy.verdict(Need(1_500, 50, streams=True), 0.0) is None


def test_whoever_hears_of_another_gateway_looks_ahead_no_more():
    busy = streaming()
    busy.hear(UnderWay(requests=1, coming_tokens=2000))
    assert busy.projection(0.0).tokens == 6500 + 2000


def test_a_look_ahead_is_not_for_whom_it_is_not_meant_for():
    busy = streaming()
    assert busy.verdict(Need(1484, 1000, streams=True), 0.0) is None
    assert busy.verdict(Need(3010, 0, streams=True), 0.0) is None
    assert busy.verdict(Need(3010, 0, streams=True), 0.0, by_peak=False) is Exclusion.NO_KV_ROOM


def test_another_gateway_that_has_nothing_here_changes_nothing():
    busy = room(0.5)
    busy.writing.wrote(0.01)
    busy.first_token(busy.take(5000, 100), 0.0)
    busy.observe(scrape(1.0, 0.5))
    assert busy.peak.knows(1)
    busy.hear(NOTHING)
    assert busy.peak.knows(1)
    busy.hear(UnderWay(requests=1))
    assert not busy.peak.knows(1)
