"""Many LoRA adapters on a few engines in simulated time, by the gateway's placement or by other choices.

An engine keeps so many adapters. One that it has not, or not any more, is read from disk, and the engine
stands still meanwhile: between two steps when a request needs it, as vLLM does, or when it is ordered
to load it. The other arms have every name registered on every engine, which costs nothing by itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gateway.adapters.keeper import PoolAdapters, Tools
from gateway.adapters.memory import Memory
from gateway.core.aio import guarded, periodic
from gateway.core.events import Events
from gateway.core.types import ModelsSeen, Route, ServedModel
from gateway.pools.table import Backend
from gateway.sim.config import SimConfig
from gateway.sim.sequence import Sequence as EngineSequence
from loadtest.arrivals import Shot
from loadtest.openloop import Target
from loadtest.outcomes import Outcome
from loadtest.virtual import Direct, Engines, Reply, VirtualLoop
from loadtest.virtual_gateway import Gateway

BACKENDS: Final = 4
ADAPTERS: Final = 100
MAX_LORAS: Final = 8  # run at a time
MAX_CPU_LORAS: Final = 16  # are kept
LOAD_S: Final = (0.3, 1.0)
# About an 8B model on one GPU of 40 GB.
ENGINE: Final = SimConfig(
    model="m",
    max_num_seqs=128,
    num_blocks=8192,
    max_batched_tokens=2048,
    max_model_len=16_384,
    max_loras=MAX_LORAS,
    prefill_tokens_per_s=16_000.0,
    decode_step_s=0.012,
)
_LONGEST_S: Final = 60.0  # after the last arrival; what still runs then is cut


@dataclass(frozen=True, slots=True)
class Named(Shot):
    """A request for one adapter."""

    adapter: str = ""


def mix(seconds: float, rate_per_s: float, skew: float, seed: int) -> list[Named]:
    """Return Poisson arrivals; the n-th adapter is asked for in proportion to 1 / n ** skew."""
    rng, found, at_s = random.Random(seed), list[Named](), 0.0
    weights = [1 / rank**skew for rank in range(1, ADAPTERS + 1)]
    while (at_s := at_s + rng.expovariate(rate_per_s)) < seconds:
        (rank,) = rng.choices(range(ADAPTERS), weights)
        sizes = rng.randint(128, 1024), rng.randint(64, 256)
        found.append(Named(at_s, "t", "chat", *sizes, len(found), f"a{rank:02}"))
    return found


def load_s(name: str) -> float:
    """Return how long an adapter takes to load: its own time, alike in every arm."""
    least, most = LOAD_S
    return least + (most - least) * random.Random(name).random()


class AdapterEngines(Engines):
    """Engines that keep the adapters used last."""

    def __init__(self, config: SimConfig, count: int) -> None:
        super().__init__(config, count)
        self.kept: list[OrderedDict[str, None]] = [OrderedDict() for _ in range(count)]
        self._disks = [asyncio.Lock() for _ in range(count)]
        self.loads = 0

    def sequence(self, number: int, shot: Shot) -> EngineSequence:
        """Return what an engine is asked."""
        assert isinstance(shot, Named)
        found = super().sequence(number, shot)
        found.adapter = shot.adapter
        return found

    async def run(self, place: int, reply: Reply) -> None:
        """Have a server work on a request; it reads the adapter first if it does not keep it."""
        shot, kept = reply.shot, self.kept[place]
        assert isinstance(shot, Named)
        if shot.adapter not in kept:
            await self.load(place, shot.adapter)
        kept.move_to_end(shot.adapter)
        await super().run(place, reply)

    async def load(self, place: int, name: str, *, anew: bool = False) -> None:
        """Read an adapter from disk, if it is not there by then; the engine stands still meanwhile."""
        async with self._disks[place]:
            kept = self.kept[place]
            if name in kept and not anew:
                return
            self.loads += 1
            driver = self.states[place].drivers[0]
            driver.freeze(frozen=True)
            try:
                await asyncio.sleep(load_s(name))
            finally:
                driver.freeze(frozen=False)
            kept[name] = None
            kept.move_to_end(name)
            while len(kept) > MAX_CPU_LORAS:
                kept.popitem(last=False)


Choose = Callable[[AdapterEngines, Sequence[int], str], int]  # engines, requests at each, adapter


def _least(engines: AdapterEngines, loads: Sequence[int], name: str) -> int:
    return loads.index(min(loads))


def _rendezvous(engines: AdapterEngines, loads: Sequence[int], name: str) -> int:
    places = range(len(loads))
    return max(places, key=lambda each: hashlib.sha256(f"{name}/{each}".encode()).digest())


def _resident(engines: AdapterEngines, loads: Sequence[int], name: str) -> int:
    """The least loaded of those that keep it now, which no router can see; else of all."""
    having = [place for place, kept in enumerate(engines.kept) if name in kept]
    return min(having or range(len(loads)), key=loads.__getitem__)


CHOICES: Final[dict[str, Choose]] = {
    "least load": _least,
    "rendezvous": _rendezvous,
    "sees what is kept": _resident,
}
ARMS: Final = ("gateway", *CHOICES)


class _Server:
    """An `adapters.server.Server` over a simulated engine."""

    def __init__(self, engines: AdapterEngines, place: int, names: dict[str, str]) -> None:
        self._engines, self._place, self._names = engines, place, names

    async def load(self, name: str, path: str) -> None:
        # An unloaded name that comes back is another adapter to vLLM: it is read again.
        await self._engines.load(self._place, name, anew=True)
        self._names[name] = path

    async def unload(self, name: str) -> None:
        self._names.pop(name, None)

    async def models(self) -> tuple[ServedModel, ...]:
        base = ServedModel("m", None, self._engines.config.max_model_len)
        return (base, *(ServedModel(name, "m", None, path) for name, path in self._names.items()))

    def close(self) -> None:
        pass


class AdapterGateway(Gateway):
    """The gateway with its own placement of adapters."""

    def __init__(self, engines: AdapterEngines, seed: int, folder: Path) -> None:
        adapters = [{"name": f"a{each:02}", "path": f"/a{each:02}"} for each in range(ADAPTERS)]
        settings: dict[str, Any] = {"adapters": adapters, "prefix": "off"}
        super().__init__(engines, settings, seed)
        pool = self.config.pools["m"]
        limited = [
            each.model_copy(update={"max_cpu_loras": MAX_CPU_LORAS}) for each in pool.backends
        ]
        self._pool = pool.model_copy(update={"backends": tuple(limited)})
        self._names: list[dict[str, str]] = [{} for _ in engines.states]
        self._folder = folder
        self._adapter_engines = engines

    def _connect(self, backend: Backend) -> _Server:
        place = self._places[backend.id]
        return _Server(self._adapter_engines, place, self._names[place])

    async def run(self) -> None:
        """Watch the engines, and place adapters. Cancel: it ends."""
        async with asyncio.TaskGroup() as group:
            group.create_task(super().run(), name="gateway")
            await asyncio.sleep(0)
            for backend in self.table.backends("m"):
                base = (ServedModel("m", None, self._engines.config.max_model_len),)
                self.table.observe(backend.id, ModelsSeen(self._loop.time(), base, None, "0.32.0"))

            def start(work: Coroutine[Any, Any, None], name: str) -> None:
                group.create_task(guarded(work, name=name), name=name)

            tools = Tools(
                self.table, self._loop, Events(), Memory(self._folder), self._connect, start
            )
            keeper = PoolAdapters("m", self._pool, tools)
            self.gate.on_wanted.append(lambda route, _: keeper.want(str(route.adapter)))

            async def turn() -> None:
                keeper.turn(self.gate.awaited("m"))

            rng = random.Random(0)
            group.create_task(periodic(turn, every_s=0.5, name="adapters", rng=rng))

    def route(self, shot: Shot) -> Route:
        """Return where a request's model leads."""
        assert isinstance(shot, Named)
        window = self._engines.config.max_model_len
        name = shot.adapter
        return Route(name, "m", name, adapter=name, window_tokens=window, engine_tokens=window)


def run(shots: Sequence[Named], arm: str, seed: int, head_s: float) -> tuple[list[Outcome], int]:
    """Send a mix to one arm, in simulated time; returns what became of it, and the loads after `head_s`."""

    async def main(folder: Path) -> tuple[list[Outcome], int]:
        engines = AdapterEngines(ENGINE, BACKENDS)
        if arm in CHOICES:
            choose = CHOICES[arm]
            target = Direct(engines, lambda shot, loads: choose(engines, loads, shot.adapter))
            return await _play(shots, target, engines, head_s)
        gateway = AdapterGateway(engines, seed, folder)
        async with asyncio.TaskGroup() as group:
            background = group.create_task(gateway.run())
            await asyncio.sleep(30.0)  # until all that fits is loaded
            try:
                return await _play(shots, gateway, engines, head_s)
            finally:
                background.cancel()

    with (
        tempfile.TemporaryDirectory() as folder,
        asyncio.Runner(loop_factory=VirtualLoop) as runner,
    ):
        return runner.run(main(Path(folder)))


async def _play(
    shots: Sequence[Named], target: Target, engines: AdapterEngines, head_s: float
) -> tuple[list[Outcome], int]:
    loop = asyncio.get_running_loop()
    start, outcomes, before = loop.time(), list[Outcome](), 0

    def clock() -> float:
        return loop.time() - start

    def head_ended() -> None:
        nonlocal before
        before = engines.loads

    async with asyncio.TaskGroup() as group:
        loop.call_at(start + head_s, head_ended)
        tasks = []
        for shot in shots:
            if (ahead_s := shot.at_s - clock()) > 0:
                await asyncio.sleep(ahead_s)
            outcome = Outcome(shot, shot.at_s)
            outcomes.append(outcome)
            tasks.append(group.create_task(target.send(target.prepare(shot), outcome, clock)))
        loads = engines.loads - before
        _, running = await asyncio.wait(tasks, timeout=_LONGEST_S)
        for task in running:
            task.cancel()
    return outcomes, loads
