"""A replica may restart the backends of the pools whose lease it holds."""

import asyncio
import math

from gateway.heal.leases import Leases
from gateway.store.memory import MemoryStore
from gateway.store.shared import LEASE_S, LEFT_S, RENEW_S, StoreUnavailable


class Held:
    """A clock that is held."""

    def __init__(self):
        self.at = 100.0

    def now(self):
        return self.at

    def wall(self):
        return self.at


class Store(MemoryStore):
    lost = False

    async def holds(self):
        if self.lost:
            raise StoreUnavailable
        return await super().holds()

    async def renew(self, lease):
        if self.lost:
            raise StoreUnavailable
        return await super().renew(lease)


def run(story):
    asyncio.run(story())


def test_one_of_two_leads_a_pool_and_keeps_it():
    async def story():
        clock = Held()
        store = Store(clock)
        one, other = Leases(store, clock), Leases(store, clock)
        assert await one.keep({"a": "a"}) == {"a"}
        assert await other.keep({"a": "a", "b": "b"}) == {"b"}
        for _ in range(20):
            clock.at += RENEW_S
            assert await one.keep({"a": "a"}) == {"a"}
            assert await other.keep({"a": "a", "b": "b"}) == {"b"}

    run(story)


def test_one_that_goes_or_falls_silent_is_followed():
    async def story():
        clock = Held()
        store = Store(clock)
        one, other = Leases(store, clock), Leases(store, clock)
        await one.keep({"a": "a"})
        await one.release()
        assert await other.keep({"a": "a"}) == {"a"}
        clock.at += LEASE_S
        assert await one.keep({"a": "a"}) == {"a"}
        assert await other.keep({"a": "a"}) == frozenset()

    run(story)


def test_without_the_store_nobody_leads_for_long_and_holds_stay():
    async def story():
        clock = Held()
        store = Store(clock)
        leases = Leases(store, clock)
        await store.hold("a", None)
        await leases.keep({"a": "a"})
        store.lost = True
        clock.at += LEASE_S - LEFT_S
        assert await leases.keep({"a": "a"}) == {"a"}
        clock.at += 0.1
        assert await leases.keep({"a": "a"}) == frozenset()
        assert "a" in leases.holds
        store.lost = False
        assert await leases.keep({"a": "a"}) == {"a"}  # it was not taken meanwhile: it is renewed

    run(story)


def test_a_pool_goes_by_the_name_of_its_lease():
    async def story():
        clock = Held()
        store = Store(clock)
        one, other = Leases(store, clock), Leases(store, clock)
        assert await one.keep({"a": "restarts/a@one"}) == {"a"}
        assert await other.keep({"a": "restarts/a@other"}) == {"a"}
        assert await Leases(store, clock).keep({"a": "restarts/a@one"}) == frozenset()

    run(story)


def test_what_the_store_lost_is_told_anew_and_what_was_lifted_is_not():
    async def story():
        clock = Held()
        stores = [Store(clock), Store(clock)]
        leases = Leases(stores[0], clock)
        for scope, for_s in (("a", 60.0), ("b", None), ("c", None), ("d", 5.0)):
            await stores[0].hold(scope, for_s)
        await leases.keep({})
        await stores[0].lift("c")
        await leases.keep({})
        leases._store = stores[1]  # it came back empty
        clock.at += 10
        await leases.keep({})
        assert leases.holds == {"a": 160.0, "b": math.inf}
        assert await stores[1].holds() == {"a": 160.0, "b": math.inf}

    run(story)
