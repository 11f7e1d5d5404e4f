"""What adapters that are loaded do to requests for others: the real gate, table and keepers, in held time."""

import asyncio

import pytest

from gateway.adapters.keepers import Adapters
from gateway.adapters.memory import Memory
from gateway.config.models import Config
from gateway.core.events import Events
from gateway.core.types import ModelsSeen, Need, ProbePassed, ServedModel
from gateway.watch.adapters import AdapterError
from tests.gatehouse import House, held, passes

BASE = ServedModel("m", None, None)
ONE, TWO = "http://127.0.0.1:8001", "http://127.0.0.1:8002"


class Server:
    """The server at an address. Where loads hang, they fail after two minutes."""

    def __init__(self, site, url):
        self.site, self.url, self.names = site, url, site.names[url]

    async def load(self, name, path):
        if self.url in self.site.hangs:
            await asyncio.sleep(120.0)
            raise AdapterError("timed out", fatal=True)
        await asyncio.sleep(self.site.load_s)
        self.names[name] = path

    async def unload(self, name):
        self.names.pop(name, None)

    async def models(self):
        return (BASE, *(ServedModel(name, "m", None, path) for name, path in self.names.items()))

    def close(self):
        pass


class Site:
    """A pool whose servers keep so many of the adapters a and b."""

    def __init__(self, folder, keeps, urls=(ONE,), load_s=0.25, version="0.33.0"):
        self.names, self.hangs, self.load_s, self.version = (
            {ONE: {}, TWO: {}},
            set(),
            load_s,
            version,
        )
        adapters = [{"name": name, "path": f"/{name}"} for name in "ab"]
        backends = [
            {"url": url, "max_cpu_loras": keeps, "name": f"b{number}", "max_in_flight": 1000}
            for number, url in enumerate(urls, 1)
        ]
        self.pools = {"m": {"backends": backends, "adapters": adapters}}
        self.house = House(**self.pools)
        self.loop, self.table = self.house.loop, self.house.table
        self.adapters = Adapters(
            *(self.table, self.loop, Events(), Memory(folder), self.house.gate.awaited),
            connect=lambda backend: Server(self, backend.url),
        )
        self.house.gate.on_wanted.append(self.adapters.want)
        self.adapters.apply(Config.model_validate({"pools": self.pools}).pools)
        for each in self.table:
            self.lists(each.id)
        self.running = self.loop.create_task(self.adapters.run())

    def reload(self):
        self.house.reload(**self.pools)
        self.adapters.apply(Config.model_validate({"pools": self.pools}).pools)

    def lists(self, backend_id):
        names = self.names[self.table.get(backend_id).url]
        models = (BASE, *(ServedModel(name, "m", None, path) for name, path in names.items()))
        self.table.observe(backend_id, ModelsSeen(self.loop.time(), models, None, self.version))

    def up(self, backend_id):
        self.lists(backend_id)
        for _ in range(2):
            self.table.observe(backend_id, ProbePassed(self.loop.time(), self.loop.time()))

    async def end(self):
        self.running.cancel()
        await asyncio.wait([self.running])


async def streams(site):
    """Have a request for `a` run on, at the only server that is up."""
    first = site.house.guest(adapter="a")
    await passes(4.0)
    assert first.inside
    return first


@held
async def is_called_off(folder):
    site = Site(folder, keeps=1)
    await streams(site)
    other = site.house.guest("u", adapter="b")
    await passes(1.0)
    other.hang_up()
    await passes(1.0)
    second = site.house.guest("v", adapter="a")
    await passes(1.0)
    assert second.inside, second.refusal
    assert site.names[ONE] == {"a": "/a"}
    await site.end()


def test_a_swap_that_waits_for_a_stream_is_called_off_as_whoever_asked_for_it_leaves(tmp_path):
    is_called_off(tmp_path)


@held
async def is_loaded_elsewhere(folder):
    site = Site(folder, keeps=1, urls=(ONE, TWO))
    site.house.down("m/b2")
    await streams(site)
    waits = site.house.guest("u", adapter="b", wait_s=120.0)
    await passes(1.0)
    assert waits.waits
    site.names[TWO] = {}
    site.up("m/b2")  # it is back, and empty
    await passes(2.0)
    assert waits.inside, waits.refusal
    second = site.house.guest("v", adapter="a")
    await passes(1.0)
    assert second.inside, second.refusal
    assert site.names == {ONE: {"a": "/a"}, TWO: {"b": "/b"}}
    await site.end()


def test_what_a_swap_would_load_after_a_stream_is_loaded_where_there_is_room_meanwhile(tmp_path):
    is_loaded_elsewhere(tmp_path)


@held
async def is_replaced(folder):
    site = Site(folder, keeps=4)
    site.hangs.add(ONE)
    site.names[TWO] = {"a": "/a"}
    site.adapters.pools["m"].loads_s.append(1.0)
    site.house.guest(adapter="a")
    await passes(5.0)
    site.pools["m"]["backends"][0]["url"] = TWO  # the operator replaces the server that hangs
    site.reload()
    site.up("m/b1")
    await passes(2.0)
    guests = [site.house.guest("u", adapter=name) for name in "ab"]
    await passes(2.0)
    assert [each.inside for each in guests] == [True, True], [each.refusal for each in guests]
    await passes(150.0)  # until the load at the old one has failed
    assert not site.adapters.pools["m"].changes
    assert site.names == {ONE: {}, TWO: {"a": "/a", "b": "/b"}}
    await site.end()


def test_a_load_that_hangs_at_a_server_keeps_nothing_from_the_one_that_replaces_it(tmp_path):
    is_replaced(tmp_path)


@held
async def loads_beside(folder, version):
    """Restart a server empty, and have requests for `a` overlap from then on: each runs for ten seconds."""
    site = Site(folder, keeps=4, version=version)
    site.house.down("m/b1")
    site.names[ONE].clear()
    await passes(1.0)
    running = [site.house.guest(adapter="a")]
    site.up("m/b1")
    for second in range(60):
        running.append(site.house.guest(adapter="a"))
        if second == 20:
            other = site.house.guest("u", adapter="b")
        await passes(1.0)
        for each in [each for each in running if each.inside]:
            if site.loop.time() - each.ended >= 10.0:
                each.end()
                running.remove(each)
    assert other.inside, other.refusal
    assert site.names[ONE] == {"a": "/a", "b": "/b"}
    assert not [each.refusal for each in running if each.refusal]
    await site.end()


@pytest.mark.parametrize("version", ["0.33.0", "0.24.0", "0.1.dev1+gabc", None])
def test_a_version_that_loads_nothing_beside_requests_for_adapters_comes_to_load_the_next(
    tmp_path, version
):
    loads_beside(tmp_path, version)


@held
async def owes(folder):
    site = Site(folder, keeps=1, load_s=20.0)
    for _ in range(200):
        site.table.take("m/b1", site.loop.time(), Need(10, 10))
    guest = site.house.guest(adapter="a")
    await passes(40.0)
    guest.end()
    began = site.loop.time()
    while "b" not in site.names[ONE]:
        site.house.guest("u", adapter="b")
        await passes(30.0)
    assert site.loop.time() - began < 300.0
    await site.end()


def test_however_many_a_load_held_up_the_next_that_is_waited_for_comes_in_time(tmp_path):
    owes(tmp_path)
