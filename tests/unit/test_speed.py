"""How much slower than its peers a backend is, by what its scrapes show."""

import pytest

from gateway.core.types import LoadSample
from gateway.pools.speed import Speed, slownesses


def after(seconds, *paces, start=0.0, speeds=None):
    """Speeds of backends that run so many streams with so many tokens a second each."""
    speeds = speeds or [Speed() for _ in paces]
    for speed, (running, per_stream) in zip(speeds, paces, strict=True):
        for second in range(seconds):
            at = start + second
            told = [(each, 1000 + running * per_stream * each) for each in (at, at + 1)]
            before, sample = (
                LoadSample(each, running, 0, 0.1, generation_tokens=tokens) for each, tokens in told
            )
            speed.observe(before, sample)
    return speeds


def found(seconds, *paces, later_s=0.0, **more):
    return slownesses(after(seconds, *paces, **more), seconds + later_s + more.get("start", 0.0))


def test_equal_backends_are_equally_fast_and_small_differences_count_for_nothing():
    assert found(20, (8, 50), (8, 50)) == [1, 1]
    assert found(20, (8, 40), (8, 50)) == [1, 1]


def test_one_at_a_fifth_of_the_pace_is_five_times_slower():
    assert found(20, (8, 10), (8, 50)) == pytest.approx([5, 1])


def test_a_collapse_shows_within_20_s_and_so_does_its_end():
    speeds = after(60, (8, 50), (8, 50))
    slow = found(20, (8, 10), (8, 50), start=60.0, speeds=speeds)
    assert slow == pytest.approx([5, 1], rel=0.1)
    assert found(20, (8, 50), (8, 50), start=80.0, speeds=speeds) == [1, 1]


def test_an_engine_that_stands_still_is_as_slow_as_can_be():
    speeds = after(60, (8, 50), (8, 50))
    assert found(20, (8, 0), (8, 50), start=60.0, speeds=speeds)[0] == 10


def test_a_larger_batch_is_no_slowness_and_neither_is_a_smaller_one_a_pace_for_it():
    assert found(20, (64, 25), (1, 100)) == [1, 1]  # it makes 16 times the tokens
    assert found(20, (10, 2), (5, 8)) == pytest.approx([2, 1])  # 20 tokens a second, and 40
    assert found(20, (2, 8), (10, 20)) == pytest.approx([2.5, 1])


def test_what_is_not_measured_for_a_while_is_tried_again():
    speeds = after(20, (8, 10), (8, 50))
    assert slownesses(speeds, 20.0)[0] == pytest.approx(5)
    assert 1.5 < slownesses(speeds, 30.0)[0] < 3
    assert slownesses(speeds, 40.0)[0] == 1


def test_without_tokens_anywhere_nobody_is_slow():
    assert found(20, (8, 0), (8, 0)) == [1, 1]
    assert found(20, (8, 10)) == [1]
    assert slownesses([Speed(), Speed()], 0.0) == [1, 1]


def test_another_process_is_measured_anew():
    speeds = after(20, (8, 10), (8, 50))
    before, sample = (LoadSample(20.0 + n, 8, 0, 0.1, generation_tokens=9.0 - n) for n in (0, 1))
    speeds[0].observe(before, sample)
    assert slownesses(speeds, 21.0) == [1, 1]
