"""A replica may restart the backends of the pools whose lease it holds."""

import asyncio

from gateway.heal.leases import Leases
from gateway.pools.store import LEASE_S, LEFT_S, RENEW_S, MemoryStore, StoreUnavailable


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
        assert await one.keep(["a"]) == {"a"}
        assert await other.keep(["a", "b"]) == {"b"}
        for _ in range(20):
            clock.at += RENEW_S
            assert await one.keep(["a"]) == {"a"}
            assert await other.keep(["a", "b"]) == {"b"}

    run(story)


def test_one_that_goes_or_falls_silent_is_followed():
    async def story():
        clock = Held()
        store = Store(clock)
        one, other = Leases(store, clock), Leases(store, clock)
        await one.keep(["a"])
        await one.release()
        assert await other.keep(["a"]) == {"a"}
        clock.at += LEASE_S
        assert await one.keep(["a"]) == {"a"}
        assert await other.keep(["a"]) == frozenset()

    run(story)


def test_without_the_store_nobody_leads_for_long_and_holds_stay():
    async def story():
        clock = Held()
        store = Store(clock)
        leases = Leases(store, clock)
        await store.hold("a", None)
        await leases.keep(["a"])
        store.lost = True
        clock.at += LEASE_S - LEFT_S
        assert await leases.keep(["a"]) == {"a"}
        clock.at += 0.1
        assert await leases.keep(["a"]) == frozenset()
        assert "a" in leases.holds
        store.lost = False
        assert await leases.keep(["a"]) == {"a"}  # it was not taken meanwhile: it is renewed

    run(story)
