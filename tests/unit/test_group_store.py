"""The shared store of workers: the one that their parent keeps, over the channel to it."""

import asyncio
import socket

import pytest

from gateway.core.aio import start
from gateway.core.channel import Channel
from gateway.store.group import Group, GroupStore, Place, store_answers
from gateway.store.memory import MemoryStore
from gateway.store.shared import StoreUnavailable
from tests.storecases import Desk, HeldClock, StoreCases

PATIENCE_S = 60.0  # a busy machine answers late, which is none of these tests' business


class WorkerDesk(Desk):
    """The store as one worker has it. `leases` are those that its parent knows it to hold."""

    def __init__(self):
        self.leases = {}
        super().__init__(self.linked)
        self.run(self.opened())

    def linked(self, clock):
        here, there = socket.socketpair()
        for each in (here, there):
            each.setblocking(False)
        group = Group(Place(1, 2, "", 0, 0))
        group.channel = Channel(here, group.answers)
        self.ends = group.channel, Channel(there, store_answers(MemoryStore(clock), self.leases))
        return GroupStore(group, within_s=PATIENCE_S)

    async def opened(self):
        self.tasks = [start(each.run(), name="channel") for each in self.ends]
        for each in self.ends:
            await each.open.wait()

    async def cut_off(self):
        for each in self.tasks:
            each.cancel()
        await asyncio.wait(self.tasks)

    def close(self):
        self.run(self.cut_off())
        super().close()


@pytest.fixture
def desk():
    desk = WorkerDesk()
    yield desk
    desk.close()


class TestInTheParent(StoreCases):
    pass


def test_the_parent_knows_which_leases_a_worker_took(desk):
    lease = desk.acquire("chat", "a")
    assert desk.acquire("chat", "b") is None
    assert desk.leases == {"chat": lease}


def test_a_parent_that_has_gone_is_a_store_that_does_not_answer(desk):
    lease = desk.acquire("chat", "a")
    desk.run(desk.cut_off())
    for call in (lambda: desk.renew(lease), lambda: desk.claim_restart("p/a", "one"), desk.holds):
        with pytest.raises(StoreUnavailable):
            call()


class Late(MemoryStore):
    """A store that does what it is asked, and answers when it may."""

    async def claim_restart(self, *claim):
        claimed = await super().claim_restart(*claim)
        await self.answers.wait()
        return claimed


def test_a_claim_that_was_confirmed_too_late_is_confirmed_when_it_is_asked_again():
    async def claims():
        store = Late(HeldClock())
        store.answers = asyncio.Event()
        here, there = socket.socketpair()
        for each in (here, there):
            each.setblocking(False)
        group = Group(Place(1, 2, "", 0, 0))
        group.channel = Channel(here, group.answers)
        ends = group.channel, Channel(there, store_answers(store, {}))
        tasks = [start(each.run(), name="channel") for each in ends]
        await group.channel.open.wait()
        worker = GroupStore(group, within_s=0.05)
        with pytest.raises(StoreUnavailable):
            await worker.claim_restart("p/a", "one")
        store.answers.set()
        another = await GroupStore(group, within_s=PATIENCE_S).claim_restart("p/a", "one")
        worker.within_s = PATIENCE_S
        again = [await worker.claim_restart("p/a", "one") for _ in range(2)]
        for each in tasks:
            each.cancel()
        await asyncio.wait(tasks)
        return another, again

    assert asyncio.run(claims()) == (False, [True, False])
