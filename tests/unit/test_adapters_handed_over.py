"""Adapters in a process whose place another one took: it goes by what that one does."""

import asyncio
import contextlib

from gateway.adapters.keepers import Adapters
from gateway.adapters.memory import FILE, Memory, Order
from gateway.adapters.together import Together
from gateway.core.events import Events
from gateway.core.types import ModelsSeen
from gateway.store.memory import MemoryStore
from tests.gatehouse import held, passes
from tests.unit.test_adapter_keeper import LOAD_S, Server, Site


class Old(Site):
    """A process with a gate before a server that has one of two adapters."""

    def __init__(self, folder, together=None):
        super().__init__(folder)
        self.reads = 0  # connections to the server
        gate = self.house.gate
        self.adapters = Adapters(
            *(self.table, self.loop, Events(), Memory(folder), gate.awaited), connect=self.connect
        )
        self.adapters.together = together and together(self.loop)
        self.adapters.apply(self.settings)
        gate.on_wanted.append(self.adapters.want)
        self.house.scrape("m/b1")

    def connect(self, backend):
        self.reads += 1
        return Server(self.names)

    @contextlib.asynccontextmanager
    async def runs(self):
        running = self.loop.create_task(self.adapters.run())
        yield
        running.cancel()
        await asyncio.wait([running])

    async def lists(self, *names):
        """Have another process load these, and no others."""
        self.names.clear()
        self.names.update({name: f"/{name}" for name in names})

    async def guest(self, name):
        (guest,) = await self.house.guests(1, adapter=name, tokens=8)
        return guest


@held
async def goes_by_lists(folder):
    old = Old(folder)
    async with old.runs():
        await passes(8 * LOAD_S)
    assert [*old.names] == ["a"]
    old.adapters.hand_over()
    before = (folder / FILE).read_bytes()
    old.reads = 0
    async with old.runs():
        await passes(4 * LOAD_S)
        assert old.reads == 0
        waits = await old.guest("b")
        await passes(4 * LOAD_S)
        assert (waits.waits, [*old.names]) == (True, ["a"])
        for name in ("b", "a"):
            waits = await old.guest(name)
            await passes(LOAD_S)
            assert waits.waits, waits.refusal
            await old.lists(name)
            await passes(LOAD_S)
            assert waits.inside
            waits.end()
        old.reads = 0
        await passes(4 * LOAD_S)
        assert old.reads == 0
    assert (folder / FILE).read_bytes() == before


def test_it_lets_requests_in_as_servers_list_their_adapters_and_loads_and_writes_nothing(tmp_path):
    goes_by_lists(tmp_path)


@held
async def follows_through_the_store(folder):
    store = None

    def member(name):
        def together(loop):
            nonlocal store
            store = store or MemoryStore(loop)
            return Together(store, loop, name)

        return together

    old = Old(folder / "old", member("old"))
    async with old.runs():
        await passes(8 * LOAD_S)
    assert [*old.names] == ["a"]
    new = Old(folder / "new", member("new"))
    new.names = old.names
    listed = await Server(new.names).models()
    new.table.observe("m/b1", ModelsSeen(new.loop.time(), listed, None, "0.32.0"))
    new.adapters.memory.note("m/b1", "a")  # from the state folder
    old.adapters.memory.order("m/b1", "b", Order(keep=False))  # the new one was told to end it
    old.adapters.hand_over()
    async with old.runs(), new.runs():
        await passes(LOAD_S)
        waits = await old.guest("b")
        await passes(8 * LOAD_S)
        assert (waits.inside, [*old.names]) == (True, ["b"])


def test_of_several_gateways_it_leaves_the_lead_at_once_and_has_its_adapters_loaded_by_the_next(
    tmp_path,
):
    follows_through_the_store(tmp_path)


@held
async def loads_for_the_old_one(folder):
    new = Old(folder)
    async with new.runs():
        await passes(8 * LOAD_S)
        assert [*new.names] == ["a"]
        new.adapters.awaited_before = {"m": frozenset("b"), "gone": frozenset("c")}
        await passes(4 * LOAD_S)
        assert [*new.names] == ["b"]
        assert new.adapters.awaited("m") == {"b"}  # so that the next process hears of it, too


def test_what_requests_of_the_old_process_wait_for_is_loaded_by_the_new_one(tmp_path):
    loads_for_the_old_one(tmp_path)
