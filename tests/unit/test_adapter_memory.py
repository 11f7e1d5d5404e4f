"""What gateways loaded, and what operators ordered, when servers are renamed or replaced."""

import asyncio
import json

import pytest

from gateway.adapters.keepers import Adapters
from gateway.adapters.memory import Death, Memory, Order
from gateway.adapters.together import Together
from gateway.config.models import Config
from gateway.core.events import Events
from gateway.core.types import ModelsSeen, ProbePassed, ServedModel
from gateway.store.memory import MemoryStore
from tests.gatehouse import House, held, passes
from tests.unit.test_adapter_keeper import BASE, Server

ONE, TWO, THREE = (f"http://127.0.0.1:{port}" for port in (8001, 8002, 8003))
LOAD_S = 0.25


def pool(adapters, keeps=4, **backends):
    """Return settings of a pool, with backends by name."""
    return {
        "backends": [
            {"name": name, "url": url, "max_cpu_loras": keeps} for name, url in backends.items()
        ],
        "adapters": [{"name": name, "path": path} for name, path in adapters.items()],
    }


class Site:
    """A gateway before servers, each with the adapters that it has, by address."""

    def __init__(self, folder, servers=None, store=None, **pools):
        self.servers = {} if servers is None else servers
        self.house = House(**pools)
        self.adapters = Adapters(
            *(self.house.table, self.house.loop, Events(), Memory(folder), self.house.gate.awaited),
            connect=lambda backend: Server(self.has(backend), load_s=LOAD_S),
        )
        self.house.gate.on_wanted.append(self.adapters.want)
        self.adapters.apply(Config.model_validate({"pools": pools}).pools)
        if store is not None:
            who = "the one with the file" if folder else "the other one"
            leads = folder is not None
            self.adapters.together = Together(store, self.house.loop, who, leads, others=True)
        self.see()
        self.running = self.house.loop.create_task(self.adapters.run())

    def has(self, backend):
        return self.servers.setdefault(backend.url, {})

    def see(self):
        """Have all servers pass their probes, and list their models."""
        for each in self.house.table:
            listed = (ServedModel(name, "m", None, path) for name, path in self.has(each).items())
            now = self.house.loop.time()
            self.house.table.observe(each.id, ModelsSeen(now, (BASE, *listed), None, "0.33.0"))
            for _ in range(2):
                self.house.table.observe(each.id, ProbePassed(now, now))

    async def reload(self, for_s=30.0, **pools):
        self.house.reload(**pools)
        self.adapters.apply(Config.model_validate({"pools": pools}).pools)
        self.see()
        await passes(for_s)

    def loaded_by(self):
        return {
            (each.backend_id, each.adapter): each.loaded_by for each in self.adapters.statuses()
        }

    async def end(self):
        self.running.cancel()
        await asyncio.wait([self.running])


RENAMED = {
    "a backend": {"m": {"gpu1": ONE}},
    "a pool": {"n": {"b1": ONE}},
    "moved to another pool": {"m": {"b1": TWO}, "n": {"b2": ONE}},
}


@held
async def is_renamed(folder, to, restarts):
    """Have `a` and `b` be loaded on a server; then it gets another name, `a` another path, and nobody wants `b`."""
    site = Site(folder, m=pool({"a": "/a", "b": "/b"}, b1=ONE))
    await passes(8.0)
    assert site.servers[ONE] == {"a": "/a", "b": "/b"}
    pools = {name: pool({"a": "/new"}, **backends) for name, backends in to.items()}
    if restarts:
        await site.end()
        site = Site(folder, site.servers, **pools)
        await passes(30.0)
    else:
        await site.reload(**pools)
    assert site.servers[ONE] == {"a": "/new"}
    await site.end()


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("what", RENAMED)
def test_settings_of_adapters_take_effect_on_a_server_that_is_renamed(tmp_path, what, restarts):
    is_renamed(tmp_path, RENAMED[what], restarts)


@held
async def makes_room(folder):
    site = Site(folder, m=pool({"a": "/a", "b": "/b"}, keeps=1, b1=ONE))
    guest = site.house.guest(adapter="a")
    await passes(4.0)
    assert guest.inside
    guest.end()
    await site.reload(m=pool({"a": "/a", "b": "/b"}, keeps=1, gpu1=ONE))
    other = site.house.guest(adapter="b")
    await passes(8.0)
    assert other.inside, other.refusal
    await site.end()


def test_what_was_loaded_on_a_server_that_is_renamed_makes_room_for_others(tmp_path):
    makes_room(tmp_path)


@held
async def is_replaced(folder, restarts):
    """Have `a` and `b` be loaded on a server; its name then is another's, which has `b` by itself."""
    site = Site(folder, {TWO: {"b": "/b"}}, m=pool({"a": "/a", "b": "/b"}, b1=ONE))
    await passes(8.0)
    assert site.servers[ONE] == {"a": "/a", "b": "/b"}
    pools = {"m": pool({"a": "/a"}, b1=TWO)}
    if restarts:
        await site.end()
        site = Site(folder, site.servers, **pools)
        await passes(30.0)
    else:
        await site.reload(**pools)
    assert site.servers[TWO] == {"a": "/a", "b": "/b"}
    assert site.loaded_by() == {("m/b1", "a"): "gateway", ("m/b1", "b"): "other"}
    await site.end()


@pytest.mark.parametrize("restarts", [False, True])
def test_what_another_server_of_a_name_loaded_by_itself_stays(tmp_path, restarts):
    is_replaced(tmp_path, restarts)


@held
async def swap_names(folder):
    site = Site(folder, {TWO: {"a": "/a"}}, m=pool({"a": "/a"}, b1=ONE, b2=TWO))
    await passes(8.0)
    assert site.loaded_by() == {("m/b1", "a"): "gateway", ("m/b2", "a"): "other"}
    await site.reload(m=pool({"a": "/a"}, b1=TWO, b2=ONE))
    assert site.loaded_by() == {("m/b1", "a"): "other", ("m/b2", "a"): "gateway"}
    await site.end()


def test_two_servers_that_swap_names_keep_what_is_known_of_each(tmp_path):
    swap_names(tmp_path)


@held
async def are_two(folder, one_first, before, after, known):
    """Have the workers of a gateway, of which one keeps the file, reload one after the other."""
    servers, store = {TWO: {"a": "/a"}}, MemoryStore(asyncio.get_running_loop())
    settings = pool({"a": "/a"}, **before)
    one, two = (Site(each, servers, store, m=settings) for each in (folder, None))
    await passes(8.0)
    two.see()
    await passes(8.0)
    assert one.loaded_by()["m/b1", "a"] == two.loaded_by()["m/b1", "a"] == "gateway"
    for each in (one, two) if one_first else (two, one):
        await each.reload(5.0, m=pool({"a": "/a"}, **after))
    await passes(8.0)
    assert one.loaded_by() == two.loaded_by() == known
    await one.end()
    await two.end()


@pytest.mark.parametrize("one_first", [True, False])
def test_what_a_worker_tells_that_has_not_reloaded_yet_is_not_held_to_be_of_another_server(
    tmp_path, one_first
):
    replaced = {("m/b1", "a"): "other"}
    are_two(tmp_path / "replaced", one_first, {"b1": ONE}, {"b1": TWO}, replaced)
    swapped = {("m/b1", "a"): "other", ("m/b2", "a"): "gateway"}
    both = {"b1": ONE, "b2": TWO}, {"b1": TWO, "b2": ONE}
    are_two(tmp_path / "swapped", one_first, *both, swapped)
    renamed = {("m/gpu1", "a"): "gateway"}
    are_two(tmp_path / "renamed", one_first, {"b1": ONE}, {"gpu1": ONE}, renamed)


@held
async def loads_as_it_is_renamed(folder):
    site = Site(folder, m=pool({"a": "/a"}, b1=ONE))
    while not site.adapters.memory.begun("m/b1"):
        await passes(LOAD_S / 8)
    await site.reload(m=pool({"a": "/a"}, gpu1=ONE))
    assert site.loaded_by() == {("m/gpu1", "a"): "gateway"}
    await site.end()


def test_a_load_that_is_under_way_as_its_server_is_renamed_is_the_gateways(tmp_path):
    loads_as_it_is_renamed(tmp_path)


@held
async def keeps_away(folder, now, kept_away):
    site = Site(folder, m=pool({"a": "/a"}, b1=ONE, b2=TWO))
    await passes(8.0)
    site.adapters.order("m/b1", "a", Order(keep=False))
    await passes(8.0)
    assert not site.servers[ONE]
    await site.reload(m=pool({"a": "/a"}, **now))
    assert {url for url in now.values() if not site.servers[url]} == {kept_away}
    await site.end()


@pytest.mark.parametrize(
    ("now", "kept_away"),
    [
        ({"gpu1": ONE, "b2": TWO}, ONE),
        ({"b1": TWO, "b2": ONE}, ONE),
        ({"b1": TWO, "b2": THREE, "b3": ONE}, ONE),
        ({"b1": THREE, "b2": TWO}, THREE),
    ],
)
def test_an_order_goes_with_its_server_and_stays_with_the_name_of_one_that_is_gone(
    tmp_path, now, kept_away
):
    keeps_away(tmp_path, now, kept_away)


def test_of_two_orders_that_meet_the_later_one_holds(tmp_path):
    memory = Memory(tmp_path)
    memory.apply({"m/b1": ONE, "m/b2": TWO})
    later = Order(keep=True, path="/a", at=20.0)
    for at, own in ((10.0, later), (30.0, Order(keep=False, at=30.0))):
        memory.order("m/b1", "a", Order(keep=False, at=at))
        memory.order("m/b2", "a", later)
        memory.apply({"m/b1": TWO})
        assert memory.orders("m/b1")["a"] == own
        memory.apply({"m/b1": ONE, "m/b2": TWO})


def test_a_server_that_comes_back_under_another_name_is_known(tmp_path):
    memory = Memory(tmp_path)
    memory.apply({"m/b1": ONE, "m/b2": TWO})
    memory.note("m/b2", "a")
    memory.apply({"m/b1": ONE})
    again = Memory(tmp_path)
    again.apply({"m/b1": ONE})
    again.apply({"m/b1": ONE, "m/gpu2": TWO})
    assert again.loaded("m/gpu2") == {"a"}


def test_of_a_server_in_two_pools_each_keeps_its_own(tmp_path):
    memory = Memory(tmp_path)
    memory.apply({"m/b1": ONE, "n/b1": ONE})
    memory.note("m/b1", "a")
    memory.note("n/b1", "b")
    memory.apply({"n/gpu1": ONE, "m/gpu1": ONE})
    assert (memory.loaded("m/gpu1"), memory.loaded("n/gpu1")) == ({"a"}, {"b"})
    memory.apply({"n/gpu1": ONE})
    assert memory.loaded("n/gpu1") == {"b"}


def test_what_ended_servers_of_a_pool_that_is_renamed_is_known(tmp_path):
    memory = Memory(tmp_path)
    memory.apply({"m/b1": ONE, "m/b2": TWO})
    for at, each in ((10.0, "m/b2"), (20.0, "m/b1")):
        memory.died("m", "a", Death(each, "/a", at))
    memory.apply({"m/b1": ONE, "n/b2": TWO})
    assert (len(memory.deaths("m")["a"]), memory.deaths("n")) == (2, {})
    memory.apply({"n/b1": ONE, "n/b2": TWO})
    assert memory.deaths("n") == {"a": [Death("n/b2", "/a", 10.0), Death("n/b1", "/a", 20.0)]}
    assert not Memory(tmp_path).deaths("m")


def test_a_file_of_before_is_read_and_gets_the_addresses_of_what_it_names(tmp_path):
    file = tmp_path / "adapters.json"
    file.write_text(json.dumps({"loaded": {"m/b1": ["a"]}, "begun": {}}))
    memory = Memory(tmp_path)
    memory.apply({"m/b1": ONE, "m/b2": TWO})
    assert memory.loaded("m/b1") == {"a"}
    kept = json.loads(file.read_text())
    assert (kept["loaded"], kept["urls"]) == ({"m/b1": ["a"]}, {"m/b1": ONE})
    assert file.stat().st_mode & 0o777 == 0o600
    again = Memory(tmp_path)
    again.apply({"m/gpu1": ONE, "m/b1": TWO})
    assert (again.loaded("m/gpu1"), again.loaded("m/b1")) == ({"a"}, set())


def test_where_another_worker_keeps_the_file_what_is_known_goes_with_its_server_too():
    memory = Memory(None)
    memory.apply({"m/b1": ONE})
    memory.note("m/b1", "a")
    memory.apply({"m/gpu1": ONE})
    assert (memory.loaded("m/gpu1"), memory.loaded("m/b1")) == ({"a"}, set())


def test_settings_without_anything_known_of_their_servers_leave_no_file(tmp_path):
    memory = Memory(tmp_path)
    memory.apply({"m/b1": ONE})
    memory.apply({"m/gpu1": ONE})
    assert not list(tmp_path.iterdir())
