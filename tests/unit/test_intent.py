"""What operators want outlives the gateway, and what one replica says the others do."""

import asyncio
import math

import pytest

from gateway.core.aio import SystemClock
from gateway.heal.intent import FILE, Intent, Mark
from gateway.store.memory import MemoryStore
from gateway.store.shared import LIFTED, StoreUnavailable
from tests.storecases import HeldClock

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

    def forget(self):
        self._holds = {}

    async def lift(self, scope):
        if self.lost:
            raise StoreUnavailable
        await super().lift(scope)


class Replica:
    """One replica's intent."""

    def __init__(self, store, folder):
        self.intent, self.store = Intent(store, SystemClock(), folder), store

    @property
    def here(self):
        return {(mark, each) for mark in Mark for each in IDS[mark] if self.intent.has(mark, each)}

    def say(self, mark, backend_id, *, on):
        self.intent.say(mark, backend_id, on=on)

    def take(self, holds):
        return [*self.intent.changes(holds, IDS)]

    async def turn(self):
        found = self.take(await self.store.holds())
        await self.intent.tell()
        return found


def replicas(test):
    def run(tmp_path):
        async def main():
            store = Store()
            await test(store, Replica(store, tmp_path / "1"), Replica(store, tmp_path / "2"))

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
    await other.intent.tell()
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
    await one.intent.tell()
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
    await one.intent.tell()
    assert "m/a" in await store.holds()
    assert await one.turn() == []
    assert (await store.holds())["m/a"] == LIFTED


@replicas
async def test_what_the_store_lost_is_taken_off_nowhere_and_told_anew(store, one, other):
    one.say(S, "m/a", on=True)
    one.say(D, "m/b", on=True)
    for each in (one, other, one):
        await each.turn()
    store.forget()
    assert await other.turn() == await one.turn() == []
    assert one.here == other.here == {(S, "m/a"), (D, "m/b")}
    assert set(await store.holds()) == {"m/a", "m/b#drained"}


@replicas
async def test_a_mark_that_was_lifted_while_its_replica_was_away_is_not_told_again(
    store, one, other
):
    for mark, backend_id in ((S, "m/a"), (D, "m/b"), (D, "m/a")):
        one.say(mark, backend_id, on=True)
    await one.turn()
    await other.turn()
    other.say(S, "m/a", on=False)
    other.say(D, "m/b", on=False)
    await other.turn()
    heir = Replica(store, one.intent.folder)
    heir.say(D, "m/b", on=True)  # said since: that counts
    await heir.intent.tell()  # the store did not answer first, and does so now
    await heir.intent.restore(await store.holds())
    assert await heir.turn() == [(S, "m/a", False)]
    assert heir.here == {(D, "m/a"), (D, "m/b")}
    assert await other.turn() == [(D, "m/b", True)]


@replicas
async def test_a_mark_that_the_store_did_not_hear_was_taken_off_stays_so_for_the_next_gateway(
    store, one, other
):
    one.say(D, "m/a", on=True)
    one.say(S, "m/b", on=True)
    await one.turn()
    await other.turn()
    store.lost = True
    one.say(D, "m/a", on=False)
    one.say(S, "m/b", on=False)
    await one.turn()
    heir = Replica(store, one.intent.folder)
    assert await heir.turn() == []  # the store still has both, and does not hear of it here either
    store.lost = False
    await heir.intent.restore(await store.holds())
    assert await heir.turn() == []
    assert heir.here == set()
    assert set(await other.turn()) == {(D, "m/a", False), (S, "m/b", False)}
    other.say(D, "m/a", on=True)
    await other.turn()
    again = Replica(store, one.intent.folder)  # which has nothing left to tell
    assert await again.turn() == [(D, "m/a", True)]


@replicas
async def test_what_is_given_a_mark_again_was_not_taken_off(store, one, other):
    for on in (True, False, True):
        one.say(D, "m/a", on=on)
    assert Replica(store, one.intent.folder).here == {(D, "m/a")}
    await Replica(store, one.intent.folder).turn()
    assert await other.turn() == []


@replicas
async def test_a_store_that_hangs_keeps_no_gateway_from_its_end(store, one, other):
    async def hangs(scope):
        await asyncio.Event().wait()

    one.say(D, "m/a", on=True)
    await one.turn()
    store.lift = hangs
    one.say(D, "m/a", on=False)
    async with asyncio.timeout(10):
        await one.intent.close()
    del store.lift
    await Replica(store, one.intent.folder).turn()
    assert (await store.holds())["m/a#drained"] == LIFTED


@replicas
async def test_a_hold_that_another_replica_lifted_does_not_come_back_with_the_next_gateway(
    store, one, other
):
    await one.intent.hold(None, None, "new disks")
    await one.turn()
    await other.intent.lift(None)
    before = await store.holds()
    await one.intent.hold("m", None, "")
    await one.turn()
    assert set(one.intent.holds) == {"m"}
    store.forget()  # that it was lifted is told for 30 days
    await Replica(store, one.intent.folder).intent.restore(await store.holds())
    assert set(await store.holds()) == {"m"}
    one.take({**before, "m": LIFTED})
    assert set(one.intent.holds) == set()


@replicas
async def test_a_hold_that_was_set_as_the_store_answered_stays(store, one, other):
    await one.intent.hold("m", None, "")
    await other.intent.lift("m")
    answer = await store.holds()  # on its way, while
    await one.intent.hold("m", None, "new disks")
    one.take(answer)
    assert set(one.intent.holds) == {"m"}
    await one.turn()
    assert set(one.intent.holds) == {"m"}


@replicas
async def test_marks_go_by_the_names_that_all_replicas_use(store, one, other):
    one.intent.named = other.intent.named = lambda backend_id: f"{backend_id}@here"
    one.say(D, "m/a", on=True)
    await one.turn()
    assert set(await store.holds()) == {"m/a@here#drained"}
    assert await other.turn() == [(D, "m/a", True)]


@replicas
async def test_a_mark_outlives_the_replica_that_made_it(store, one, other):
    one.say(S, "m/a", on=True)
    await one.turn()
    heir = Replica(store, one.intent.folder / "heir")
    assert await heir.turn() == [(S, "m/a", True)]


# --- on disk --------------------------------------------------------------------------------------


def started(folder, store=None):
    return Intent(store or MemoryStore(SystemClock()), SystemClock(), folder)


def test_what_was_said_is_known_to_the_next_gateway_and_told_to_its_store(tmp_path):
    first = started(tmp_path)
    first.say(S, "m/a", on=True, why="5 restarts did not help")
    first.say(D, "m/b", on=True, why="disk")
    first.say(D, "m/a", on=True)
    first.say(D, "m/a", on=False)
    again = started(tmp_path)
    assert (again.has(S, "m/a"), again.why(S, "m/a")) == (True, "5 restarts did not help")
    assert (again.has(D, "m/b"), again.why(D, "m/b")) == (True, "disk")
    assert not again.has(D, "m/a")
    asyncio.run(again.restore({}))
    asyncio.run(again.tell())
    holds = asyncio.run(again.store.holds())
    assert {scope for scope, end in holds.items() if end != LIFTED} == {"m/a", "m/b#drained"}
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("leap_s", [-7200.0, 7200.0])
def test_a_hold_lasts_as_long_as_the_store_says_though_the_clock_is_set(tmp_path, leap_s):
    class Set(HeldClock):
        ahead_s = 0.0

        def wall(self):
            return self.at + self.ahead_s

    clock = Set()
    intent = Intent(MemoryStore(clock), clock, tmp_path)
    asyncio.run(intent.hold("m", 600.0, "new disks"))
    clock.ahead_s = leap_s
    for passed_s, holds in ((599.0, True), (2.0, False)):
        clock.at += passed_s
        assert bool(asyncio.run(intent.store.holds())) is holds
        assert intent.holds_now("m") is holds


def test_holds_go_on_for_what_is_left_of_their_time(tmp_path):
    class Wall(SystemClock):
        def wall(self):
            return 1000.0 + self.passed_s

    clock = Wall()
    clock.passed_s = 0.0

    async def main():
        first = Intent(MemoryStore(clock), clock, tmp_path)
        await first.hold("m", 600.0, "new disks")
        await first.hold("x", 60.0, "")
        await first.hold(None, None, "")
        clock.passed_s = 100.0
        again = Intent(MemoryStore(clock), clock, tmp_path)
        await again.restore(await again.store.holds())
        holds = await again.store.holds()
        assert set(holds) == {"m", None}
        assert holds["m"] - clock.now() == pytest.approx(500.0, abs=1.0)
        assert holds[None] == math.inf
        await again.lift(None)
        third = Intent(MemoryStore(clock), clock, tmp_path)
        await third.restore(await third.store.holds())
        assert set(await third.store.holds()) == {"m"}
        await third.store.lift("m")  # by another replica
        fourth = Intent(third.store, clock, tmp_path)
        await fourth.restore(await fourth.store.holds())
        assert (await fourth.store.holds())["m"] == LIFTED
        fifth = Intent(MemoryStore(clock), clock, tmp_path)
        await fifth.restore({})
        assert await fifth.store.holds() == {}

    asyncio.run(main())


def test_an_order_that_cannot_be_saved_is_carried_out_and_says_so(tmp_path, caplog):
    (tmp_path / "state").write_text("a file, not a folder")
    intent = started(tmp_path / "state")
    intent.say(D, "m/a", on=True)
    assert intent.has(D, "m/a")
    assert not intent.saved
    assert "cannot save what operators ordered" in caplog.text


def test_a_damaged_file_counts_as_empty_and_is_told(tmp_path, caplog):
    (tmp_path / FILE).write_text("{")
    assert not started(tmp_path).has(D, "m/a")
    assert f"cannot read {tmp_path / FILE}" in caplog.text


def test_a_file_that_cannot_be_read_is_told_once(tmp_path, caplog):
    (tmp_path / FILE).mkdir()
    started(tmp_path)
    assert caplog.messages[0] == (
        f"cannot read {tmp_path / FILE}, so it counts as empty: Is a directory."
    )


def test_a_damaged_file_is_kept_aside_so_that_no_order_is_lost_for_good(tmp_path, caplog):
    damaged = b'{"drained": {"m/a": {"at": 1.0'
    (tmp_path / FILE).write_bytes(damaged)
    intent = Intent(Store(), SystemClock(), tmp_path)
    intent.say(D, "m/b", on=True)
    aside = tmp_path / f"{FILE}.damaged"
    assert aside.read_bytes() == damaged
    assert str(aside) in caplog.text
    assert Intent(Store(), SystemClock(), tmp_path).has(D, "m/b")
