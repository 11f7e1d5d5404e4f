"""One seat for several gateways, on a store that loses things."""

import asyncio

import pytest

from gateway.store.memory import MemoryStore
from gateway.store.seat import Seat
from gateway.store.shared import StoreUnavailable
from tests.storecases import HeldClock


class Forgetful(MemoryStore):
    """A store that may lose its leases, and take no new ones."""

    full = False  # by then it has forgotten them

    async def renew(self, lease):
        return None if self.full else await super().renew(lease)

    async def acquire(self, name, holder):
        if self.full:
            raise StoreUnavailable("it was too slow")
        return await super().acquire(name, holder)

    def forget(self):
        self._leases.clear()


def test_who_lost_a_seat_does_not_hold_it_because_the_store_fails_then():
    async def story():
        clock = HeldClock()
        store = Forgetful(clock)
        one, other = (Seat("adapters", name, store, clock) for name in ("one", "other"))
        await one.keep()
        assert one.ours
        store.forget()
        await other.keep()
        assert other.ours
        store.full = True
        with pytest.raises(StoreUnavailable):
            await one.keep()
        return one.ours, other.ours

    assert asyncio.run(story()) == (False, True)


def test_another_one_has_a_seat_at_once_that_was_given_up():
    async def story():
        clock = HeldClock()
        store = MemoryStore(clock)
        one, other = (Seat("adapters", name, store, clock) for name in ("one", "other"))
        await one.keep()
        await other.leave()  # it never had it
        assert (one.ours, other.ours) == (True, False)
        await one.leave()
        await other.keep()
        return one.ours, other.ours

    assert asyncio.run(story()) == (False, True)
