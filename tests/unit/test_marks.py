"""What one replica says of a backend, the others do; and its own word counts until the store has it."""

import asyncio

from gateway.core.aio import SystemClock
from gateway.heal.marks import Mark, Marks
from gateway.pools.store import MemoryStore, StoreUnavailable

S, D = Mark.SUSPENDED, Mark.DRAINED
IDS = {S: ["m/a", "m/b"], D: ["m/a", "m/b"]}


class Store(MemoryStore):
    lost = False

    def __init__(self):
        super().__init__(SystemClock())

    async def hold(self, scope, for_s=None):
        if self.lost:
            raise StoreUnavailable
        await super().hold(scope, for_s)

    async def lift(self, scope):
        if self.lost:
            raise StoreUnavailable
        await super().lift(scope)


class Replica:
    """Marks, and what is in force here."""

    def __init__(self, store):
        self.marks, self.store, self.here = Marks(store), store, set()

    def say(self, mark, backend_id, *, on):
        (self.here.add if on else self.here.discard)((mark, backend_id))
        self.marks.say(mark, backend_id, on=on)

    def take(self, holds):
        found = [*self.marks.changes(holds, self.here, IDS)]
        for mark, backend_id, on in found:
            (self.here.add if on else self.here.discard)((mark, backend_id))
        return found

    async def turn(self):
        found = self.take(await self.store.holds())
        await self.marks.tell()
        return found


def replicas(test):
    def run():
        async def main():
            store = Store()
            await test(store, Replica(store), Replica(store))

        asyncio.run(main())

    run.__name__ = test.__name__
    return run


@replicas
async def test_what_one_says_the_other_does_once_and_undoes_when_it_is_taken_off(store, one, other):
    one.say(S, "m/a", on=True)
    one.say(D, "m/b", on=True)
    assert await one.turn() == []
    assert await other.turn() == [(D, "m/b", True), (S, "m/a", True)]
    assert await other.turn() == await one.turn() == []
    other.say(S, "m/a", on=False)  # whoever takes it off
    other.say(D, "m/b", on=False)
    assert await other.turn() == []
    assert await one.turn() == [(D, "m/b", False), (S, "m/a", False)]
    assert one.here == other.here == set()


@replicas
async def test_a_drained_backend_is_not_taken_for_a_suspended_one(store, one, other):
    one.say(D, "m/a", on=True)
    await one.turn()
    assert "m/a" not in await store.holds()
    assert await other.turn() == [(D, "m/a", True)]


@replicas
async def test_what_is_said_here_wins_over_a_store_that_does_not_have_it_yet(store, one, other):
    one.say(S, "m/a", on=True)
    await one.turn()
    await other.turn()
    before = await store.holds()
    other.say(S, "m/a", on=False)
    assert other.take(before) == []
    await other.marks.tell()
    assert await other.turn() == []
    assert other.here == set()


@replicas
async def test_a_store_that_was_lost_is_told_when_it_is_back(store, one, other):
    one.say(S, "m/a", on=True)
    store.lost = True
    await one.turn()
    assert await other.turn() == []
    store.lost = False
    await one.turn()
    assert await other.turn() == [(S, "m/a", True)]


@replicas
async def test_no_answer_of_the_store_takes_nothing_off(store, one, other):
    before = await store.holds()
    assert one.take(before) == []
    one.say(S, "m/a", on=True)
    await one.marks.tell()
    assert one.take(before) == []  # the store did not answer since
    assert one.here == {(S, "m/a")}


@replicas
async def test_what_is_said_while_the_store_is_told_is_told_too(store, one, other):
    hold = store.hold

    async def slow(scope, for_s=None):
        await hold(scope, for_s)
        one.say(S, "m/a", on=False)

    store.hold = slow
    one.say(S, "m/a", on=True)
    await one.marks.tell()
    assert "m/a" in await store.holds()
    assert await one.turn() == []
    assert "m/a" not in await store.holds()


@replicas
async def test_a_mark_outlives_the_replica_that_made_it(store, one, other):
    one.say(S, "m/a", on=True)
    await one.turn()
    heir = Replica(store)
    assert await heir.turn() == [(S, "m/a", True)]
