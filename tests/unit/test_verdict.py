"""What is sure of a revision on trial, and how seldom that is wrong."""

from __future__ import annotations

import random

import pytest

from gateway.rollout.verdict import (
    ERROR,
    FAILED_MARGIN,
    FEWEST,
    TIME_MARGIN,
    Arm,
    Finding,
    judge,
    look_at,
)


def trial(seed, *, fails=0.002, slower=1.0, share=0.3, most=3000, times=True):
    """Return what is found of a revision in so many requests, and after how many of its own."""
    rng, mine, other, look = random.Random(seed), Arm(), Arm(), 1
    for at in range(most):
        chosen = rng.random() < share
        arm = mine if chosen else other
        if rng.random() < (fails if chosen else 0.002):
            arm.fail(at)
        else:
            first_s = rng.lognormvariate(-1.5, 0.8) * (slower if chosen else 1.0)
            arm.serve(first_s, rng.lognormvariate(-3.5, 0.3))
        if mine.requests >= look_at(look) and other.requests >= FEWEST:
            found = judge(mine, other, look, times=times)
            look += 1
            if found is not Finding.OPEN:
                return found, mine.requests
    return Finding.OPEN, mine.requests


@pytest.mark.parametrize(
    "worst", [{}, {"fails": 0.002 + FAILED_MARGIN}, {"slower": TIME_MARGIN}], ids=str
)
def test_a_revision_within_the_margins_is_seldom_called_worse(worst):
    found = [trial(seed, **worst)[0] for seed in range(60)]
    assert found.count(Finding.WORSE) <= 2 * ERROR * len(found)


@pytest.mark.parametrize(
    ("worse", "within"),
    [({"fails": 0.2}, 80), ({"fails": 1.0}, 20), ({"slower": 2.0}, 320)],
    ids=str,
)
def test_a_revision_that_is_clearly_worse_is_found_soon(worse, within):
    for seed in range(20):
        found, after = trial(seed, **worse)
        assert (found, after <= within) == (Finding.WORSE, True)


def test_a_revision_that_is_as_good_is_found_fine_with_enough_samples():
    found = [trial(seed, share=0.5, most=6000) for seed in range(10)]
    assert [each for each, _ in found].count(Finding.FINE) >= 8
    assert min(after for each, after in found if each is Finding.FINE) > 100


def test_slow_ones_are_never_called_fine():
    assert Finding.FINE not in {trial(seed, slower=1.4)[0] for seed in range(20)}
    assert trial(1, slower=3.0, times=False, share=0.5, most=6000)[0] is not Finding.WORSE


def test_few_samples_say_nothing():
    assert judge(Arm(19, 19), Arm(19, 0), 1) is Finding.OPEN
    assert judge(Arm(), Arm(1000, 0), 1) is Finding.OPEN
