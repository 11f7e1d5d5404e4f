"""What is known of a backend whose engines tell what they hold, and where that is not enough."""

import pytest

from gateway.core.prefix import BlockShape, Prefix
from gateway.prefix.follower import Follower
from gateway.prefix.mirror import MOST_BLOCKS, Mirror
from gateway.prefix.precise import PreciseIndex, PromptBlocks
from gateway.prefix.ranked import block_shapes
from tests.kvengine import SIZE, Engine, catch_up, deliver

TOKENS = list(range(1, 42))  # ten blocks and a token
ALL = len(TOKENS) - 1


def prompt(tokens=TOKENS, adapter=None, salt=None, *, key=1):
    """Return a prompt whose only beginning is half of it."""
    blocks = None if tokens is None else PromptBlocks(tokens, adapter, salt, {BlockShape(SIZE)})
    return Prefix([key], (1,), 2, len(tokens or TOKENS), 8, blocks=blocks)


class Told:
    """A backend whose engine is at hand."""

    def __init__(self, **more):
        self.prefix_index, self.engine = PreciseIndex(), Engine(**more)
        self.prefix_index.follower = Follower()
        catch_up(self.prefix_index.follower, self.engine)

    def read(self, tokens=TOKENS, adapter=None, salt=None):
        self.deliver(self.engine.read((tokens, adapter, salt)))

    def deliver(self, messages):
        deliver(self.prefix_index.follower, self.engine, messages)

    def tokens(self, *args, **more):
        return self.prefix_index.tokens(prompt(*args, **more))


def test_it_holds_what_its_engine_tells_whatever_was_sent_there():
    told = Told()
    told.read()
    assert told.tokens() == ALL
    assert told.tokens(TOKENS[:20] + [0] * 20) == 20
    told.prefix_index.sent(prompt(None))  # the guess takes half of it for held
    told.deliver(told.engine.clear())
    assert told.tokens() == 0
    assert told.tokens(None) == len(TOKENS) // 2  # of a prompt without ids only the guess knows


@pytest.mark.parametrize("what", ["missing", "late", "nobody", "empty"])
def test_where_events_are_missing_or_late_it_is_the_guess(what):
    told = Told()
    if what != "empty":
        told.read()
    told.prefix_index.sent(prompt(None))
    match what:
        case "missing":
            told.prefix_index.follower.disconnected()
        case "late":
            told.prefix_index.follower.is_late = True
        case "nobody":
            told.prefix_index.follower = None
    assert told.tokens() == len(TOKENS) // 2
    assert block_shapes([told]) == set()
    assert told.prefix_index.knows is (what == "empty")


def test_of_an_engine_that_was_followed_late_the_guess_may_know_more():
    told = Told()
    told.engine.read((TOKENS, None, None))
    follower = told.prefix_index.follower = Follower()
    deliver(follower, told.engine, told.engine.read(([5] * 9, None, None)), replays=False)
    assert told.tokens() == 0
    told.prefix_index.sent(prompt(None))
    assert told.tokens() == len(TOKENS) // 2
    assert told.tokens([5] * 9, key=2) == 8


def test_what_was_sent_is_expected_until_it_comes_or_fails():
    told = Told()
    told.read([7] * 9)
    sent = told.prefix_index.sent(prompt())
    assert sent.cached_tokens == 0
    assert told.tokens() == ALL
    told.prefix_index.unsent(sent)
    assert told.tokens() == 0
    told.prefix_index.sent(prompt())
    told.read()
    told.deliver(told.engine.clear())
    assert told.tokens() == 0  # it came, so nothing more of it is expected
    told.prefix_index.sent(prompt())
    told.prefix_index.forget()
    assert told.tokens() == 0


def test_of_a_prompt_that_was_read_no_blocks_are_kept():
    told = Told()
    told.read([7] * 9)
    sent = told.prefix_index.sent(prompt())
    told.prefix_index.read(sent)
    assert (sent.prefix.blocks, sent.expected) == (None, ())
    assert told.tokens() == ALL  # the engine will tell


def test_blocks_of_a_size_that_nobody_asked_for_are_guessed():
    told = Told()
    told.read()
    told.prefix_index.sent(prompt(None))
    other = prompt()
    other.blocks = PromptBlocks(TOKENS, None, None, {BlockShape(2 * SIZE)})
    assert told.prefix_index.tokens(other) == len(TOKENS) // 2
    told.prefix_index.unsent(told.prefix_index.sent(other))


def test_salts_and_adapters_are_apart():
    told = Told()
    told.read()
    told.read(salt="s")
    told.read(adapter="s")
    assert told.tokens(salt="s") == told.tokens(adapter="s") == told.tokens() == ALL
    assert told.tokens(salt="t") == told.tokens(adapter="t") == told.tokens(adapter="s", salt="s") == 0  # fmt: skip


def test_an_engine_that_does_not_tell_salts_is_believed_only_where_there_are_none():
    told = Told()
    event = ["BlockStored", [1], None, TOKENS[:SIZE], SIZE, None]
    told.engine.arrays = True
    told.deliver(told.engine.publish(dict(enumerate(event))))
    assert told.tokens() == SIZE
    told.prefix_index.sent(prompt(None))
    half = len(TOKENS) // 2
    assert told.tokens(salt="s") == told.tokens(adapter="a") == half
    told.prefix_index.sent(prompt(TOKENS, None, "s", key=2))
    assert told.tokens() == half  # whose block it is nobody knows any more


def test_its_mirror_is_no_larger_than_its_cache():
    told = Told()
    told.read()
    mirror = told.prefix_index.follower.mirror
    told.prefix_index.scraped(400, None)
    assert mirror.most_blocks == 126
    told.prefix_index.scraped(None, None)
    assert mirror.most_blocks == MOST_BLOCKS


def test_one_of_a_burst_that_is_cancelled_leaves_expected_what_the_others_sent():
    told = Told()
    told.read(list(range(100, 130)))  # so it is known how large its blocks are
    first = told.prefix_index.sent(prompt())
    told.prefix_index.unsent(told.prefix_index.sent(prompt()))
    assert told.tokens() == ALL
    told.prefix_index.unsent(first)
    assert told.tokens() == 0


def test_what_is_expected_is_bounded():
    mirror = Mirror()
    for place in range(100):
        mirror.expect([b"%d %d" % (place, each) for each in range(1000)])
    assert mirror.held([b"0 0"]) == 0
    assert mirror.held([b"99 999"]) == 1


def test_what_no_event_confirms_is_expected_no_longer_than_the_cache_could_hold_it():
    told, before = Told(), TOKENS[: 2 * SIZE]
    told.engine.read(
        (before, None, None)
    )  # while nobody listens: what follows these blocks is not known
    follower = told.prefix_index.follower = Follower()
    deliver(follower, told.engine, told.engine.read(([7] * 9, None, None)), replays=False)
    told.prefix_index.scraped(400, None)
    told.prefix_index.sent(prompt())
    told.read()
    assert told.tokens() == ALL
    for number in range(100, 200):
        other = [*before, *[number] * 33]
        told.prefix_index.sent(prompt(other, key=number))
        told.read(other)
        assert told.tokens(other, key=number) == ALL
    assert told.tokens() <= len(before)


def test_the_sizes_of_blocks_are_those_of_engines_that_tell():
    told, silent = Told(), Told()
    told.read()
    assert block_shapes([told, silent]) == {BlockShape(SIZE)}
    told.prefix_index.follower.disconnected()
    assert block_shapes([told, silent]) == set()
