"""The adaptive limit, over any history and in front of toy engines."""

import heapq
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.types import LoadSample
from gateway.pools.limit import CEILING, Limit, Sign, unreserved

windows = st.lists(
    st.fixed_dictionaries(
        {
            "scraped": st.booleans(),
            "running": st.integers(0, 2000),
            "waiting": st.integers(0, 2000),
            "preemptions": st.integers(0, 5),
            "in_flight": st.integers(0, 2000),
            "refused": st.integers(0, 2),
            "ttfts": st.lists(st.floats(0, 100), max_size=20),
            "prompt": st.integers(0, 100_000),
        }
    ),
    max_size=40,
)


def walk(limit, windows):
    """Yield the limit before, what was said, and the limit after each window of a backend once seen."""
    limit.observe(-1.0, LoadSample(-1.0, 0, 0, None), 0)
    for second, window in enumerate(windows):
        now = float(second)
        for _ in range(window["refused"]):
            limit.refused()
        for ttft_s in window["ttfts"]:
            limit.first_token(now, ttft_s, window["prompt"])
        sample = LoadSample(
            now, window["running"], window["waiting"], None, preemptions=window["preemptions"]
        )
        before = limit.value
        sign = limit.observe(now, sample if window["scraped"] else None, window["in_flight"])
        yield before, window, sign, limit.value


@given(windows, st.none() | st.integers(1, 3000))
def test_the_limit_stays_within_one_and_the_ceiling(windows, fixed):
    for _, _, _, after in walk(Limit(fixed), windows):
        assert 1 <= after <= (fixed or CEILING)


@given(windows, st.none() | st.integers(1, 300))
def test_only_a_sign_lowers_it_and_never_below_half_of_what_was_used(windows, fixed):
    for before, window, sign, after in walk(Limit(fixed), windows):
        assert (sign is not None) == (after < before) or before == after <= 16
        assert after >= min(before, math.floor(window["in_flight"] / 2))


@given(windows)
def test_it_moves_only_when_it_is_used(windows):
    for before, window, sign, after in walk(Limit(), windows):
        if after > before:
            assert window["in_flight"] * 2 >= before
        if sign is not None:
            assert 0 < window["in_flight"] <= before


@given(st.integers(1, 1024), st.lists(st.floats(-10, 100), min_size=2), st.floats(0.1, 90))
def test_slow_start_only_ever_opens(fixed, times, window_s):
    limit = Limit(fixed, slow_start_s=window_s, ready_at=0.0)
    allowed = [limit.effective(now) for now in sorted(times)]
    assert allowed == sorted(allowed)
    assert allowed[0] >= 1
    assert limit.effective(window_s) == fixed


@given(st.integers(1, 1024))
def test_reserves_leave_everybody_a_place(allowed):
    left = [unreserved(allowed, reserves) for reserves in (2, 1, 0)]
    assert left == sorted(left)
    assert left[0] >= 1
    assert left[-1] == allowed
    assert left[1] < allowed or allowed <= 4


class Toy:
    """An engine that serves `capacity` requests well, under more demand than it can serve.

    `shows` is how it takes it when there are more: by a queue, by preemptions or by late first tokens.
    """

    STEPS = 10  # a window of one second

    def __init__(self, capacity, life_s, shows):
        self.capacity, self.life_s, self.shows = capacity, life_s, shows
        self.in_flight, self.ended, self.preemptions = 0, 0.0, 0.0
        self.first_tokens = []

    def window(self, limit, now):
        """Run one second; returns what was most in flight, the scrape and what the limit said."""
        peak = self.in_flight
        for step in range(self.STEPS):
            at = now + step / self.STEPS
            self.ended += min(self.in_flight, self.capacity) / self.life_s / self.STEPS
            self.in_flight -= int(self.ended)
            self.ended %= 1
            while self.in_flight < limit.effective(at):
                self.in_flight += 1
                ttft_s = 0.2 if self.in_flight <= self.capacity else 4.0
                heapq.heappush(self.first_tokens, (at + ttft_s, ttft_s))
            peak = max(peak, self.in_flight)
            over = max(0, self.in_flight - self.capacity)
            self.preemptions += over
            self._deliver(limit, at)
        queue = over if self.shows is Sign.WAITING else 0
        preemptions = self.preemptions if self.shows is Sign.PREEMPTED else 0.0
        sample = LoadSample(now + 1, self.in_flight - queue, queue, None, preemptions=preemptions)
        return peak, sample, limit.observe(now + 1, sample, peak)

    def _deliver(self, limit, at):
        while self.first_tokens and self.first_tokens[0][0] <= at:
            when, ttft_s = heapq.heappop(self.first_tokens)
            if self.shows is Sign.LATE:
                limit.first_token(when, ttft_s, 100)


def settled(shows, capacity, life_s):
    """Return the second half of 300 windows: the limit, most in flight, the scrape, the sign."""
    limit, engine = Limit(), Toy(capacity, life_s, shows)
    limit.value = 32  # after a first burst on a small engine; or too low for a large one
    return [(limit.value, *engine.window(limit, float(now))) for now in range(300)][150:]


@pytest.mark.parametrize("shows", [Sign.WAITING, Sign.PREEMPTED])
@settings(max_examples=25, deadline=None)  # one example is 300 simulated seconds
@given(capacity=st.integers(4, 200), life_s=st.floats(0.5, 8))
def test_the_limit_finds_what_an_engine_can_serve_and_stays_there(shows, capacity, life_s):
    seen = settled(shows, capacity, life_s)
    for value, peak, sample, sign in seen:
        assert 0.75 * capacity <= value <= 1.15 * capacity + 1
        assert sign in (None, shows)
        assert sample.waiting <= 0.15 * capacity + 1
        if shows is Sign.PREEMPTED:
            assert peak <= capacity + 1  # one step too far, then back
    if capacity >= 20:  # the saw has a tooth of a tenth
        assert sum(sign is not None for *_, sign in seen) <= len(seen) / (0.05 * capacity)


def six_steps_over(capacity):
    """Return the highest limit that such an engine may see: its first tokens tell it four windows late.

    One step goes over the capacity; while its late first tokens come, and are judged with the window
    in which they came, five more follow. The steps are x 1.05 + 1.
    """
    value = capacity
    for _ in range(6):
        value = 1.05 * value + 1
    return value


@settings(max_examples=10, deadline=None)
@given(capacity=st.integers(16, 400), life_s=st.floats(0.5, 4))
def test_first_tokens_alone_find_it_too_though_they_tell_later(capacity, life_s):
    for value, _, _, sign in settled(Sign.LATE, capacity, life_s):
        assert 0.5 * capacity <= value <= six_steps_over(capacity)  # no cut takes more than half
        assert sign in (None, Sign.LATE)
