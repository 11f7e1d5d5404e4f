"""What of an engine's events a mirror takes in, and what it leaves out."""

import msgspec
import pytest

from gateway.core.prefix import BlockShape
from gateway.prefix.follower import Follower
from gateway.prefix.mirror import Mirror, prefix_digests
from gateway.wire.kvevents import BlockRemoved, BlockStored
from tests.kvengine import SIZE, Engine, catch_up, deliver

TOKENS = [1, 2, 3, 4, 5, 6, 7, 8, 9]
HASHES = [101, 102]


def stored(**more):
    return BlockStored(
        **({"block_hashes": HASHES, "parent_block_hash": None, "token_ids": TOKENS[:8], "block_size": SIZE} | more)
    )  # fmt: skip


def held(mirror, adapter=None, salt=None, tokens=TOKENS, ahead=0):
    return mirror.held(prefix_digests(tokens, BlockShape(SIZE, ahead), adapter, salt))


def mirror_of(*events):
    mirror = Mirror()
    mirror.apply(events)
    return mirror


def test_the_last_token_is_never_found_in_a_cache():
    assert len(prefix_digests(TOKENS[:8], BlockShape(SIZE))) == 1
    assert len(prefix_digests(TOKENS, BlockShape(SIZE))) == 2
    assert prefix_digests([], BlockShape(SIZE)) == []


def test_a_block_that_is_stored_twice_is_there_until_both_are_gone():
    mirror = mirror_of(stored(), stored(), BlockRemoved(HASHES))
    assert held(mirror) == 2
    mirror.apply([BlockRemoved(HASHES)])
    assert held(mirror) == len(mirror) == 0


def test_a_block_whose_hash_covers_the_token_behind_it_is_found_before_that_one_only():
    """Of vLLM 0.33 with drafted tokens: each of two prompts that part right behind a block has its own."""
    parting = [*TOKENS[:4], 70, 71, 72, 73, 74]
    first = stored(lookahead_token_ids=[[5], [9]])
    other = stored(block_hashes=[201], token_ids=TOKENS[:4], lookahead_token_ids=[[70]])
    mirror = mirror_of(first)
    assert held(mirror, ahead=1) == 2
    assert held(mirror, tokens=parting, ahead=1) == 0
    mirror.apply([other])
    assert held(mirror, tokens=parting, ahead=1) == 1
    mirror.apply([BlockRemoved([201])])
    assert held(mirror, ahead=1) == 2
    assert mirror.shape == BlockShape(SIZE, 1)


@pytest.mark.parametrize(("ahead", "blocks"), [(0, 2), (1, 2), (2, 1)])
def test_a_block_that_lacks_the_tokens_behind_it_is_not_found(ahead, blocks):
    assert len(prefix_digests(TOKENS, BlockShape(SIZE, ahead))) == blocks


def test_events_whose_blocks_do_not_all_tell_what_is_behind_them_are_left_out():
    assert len(mirror_of(stored(lookahead_token_ids=[[5]]))) == 0


def test_what_follows_a_block_that_is_gone_counts_no_more_until_it_is_back():
    mirror = mirror_of(stored(), BlockRemoved([101]))
    assert held(mirror) == 0
    mirror.apply([stored(block_hashes=[101], token_ids=TOKENS[:4])])
    assert held(mirror) == 2


@pytest.mark.parametrize(
    "more",
    [
        {"medium": "CPU"},
        {"locality": "REMOTE"},
        {"kv_cache_spec_kind": "sliding_window"},
        {"token_ids": TOKENS[:5]},  # a window's: blocks are left out
        {"parent_block_hash": 7},  # stored before anybody listened
        {"block_hashes": [], "token_ids": []},
    ],
    ids=str,
)
def test_events_of_other_caches_are_passed_over(more):
    assert len(mirror_of(stored(**more))) == 0


def test_only_one_group_of_layers_is_followed_and_removals_of_others_change_nothing():
    mirror = mirror_of(stored(group_idx=0), stored(group_idx=1), BlockRemoved(HASHES, group_idx=1))
    assert held(mirror) == 2
    mirror.apply([BlockRemoved(HASHES, medium="CPU", group_idx=0)])
    assert held(mirror) == 2
    mirror.apply([BlockRemoved(HASHES, medium="GPU", group_idx=0)])
    assert held(mirror) == 0


def test_a_part_of_a_block_is_no_block():
    mirror = mirror_of(stored(block_size=2, token_ids=TOKENS[:4]), stored(block_hashes=[7, 8]))
    assert mirror.shape == BlockShape(SIZE)
    mirror.apply([stored(block_size=2, token_ids=TOKENS[:4], block_hashes=[9, 10])])
    assert held(mirror) == len(mirror) == 2


def test_keys_come_from_the_event_or_from_the_adapter_that_it_names():
    assert held(mirror_of(stored(lora_name="a", extra_keys=[["a", "s"], ["a"]])), "a", "s") == 2
    assert held(mirror_of(stored(lora_name="a")), "a") == 2
    by_number = mirror_of(stored(lora_id=1, tells_keys=False))
    assert (held(by_number), held(by_number, "1")) == (0, 0)
    assert not by_number.tells_keys
    assert held(mirror_of(stored(extra_keys=[["s"], None])), "s") == 0  # a salt is no adapter


def test_an_image_in_a_prompt_parts_it_from_the_same_tokens():
    assert held(mirror_of(stored(extra_keys=[None, [["image", 0]]]))) == 1


def test_an_adapter_loaded_anew_keeps_the_blocks_of_its_new_path():
    mirror = mirror_of(stored(lora_name="a"), stored(lora_name="a", block_hashes=[201, 202]))
    mirror.apply([BlockRemoved(HASHES)])
    assert held(mirror, "a") == 2


def test_beyond_its_bound_the_oldest_go():
    mirror = Mirror(most_blocks=16)
    for place in range(17):
        mirror.apply([stored(block_hashes=[place], token_ids=[place] * SIZE)])
    assert len(mirror) == 15
    assert held(mirror, tokens=[0] * 5) == held(mirror, tokens=[1] * 5) == 0
    assert held(mirror, tokens=[16] * 5) == 1


def test_a_message_that_nobody_can_read_leaves_nothing_known():
    engine, follower = Engine(), Follower()
    catch_up(follower, engine)
    deliver(follower, engine, engine.read((TOKENS, None, None)))
    assert follower.published(1, b"?")
    assert (len(follower.mirror), follower.garbled, follower.losses) == (0, 1, 1)
    assert follower.knows  # that nothing is known to be there
    assert not follower.whole


def test_what_was_found_before_is_not_looked_for_again_unless_its_end_is_gone():
    mirror, digests = mirror_of(stored()), prefix_digests(TOKENS, BlockShape(SIZE))
    assert mirror.held(digests, 1) == mirror.held(digests, 2) == 2
    mirror.apply([BlockRemoved([102])])
    assert mirror.held(digests, 2) == 1
    mirror.apply([BlockRemoved([101])])
    assert mirror.held(digests, 1) == 0
    mirror.expect(digests)
    assert mirror.held(digests, 2) == 2


def test_another_process_is_known_by_the_time_of_its_messages():
    other = list(range(20, 29))
    for is_seen in (True, False):
        engine, follower = Engine(), Follower()
        engine.read((TOKENS, None, None))
        catch_up(follower, engine)
        second = engine.restarted()
        (message,) = second.read((other, None, None))  # with the number of the one before
        if is_seen:
            assert not follower.published(*message)
        else:
            follower.disconnected()
        catch_up(follower, second)
        assert (held(follower.mirror), held(follower.mirror, tokens=other)) == (0, 2)
        assert (follower.whole, follower.losses) == (True, 1)


def test_a_long_replay_is_asked_for_again_until_it_brings_little():
    engine, follower = Engine(), Follower()
    for token in range(600):
        engine.read(([token] * (SIZE + 1), None, None))
    assert follower.replay_begins() == 0
    assert all(follower.replayed(*each) for each in engine.replay(0))
    assert not follower.replay_ended()  # the end of it may have been dropped
    catch_up(follower, engine)
    assert (follower.is_current, len(follower.mirror)) == (True, 600)


def test_strange_events_are_counted():
    follower = Follower()
    follower.begin_with(3, msgspec.msgpack.encode([1.0, [{"type": "Later"}], 0]))
    assert (follower.strange, follower.seen, follower.whole) == (1, 4, False)


def test_an_emptied_cache_is_known_wholly():
    engine, follower = Engine(), Follower()
    engine.read((TOKENS, None, None))
    deliver(follower, engine, engine.evict(0), replays=False)
    assert not follower.whole
    deliver(follower, engine, engine.clear(), replays=False)
    assert follower.whole


def test_a_published_message_that_a_replay_brought_is_followed_once():
    engine, follower = Engine(), Follower()
    both = [*engine.read((TOKENS, None, None)), *engine.read((TOKENS, "a", None))]
    catch_up(follower, engine)
    assert all(follower.published(*each) for each in both)
    deliver(follower, engine, engine.evict(0))
    assert held(follower.mirror) == engine.held(TOKENS)


def test_what_was_found_of_smaller_blocks_says_nothing_of_larger_ones():
    mirror, tokens = mirror_of(stored()), list(range(400))
    small, large = (prefix_digests(tokens, BlockShape(size), None, None) for size in (16, 64))
    assert mirror.held(small, 0) == 0
    mirror.expect(large[:3])
    assert mirror.held(large, 24) == 3
