"""What workers without Redis give out of a limit, from their first moment on."""

import asyncio
import os
import socket
from contextlib import ExitStack, suppress

import pytest

from gateway.app import build
from gateway.config.load import load_config
from gateway.core.aio import start
from gateway.core.channel import Channel, Unanswered
from gateway.core.limits import Amounts, KeyLimits, Rule, Taken
from gateway.limiting import scripts
from gateway.limiting.inparent import SharedLevels
from gateway.limiting.limiter import RUNS_S, Limiter
from gateway.observe.outlet import Outlet
from gateway.store.group import Group, GroupScripts, Place
from tests.limitercases import LimiterCases, LimiterDesk, fits, plan_of, used_of
from tests.storecases import HeldClock

SETTINGS = """
pools:
  m: {backends: [{url: "http://127.0.0.1:1"}]}
"""


def test_workers_that_have_not_heard_of_each_other_give_out_no_more_than_a_limit(tmp_path):
    path = tmp_path / "gateway.yaml"
    path.write_text(SETTINGS)
    (tmp_path / "keys.yaml").write_text("keys: []\n")
    address = f"vllm-gateway-test-{os.getpid()}"

    async def taken_of(count, limit):
        plan = plan_of(KeyLimits(concurrent_requests=limit))
        with ExitStack() as stack:
            parent = stack.enter_context(socket.socket(socket.AF_UNIX))
            parent.bind("\0" + address)
            parent.listen()
            found = []
            for number in range(1, count + 1):
                group = Group.join(Place(number, count, address, 0, 0))
                worker = build(load_config(path), path, Outlet(), group=group)
                limiter, cost = worker.handler.limiter, Amounts(1, 1, 1, 2, 0)
                takes = [await limiter.take(plan, cost) for _ in range(limit)]
                found.append(sum(isinstance(each, Taken) for each in takes))
                await worker.accounts.close()
                channel = start(group.channel.run(), name="channel")
                await group.channel.open.wait()
                channel.cancel()
                await asyncio.wait([channel])
            return found

    assert asyncio.run(taken_of(2, 6)) == [3, 3]
    assert asyncio.run(taken_of(4, 10)) == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("days", "used"),
    [(0, "61.000000000 601.000000000"), (1, "1.000000000 601.000000000"), (40, "1.000000000 1.000000000")],
)  # fmt: skip
def test_what_was_spent_counts_for_its_own_day_and_month_although_it_is_told_after_them(days, used):
    """A worker tells its parent at the end of a day, and is heard in the next one."""
    clock = HeldClock()
    parent = SharedLevels(clock)
    plan = plan_of(KeyLimits(tokens_per_day=1000, tokens_per_month=1000))
    told = f"{clock.wall() // 86_400:.0f} 60 600"
    clock.at += days * 86_400
    parent.run(scripts.RECALL.sha, plan.stores, (plan.calendar, told))
    taking = scripts.words("lease 30000", Amounts(1, 1, 0, 1, 0), plan.words)
    assert parent.run(scripts.TAKE.sha, plan.stores, taking).split(" ", 2)[2] == used


PATIENCE_S = 2.0


class PatientScripts(GroupScripts):
    """Waits longer than a request does: these tests ask what the parent decides, however busy the machine is."""

    async def ask(self, script, keys, args, within_s=PATIENCE_S, late=None):
        return await super().ask(script, keys, args, max(within_s, PATIENCE_S), late)


class Workers(LimiterDesk):
    """A limiter in a worker, over the channel to its parent; `fellow` makes one more."""

    def __init__(self):
        self.shared, self.running = None, []
        self.answers = {}  # that the parent gives in tasks of their own
        super().__init__(self.worker_link)
        self.run(self.opened())

    def worker_link(self, clock):
        self.shared = self.shared or SharedLevels(clock)
        here, there = socket.socketpair()
        for each in (here, there):
            each.setblocking(False)
        group = Group(Place(1, 2, "", 0, 0))
        group.channel, parent = Channel(here, {}), Channel(there, self.answers)
        parent.at_once = {"limits": self.shared.run}
        self.running += [group.channel, parent]
        return PatientScripts(group)

    async def opened(self):
        self.tasks = [start(each.run(), name="channel") for each in self.running]
        for each in self.running:
            await each.open.wait()

    def passes(self, seconds):
        self.run(self.arrived())
        super().passes(seconds)

    async def arrived(self):
        """Wait until the parent has read what it was told."""
        with suppress(Unanswered):
            await self.running[0].ask("limits", "", [], [], within_s=5)

    def fellow(self, spent=None):
        fellow = Workers.__new__(Workers)
        fellow.__dict__.update(self.__dict__, running=[])
        fellow.store = Limiter(self.clock, fellow.worker_link(self.clock), lambda: 2, spent)
        self.run(fellow.opened())
        self.tasks += fellow.tasks
        return fellow

    def close(self):
        async def closed():
            for each in self.tasks:
                each.cancel()
            await asyncio.wait(self.tasks)

        self.run(closed())
        super().close()


@pytest.fixture
def desk():
    desk = Workers()
    yield desk
    desk.close()


class TestInTheParent(LimiterCases):
    pass


def test_one_worker_gives_out_all_that_the_others_leave(desk):
    fellow, limits = desk.fellow(), KeyLimits(requests_per_minute=10, concurrent_requests=9)
    assert [fits(desk.take(limits)) for _ in range(7)] == [True] * 7
    found = [fellow.take(limits) for _ in range(3)]
    assert [fits(each) for each in found] == [True, True, False]
    assert (found[-1].why.most, found[-1].why.used, found[-1].share_of) == (9, 9, 1)


def test_what_a_dead_worker_ran_makes_room_when_its_lease_ends(desk):
    fellow, limits = desk.fellow(), KeyLimits(concurrent_requests=2)
    assert fits(desk.take(limits))
    assert fits(fellow.take(limits))
    desk.passes(RUNS_S / 2)
    desk.run(desk.store.renew())
    assert not fits(desk.take(limits))
    desk.passes(RUNS_S / 2 + 1)
    assert [fits(desk.take(limits)) for _ in range(2)] == [True, False]


def test_days_go_on_from_what_was_used_before_the_gateway_began(desk):
    desk.starts_a_day()
    limits = KeyLimits(requests_per_minute=100, tokens_per_day=1000)
    first, second = (desk.fellow(lambda rule, key_id: 600.0) for _ in range(2))
    assert [fits(each.take(limits, 150)) for each in (first, second, first)] == [True, True, False]


def test_what_was_used_before_is_summed_up_once_however_often_a_plan_is_compiled(desk):
    asked = []
    fellow = desk.fellow(lambda rule, key_id: asked.append(key_id) or 0.0)
    for _ in range(3):
        fellow.plans.clear()
        assert fits(fellow.take(KeyLimits(tokens_per_day=1000), 150))
    assert len(asked) == 1


@pytest.mark.parametrize("gone", [True, False])
def test_a_parent_that_does_not_answer_leaves_each_its_share(desk, gone):
    limits = KeyLimits(requests_per_minute=10)
    desk.replicas = 2
    assert fits(desk.take(limits))
    if gone:
        desk.run(ended(desk.tasks[1]))
    else:
        desk.running[1].at_once = {"limits": lambda *args: ""}  # a parent of another version
    desk.passes(120)
    found = [desk.take(limits) for _ in range(6)]
    assert [fits(each) for each in found] == [True] * 5 + [False]
    assert (found[-1].why.most, found[-1].share_of) == (5, 2)


def test_what_a_parent_lets_through_too_late_uses_up_nothing(desk):
    parent, limits = desk.running[1], KeyLimits(tokens_per_month=10_000)
    at_once, parent.at_once, may_answer = parent.at_once, {}, asyncio.Event()

    async def answer(*args):
        await may_answer.wait()
        return desk.shared.run(*args)

    desk.answers["limits"] = answer
    assert not desk.take(limits, 100, 4_000).shared
    may_answer.set()
    desk.run(desk.arrived())
    parent.at_once = at_once
    desk.run(desk.arrived())  # it has what was given back
    desk.clock.at += 2  # and is asked again
    again = desk.take(limits, 1)
    assert again.shared
    assert used_of(again)[Rule.TOKENS_MONTH] == 1


def test_what_was_used_while_the_parent_did_not_answer_is_told_at_once_when_it_does(desk):
    desk.starts_a_day()
    parent, limits, keys = desk.running[1], KeyLimits(tokens_per_day=10_000), ("a", "b", "c")
    at_once, parent.at_once = parent.at_once, {"limits": lambda *args: ""}
    for key in keys:
        desk.settle(desk.take(limits, 100, 900, key=key), 100, 900)
    parent.at_once = at_once
    desk.run(desk.store.tell_owed())
    desk.clock.at += 2  # it is asked again
    used = [used_of(desk.take(limits, 1, key=key))[Rule.TOKENS_DAY] for key in keys]
    assert used == [1001] * 3


def test_what_ends_while_the_parent_reads_nothing_is_told_when_it_does(desk):
    desk.starts_a_day()
    limits = KeyLimits(tokens_per_day=10_000, concurrent_requests=1)
    taken = desk.take(limits, 100, 4_000)

    async def ends_while_much_is_unread():
        for _ in range(300):
            desk.running[0].tell("limits", "", [], ["x" * 10_000])
        desk.store.settle(taken, Amounts(1, 100, 900, 1000, 0))

    desk.run(ends_while_much_is_unread())
    desk.run(desk.arrived())
    desk.run(desk.store._turn())
    again = desk.take(limits, 1)
    assert fits(again)
    assert used_of(again) == {Rule.TOKENS_DAY: 1001, Rule.CONCURRENT: 1}


async def ended(task):
    task.cancel()
    await asyncio.wait([task])


def test_what_a_parent_does_not_read_is_not_kept_for_ever():
    async def told():
        here, there = socket.socketpair()
        for each in (here, there):
            each.setblocking(False)
        with there:
            channel = Channel(here, {})
            task = start(channel.run(), name="channel")
            await channel.open.wait()
            # In few pieces: Python 3.12 adds up the lengths of all that wait, each time it is asked.
            for _ in range(1_000):
                channel.tell("limits", "x" * 10_000)
            read, loop = 0, asyncio.get_running_loop()
            with suppress(TimeoutError):
                while True:
                    async with asyncio.timeout(1):
                        read += len(await loop.sock_recv(there, 1 << 20))
        await asyncio.wait([task])
        return read

    assert asyncio.run(told()) < 5 << 20
