"""Which gateways share the store, as each of them knows it."""

import asyncio

from gateway.ops.moment import Moment
from gateway.ops.sharing import store_told
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
    assert one.alive == 1


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
