"""What one index tells another of the same backend, and what that makes of it."""

from gateway.core.prefix import Prefix
from gateway.prefix.approximate import MOST_KEYS, ApproximateIndex
from gateway.prefix.news import MOST_NEWS, News


def prompt(*keys, tokens=1000, output=0):
    """Return a prompt by its hashes, the shortest first, in equal steps."""
    count = len(keys)
    return Prefix([*reversed(keys)], tuple(range(count, 0, -1)), count, tokens, output)


class Pair:
    """Two gateways' indexes of one backend."""

    def __init__(self, capacity=None):
        self.one, self.other = ApproximateIndex(), ApproximateIndex()
        for each in (self.one, self.other):
            each.news = News()
            each.scraped(capacity, None)

    def tell(self):
        news, self.one.news = self.one.news, News()
        self.other.heard(news)
        return news


def test_a_prompt_that_another_gateway_sent_is_held_here_too():
    pair = Pair()
    pair.one.sent(prompt(1, 2, 3, 4))
    pair.tell()
    assert pair.other.tokens(prompt(1, 2, 8, 9)) == 500
    assert not pair.other.news  # what was heard is not told again


def test_only_what_is_new_of_a_prompt_is_told():
    pair = Pair()
    pair.one.sent(prompt(1, 2, 3, 4))
    assert sorted(pair.tell().keys) == [1, 2, 3, 4]
    pair.one.sent(prompt(1, 2, 8, 9))
    assert sorted(pair.tell().keys) == [8, 9]
    pair.one.sent(prompt(1, 2, 8, 9))
    assert pair.tell().keys == []
    assert pair.other.tokens(prompt(1, 2, 8, 9)) == 1000


def test_what_others_sent_drives_out_what_was_sent_from_here():
    pair = Pair(capacity=10_000)
    pair.other.sent(prompt(1, 2))
    for number in range(30):
        assert number > 8 or pair.other.tokens(prompt(1, 2)) == 1000
        pair.one.sent(prompt(100 + number))
        pair.tell()
    assert pair.other.tokens(prompt(1, 2)) == 0


def test_a_hot_prompt_is_told_again_after_a_cache_full_of_others():
    pair = Pair(capacity=10_000)
    for number in range(60):
        pair.one.sent(prompt(1, 2))
        pair.one.sent(prompt(100 + number))
        pair.tell()
        assert pair.other.tokens(prompt(1, 2)) == 1000


def test_a_prompt_that_was_never_read_is_taken_back_there_too():
    pair = Pair()
    pair.one.sent(prompt(1, 2, 8, 9))
    sent = pair.one.sent(prompt(1, 2, 3, 4))
    pair.tell()
    pair.one.unsent(sent)
    pair.tell()
    assert pair.other.tokens(prompt(1, 2, 3, 4)) == 500
    assert pair.other.tokens(prompt(1, 2, 8, 9)) == 1000


def test_what_is_sent_taken_back_and_sent_again_between_two_tells_is_held():
    pair = Pair()
    pair.one.unsent(pair.one.sent(prompt(1, 2)))
    pair.one.sent(prompt(1, 2))
    pair.tell()
    assert pair.other.tokens(prompt(1, 2)) == 1000


def test_a_cache_that_was_lost_is_forgotten_by_all_and_what_came_later_is_kept():
    pair = Pair()
    pair.one.sent(prompt(1, 2))
    pair.tell()
    pair.one.forget()
    pair.one.sent(prompt(3, 4))
    pair.tell()
    assert pair.other.tokens(prompt(1, 2)) == 0
    assert pair.other.tokens(prompt(3, 4)) == 1000


def test_who_knows_nothing_of_a_cache_tells_nobody_that_it_is_lost():
    pair = Pair()
    pair.one.forget()
    assert not pair.tell()


def test_what_is_used_is_told_again_once_another_gateway_has_come():
    pair = Pair()
    pair.one.sent(prompt(1, 2, 3, 4))
    pair.one.news = News()  # before the other one came
    pair.one.retell()
    assert pair.one.tokens(prompt(1, 2, 3, 4)) == 1000
    pair.one.sent(prompt(1, 2, 8, 9))
    pair.tell()
    assert pair.other.tokens(prompt(1, 2, 8, 9)) == 1000


def test_gateways_that_come_again_and_again_let_no_index_grow():
    held = ApproximateIndex()
    held.scraped(1 << 40, None)
    for number in range(100):
        held.sent(prompt(*range(number * 1000, number * 1000 + 1000)))
        held.retell()
        assert len(held) <= MOST_KEYS + 1000


def test_news_are_bounded_and_what_is_too_much_is_counted():
    pair = Pair()
    for number in range(MOST_NEWS):
        pair.one.sent(prompt(3 * number, 3 * number + 1, 3 * number + 2))
    news = pair.tell()
    assert len(news.keys) <= MOST_NEWS
    assert len(news.keys) + news.dropped == 3 * MOST_NEWS
    assert news.tokens == 1000 * MOST_NEWS  # it is known how old the rest has become
    for _ in range(MOST_NEWS):
        pair.one.unsent(pair.one.sent(prompt(-1, -2)))
    assert len(pair.tell().gone) <= MOST_NEWS


# --- how much that is believed ----------------------------------------------------------------------


def test_hits_of_what_others_sent_are_expected_so_that_a_lost_cache_is_seen():
    pair, hits = Pair(), 0.0
    for each in (pair.one, pair.other):
        each.scraped(None, hits)
    pair.one.read(pair.one.sent(prompt(1, 2, tokens=2000)))
    for number in range(20):
        pair.one.read(pair.one.sent(prompt(1, 2, tokens=2000)))
        pair.tell()
        hits += 2000
        pair.other.scraped(None, hits)
        # No more is found than is known, so how fast the engine reads can be learned.
        assert pair.other.sent(prompt(10 + number)).surely_read_tokens == 1000
    assert pair.other.trust == 1.0
    for _ in range(10):
        pair.one.read(pair.one.sent(prompt(1, 2, tokens=2000)))
    pair.tell()
    pair.other.scraped(None, hits)
    assert len(pair.other) == 0


def test_expectations_of_others_say_nothing_where_replies_tell():
    pair = Pair()
    for _ in range(20):
        pair.other.ended(pair.other.sent(prompt(1, 2)), 1000)
        pair.one.ended(pair.one.sent(prompt(1, 2)), 1000)
        pair.tell()
    assert pair.other.trust == 1.0
    assert pair.other.tokens(prompt(1, 2)) == 1000
