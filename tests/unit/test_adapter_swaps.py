"""What adapters that are loaded do to requests for others: the real gate, table and keepers, in held time."""

import asyncio

import pytest

from gateway.adapters.keepers import Adapters
from gateway.adapters.memory import Memory
from gateway.config.models import Config
from gateway.core.events import Events
from gateway.core.types import ModelsSeen, Need, ProbePassed, ServedModel
from tests.gatehouse import House, held, passes
from tests.unit.test_adapter_keeper import BASE, Server

ONE, TWO = "http://127.0.0.1:8001", "http://127.0.0.1:8002"


class Noted(Server):
    """One that notes each load, with the adapters that requests used there as it began."""

    def __init__(self, loads, backend, names, **more):
        super().__init__(names, **more)
        self.noted, self.backend = loads, backend

    async def load(self, name, path):
        self.noted.append((name, {*self.backend.adapter_requests}))
        await super().load(name, path)


class Site:
    """A pool whose servers keep so many of the adapters a and b."""

    def __init__(self, folder, keeps, urls=(ONE,), load_s=0.25, version="0.33.0"):
        self.names, self.hangs = {ONE: {}, TWO: {}}, set()
        self.load_s, self.version = load_s, version
        self.loads = []
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
            connect=self.connect,
        )
        self.house.gate.on_wanted.append(self.adapters.want)
        self.adapters.apply(Config.model_validate({"pools": self.pools}).pools)
        for each in self.table:
            self.lists(each.id)
        self.running = self.loop.create_task(self.adapters.run())

    def connect(self, backend):
        hangs = backend.url in self.hangs
        return Noted(self.loads, backend, self.names[backend.url], load_s=self.load_s, hangs=hangs)

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
async def ends_late(folder):
    """Have the load at the new server last until that at the old one has failed."""
    site = Site(folder, keeps=4, load_s=150.0)
    site.hangs.add(ONE)
    site.house.guest(adapter="a")
    await passes(5.0)
    site.pools["m"]["backends"][0]["url"] = TWO
    site.reload()
    site.up("m/b1")
    await passes(5.0)
    (change,) = site.adapters.pools["m"].changes.values()
    await passes(125.0)
    assert [*site.adapters.pools["m"].changes.values()] == [change]
    await site.end()


def test_a_load_that_fails_at_a_replaced_server_ends_none_at_the_one_that_has_its_name(tmp_path):
    ends_late(tmp_path)


@held
async def comes_again(folder):
    """Take a pool away while it loads `a`; when it is back, it wants `b` alone."""
    site = Site(folder, keeps=4)
    site.hangs.add(ONE)
    site.house.guest(adapter="a")
    await passes(5.0)
    pool = site.pools.pop("m")
    site.pools["other"] = {"backends": ["http://127.0.0.1:8009"]}
    site.reload()
    site.pools = {"m": pool}
    pool["backends"][0]["url"] = TWO
    pool["adapters"] = [each for each in pool["adapters"] if each["name"] == "b"]
    site.reload()
    site.up("m/b1")
    await passes(150.0)
    assert site.names == {ONE: {}, TWO: {"b": "/b"}}
    assert [name for name, _ in site.loads] == ["a", "b"]
    await site.end()


def test_a_load_that_fails_of_a_pool_that_was_away_plans_nothing_by_its_old_settings(tmp_path):
    comes_again(tmp_path)


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
    if version != "0.33.0":
        assert site.loads[-1] == ("b", set())
    assert not [each.refusal for each in running if each.refusal]
    await site.end()


@pytest.mark.parametrize("version", ["0.33.0", "0.24.0", "0.1.dev1+gabc", None])
def test_a_version_that_loads_nothing_beside_requests_for_adapters_comes_to_load_the_next(
    tmp_path, version
):
    loads_beside(tmp_path, version)


@held
async def owes(folder, restarts):
    """Have a load of 20 s hold up 200 requests; then another adapter is asked for, or the same after a restart."""
    site = Site(folder, keeps=1, load_s=20.0)
    slots = [site.table.take("m/b1", site.loop.time(), Need(10, 10)) for _ in range(200)]
    guest = site.house.guest(adapter="a")
    await passes(40.0)
    guest.end()
    name, within_s = "b", 300.0
    if restarts:
        for each in slots:
            each.release()
        site.house.down("m/b1")
        site.names[ONE].clear()
        await passes(5.0)
        site.up("m/b1")
        site.table.take("m/b1", site.loop.time(), Need(10, 10))
        name, within_s = "a", 60.0
    began = site.loop.time()
    while name not in site.names[ONE]:
        site.house.guest("u", adapter=name)
        await passes(30.0)
    assert site.loop.time() - began < within_s
    await site.end()


@pytest.mark.parametrize("restarts", [False, True])
def test_however_many_a_load_held_up_the_next_that_is_waited_for_comes_in_time(tmp_path, restarts):
    owes(tmp_path, restarts)
