"""What scrapes tell of estimates: how much prompts share, and whether too much was let in."""

import pytest

from gateway.core.types import LoadSample
from gateway.pools.trust import Trust

CAPACITY = 10_000


def scrape(usage=0.5, preemptions=0.0):
    return LoadSample(0.0, 1, 0, usage, CAPACITY, preemptions=preemptions)


def test_preemptions_leave_a_part_of_the_cache_free_for_a_while():
    trust = Trust()
    trust.scraped(scrape(preemptions=7.0), CAPACITY, 0.0)  # what was before is nobody's fault
    assert trust.spared_ratio == 0.0
    trust.scraped(scrape(preemptions=8.0), CAPACITY, 0.0)
    assert trust.spared_ratio == pytest.approx(0.05)
    for _ in range(14):
        trust.scraped(scrape(preemptions=8.0), CAPACITY, 0.0)
    assert trust.spared_ratio == pytest.approx(0.025, rel=0.05)


def test_it_is_never_more_than_a_little():
    trust = Trust()
    for count in range(100):
        trust.scraped(scrape(preemptions=float(count)), CAPACITY, 0.0)
    assert trust.spared_ratio == pytest.approx(0.15)


def test_a_counter_that_fell_is_a_new_process():
    trust = Trust()
    for count in (50.0, 0.0, 0.0):
        trust.scraped(scrape(preemptions=count), CAPACITY, 0.0)
    assert trust.spared_ratio == 0.0
