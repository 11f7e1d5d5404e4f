"""Which gateways share the store, as each of them knows it."""

import asyncio

import pytest

from gateway.config.models import Config
from gateway.core.traffic import Queued
from gateway.core.types import Phase
from gateway.heal.following import Following, told_of
from gateway.heal.names import Names
from gateway.observe.readings import queued_in_all
from gateway.ops.moment import Moment
from gateway.ops.sharing import store_told
from gateway.pools.table import PoolTable
from gateway.store.memory import MemoryStore
from gateway.store.replicas import ALIVE_S, Replicas, Told
from gateway.store.shared import StoreUnavailable
from tests.storecases import HeldClock


class Store(MemoryStore):
    lost = False

    async def beat(self, *args):
        if self.lost:
            raise StoreUnavailable("the connection was refused")
        return await super().beat(*args)


def some(*hashes):
    clock = HeldClock()
    store = Store(clock)
    every = [Replicas(store, clock, lambda each=each: Told("h", 1, "1.0", each)) for each in hashes]
    return clock, store, every


def turn(*replicas):
    for each in replicas:
        asyncio.run(each.turn())


def test_a_replica_knows_how_many_live_and_keeps_that_while_the_store_is_away():
    clock, store, (one, two, three) = some("x", "x", "x")
    assert one.alive == 1
    turn(one, two, three, one)
    assert one.alive == 3
    clock.at += ALIVE_S + 1
    turn(two, one)
    assert one.alive == 2
    store.lost = True
    clock.at += 100
    turn(one)
    assert one.alive == 2
    store.lost = False
    asyncio.run(two.leave())
    turn(one)
    clock.at += ALIVE_S + 1
    turn(one)
    assert one.alive == 1


def test_a_replica_that_hears_of_the_store_first_after_it_was_away_is_not_alone():
    """The others tell it within a second. If it is away again by then, they live all the same."""
    clock, store, (one, two, three) = some("x", "x", "x")
    turn(one, two, three, one)
    for _ in range(2):
        store.lost = True
        clock.at += ALIVE_S + 5
        turn(one, two, three)
        store.lost = False
        turn(one)
        assert one.alive == 3
    for _ in range(int(ALIVE_S) + 1):
        clock.at += 1
        turn(two, one)
    assert one.alive == 2


def test_the_workers_of_a_group_count_before_they_are_heard_of_and_while_one_is_started_again():
    _, _, (one, two) = some("x", "x")
    one.least = 2
    assert one.alive == 2
    turn(one)
    assert one.alive == 2
    turn(two, one)
    asyncio.run(two.leave())
    turn(one)
    assert one.alive == 2


def test_the_overview_tells_who_is_there_and_whose_configuration_differs():
    clock, _, (one, two) = some("x", "y")
    turn(two)
    clock.at += 7
    turn(one)
    here, other = sorted(
        store_told(one, Moment(clock.at, 0.0))["replicas"], key=lambda r: not r["here"]
    )
    assert (here["here"], here["alive"], here["config_agrees"]) == (True, True, True)
    assert (other["here"], other["alive"], other["config_agrees"]) == (False, False, False)
    assert other["heard_s"] == 7.0


def test_what_another_version_tells_is_taken_as_far_as_it_is_known():
    clock, store, (one,) = some("x")
    asyncio.run(store.beat("new", '{"host": "h2", "more": [1]}', 60))
    asyncio.run(store.beat("odd", "no json", 60))
    turn(one)
    told = {each.id: each.told for each in one.every}
    assert told["new"].host == "h2"
    assert told["odd"] == Told()


@pytest.mark.parametrize("ids", ["ab", "ba"])
def test_of_two_processes_of_the_first_worker_the_one_in_charge_is_followed(ids):
    """One took the other's place, which finishes its streams, and knows nothing more of what is worked on."""
    clock = HeldClock()
    store, table = MemoryStore(clock), PoolTable(clock)
    table.apply(Config(pools={"m": {"backends": [{"name": "b1", "url": "http://h:1"}]}}).pools)

    def worker(number, **more):
        told = Told("h", number, "1.0", "x", group="g", worker=number, **more)
        return Replicas(store, clock, lambda: told)

    tends = {"m/b1": ("draining", "restart", "finishing 1 request")}
    before, after = worker(1, in_charge=False), worker(1, tends=tends)
    before.id, after.id = ids
    other = worker(2, in_charge=False)
    turn(before, after, other)
    following = Following(table, store, Names(), other)
    asyncio.run(following.turn())
    (backend,) = table
    assert backend.phase is Phase.DRAINING


def test_what_is_worked_on_stays_so_when_a_reload_changes_how_it_is_reached():
    clock = HeldClock()
    store, table = MemoryStore(clock), PoolTable(clock)

    def apply(key):
        backend = {"name": "b1", "url": "http://h:1", "api_key": key}
        table.apply(Config(pools={"m": {"backends": [backend]}}).pools)

    def worker(number, **more):
        told = Told("h", number, "1.0", "x", group="g", worker=number, **more)
        return Replicas(store, clock, lambda: told)

    leader = worker(1, tends={"m/b1": ("draining", "restart", "finishing its requests")})
    other = worker(2, in_charge=False)
    turn(leader, other)
    following = Following(table, store, Names(), other)
    for key in ("one", "another"):
        apply(key)
        asyncio.run(following.turn())
        (backend,) = table
        assert backend.phase is Phase.DRAINING


def test_what_other_workers_carry_is_waited_for_until_they_have_told_that_it_is_nothing():
    clock = HeldClock()
    store = MemoryStore(clock)
    carried = {"m/b1": 2}

    def worker(number, group="g", in_flight=None):
        told = Told("h", number, "1.0", "x", group=group, worker=number, in_flight=in_flight or {})
        return Replicas(store, clock, lambda: told)

    leader, other, stranger = worker(1), worker(2, in_flight=carried), worker(3, "another", carried)
    turn(stranger, leader)
    assert not leader.carried_elsewhere("m/b1", clock.at), (
        "workers of another host have other servers"
    )
    turn(other, leader)
    since = clock.at
    assert leader.carried_elsewhere("m/b1", since)
    assert leader.carried_elsewhere("m/b2", since), "it may not have heard yet"
    clock.at += 3.0
    turn(other, leader)
    assert leader.carried_elsewhere("m/b1", since)
    assert not leader.carried_elsewhere("m/b2", since)
    carried.clear()
    turn(other, leader)
    assert not leader.carried_elsewhere("m/b1", since)
    carried["m/b1"] = 1
    turn(other)
    clock.at += ALIVE_S + 1
    turn(leader)
    assert not leader.carried_elsewhere("m/b1", since), "it died, and what it carried with it"


def test_what_the_workers_of_its_group_tell_is_heard_with_each_beat():
    clock = HeldClock()
    store = MemoryStore(clock)

    def worker(number, group, connections):
        told = Told("h", number, "1.0", "x", group=group, worker=number, connections=connections)
        return Replicas(store, clock, lambda: told)

    one, other, stranger = worker(1, "g", 3), worker(2, "g", 40), worker(3, "another", 500)
    heard = []
    one.on_heard.append(lambda fellows: heard.append([each.connections for each in fellows]))
    turn(one, other, stranger, one)
    assert heard == [[], [40]]


def test_a_replica_hears_which_backends_others_drain_by_the_names_that_all_use():
    clock = HeldClock()
    store = MemoryStore(clock)

    def replica(*drains):
        told = Told("h", 1, "1.0", "x", drains=drains)
        return Replicas(store, clock, lambda: told)

    one, other = replica("m/b1@here"), replica("m/b2")
    assert one.drained_elsewhere() == frozenset()
    turn(one, other, one)
    assert one.drained_elsewhere() == {"m/b2"}
    assert other.drained_elsewhere() == {"m/b1@here"}
    clock.at += 6
    turn(one)
    assert one.drained_elsewhere() == frozenset(), "who fell silent drains nothing any more"


def test_a_replica_tells_which_servers_are_about_to_be_stopped_and_what_it_has_at_each():
    clock = HeldClock()
    table = PoolTable(clock)
    urls = ["http://127.0.0.1:8001", "http://10.0.0.2:8000"]
    config = Config.model_validate({"pools": {"m": {"backends": urls}}})
    table.apply(config.pools, config.health)
    first, second = (table.get(each) for each in sorted(table.ids()))
    told = told_of(table, Names("here"), Told(), {}, [first])
    assert told.drains == (f"{first.id}@here",)
    assert told.carries == {f"{first.id}@here": 0, second.id: 0}


def test_what_other_gateways_carry_is_waited_for_where_it_is_the_same_server():
    clock = HeldClock()
    store, carried = MemoryStore(clock), {"m/b1@here": 0, "m/b2": 2}

    def gateway(group="", **more):
        told = Told("h", 1, "1.0", "x", group=group, **more)
        found = Replicas(store, clock, lambda: told)
        found.named = lambda each: f"{each}@here" if each == "m/b1" else each
        return found

    one, other = gateway(), gateway("g", carries=carried)
    turn(other, one)
    since = clock.at
    assert one.carried_elsewhere("m/b1", since), "it may not have heard yet"
    assert not one.carried_elsewhere("m/b3", since), "it has no such backend"
    assert one.at_other_gateways("m/b2") == 2
    clock.at += 4.0
    turn(other, one)
    assert not one.carried_elsewhere("m/b1", since)
    assert one.carried_elsewhere("m/b2", since)
    clock.at += ALIVE_S + 1
    turn(one)
    assert not one.carried_elsewhere("m/b2", since), "it died, and what it carried with it"
    assert one.at_other_gateways("m/b2") == 0


def test_a_server_that_a_reload_took_away_is_told_of_while_it_carries_something():
    clock = HeldClock()
    table, url = PoolTable(clock), "http://10.0.0.2:8000"

    def pool(*backends):
        return Config.model_validate({"pools": {"m": {"backends": [*backends]}}}).pools

    gone = {"name": "gone", "url": "http://127.0.0.1:8001"}
    table.apply(pool(gone, url))
    slots = [table.take("m/gone", clock.now()) for _ in range(2)]
    table.apply(pool(url))
    assert told_of(table, Names("here"), Told(), {}).in_flight == {"m/gone": 2}
    table.apply(pool({**gone, "url": "http://127.0.0.1:9001"}, url))  # another one has its name
    slots.append(table.take("m/gone", clock.now()))
    assert told_of(table, Names("here"), Told(), {}).in_flight == {
        "m/gone": 1,
        "m/gone http://127.0.0.1:8001": 2,
    }
    for each in slots:
        each.release()
    assert told_of(table, Names("here"), Told(), {}).in_flight == {}


def test_fellows_are_the_living_workers_of_the_same_group():
    clock = HeldClock()
    store = MemoryStore(clock)

    def worker(number, group="g"):
        told = Told(group=group, worker=number, queued={"m": Queued(number)})
        return Replicas(store, clock, lambda: told)

    one, two, stranger, alone = worker(1), worker(2), worker(3, "another"), worker(4, "")
    turn(one, two, stranger, alone, one)
    assert [each.worker for each in one.fellows()] == [2]
    assert alone.fellows() == []
    clock.at += 6
    turn(one)
    assert one.fellows() == []


def test_what_waits_in_all_workers_is_summed_and_the_oldest_of_all_is_told():
    own = {"m": Queued(1, 100, 0.5), "n": Queued()}
    fellows = [Told(queued={"m": Queued(2, 900, 3.0)}), Told(queued={"o": Queued(1, 50, 1.0)})]
    assert queued_in_all(own, fellows) == {
        "m": Queued(3, 1000, 3.0),
        "n": Queued(),
        "o": Queued(1, 50, 1.0),
    }
