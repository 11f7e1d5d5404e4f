"""What gateways have under way, as each knows it of the others."""

import asyncio

import pytest

from gateway.admission.telling import Telling
from gateway.config.models import Config
from gateway.core.types import Exclusion, LoadSample, Need, Scraped
from gateway.heal.names import Names
from gateway.pools.elsewhere import NOTHING, UnderWay, since, together
from gateway.pools.table import PoolTable
from gateway.store.memory import MemoryStore
from gateway.store.shared import Board, StoreUnavailable
from tests.storecases import HeldClock

URLS = ("http://10.0.0.1:8000", "http://10.0.0.2:8000")
CAPACITY = 10_000


class Store(MemoryStore):
    lost = False

    async def beat(self, *args):
        if self.lost:
            raise StoreUnavailable("the connection was refused")
        return await super().beat(*args)


class World:
    """Some gateways before the same two backends, each on a machine of its own, or all on one."""

    def __init__(self, count=2, urls=URLS, machine="host-{}"):
        self.clock = HeldClock()
        self.store = Store(self.clock)
        config = Config.model_validate({"pools": {"m": {"backends": [*urls]}}})
        self.tables = [PoolTable(self.clock) for _ in range(count)]
        for table in self.tables:
            table.apply(config.pools, config.health)
        self.ids = [each.id for each in self.tables[0]]
        self.waiting = set()
        self.telling = [
            Telling(
                self.store,
                self.clock,
                table,
                str(n),
                lambda n=n: n in self.waiting,
                Names(machine.format(n)).of,
            )
            for n, table in enumerate(self.tables)
        ]

    def turn(self, *who):
        for each in who or range(len(self.telling)):
            asyncio.run(self.telling[each].turn())

    def scrape(self, who, running=0, usage=0.0, place=0):
        sample = LoadSample(self.clock.at, running, 0, usage, CAPACITY)
        self.tables[who].observe(self.ids[place], Scraped(sample))

    def take(self, who, prompt=1000, output=200, place=0, streams=True, sequences=1):
        need = Need(prompt, output, streams=streams, sequences=sequences)
        return self.tables[who].take(self.ids[place], self.clock.at, need)

    def backend(self, who, place=0):
        return self.tables[who].get(self.ids[place])


def test_a_server_of_another_machine_has_nothing_to_do_with_that_of_the_same_name_here():
    world = World(urls=("http://127.0.0.1:8000", URLS[1]))
    for place in (0, 1):
        world.take(1, place=place)
    world.turn(1, 0)
    assert world.backend(0, place=0).elsewhere == NOTHING
    assert world.backend(0, place=1).elsewhere.requests == 1


def test_a_server_of_this_machine_is_the_same_one_for_all_gateways_here():
    world = World(urls=("http://127.0.0.1:8000", URLS[1]), machine="one")
    world.take(1)
    world.turn(1, 0)
    assert world.backend(0).elsewhere.requests == 1


def test_what_another_gateway_sends_is_work_here():
    world = World()
    for who in (0, 1):
        for place in (0, 1):
            world.scrape(who, place=place)
    before = world.backend(0).weighed()
    world.take(1)
    world.turn(1, 0)
    after = world.backend(0).weighed()
    assert after.ahead_s > before.ahead_s
    assert after.streams == before.streams + 1
    assert world.backend(0, place=1).weighed() == before


def test_it_is_counted_once_when_a_scrape_shows_it():
    world = World()
    slot = world.take(1, prompt=1000, output=200)
    world.turn(1, 0)
    world.scrape(0, running=1)
    assert world.backend(0).foreign == 0
    slot.release()
    world.turn(1, 0)
    assert world.backend(0).weighed().streams == 1  # nobody is there but who comes


def test_strangers_count_beside_it():
    world = World()
    world.take(1)
    world.turn(1, 0)
    world.scrape(0, running=3)
    assert world.backend(0).foreign == 2


def test_the_cache_that_another_takes_is_no_room_here_until_it_ends():
    world = World()
    world.scrape(0, running=1, usage=0.5)
    room, now = world.backend(0).room, world.clock.at
    assert room.verdict(Need(4000, 0), now) is None
    slot = world.take(1, prompt=2000, output=500)
    world.turn(1, 0)
    assert room.verdict(Need(4000, 0), now) is Exclusion.NO_KV_ROOM
    world.tables[1].first_token(slot, now)  # it is read, and no scrape has shown that here
    world.turn(1, 0)
    assert room.verdict(Need(4000, 0), now) is Exclusion.NO_KV_ROOM
    world.scrape(0, running=2, usage=0.5)  # now one has, and what it holds is in the usage
    world.turn(1, 0)
    assert room.verdict(Need(3800, 0), now) is None


def test_a_backend_that_is_idle_but_for_what_another_sends_takes_no_more_than_fits():
    world = World()
    world.scrape(0)
    room, now = world.backend(0).room, world.clock.at
    assert room.verdict(Need(9_500, 0), now) is None
    slot = world.take(1, prompt=6_000, output=0)
    world.turn(1, 0)
    assert room.verdict(Need(9_500, 0), now) is Exclusion.NO_KV_ROOM
    slot.release()
    world.turn(1, 0)
    assert room.verdict(Need(9_500, 0), now) is None


def test_what_has_ended_elsewhere_is_free_before_a_scrape_shows_it():
    world = World()
    slot = world.take(1, prompt=2000, output=0)
    world.tables[1].first_token(slot, world.clock.at)
    world.scrape(1, running=1, usage=0.9)
    world.scrape(0, running=1, usage=0.9)
    world.turn(1, 0)
    room, now = world.backend(0).room, world.clock.at
    assert room.verdict(Need(2000, 0), now) is Exclusion.NO_KV_ROOM
    slot.release()
    world.turn(1, 0)
    assert room.verdict(Need(2000, 0), now) is None


@pytest.mark.parametrize("told_meanwhile", [True, False])
@pytest.mark.parametrize("streams", [True, False])
def test_what_begins_and_ends_elsewhere_between_two_scrapes_takes_no_room(told_meanwhile, streams):
    world = World()
    for who in (0, 1):
        world.scrape(who, running=1, usage=0.5)
    world.turn(1, 0)
    room, now = world.backend(0).room, world.clock.at
    for _ in range(20):
        slot = world.take(1, prompt=1000, output=200, streams=streams)
        world.tables[1].first_token(slot, now)
        if told_meanwhile:
            world.turn(1, 0)
            assert room.projection(now).tokens == 5000 + 1200
        slot.release()
        world.turn(1, 0)
        assert room.projection(now).tokens == 5000
    assert room.verdict(Need(4000, 0), now) is None


def test_what_a_scrape_of_ours_showed_in_between_is_free_once_it_has_ended():
    world = World()
    world.scrape(1, running=1, usage=0.1)
    slot = world.take(1, prompt=1000, output=200)
    world.tables[1].first_token(slot, world.clock.at)
    world.turn(1, 0)
    world.scrape(0, running=2, usage=0.2)
    slot.release()
    world.turn(1, 0)
    tokens = world.backend(0).room.projection(world.clock.at).tokens
    assert 2000 - 1200 <= tokens <= 1000


@pytest.mark.parametrize("guarded", [True, False])
def test_the_places_of_a_backend_are_for_all_and_each_has_an_even_part(guarded):
    world = World()
    for who in (0, 1):
        world.scrape(who)
        world.backend(who).limit.fix(4)
        world.backend(who).guarded = guarded  # admission is on
    for _ in range(3):
        world.take(1, prompt=10, output=10)
    world.turn(1, 0, 1)
    mine = world.backend(0)
    assert mine.obstacle(Need(20, 0), world.clock.at, to_read=0) is None
    world.take(0, prompt=10, output=10)
    world.turn(0, 1)
    # The other has more than its half, so it takes no more; here a second one is within ours.
    assert world.backend(1).obstacle(Need(20, 0), world.clock.at, to_read=0) is Exclusion.AT_LIMIT
    assert mine.obstacle(Need(20, 0), world.clock.at, to_read=0) is None
    world.take(0, prompt=10, output=10)
    assert mine.obstacle(Need(20, 0), world.clock.at, to_read=0) is Exclusion.AT_LIMIT


def test_a_batch_elsewhere_takes_one_place_and_is_as_many_in_the_metrics_as_it_has_sequences():
    world = World()
    for who in (0, 1):
        world.scrape(who)
        world.backend(who).limit.fix(4)
    world.take(1, prompt=10, output=10, streams=False, sequences=100)
    world.turn(1, 0)
    world.scrape(0, running=100)
    mine = world.backend(0)
    assert mine.foreign == 0
    assert mine.peak == 1
    for _ in range(3):
        assert mine.obstacle(Need(20, 0), world.clock.at) is None
        world.take(0, prompt=10, output=10, streams=False)
    assert mine.obstacle(Need(20, 0), world.clock.at) is Exclusion.AT_LIMIT


@pytest.mark.parametrize("how", ["silent", "store lost"])
def test_a_gateway_that_is_not_heard_of_holds_nothing(how):
    world = World()
    world.take(1)
    world.turn(1, 0)
    assert world.backend(0).elsewhere.requests == 1
    if how == "silent":
        world.clock.at += 2.5
    else:
        world.store.lost = True
    world.turn(0)
    assert (world.backend(0).elsewhere.requests, world.backend(0).gateways) == (0, 1)


def test_what_another_version_tells_is_nothing():
    world = World()
    world.telling[0].table.hear({}, 1)
    asyncio.run(world.store.beat("new", "no json", 60, Board.UNDER_WAY))
    world.turn(0)
    assert world.backend(0).gateways == 2
    assert world.backend(0).elsewhere == UnderWay()


def test_all_tell_more_often_while_one_has_requests_that_wait():
    world = World()
    world.turn(0, 1, 0)
    calm_s = world.telling[0].pace_s()
    world.waiting.add(1)
    world.turn(1, 0)
    assert world.telling[0].pace_s() < calm_s
    assert world.telling[1].pace_s() < calm_s
    world.waiting.clear()
    world.clock.at += 3
    world.turn(1, 0, 1)
    assert world.telling[0].pace_s() == calm_s


def test_sums_over_all_time_are_told_as_what_came_since():
    before = UnderWay(1, read_tokens=700, ended_tokens=50)
    now = UnderWay(2, read_tokens=900, ended_tokens=80)
    assert since(before, now) == UnderWay(2, read_tokens=200, ended_tokens=30)
    fewer = UnderWay(2, read_tokens=600, ended_tokens=50)
    assert since(before, fewer) == UnderWay(2, read_tokens=-100)
    assert since(now, before) == UnderWay(1), "it counts anew"
    assert since(None, now) == UnderWay(2)
    assert together([UnderWay(1, 2), UnderWay(3, 4, read_tokens=5)]) == UnderWay(
        4, 6, read_tokens=5
    )
