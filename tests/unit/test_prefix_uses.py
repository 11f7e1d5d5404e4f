"""How often prompts go on in different ways from where a known beginning ends."""

import pytest

from gateway.core.prefix import Prefix
from gateway.prefix.approximate import MOST_KEYS, ApproximateIndex
from gateway.prefix.precise import PreciseIndex
from gateway.prefix.ranked import RankedIndex
from gateway.prefix.uses import Uses

CAPACITY = 100_000


def prompt(*keys, tokens=1000):
    """Return a prompt by its hashes, the shortest first, in equal steps."""
    count = len(keys)
    return Prefix([*reversed(keys)], tuple(range(count, 0, -1)), count, tokens, 0)


class Pool:
    """A pool of some caches, and what is sent to it."""

    def __init__(self, caches=1):
        self.uses, self.index = Uses(), ApproximateIndex()
        self.caches = caches
        self.filled = 0

    def send(self, *keys, tokens=1000):
        self.uses.sent(self.index.sent(prompt(*keys, tokens=tokens)))
        self.uses.tick(self.caches * CAPACITY)

    def fill(self, caches):
        """Send so many caches full of prompts that share nothing."""
        for _ in range(round(caches * CAPACITY / 1000)):
            self.filled += 1
            self.send(10_000 + self.filled)


def test_nothing_is_expected_of_what_was_used_less_than_twice():
    pool = Pool()
    assert pool.uses.expected(1) == 0
    pool.send(1, 2)
    pool.send(1, 3)
    assert pool.uses.expected(1) == 0


def test_what_another_gateway_had_sent_before_may_add_nothing():
    pool = Pool()
    pool.index.sent(prompt(1))  # as if it was heard
    for _ in range(3):
        pool.send(1)
    assert pool.uses.expected(1) > 0


def test_as_many_are_expected_in_a_turn_as_came_in_one():
    pool = Pool()
    for number in range(11):
        pool.send(1, 100 + number)
    pool.fill(0.44)  # each of the eleven has half of its 1000 tokens of its own, the first all
    assert pool.uses.expected(1) == pytest.approx(9 / 0.5, rel=0.01)


def test_a_pool_of_more_caches_is_filled_later():
    one, four = Pool(), Pool(caches=4)
    for pool in (one, four):
        for number in range(11):
            pool.send(1, 100 + number)
        pool.fill(0.5)
    assert four.uses.expected(1) == pytest.approx(4 * one.uses.expected(1))


def test_of_a_conversation_nobody_else_is_expected():
    pool = Pool()
    for turns in range(1, 12):
        pool.send(*range(1, turns + 1))
    assert [pool.uses.expected(key) for key in range(1, 12)] == [0] * 11


def test_what_is_used_no_more_is_forgotten_after_two_turns():
    pool = Pool()
    for number in range(11):
        pool.send(1, 100 + number)
    pool.fill(1.0)
    assert pool.uses.expected(1) > 0
    pool.fill(1.1)
    assert pool.uses.expected(1) == 0


def test_hashes_are_bounded():
    pool = Pool()
    for number in range(3 * MOST_KEYS):
        pool.send(number, tokens=0)
        pool.send(number, -number - 1, tokens=0)
    assert len(pool.uses) <= 2 * (MOST_KEYS + 1)


@pytest.mark.parametrize("kind", [ApproximateIndex, PreciseIndex, lambda: RankedIndex([ApproximateIndex(), ApproximateIndex()])])  # fmt: skip
def test_the_longest_hash_that_was_sent_is_where_a_prompt_goes_on(kind):
    index = kind()
    assert index.longest(prompt(1, 2, 3)) == 3  # none
    index.sent(prompt(1, 2))
    assert index.longest(prompt(1, 2, 3)) == 1
    assert index.longest(prompt(1, 8, 9)) == 2
    assert index.longest(prompt()) == 0


def test_the_longest_hash_is_found_among_old_ones_too():
    index = ApproximateIndex()
    index.scraped(2000, None)
    index.sent(prompt(1, 2, 3))
    index.sent(prompt(7, tokens=1500))  # it fills the cache
    index.sent(prompt(1))
    assert index.longest(prompt(1, 2, 3, 4)) == 1
