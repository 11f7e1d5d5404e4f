"""Gateways that tell each other, over a shared store, which prompts they sent where."""

import asyncio
from collections import Counter

import msgspec
import pytest

from gateway.config.models import Config
from gateway.core.prefix import Prefix
from gateway.core.types import (
    LoadSample,
    ModelsSeen,
    ProbeFailed,
    ProbePassed,
    Scraped,
    ServedModel,
)
from gateway.pools.table import PoolTable
from gateway.prefix.hashing import PrefixHasher
from gateway.prefix.news import MOST_NEWS
from gateway.prefix.ranked import RankedIndex
from gateway.routing.exchange import PrefixExchange
from gateway.store.memory import MemoryStore
from gateway.store.shared import LOG_KEPT, LOG_READ, StoreUnavailable
from tests.storecases import HeldClock

URLS = ("http://10.0.0.1:8000", "http://10.0.0.2:8000")
LOG_BYTES = 65_536


class Store(MemoryStore):
    lost = False

    def __init__(self, clock):
        super().__init__(clock)
        self.texts = []

    async def tell(self, log, word, by, told, after):
        if self.lost:
            raise StoreUnavailable("the connection was refused")
        self.texts.append(told)
        return await super().tell(log, word, by, told, after)


class One:
    """One gateway."""

    def __init__(self, store, clock, name, prefix="approximate", secret=b"pepper"):
        config = Config.model_validate({"pools": {"m": {"backends": [*URLS], "prefix": prefix}}})
        self.clock, self.secret = clock, secret
        self.table = PoolTable(clock)
        self.table.apply(config.pools, config.health)
        self.hasher, self.counts = PrefixHasher(), Counter()
        self.exchange = PrefixExchange(
            store, self.table, name, self.hasher, lambda backend: backend.id,
            lambda: self.secret, lambda result, hashes: self.counts.update({result: hashes}),
        )  # fmt: skip

    def turn(self):
        asyncio.run(self.exchange.turn())

    def index(self, place=1):
        return self.table.get(f"m/b{place}").prefix_index

    def knows(self, *keys, place=1):
        return self.index(place).tokens(prompt(*keys)) > 0


def prompt(*keys):
    count = len(keys)
    return Prefix([*reversed(keys)], tuple(range(count, 0, -1)), count, 1000, 0)


@pytest.fixture
def world():
    class World:
        def __init__(self):
            self.clock = HeldClock()
            self.store = Store(self.clock)
            self.one, self.other = self.add("one"), self.add("other")
            self.turns()
            self.turns()  # the one that came first tells all that is used again

        def add(self, name, **more):
            return One(self.store, self.clock, name, **more)

        def turns(self):
            for each in (self.one, self.other, self.one):
                each.turn()

    return World()


def test_gateways_hash_alike_once_they_have_heard_of_each_other(world):
    assert world.one.hasher.seed == world.other.hasher.seed
    late = world.add("late")
    assert late.hasher.seed != world.one.hasher.seed
    late.turn()
    assert late.hasher.seed == world.one.hasher.seed


def test_what_one_sent_another_knows_of_that_backend_and_of_no_other(world):
    world.one.index(2).sent(prompt(1, 2))
    world.turns()
    assert world.other.knows(1, 2, place=2)
    assert not world.other.knows(1, 2, place=1)
    assert +world.one.counts == {"told": 2}
    assert world.other.counts["heard"] == 2


def test_what_was_heard_is_not_told_again(world):
    world.one.index().sent(prompt(1, 2))
    world.turns()
    world.turns()
    assert world.other.counts["told"] == 0
    assert world.one.counts["heard"] == 0


def test_nothing_is_told_while_nothing_is_learned_and_then_they_ask_less_often(world):
    before = len(world.store.texts)
    world.turns()
    assert [*filter(None, world.store.texts[before:])] == []
    calm_s = world.one.exchange.pace_s()
    world.one.index().sent(prompt(1, 2))
    world.turns()
    assert world.other.exchange.pace_s() < calm_s


def test_a_cache_that_one_finds_lost_is_forgotten_by_all(world):
    world.one.index().sent(prompt(1, 2))
    world.turns()
    world.one.table.get("m/b1").forget_prefixes()
    world.turns()
    assert not world.other.knows(1, 2)


def test_a_gateway_that_cannot_connect_to_a_backend_forgets_what_it_held_alone(world):
    for each in (world.one, world.other):
        each.table.observe("m/b1", ModelsSeen(world.clock.at, (ServedModel("m", None, 8192),)))
        for _ in range(2):
            each.table.observe("m/b1", ProbePassed(world.clock.at))
    world.one.index().sent(prompt(1, 2))
    world.turns()
    for _ in range(3):
        world.one.table.observe("m/b1", ProbeFailed(world.clock.at, "refused"))
    assert not world.one.knows(1, 2)
    world.turns()
    assert world.other.knows(1, 2)


def test_one_that_comes_later_learns_of_prompts_as_they_are_used(world):
    world.one.index().sent(prompt(1, 2, 3))
    world.turns()
    for _ in range(LOG_KEPT):  # what the log has no more
        asyncio.run(world.store.tell(log_of(world), world.one.exchange._word, "x", "{}", 0))
    for _ in range(LOG_KEPT // LOG_READ):
        world.turns()
    late = world.add("late")
    late.turn()
    late.turn()
    world.turns()
    world.one.index().sent(prompt(1, 2, 9))
    world.turns()
    for _ in range(LOG_KEPT // LOG_READ + 1):
        late.turn()
    assert late.knows(1, 2, 9)


def test_without_the_store_each_goes_by_what_it_knows_and_the_rest_is_dropped(world):
    world.store.lost = True
    world.one.index().sent(prompt(1, 2))
    world.turns()
    assert world.one.counts["dropped"] == 2
    world.store.lost = False
    world.one.index().sent(prompt(3, 4))
    world.turns()
    assert world.one.knows(1, 2)
    assert world.other.knows(3, 4)
    assert not world.other.knows(1, 2)


def test_a_store_that_lost_everything_takes_the_word_that_all_have(world):
    seed = world.one.hasher.seed
    world.one.index().sent(prompt(1, 2))
    world.turns()
    world.store._logs.clear()
    world.one.index().sent(prompt(3, 4))
    world.turns()
    assert world.one.hasher.seed == world.other.hasher.seed == seed
    assert world.other.knows(1, 2)
    assert world.other.knows(3, 4)


def test_what_is_told_at_a_time_is_bounded_and_the_rest_is_counted(world):
    for place in (1, 2):
        world.one.index(place).sent(prompt(*range(place << 60, (place << 60) + MOST_NEWS)))
    world.turns()
    assert max(map(len, world.store.texts)) < LOG_BYTES
    assert +world.one.counts == {"told": MOST_NEWS, "dropped": MOST_NEWS}
    assert world.other.counts["heard"] == MOST_NEWS


def test_where_more_is_learned_than_can_be_told_each_backend_has_its_part(world):
    for turn in range(30):  # which comes first is by chance
        for place in (1, 2):
            first = (place << 60) + turn * MOST_NEWS
            world.one.index(place).sent(prompt(*range(first, first + MOST_NEWS)))
        world.turns()
    parts = [len(world.other.index(place).young | world.other.index(place).old) for place in (1, 2)]
    assert min(parts) > 0


def test_more_than_is_read_at_a_time_is_read_in_the_next_turns(world):
    for number in range(LOG_READ + 5):
        world.one.index().sent(prompt(number))
        world.one.turn()
    world.other.turn()
    assert not world.other.knows(LOG_READ + 4)
    world.other.turn()
    assert world.other.knows(LOG_READ + 4)


def test_no_tell_has_a_name_of_a_backend_or_the_word_in_it(world):
    world.one.index().sent(prompt(1, 2))
    world.turns()
    told = " ".join(world.store.texts)
    assert told
    assert "m/b" not in told
    assert world.one.exchange._word not in told


def test_gateways_with_other_secrets_hear_nothing_of_these(world):
    stranger = world.add("stranger", secret=b"another")
    world.one.index().sent(prompt(1, 2))
    world.turns()
    for _ in range(3):
        stranger.turn()
    assert stranger.counts["heard"] == 0
    assert stranger.hasher.seed != world.one.hasher.seed


def test_a_secret_that_changes_makes_other_hashes(world):
    seed = world.one.hasher.seed
    world.one.index().sent(prompt(1, 2))
    world.one.secret = world.other.secret = b"new"
    world.turns()
    world.turns()
    assert world.one.hasher.seed == world.other.hasher.seed != seed
    assert not world.one.knows(1, 2)


@pytest.mark.parametrize("text", ["no json", "[1]", '{"engines": [[1, 0, 5, "AAA="]]}', '{"engines": [[1]]}'])  # fmt: skip
def test_what_another_version_tells_is_left_alone(world, text):
    asyncio.run(world.store.tell(log_of(world), world.one.exchange._word, "new", text, 0))
    world.turns()
    world.one.index().sent(prompt(1, 2))
    world.turns()
    assert world.other.knows(1, 2)


def test_news_of_a_server_or_an_engine_that_is_not_known_are_left_alone(world):
    number = world.one.exchange._number(world.one.table.get("m/b1"))
    told = {"engines": [[5, 0, 1, "AAAAAAAAAAE="], [number, 7, 1, "AAAAAAAAAAE="]]}
    text = msgspec.json.encode(told).decode()
    asyncio.run(world.store.tell(log_of(world), world.one.exchange._word, "new", text, 0))
    world.turns()
    assert len(world.one.index()) == 0


def log_of(world):
    return next(iter(world.store._logs))


def test_each_engine_of_a_server_is_told_of_by_itself(world):
    for each in (world.one, world.other):
        sample = LoadSample(world.clock.at, 0, 0, 0.0, 10_000, engines=(0, 0))
        each.table.observe("m/b1", Scraped(sample))
        assert isinstance(each.index(), RankedIndex)
    world.turns()  # from now on each of them has news
    world.one.index().engines[1].sent(prompt(1, 2))
    world.turns()
    held = [each.tokens(prompt(1, 2)) for each in world.other.index().engines]
    assert held == [0, 1000]


def test_a_pool_without_an_index_tells_nothing():
    clock = HeldClock()
    store = Store(clock)
    one = One(store, clock, "one", prefix="off")
    one.turn()
    one.turn()
    assert store.texts[1:] == [""]
