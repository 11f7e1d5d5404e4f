"""The owner of a pool's adapters: what it begins, and when."""

import asyncio

from gateway.adapters.keeper import Done, PoolAdapters, Tools
from gateway.adapters.memory import Memory
from gateway.config.models import Config
from gateway.core.events import Events
from gateway.core.types import ModelsSeen, Need, ServedModel
from gateway.watch.adapters import AdapterError
from tests.gatehouse import House, held, passes

BASE = ServedModel("m", None, None)
LOAD_S = 1.0


class Server:
    """One that loads in a second, but for adapters that it has not."""

    def __init__(self, names, broken=()):
        self.names, self.broken = names, broken

    async def load(self, name, path):
        await asyncio.sleep(LOAD_S)
        if name in self.broken:
            raise AdapterError("no such file")
        self.names[name] = path

    async def unload(self, name):
        self.names.pop(name, None)

    async def models(self):
        return (BASE, *(ServedModel(name, "m", None, path) for name, path in self.names.items()))

    def close(self):
        pass


class Site:
    """A pool of one server that keeps one adapter of two, and its keeper."""

    def __init__(self, folder):
        adapters = [{"name": name, "path": f"/{name}"} for name in "ab"]
        backend = {"url": "http://127.0.0.1:8001", "max_cpu_loras": 1}
        pools = {"m": {"backends": [backend], "adapters": adapters}}
        self.house, self.names, self.tasks, self.broken = House(**pools), {}, [], set()
        self.table, self.loop = self.house.table, self.house.loop
        self.table.observe("m/b1", ModelsSeen(self.loop.time(), (BASE,), None, "0.32.0"))
        tools = Tools(
            self.table, self.loop, Events(), Memory(folder), lambda backend: Server(self.names, self.broken),
            lambda work, name: self.tasks.append(self.loop.create_task(work)),
        )  # fmt: skip
        self.keeper = PoolAdapters("m", Config.model_validate({"pools": pools}).pools["m"], tools)

    async def turns(self, seconds, awaited):
        for _ in range(int(2 * seconds)):
            self.keeper.turn(frozenset(awaited))
            await passes(0.5)


@held
async def loads_one_after_the_other(folder, in_flight, names):
    """Have one be loaded, and say what is there 8 s later, when another is waited for."""
    site = Site(folder)
    for _ in range(in_flight):
        site.table.take("m/b1", site.loop.time(), Need(10, 10))
    site.keeper.want("a")
    await passes(LOAD_S)
    assert [*site.names] == ["a"]
    await site.turns(8 * LOAD_S, ["b"])
    assert [*site.names] == names
    await site.turns(4 * LOAD_S, ["b"])
    assert [*site.names] == ["b"]


def test_what_a_load_held_up_goes_on_for_a_while_before_the_next_that_is_waited_for(tmp_path):
    loads_one_after_the_other(tmp_path / "idle", 0, ["b"])
    loads_one_after_the_other(tmp_path / "busy", 36, ["a"])  # for a quarter of 36 times a second


@held
async def goes_and_comes(folder):
    site = Site(folder)
    site.keeper.want("a")
    await site.turns(6 * LOAD_S, ["a"])
    site.keeper.want("b")  # while requests for `a` wait for room
    await site.turns(2 * LOAD_S, ["a", "b"])
    assert [*site.names] == ["b"]
    await site.turns(8 * LOAD_S, ["a"])
    assert [*site.names] == ["a"]


def test_an_adapter_that_went_while_requests_for_it_waited_for_room_comes_back(tmp_path):
    goes_and_comes(tmp_path)


@held
async def counts(folder):
    site = Site(folder)
    site.keeper.want("a")
    await site.turns(2 * LOAD_S, ["a"])
    assert site.keeper.done == {Done.LOADED: 1}
    await site.turns(8 * LOAD_S, ["b"])  # in its place
    assert site.keeper.done == {Done.LOADED: 2, Done.EVICTED: 1}
    assert site.keeper.all_loads_s == 2 * LOAD_S
    site.broken.add("a")
    while not site.keeper.done[Done.FAILED]:
        await site.turns(LOAD_S, ["a"])
    assert site.keeper.done == {Done.LOADED: 2, Done.EVICTED: 2, Done.FAILED: 1}
    assert site.keeper.all_loads_s == 2 * LOAD_S  # one that failed is not in it


def test_loads_and_what_they_took_evictions_and_failures_are_counted(tmp_path):
    counts(tmp_path)
