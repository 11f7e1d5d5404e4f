"""The owner of a pool's adapters: what it begins, and when."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from gateway.adapters.elsewhere import Elsewhere, Placed, PoolTold
from gateway.adapters.keeper import Done, PoolAdapters, Tools
from gateway.adapters.keepers import Adapters, OrderRefused
from gateway.adapters.memory import Death, Memory, Order
from gateway.adapters.seen import Failure
from gateway.adapters.together import Together
from gateway.config.models import Config
from gateway.core.events import EventKind, Events
from gateway.core.exclusion import Exclusion
from gateway.core.types import ModelsSeen, Need, ProbeFailed, ProbePassed, Route, ServedModel
from gateway.store.memory import MemoryStore
from gateway.store.shared import StoreUnavailable
from gateway.watch.adapters import AdapterError
from tests.gatehouse import House, held, passes

BASE = ServedModel("m", None, None)
OTHERS = PoolTold(requests={"m/b1": {"a": 1}})
LOAD_S = 1.0
UNLOAD_S = 0.1


class Server:
    """One that loads in a second, but for adapters that it has not. Where all loads hang, they fail after two minutes."""

    def __init__(self, names, broken=(), stuck=(), slow=(), *, load_s=LOAD_S, hangs=False):
        self.names, self.broken, self.stuck, self.slow = names, broken, stuck, slow
        self.load_s, self.hangs = load_s, hangs

    async def load(self, name, path):
        if self.hangs:
            await asyncio.sleep(120.0)
            raise AdapterError("timed out", fatal=True)
        await asyncio.sleep(self.load_s)
        if name in self.slow:
            raise AdapterError("timeout")
        if name in self.broken:
            raise AdapterError("no such file", refused=True)
        self.names[name] = path

    async def unload(self, name):
        if name in self.stuck:
            await asyncio.sleep(UNLOAD_S)
            raise AdapterError("the server said no")
        self.names.pop(name, None)

    async def models(self):
        return (BASE, *(ServedModel(name, "m", None, path) for name, path in self.names.items()))

    def close(self):
        pass


class Site:
    """A pool of one server that keeps one adapter of two, and its keeper."""

    def __init__(self, folder, keeps=1):
        adapters = [{"name": name, "path": f"/{name}"} for name in "ab"]
        backend = {"url": "http://127.0.0.1:8001", "max_cpu_loras": keeps}
        pools = {"m": {"backends": [backend], "adapters": adapters}}
        self.house, self.names, self.tasks, self.broken = House(**pools), {}, [], set()
        self.stuck = set()  # what the server does not unload
        self.slow = set()  # what it loads later than it is waited for
        self.table, self.loop = self.house.table, self.house.loop
        self.table.observe("m/b1", ModelsSeen(self.loop.time(), (BASE,), None, "0.32.0"))
        tools = Tools(
            self.table, self.loop, Events(), Memory(folder), lambda backend: Server(self.names, self.broken, self.stuck, self.slow),
            lambda work, name: self.tasks.append(self.loop.create_task(work)),
        )  # fmt: skip
        self.settings = Config.model_validate({"pools": pools}).pools
        self.keeper = PoolAdapters("m", self.settings["m"], tools)

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


@held
async def is_not_unloaded(folder, awaited, names):
    """Have a server fail to unload an adapter for a minute, and say what is there two minutes later."""
    site = Site(folder)
    site.keeper.want("a")
    await site.turns(2 * LOAD_S, ["a"])
    site.stuck.add("a")
    if not awaited:
        site.keeper.known.memory.order("m/b1", "a", Order(keep=False))
    await site.turns(60, awaited)
    assert 2 <= site.keeper.done[Done.FAILED] <= 5  # after 5, 10, 20 and 40 s
    site.stuck.clear()
    await site.turns(120, awaited)
    assert [*site.names] == names


def test_an_unload_that_fails_is_tried_again_with_pauses_that_grow(tmp_path):
    is_not_unloaded(tmp_path / "replaced", ["b"], ["b"])
    is_not_unloaded(tmp_path / "ordered", [], ["b"])


@held
async def fails_for_weeks(folder):
    site = Site(folder)
    site.broken.add("a")
    site.keeper.known.failures["m/b1", "a"] = Failure(5_000, site.loop.time(), "no such file")
    site.keeper.want("a")
    await site.turns(4 * LOAD_S, ["a"])
    failed = site.keeper.known.failures["m/b1", "a"]
    assert failed.tries == 5_001
    assert 590 < failed.until - site.loop.time() <= 600


def test_an_adapter_that_fails_for_weeks_is_tried_each_ten_minutes(tmp_path):
    fails_for_weeks(tmp_path)


@held
async def comes_back(folder, *, died):
    """Start a server anew that has failed to load an adapter for hours."""
    site = Site(folder, keeps=2)
    (site.slow if died else site.broken).add("a")
    site.keeper.known.failures["m/b1", "a"] = Failure(5_000, site.loop.time(), "it failed before")
    await site.turns(4 * LOAD_S, ["a"])
    assert site.keeper.done[Done.FAILED] == 1
    for _ in range(3):
        site.table.observe("m/b1", ProbeFailed(site.loop.time(), "refused"))
    await site.turns(2, ["a"])
    site.slow.clear()
    site.broken.clear()
    site.table.observe("m/b1", ModelsSeen(site.loop.time(), (BASE,), None, "0.32.0"))
    for _ in range(2):
        site.table.observe("m/b1", ProbePassed(site.loop.time()))
    await site.turns(4 * LOAD_S, ["a"])
    assert ("a" in site.names) is not died


def test_what_a_server_refused_is_tried_at_once_when_it_was_started_anew(tmp_path):
    """It has the flag that it lacked, maybe. What it died of, maybe, it is asked for as seldom as before."""
    comes_back(tmp_path / "refused", died=False)
    comes_back(tmp_path / "died", died=True)


@held
async def gets_another_server(folder):
    """Give the name of a server that fails to load an adapter for hours to another one."""
    site = Site(folder, keeps=2)
    site.slow.add("a")
    site.keeper.known.failures["m/b1", "a"] = Failure(5_000, site.loop.time(), "it failed before")
    await site.turns(4 * LOAD_S, ["a"])
    assert site.keeper.done[Done.FAILED] == 1
    backend = {"url": "http://127.0.0.1:8002", "max_cpu_loras": 2}
    site.table.apply(Config.model_validate({"pools": {"m": {"backends": [backend]}}}).pools)
    site.table.observe("m/b1", ModelsSeen(site.loop.time(), (BASE,), None, "0.32.0"))
    site.table.observe("m/b1", ProbePassed(site.loop.time()))
    site.slow.clear()
    site.names.clear()
    await site.turns(8 * LOAD_S, ["a"])
    assert {*site.names} == {"a", "b"}


def test_what_failed_on_a_server_is_tried_at_once_on_the_one_that_gets_its_name(tmp_path):
    gets_another_server(tmp_path)


@held
async def obeys_at_once(folder):
    site = Site(folder)
    site.broken |= {"a", "b"}
    adapters = Adapters(
        *(site.table, site.loop, Events(), Memory(folder), lambda pool: frozenset()),
        connect=lambda backend: Server(site.names, site.broken),
    )
    adapters.apply(site.settings)
    running = site.loop.create_task(adapters.run())
    while adapters.pools["m"].done[Done.FAILED] < 12:
        await passes(LOAD_S)
    site.broken.clear()
    adapters.order("m/b1", "a", Order(keep=True))
    await passes(2 * LOAD_S)
    assert [*site.names] == ["a"]
    running.cancel()
    await asyncio.wait([running])


def test_an_order_is_tried_at_once_however_often_a_load_has_failed(tmp_path):
    """An operator has seen to what was wrong, and is told that it is loaded."""
    obeys_at_once(tmp_path)


@held
async def is_told_once(folder):
    """Have supervision tell that a server that it starts did not load an adapter."""
    site, events = Site(folder, keeps=2), Events()
    adapters = Adapters(
        *(site.table, site.loop, events, Memory(folder), lambda pool: frozenset()),
        connect=lambda backend: Server(site.names, broken={"a"}),
    )
    adapters.apply(site.settings)
    events.note(site.loop, EventKind.ADAPTER_FAILED, "m/b1", "a", "No adapter found for /a.")
    site.table.observe("m/b1", ProbePassed(site.loop.time(), site.loop.time()))  # it lives
    running = site.loop.create_task(adapters.run())

    def told():
        return [each for each in events.newest() if each.kind is EventKind.ADAPTER_FAILED]

    await passes(4 * LOAD_S)
    assert [*site.names] == ["b"]
    assert len(told()) == 1
    await passes(6 * LOAD_S)
    assert told()[0].detail == "no such file; tried again in 10 s"
    running.cancel()


def test_what_supervision_could_not_load_is_tried_again_and_told_after_a_pause(tmp_path):
    is_told_once(tmp_path)


@held
async def is_paused(folder):
    """Pause all changes, as an upgrade does, while a request comes for an adapter that is not there."""
    site, awaited = Site(folder), set()
    adapters = Adapters(
        *(site.table, site.loop, Events(), Memory(folder), lambda pool: awaited),
        connect=lambda backend: Server(site.names),
    )
    adapters.apply(site.settings)
    for names in (["a"], ["b"]):
        running = site.loop.create_task(adapters.run())
        while [*site.names] != names:
            await asyncio.sleep(LOAD_S)
        running.cancel()
        await asyncio.wait([running])
        await passes(8 * LOAD_S)  # what was loaded has stayed long enough
        awaited.add("b")
        adapters.want(Route("b", "m", "b", adapter="b"))
        assert not adapters.pools["m"].changes, "nobody carries it out now"


def test_what_is_asked_for_in_a_pause_is_loaded_after_it(tmp_path):
    is_paused(tmp_path)


@held
async def is_paused_as_it_begins(folder):
    """Pause all changes in the turn in which one is planned: it is cancelled before its first step."""
    site, awaited = Site(folder), set()
    adapters = Adapters(
        *(site.table, site.loop, Events(), Memory(folder), lambda pool: awaited),
        connect=lambda backend: Server(site.names),
    )
    adapters.apply(site.settings)
    running = site.loop.create_task(adapters.run())
    await passes(8 * LOAD_S)
    assert [*site.names] == ["a"]
    running.cancel()
    awaited.add("b")
    adapters.want(Route("b", "m", "b", adapter="b"))
    assert adapters.pools["m"].changes
    await asyncio.wait([running])
    running = site.loop.create_task(adapters.run())
    await passes(4 * LOAD_S)
    assert [*site.names] == ["b"]
    assert not adapters.pools["m"].changes
    running.cancel()
    await asyncio.wait([running])


def test_a_change_that_a_pause_cancels_before_it_begins_is_made_after_it(tmp_path):
    is_paused_as_it_begins(tmp_path)


class Store(MemoryStore):
    lost = False

    async def renew(self, *args):
        if self.lost:
            raise StoreUnavailable("the connection was refused")
        return await super().renew(*args)

    async def beat(self, *args):
        if self.lost:
            raise StoreUnavailable("the connection was refused")
        return await super().beat(*args)


class Other:
    """A keeper of another gateway, which only tells."""

    leads = None

    def __init__(self, told):
        self.told, self.known = told, SimpleNamespace(memory=Memory(None))

    def tell(self):
        return self.told

    def hear(self, elsewhere):
        self.elsewhere = elsewhere


async def loses_the_store(folder, seconds, told):
    """Have a server with the one adapter, a gateway that leads lose the store, and then ask for the other one."""
    site = Site(folder)
    store = Store(site.loop)
    one, other = (Together(store, site.loop, name) for name in ("one", "other"))
    site.keeper.want("a")
    await site.turns(8 * LOAD_S, ["a"])
    keepers, others = {"m": site.keeper}, {"m": Other(told)}
    for _ in range(2):
        await one.turn(keepers)
        await other.turn(others)
    store.lost = True
    await passes(seconds)
    await one.turn(keepers)
    await site.turns(8, ["b"])
    return [*site.names], site


@held
async def keeps_what_others_use(folder):
    assert (await loses_the_store(folder, 0.25, OTHERS))[0] == ["a"]


@held
async def unloads_while_it_leads(folder):
    assert (await loses_the_store(folder, 0.25, PoolTold()))[0] == ["b"]


@held
async def unloads_nothing_after_its_lease(folder):
    names, site = await loses_the_store(folder, 15.0, PoolTold())
    assert names == ["a"]
    site.keeper.hear(Elsewhere())
    await site.turns(8, ["b"])
    assert [*site.names] == ["b"]


def test_a_gateway_without_the_store_unloads_nothing_that_others_may_use(tmp_path):
    """What they told holds for as long as the lease does; after that, nothing is known."""
    keeps_what_others_use(tmp_path / "0")
    unloads_while_it_leads(tmp_path / "1")
    unloads_nothing_after_its_lease(tmp_path / "2")


@held
async def follows_another_version(folder):
    site = Site(folder)
    site.names["a"] = "/a"
    site.table.observe(
        "m/b1", ModelsSeen(site.loop.time(), await Server(site.names).models(), None, "0.32.0")
    )
    site.keeper.leads = False
    placed = {"m/b1": Placed(frozenset("a"), {"a": "adapter_failed", "b": "on_the_moon"})}
    site.keeper.hear(Elsewhere([PoolTold(placed=placed)]))
    (backend,) = site.table
    assert backend.lacking == {"a": Exclusion.ADAPTER_FAILED, "b": Exclusion.MODEL_MISSING}


def test_a_reason_that_only_another_version_knows_leaves_the_others_in_force(tmp_path):
    follows_another_version(tmp_path)


@held
async def follows_one_that_did_not_see_it_serve_yet(folder):
    site = Site(folder)
    site.keeper.leads = False
    site.keeper.hear(Elsewhere([PoolTold(placed={})]))
    (backend,) = site.table
    assert backend.lacking == dict.fromkeys("ab", Exclusion.ADAPTER_DUE)


def test_what_the_one_that_places_them_may_load_on_a_server_that_only_just_serves_is_waited_for(
    tmp_path,
):
    follows_one_that_did_not_see_it_serve_yet(tmp_path)


@held
async def finds_what_was_being_loaded(folder, *, restarts):
    """Have a load end after whoever began it lost sight of it, and see that it makes room for another."""
    site = Site(folder)
    site.slow.add("a")
    site.keeper.want("a")
    await passes(LOAD_S / 2)
    if restarts:
        for task in site.tasks:
            task.cancel()
        site = Site(folder)
    site.broken |= {"a", "b"}  # its list has nothing as yet
    await site.turns(2 * LOAD_S, [])
    site.names["a"] = "/a"
    listed = BASE, ServedModel("a", "m", None, "/a")
    site.table.observe("m/b1", ModelsSeen(site.loop.time(), listed, None, "0.32.0"))
    site.broken.clear()
    await site.turns(12 * LOAD_S, ["b"])
    assert [*site.names] == ["b"]


@pytest.mark.parametrize("restarts", [False, True])
def test_an_adapter_whose_load_ended_unseen_is_known_as_loaded_by_a_gateway(tmp_path, restarts):
    """It timed out, or the gateway was restarted or upgraded meanwhile: else it kept its place for good."""
    finds_what_was_being_loaded(tmp_path, restarts=restarts)


@held
async def takes_over_from_one_that_loads(folder):
    """Have the gateway that places adapters go for ever while a server loads one for it."""
    site, loader = Site(folder / "here"), Site(folder / "there")
    loader.keeper.want("a")
    await passes(LOAD_S / 2)
    site.keeper.leads = False
    site.keeper.hear(Elsewhere([loader.keeper.tell()]))
    site.keeper.hear(Elsewhere())
    site.names["a"] = "/a"
    listed = await Server(site.names).models()
    site.table.observe("m/b1", ModelsSeen(site.loop.time(), listed, None, "0.32.0"))
    site.keeper.leads = True
    await site.turns(8 * LOAD_S, ["b"])
    assert [*site.names] == ["b"]


def test_what_was_being_loaded_by_a_gateway_that_died_is_unloaded_where_its_room_is_needed(
    tmp_path,
):
    takes_over_from_one_that_loads(tmp_path)


@held
async def goes_on_behind_a_reload(folder, *, fails):
    """Change how a server is reached while it loads an adapter."""
    site = Site(folder)
    (site.slow if fails else set()).add("a")
    site.keeper.want("a")
    await passes(LOAD_S / 2)
    backend = {"url": "http://127.0.0.1:8001", "max_cpu_loras": 1, "api_key": "another-key"}
    site.table.apply(Config.model_validate({"pools": {"m": {"backends": [backend]}}}).pools)
    site.table.observe("m/b1", ModelsSeen(site.loop.time(), (BASE,), None, "0.32.0"))
    site.table.observe("m/b1", ProbePassed(site.loop.time()))
    await passes(0.75 * LOAD_S)
    assert site.keeper.done[Done.FAILED] == 0
    if not fails:
        listed = BASE, ServedModel("a", "m", None, "/a")
        site.table.observe("m/b1", ModelsSeen(site.loop.time(), listed, None, "0.32.0"))
        await site.turns(2 * LOAD_S, ["a"])
        assert site.keeper.known.memory.loaded("m/b1") == {"a"}


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_loaded_while_a_reload_replaces_its_backend_is_no_failure_and_stays_ours(
    tmp_path, fails
):
    goes_on_behind_a_reload(tmp_path, fails=fails)


@held
async def stops_what_it_began(folder):
    site = Site(folder)
    site.keeper.want("a")
    await site.turns(8 * LOAD_S, ["a"])
    site.keeper.hear(Elsewhere([OTHERS]))
    site.keeper.known.memory.order("m/b1", "a", Order(keep=False))
    await site.turns(2, ["b"])
    assert site.keeper.changes
    site.keeper.hear(Elsewhere(stale=True))
    await site.turns(2, ["b"])
    assert (site.keeper.changes, [*site.names]) == ({}, ["a"])


def test_an_unload_that_waits_ends_when_nobody_knows_what_others_use(tmp_path):
    stops_what_it_began(tmp_path)


@held
async def loads_if_others_are_heard(folder):
    site = Site(folder)
    site.table.observe("m/b1", ModelsSeen(site.loop.time(), (BASE,), None, "0.24.0"))
    site.keeper.hear(Elsewhere(stale=True))
    await site.turns(4, ["a"])
    assert [*site.names] == []
    site.keeper.hear(Elsewhere())
    await site.turns(4, ["a"])
    assert [*site.names] == ["a"]


def test_a_version_that_mixes_adapters_up_loads_none_while_others_are_not_heard(tmp_path):
    loads_if_others_are_heard(tmp_path)


@held
async def waits_for_workers(folder, others, seconds, names):
    """Have one be there, and say what is there so long after the other one is wanted."""
    site = Site(folder)
    site.keeper.want("a")
    await site.turns(8 * LOAD_S, ["a"])
    site.keeper.hear(Elsewhere(others=others))
    site.keeper.known.memory.order("m/b1", "a", Order(keep=False))
    site.keeper.look()
    await passes(seconds)
    assert [*site.names] == names


def test_other_workers_are_waited_for_though_they_have_told_nothing_yet(tmp_path):
    waits_for_workers(tmp_path / "0", False, 0.5, [])
    waits_for_workers(tmp_path / "1", True, 1.0, ["a"])
    waits_for_workers(tmp_path / "2", True, 2.0, [])


@held
async def only_one_leads(folder):
    site = Site(folder)
    store = Store(site.loop)
    follower = Together(store, site.loop, "worker 2", may_lead=False)
    leader = Together(store, site.loop, "worker 1")
    for each in (follower, leader, follower):
        keeper = Other(PoolTold())
        await each.turn({"m": keeper})
        assert keeper.leads is (each is leader)
    store.lost = True
    await follower.turn({"m": keeper})
    assert keeper.leads is False


def test_a_worker_that_may_not_lead_never_does(tmp_path):
    only_one_leads(tmp_path)


@held
async def are_of_two_machines(folder, scopes, names):
    """Have two gateways with one store, each before a server of its own, asked for an adapter each."""
    sites = [Site(folder / each) for each in "ab"]
    store = Store(sites[0].loop)
    gateways = [
        Together(store, site.loop, name, scope_of=lambda pool, scope=scope: scope)
        for site, name, scope in zip(sites, "ab", scopes, strict=True)
    ]
    for _ in range(40):
        for site, gateway, name in zip(sites, gateways, "ab", strict=True):
            await gateway.turn({"m": site.keeper})
            site.keeper.turn(frozenset(name))
        await passes(0.25)
    assert [[*site.names] for site in sites] == names


def test_each_machine_places_the_adapters_of_its_own_servers(tmp_path):
    are_of_two_machines(tmp_path / "apart", ("@one", "@other"), [["a"], ["b"]])


@held
async def told_of_many(folder):
    listed = [{"name": f"a{each}", "path": f"/a{each}"} for each in range(1200)]
    backends = [{"url": f"http://127.0.0.1:{8001 + each}"} for each in range(8)]
    pools = {"m": {"backends": backends, "adapters": listed}}
    house = House(**pools)
    adapters = Adapters(house.table, house.loop, Events(), Memory(folder), lambda pool: frozenset())
    adapters.apply(Config.model_validate({"pools": pools}).pools)
    for each in house.table.ids():
        house.table.observe(each, ModelsSeen(house.loop.time(), (BASE,), None, "0.32.0"))
    before = time.process_time()
    assert len(adapters.statuses()) == 8 * 1200
    assert time.process_time() - before < 1.0


def test_who_asks_about_a_thousand_adapters_holds_up_no_request(tmp_path):
    told_of_many(tmp_path)  # 50 ms; the reasons of all for each of them take 4 s


@held
async def tries_the_new_path(folder):
    site = Site(folder)
    site.broken |= {"a", "b"}
    adapters = Adapters(
        *(site.table, site.loop, Events(), Memory(folder), lambda pool: frozenset()),
        connect=lambda backend: Server(site.names, site.broken),
    )
    adapters.apply(site.settings)
    running = site.loop.create_task(adapters.run())
    while adapters.pools["m"].done[Done.FAILED] < 12:
        await passes(LOAD_S)
    site.broken.clear()
    right = [{"name": "a", "path": "/right"}, {"name": "b", "path": "/b"}]
    pool = {"backends": [{"url": "http://127.0.0.1:8001", "max_cpu_loras": 1}], "adapters": right}
    adapters.apply(Config.model_validate({"pools": {"m": pool}}).pools)
    adapters.want(Route("a", "m", "a", adapter="a"))
    await passes(2 * LOAD_S)
    assert site.names == {"a": "/right"}
    running.cancel()
    await asyncio.wait([running])


def test_a_path_that_was_put_right_is_tried_at_once_however_often_the_wrong_one_failed(tmp_path):
    tries_the_new_path(tmp_path)


class Late(Store):
    """One that does not answer for ten seconds."""

    async def beat(self, *args):
        await asyncio.sleep(10.0)
        return await super().beat(*args)


@held
async def tells_at_once_and_plans_later(folder):
    site = Site(folder)
    for _ in range(3):
        site.table.observe("m/b1", ProbeFailed(site.loop.time(), "refused"))
    adapters = Adapters(
        *(site.table, site.loop, Events(), Memory(folder), lambda pool: frozenset()),
        connect=lambda backend: Server(site.names),
    )
    adapters.apply(site.settings)
    running = site.loop.create_task(adapters.run())
    await passes(0.2)
    site.table.observe("m/b1", ModelsSeen(site.loop.time(), (BASE,), None, "0.32.0"))
    for _ in range(2):
        site.table.observe("m/b1", ProbePassed(site.loop.time()))
    (backend,) = site.table
    assert backend.lacking == dict.fromkeys("ab", Exclusion.ADAPTER_DUE)
    assert not adapters.pools["m"].changes
    await passes(2 * LOAD_S)
    assert site.names
    running.cancel()
    await asyncio.wait([running])


def test_what_a_server_that_begins_to_serve_will_load_is_told_at_once_and_planned_later(tmp_path):
    tells_at_once_and_plans_later(tmp_path)


@held
async def loses_what_is_waited_for(folder):
    """Have somebody unload an adapter by hand, while a request for it waits for room."""
    site = Site(folder)
    gate, site.names["a"] = site.house.gate, "/a"
    adapters = Adapters(
        *(site.table, site.loop, Events(), Memory(folder), gate.awaited),
        connect=lambda backend: Server(site.names),
    )
    adapters.apply(site.settings)
    gate.on_wanted.append(adapters.want)
    listed = (BASE, ServedModel("a", "m", None, "/a"))
    site.table.observe("m/b1", ModelsSeen(site.loop.time(), listed, None, "0.32.0"))
    site.house.scrape("m/b1")
    running = site.loop.create_task(adapters.run())
    await passes(LOAD_S)
    (large,) = await site.house.guests(1, tokens=8_000)
    (waits,) = await site.house.guests(1, adapter="a", tokens=8_000)
    assert (large.inside, waits.waits) == (True, True)
    site.names.clear()
    site.table.observe("m/b1", ModelsSeen(site.loop.time(), (BASE,), None, "0.32.0"))
    await passes(LOAD_S / 4)
    assert waits.waits, waits.refusal
    large.end()
    await passes(8 * LOAD_S)
    assert (waits.inside, [*site.names]) == (True, ["a"])
    running.cancel()
    await asyncio.wait([running])


def test_a_request_that_waits_for_room_is_not_refused_as_its_adapter_vanishes(tmp_path):
    loses_what_is_waited_for(tmp_path)


@held
async def waits_to_know_who_leads(folder, comes_with_a_reload):
    """Ask a worker that may not lead for an adapter, before it has heard who does."""
    site = Site(folder)
    adapters = Adapters(
        *(site.table, site.loop, Events(), Memory(None), lambda pool: frozenset()),
        connect=lambda backend: Server(site.names),
    )
    adapters.together = Together(Late(site.loop), site.loop, "worker 2", may_lead=False)
    adapters.apply({} if comes_with_a_reload else site.settings)
    running = site.loop.create_task(adapters.run())
    await passes(15.0 if comes_with_a_reload else 1.0)
    adapters.apply(site.settings)
    adapters.want(Route("a", "m", "a", adapter="a"))
    await passes(2 * LOAD_S)
    assert not site.names
    running.cancel()
    await asyncio.wait([running])


def test_nothing_is_loaded_before_it_is_known_who_leads(tmp_path):
    waits_to_know_who_leads(tmp_path, False)
    waits_to_know_who_leads(tmp_path, True)


@held
async def leads_no_more(folder):
    site = Site(folder, keeps=2)
    site.table.observe("m/b1", ModelsSeen(site.loop.time(), (BASE,), None, "0.24.0"))
    await site.turns(4, ["a"])
    (backend,) = site.table.backends("m")
    assert [*site.names] == ["a"]
    await passes(8 * LOAD_S)
    site.keeper.want("b")
    await passes(LOAD_S / 2)
    site.keeper.leads = False
    site.keeper.hear(Elsewhere([PoolTold(placed={"m/b1": Placed(frozenset("a"))})]))
    assert backend.lacking["a"] is Exclusion.ADAPTER_LOADING, "it would get another one's weights"
    await passes(LOAD_S)
    assert [*site.names] == ["a", "b"]
    assert "a" not in backend.lacking


def test_who_leads_no_more_sends_none_to_a_version_that_mixes_them_up_while_its_own_load_lasts(
    tmp_path,
):
    leads_no_more(tmp_path)


@held
async def is_told_of_anothers_order(folder):
    site = Site(folder)
    adapters = Adapters(site.table, site.loop, Events(), Memory(folder), lambda pool: frozenset())
    adapters.apply(site.settings)
    told = PoolTold(orders={"m/b1": {"a": Order(keep=False, at=5.0)}})
    adapters.pools["m"].leads = False
    adapters.pools["m"].hear(Elsewhere([told]))
    (row,) = [each for each in adapters.statuses() if each.adapter == "a"]
    assert row.order == "unload"
    assert "Another gateway was given the order" in adapters.order("m/b1", "a", None)
    assert "m/b1 loads a" in adapters.order("m/b1", "a", Order(keep=True, at=9.0))  # the later one
    assert "unload a on m/b1, given to another gateway" in adapters.order("m/b1", "a", None)
    adapters.order("m/b1", "b", Order(keep=True))
    assert "No order holds for b on m/b1 any more" in adapters.order("m/b1", "b", None)


def test_an_order_that_another_gateway_was_given_is_told_of_here(tmp_path):
    is_told_of_anothers_order(tmp_path)


@held
async def tells_what_another_does(folder):
    site = Site(folder)
    adapters = Adapters(site.table, site.loop, Events(), Memory(folder), lambda pool: frozenset())
    adapters.apply(site.settings)
    adapters.pools["m"].leads = False
    placed = {"m/b1": Placed(lacking={"a": "adapter_failed", "b": "adapter_loading"})}
    adapters.pools["m"].hear(Elsewhere([PoolTold(placed=placed)]))
    found = {each.adapter: each.detail for each in adapters.statuses()}
    assert "could not load it" in found["a"]
    assert "is loading it" in found["b"]


def test_what_another_gateway_loads_or_could_not_load_is_told_here(tmp_path):
    tells_what_another_does(tmp_path)


@held
async def obeys_anothers_order(folder, at, names):
    """Have another gateway be ordered to load what has failed here for hours, and ended two servers 60 s ago."""
    site = Site(folder)
    known, wall = site.keeper.known, site.loop.wall()
    known.failures["m/b1", "a"] = Failure(12, site.loop.time() + 600, "no such file")
    for _ in range(2):
        known.memory.died("m", "a", Death("m/b1", "/a", wall - 60))
    order = Order(keep=True, at=wall + at)
    site.keeper.hear(Elsewhere([PoolTold(orders={"m/b1": {"a": order}})]))
    await site.turns(4 * LOAD_S, [])
    assert [*site.names] == names


def test_an_order_that_another_gateway_was_given_is_tried_at_once_here(tmp_path):
    obeys_anothers_order(tmp_path / "since", -1.0, ["a"])
    obeys_anothers_order(tmp_path / "before", -90.0, ["b"])  # it is what the servers died of


@held
async def tells_what_it_saw_before(folder):
    pools = {"m": {"backends": [{"url": "http://127.0.0.1:8001"}], "adapters": "auto"}}
    house, memory = House(**pools), Memory(folder)
    adapters = Adapters(house.table, house.loop, Events(), memory, lambda pool: frozenset())
    adapters.apply(Config.model_validate({"pools": pools}).pools)
    house.up("m/b1", "sql")
    (row,) = adapters.statuses()
    assert (row.state, row.detail) == ("loaded", "")
    house.down("m/b1")
    (row,) = adapters.statuses()
    assert (row.state, row.detail) == ("loaded", "as last seen: the backend is down")


def test_of_a_backend_that_is_down_the_adapters_are_those_that_were_last_seen(tmp_path):
    tells_what_it_saw_before(tmp_path)


@held
async def keeps_what_it_knows_the_path_of(folder):
    """Order to keep two that a server loaded by itself; of one it does not tell from where."""
    pools = {"m": {"backends": [{"url": "http://127.0.0.1:8001"}], "adapters": "auto"}}
    house, memory = House(**pools), Memory(folder)
    adapters = Adapters(house.table, house.loop, Events(), memory, lambda pool: frozenset())
    adapters.apply(Config.model_validate({"pools": pools}).pools)
    listed = BASE, ServedModel("a", "m", None, "/a"), ServedModel("b", "m", None, None)
    house.table.observe("m/b1", ModelsSeen(house.loop.time(), listed, None, "0.32.0"))
    adapters.order("m/b1", "a", Order(keep=True))
    with pytest.raises(OrderRefused) as refused:
        adapters.order("m/b1", "b", Order(keep=True))
    assert refused.value.code == "no_path"
    assert memory.orders("m/b1") == {"a": Order(keep=True, path="/a")}


def test_an_order_to_keep_an_adapter_keeps_its_path_or_is_refused(tmp_path):
    keeps_what_it_knows_the_path_of(tmp_path)


@held
async def test_a_load_did_not_take_as_long_as_the_gateway_stood_still_meanwhile(tmp_path):
    site = Site(tmp_path)
    for _ in range(50):  # each second that a load takes counts for all of them
        site.table.take("m/b1", site.loop.time(), Need(10, 10, streams=True))
    await site.turns(0.5, "a")
    site.loop.at += 7200.0
    await site.turns(0.5, "a")
    assert site.names == {"a": "/a"}
    assert site.keeper.usual_s < 10
    await site.turns(120, "b")
    assert site.names == {"b": "/b"}
