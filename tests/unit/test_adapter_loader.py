"""Adapters of the configuration are kept loaded on every backend of their pool."""

import asyncio

from gateway.config.models import Config
from gateway.core.events import EventKind, Events
from gateway.core.types import ModelsSeen, ProbePassed, ServedModel
from gateway.pools.table import PoolTable
from gateway.sim.config import SimConfig
from gateway.sim.server import SimServer
from gateway.watch.adapter_loader import AdapterLoader


class HeldClock:
    at = 100.0

    def now(self):
        return self.at

    def wall(self):
        return 1_700_000_000.0


class World:
    """One simulated backend in a pool whose configuration names an adapter."""

    def __init__(self, sim, path="/loras/sql"):
        backends = [{"name": "b1", "url": sim.url}]
        pool = {"backends": backends, "adapters": [{"name": "sql", "path": path}]}
        self.pools = Config.model_validate({"pools": {"m": pool}}).pools
        self.clock, self.events = HeldClock(), Events()
        self.table = PoolTable(self.clock)
        self.table.apply(self.pools)
        self.keeper = AdapterLoader(self.table, self.clock, self.events, self.pools)

    def see(self, *adapters):
        models = [ServedModel("m", None, 4096), *(ServedModel(a, "m", None) for a in adapters)]
        self.table.observe("m/b1", ModelsSeen(self.clock.at, tuple(models)))
        self.table.observe("m/b1", ProbePassed(self.clock.at))

    @property
    def told(self):
        return [(each.kind, each.label) for each in self.events.newest()]


def test_an_adapter_that_a_serving_backend_lacks_is_loaded_once():
    async def story():
        async with SimServer(SimConfig(model="m", port=0)) as sim:
            world = World(sim)
            await world.keeper.turn()
            assert sim.received("/v1/load_lora_adapter") == []  # it does not serve yet
            world.see()
            await world.keeper.turn()
            await world.keeper.turn()
            assert len(sim.received("/v1/load_lora_adapter")) == 1
            assert world.told == [(EventKind.ADAPTER, "sql")]
            world.see("sql")
            world.clock.at += 60
            await world.keeper.turn()
            assert len(sim.received("/v1/load_lora_adapter")) == 1

    asyncio.run(story())


def test_one_that_could_not_be_loaded_is_tried_again_half_a_minute_later():
    async def story():
        async with SimServer(SimConfig(model="m", port=0)) as sim:
            world = World(sim, path="/loras/missing")
            world.see()
            await world.keeper.turn()
            assert [kind for kind, _ in world.told] == [EventKind.ADAPTER_FAILED]
            world.clock.at += 29
            await world.keeper.turn()
            tries = len(sim.received("/v1/load_lora_adapter"))
            world.clock.at += 2
            await world.keeper.turn()
            assert len(sim.received("/v1/load_lora_adapter")) == tries + 1

    asyncio.run(story())
