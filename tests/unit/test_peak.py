"""The most that a KV cache will hold of streams that write at one pace, and when nobody can tell."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.types import Credit, LoadSample
from gateway.pools.peak import Peak

GAP_S = 1 / 64  # exact in binary
BLOCK = 16  # tokens that each stream takes on top
CAPACITY = 16_384


def scrape(running, usage=0.0, at=0.0, waiting=0, engines=()):
    return LoadSample(at, running, waiting, usage, CAPACITY, engines=engines)


def peak(*streams, usage=None):
    """Return what is known of streams: the prompt, the output and what is written of it; None: not begun.

    A scrape shows as much, or this usage.
    """
    found = Peak()
    for prompt, output, written in streams:
        began = None if written is None else -written * GAP_S
        found.take(Credit(prompt, output, began_at=began))
    held = sum(p + BLOCK + min(w, o) for p, o, w in streams if w is not None)
    shown = held / CAPACITY if usage is None else usage
    found.scraped(scrape(len(streams), shown), len(streams), CAPACITY, GAP_S)
    return found


def test_a_stream_alone_holds_most_at_its_end():
    assert peak().with_one_more(100, 50, 0.0) == 150 + BLOCK


def test_two_that_end_one_after_the_other_never_hold_both_whole_needs():
    # When the first one ends, the new one has written 10 of its 100.
    assert peak((1000, 50, 40)).with_one_more(200, 100, 0.0) == 1050 + 210 + 2 * BLOCK


def test_a_short_one_fits_beside_long_ones_that_have_just_begun():
    long = peak((1000, 500, 0), (1000, 500, 0))
    assert long.with_one_more(100, 10, 0.0) == 2 * 1010 + 110 + 3 * BLOCK
    assert long.with_one_more(100, 500, 0.0) == 2 * 1500 + 600 + 3 * BLOCK


def test_of_one_that_writes_more_than_was_expected_a_tenth_is_expected_on_top():
    assert peak((100, 50, 80)).with_one_more(10, 100, 0.0) == max(
        150 + 6 + 10 + 6 + 2 * BLOCK, 10 + 100 + BLOCK
    )


def test_the_outlook_is_renewed_by_whoever_comes_begins_or_goes():
    found, credit = peak(), Credit(1000, 100)
    before = found.with_one_more(10, 200, 0.0)
    found.take(credit)
    assert found.with_one_more(10, 200, 0.0) == 1100 + 110 + 2 * BLOCK
    credit.began_at = -50 * GAP_S
    found.changed()  # of 100 it has written 50
    assert found.with_one_more(10, 200, 0.0) == 1100 + 60 + 2 * BLOCK
    found.give_back(credit)
    assert found.with_one_more(10, 200, 0.0) == before


def test_what_a_scrape_shows_beyond_what_is_known_is_told():
    assert peak((1000, 500, 0), usage=0.25).beyond_tokens == 4096 - 1000 - BLOCK
    assert peak((1000, 500, 0), usage=0.03125).beyond_tokens == 0
    assert peak((1000, 500, None), usage=0.25).beyond_tokens == 4096  # its prompt is not read yet
    # Of one that wrote more than was expected, the scrape alone tells.
    assert peak((1000, 50, 3000), usage=0.25).beyond_tokens == 4096 - 1050 - BLOCK


def test_prompts_that_have_blocks_in_common_take_the_share_that_a_scrape_shows():
    # Both hold 8,192 by what is known, and the scrape shows half of it.
    shared = peak((4080, 1000, 0), (4080, 1000, 0), usage=0.25)
    assert shared.beyond_tokens == 0
    assert shared.with_one_more(1000, 10, 0.0) == (8192 + 2 * 10 + 1000 + 10 + BLOCK) / 2


def test_of_very_many_nobody_looks_ahead():
    assert peak(*[(10, 10, 0)] * 256).knows(256)
    assert not peak(*[(10, 10, 0)] * 257).knows(257)


def test_it_is_asked_while_all_that_runs_are_streams_of_this_gateway():
    found = peak((1000, 500, 0))
    assert found.knows(1)
    assert not found.knows(2)  # another one is no stream
    found.calm = False
    assert not found.knows(1)


def test_it_is_not_asked_beside_strangers_other_gateways_or_engines_or_without_a_pace():
    def known(sample, requests=1, gap_s=GAP_S):
        found = peak((1000, 500, 0))
        found.scraped(sample, requests, CAPACITY, gap_s)
        return found.knows(1)

    assert known(scrape(1))
    assert known(scrape(2))  # one may just have ended
    assert not known(scrape(3))
    assert not known(scrape(1, waiting=2))
    assert not known(scrape(1), requests=None)
    assert not known(scrape(2, engines=(1, 1)))
    assert not known(scrape(1, usage=None))
    assert not known(scrape(1), gap_s=0.0)
    found = peak((1000, 500, 0))
    found.joined()
    assert not found.knows(1)


streams = st.tuples(st.integers(1, 2000), st.integers(1, 500), st.integers(0, 500)).map(
    lambda each: (each[0], each[1] + each[2], each[2])  # each has something left to write
)


@given(st.lists(streams, max_size=12), st.integers(1, 2000), st.integers(1, 500))
def test_it_is_what_writing_token_by_token_comes_to(running, prompt, output):
    """Nobody holds more until the new one ends; what others hold later is not its doing."""
    held = []
    for step in range(1, output + 1):
        # Those whose last token this is hold it, too.
        left = [(p, w) for p, o, w in running if o - w >= step]
        held.append(sum(p + w + step + BLOCK for p, w in left) + prompt + step + BLOCK)
    assert peak(*running).with_one_more(prompt, output, 0.0) == max(held)


@given(st.lists(streams, min_size=1, max_size=12))
def test_the_most_is_what_they_come_to_without_another(running):
    longest = max(output - written for _, output, written in running)
    held = [
        sum(p + w + step + BLOCK for p, o, w in running if o - w >= step)
        for step in range(1, longest + 1)
    ]
    assert peak(*running).most(0.0) == max(held)
    assert Peak().most(0.0) == 0
