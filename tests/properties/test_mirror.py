"""A mirror of an engine's prefix cache, over any life of the engine and any loss on the way."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.prefix import BlockShape
from gateway.prefix.follower import Follower
from gateway.prefix.mirror import Mirror, prefix_digests
from gateway.wire.kvevents import Garbled, parse_batch
from tests.kvengine import SIZE, Engine, catch_up, deliver

# Few tokens, so that prompts share beginnings and end in different places.
prompts = st.tuples(
    st.lists(st.integers(1, 2), max_size=5 * SIZE),
    st.none() | st.sampled_from(["lora-a", "s"]),  # an adapter may be called as a salt is
    st.none() | st.sampled_from(["s", "t"]),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.lists(prompts, min_size=1, max_size=3)),
        st.tuples(st.just("evict"), st.integers(0, 50)),
        st.tuples(st.just("clear"), st.none()),
        st.tuples(st.just("restart"), st.none()),
        st.tuples(st.just("lose"), st.none()),
        st.tuples(st.just("disconnect"), st.none()),
    ),
    max_size=30,
)


def held(mirror, prompt):
    tokens, adapter, salt = prompt
    return mirror.held(prefix_digests(tokens, BlockShape(SIZE), adapter, salt))


def live(steps, engine, follower, *, replays):
    """Do each step; yield the engine, and the prompts so far, whenever the follower knows."""
    seen, lost = [], False
    for kind, what in steps:
        messages = []
        match kind:
            case "read":
                seen += what
                messages = engine.read(*what)
            case "evict":
                messages = engine.evict(what)
            case "clear":
                messages = engine.clear()
            case "restart":
                engine = engine.restarted()
                follower.disconnected()
                catch_up(follower, engine) if replays else follower.forget()
                lost = False
            case "lose":
                lost = True
            case "disconnect":
                follower.disconnected()
                catch_up(follower, engine) if replays else follower.forget()
        if messages and lost:
            lost = False
        else:
            deliver(follower, engine, messages, replays=replays)
        # Of the last message that was lost nobody can know before the next one comes.
        if follower.knows and follower.seen == engine.sent:
            yield engine, seen


@given(steps, st.booleans())
def test_with_a_replay_the_mirror_is_the_cache(steps, arrays):
    engine, follower = Engine(arrays), Follower()
    catch_up(follower, engine)
    for at, seen in live(steps, engine, follower, replays=True):
        assert follower.whole
        for each in seen:
            assert held(follower.mirror, each) == at.held(*each)


@given(steps, st.booleans())
def test_without_a_replay_nothing_is_claimed_that_is_not_there(steps, arrays):
    engine, follower = Engine(arrays), Follower()
    engine.read(([1] * 2 * SIZE, None, None))  # before anybody listened
    for at, seen in live(steps, engine, follower, replays=False):
        for each in seen:
            assert held(follower.mirror, each) <= at.held(*each)


@given(steps, st.integers(1, 3))
def test_a_short_replay_leads_to_no_more_than_is_there(steps, keeps):
    engine, follower = Engine(keeps=keeps), Follower()
    catch_up(follower, engine)
    for at, seen in live(steps, engine, follower, replays=True):
        for each in seen:
            found = held(follower.mirror, each)
            assert found == at.held(*each) if follower.whole else found <= at.held(*each)


@given(st.lists(prompts, min_size=1, max_size=8), st.sets(st.integers(1, 7)))
def test_what_a_replay_loses_on_the_way_is_asked_for_again(prompts, dropped):
    engine, follower = Engine(), Follower()
    for each in prompts:
        engine.read(each)
    catch_up(follower, engine, {each for each in dropped if each < engine.sent - 1})
    assert follower.seen == engine.sent
    for each in prompts:
        assert held(follower.mirror, each) == engine.held(*each)


@given(st.lists(prompts, max_size=20), st.integers(1, 12))
def test_no_mirror_grows_beyond_its_bound(prompts, most):
    engine, mirror = Engine(), Mirror(most)
    for each in prompts:
        for _, payload in engine.read(each):
            mirror.apply(parse_batch(payload).events)
            assert len(mirror) <= most
    for each in prompts:
        assert held(mirror, each) <= engine.held(*each)


@given(prompts, prompts)
def test_a_prompt_shares_nothing_across_salts_and_adapters(one, other):
    engine, mirror = Engine(), Mirror()
    for _, payload in engine.read(one):
        mirror.apply(parse_batch(payload).events)
    if one[1:] != other[1:]:
        assert held(mirror, other) == 0


@given(st.binary(max_size=200), st.integers(0, 40), st.binary(max_size=3))
def test_whatever_comes_is_a_batch_or_garbled(anything, place, instead):
    (_, good), = Engine().read(([1] * 2 * SIZE, "a", "s"))  # fmt: skip
    for payload in (anything, good[:place] + instead + good[place + len(instead) :]):
        try:
            Mirror().apply(parse_batch(payload).events)
        except Garbled:
            follower = Follower()
            follower.begin_with(0, payload)
            assert follower.garbled == 1
