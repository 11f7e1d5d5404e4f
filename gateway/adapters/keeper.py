"""The owner of one pool's LoRA adapters: it plans loads and unloads, carries them out, and notes the results.

    look        twice a second, and when a request comes for an adapter that no backend has
     `- change  at most one per backend: wait until the old adapter is unused, unload, load, verify

While a change is planned or under way, no request is sent to the adapters that it concerns. So none meets
an adapter that is about to be unloaded, or is not loaded yet. Only the background tasks (`_change`, and those of
`adapters.lists`) await; all else is synchronous. Of several gateways one plans for all, and the others follow
(`adapters.together`). A process that finishes its requests after an upgrade follows the one that took over.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from gateway.adapters.change import Change, mixes
from gateway.adapters.deadly import Deadly
from gateway.adapters.elsewhere import Elsewhere, Placed, PoolTold, placed_on
from gateway.adapters.lists import Lists
from gateway.adapters.memory import Memory
from gateway.adapters.placement import Move, lacks, plan
from gateway.adapters.seen import Known
from gateway.adapters.server import Server
from gateway.config.models import PoolConfig
from gateway.core.aio import Clock, Running
from gateway.core.events import EventKind, Events
from gateway.core.exclusion import Exclusion
from gateway.pools.configured import Withheld
from gateway.pools.table import Backend, PoolTable
from gateway.watch.adapters import AdapterError, held_by

log = logging.getLogger("gateway.adapters")

_UNUSED_S: Final = 600.0  # for the requests of an adapter to end before it is unloaded
_LOOK_S: Final = 0.02  # between two checks whether those requests have ended
_GONE_S: Final = 5.0  # a model list that was read before an unload may still name the adapter
_FRESH_S: Final = 1.0  # a loaded adapter stays at least so long, so that its requests find it
_MEMORY_S: Final = 60.0  # time constant of demand, an exponential average
_FORGOTTEN: Final = 0.001  # requests in flight on average; less demand than that is none
_RESTS: Final = 4.0  # load times until the next load that is not urgent, and the least stay
# A load stops all requests in flight. For this part of the seconds that they lost together, the backend loads
# nothing else that requests wait for. Simulated, 100 adapters on 4 engines at 12 requests/s: without it the engines
# stood still for half of the time and a fifth of the requests were refused; 5 % with 0.15, none with 0.25.
_CATCHES_UP: Final = 0.25
_MOST_RESTS: Final = 12.0  # the same in load times at most, however many were in flight
_LOADS_KEPT: Final = 16
_USUALLY: Final = 2.0  # times the slowest recent load: a longer one counts as failed until it ends
_UNKNOWN_S: Final = 30.0  # in place of the slowest recent load while there was none
_LEAST_S: Final = 1.0
_HEARD_S: Final = 1.5  # until all gateways know of an unload, and told what still uses the adapter


class Done(Enum):
    """The result of a load or an unload. It is a metric label."""

    LOADED = "loaded"
    EVICTED = "evicted"  # unloaded, and another is loaded in its place
    UNLOADED = "unloaded"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Tools:
    """What all keepers share. `start` runs a change as a background task, to its end."""

    table: PoolTable
    clock: Clock
    events: Events
    memory: Memory
    connect: Callable[[Backend], Server]
    start: Callable[[Coroutine[Any, Any, None], str], None]


class PoolAdapters:
    """One pool's adapters. One event loop."""

    def __init__(self, pool: str, settings: PoolConfig, tools: Tools) -> None:
        self.known = Known(tools.memory, settings, Deadly(pool, tools.memory, tools.clock))
        self.changes = self.known.changes
        self.loads_s: deque[float] = deque(maxlen=_LOADS_KEPT)
        self.done: Counter[Done] = Counter()
        self.all_loads_s = 0.0
        self._pool, self._table, self._clock, self._tools = pool, tools.table, tools.clock, tools
        self._running = Running(tools.clock.now())
        self.leads = True  # False: another gateway plans
        self._lacking: dict[str, dict[str, Exclusion]] = {}  # as planned last, by backend
        self._lists = Lists(tools.table, tools.clock, tools.connect, tools.start)
        self._waiting: AbstractSet[str] = frozenset()  # adapters that requests wait for here

    # --- asked ------------------------------------------------------------------------------------

    @property
    def usual_s(self) -> float | None:
        """The slowest recent load; None before the first."""
        return max(self.loads_s, default=None)

    def begin(self) -> None:
        """Forget what was to be done when all was cancelled, before it took its first step: it clears up nothing."""
        self.changes.clear()
        self._lists.begin()

    def hand_over(self) -> None:
        """Plan nothing from now on: another process has taken over."""
        self.leads, self.known.left = False, True

    def want(self, name: str) -> None:
        """Plan at once for a request whose adapter no serving backend has."""
        if self._awaited(name, self._clock.now()):
            self.look()

    def turn(self, awaited: AbstractSet[str]) -> None:
        """Update the demand, and look; about twice a second.

        `awaited` are the adapters of requests in the queue.
        """
        now, known = self._clock.now(), self.known
        fades = math.exp(-self._running.look(now) / _MEMORY_S)
        present: dict[str, int] = {}
        for each in self._table.backends(self._pool):
            for counted in (each.adapter_requests, known.elsewhere.requests(each.id)):
                for name, count in counted.items():
                    present[name] = present.get(name, 0) + count
        for name in known.demand.keys() | present.keys():
            faded = known.demand.get(name, 0.0) * fades + present.get(name, 0) * (1 - fades)
            known.demand[name] = faded
            if faded < _FORGOTTEN:
                del known.demand[name]
        self._waiting = awaited
        awaited = awaited | known.elsewhere.awaited
        for name in known.waits_since.keys() - awaited:
            del known.waits_since[name]
        for name in awaited - known.waits_since.keys():  # unloaded while requests waited for room
            self._awaited(name, now)
        self.look()

    def look(self, *, plans: bool = True) -> None:
        """Tell the pool table which adapters are not available; with `plans` first begin what placement plans."""
        now, known = self._clock.now(), self.known
        backends = self._serving()
        for each in backends:
            if each.health.models_known and each.id not in self.changes:
                known.memory.only(each.id, each.models, self._clock.wall())
        known.forget(self._table.backends(self._pool), now)
        known.deadly.look(self._table.backends(self._pool))
        if not self.leads and (placed := known.elsewhere.placed) is not None:
            self._follow(placed)
            return
        if known.left and self._nowhere(backends):  # only a list tells what the new process loads
            for each in backends:
                self._lists.read_again(each)
        paths, wanted = known.paths(backends), known.wanted(backends, now)
        places = [known.place(each, paths, now) for each in backends]
        if self.leads and plans and (moves := plan(wanted, places)):
            for move in moves:
                self._begin(move, now)
            places = [known.place(each, paths, now) for each in backends]
        planned, told = lacks(wanted, places), list[Withheld]()
        for each in self._table.backends(self._pool):
            gone = (name for place, name in known.gone if place == each.id)
            lacking = dict.fromkeys(gone, Exclusion.MODEL_MISSING) | planned.get(each.id, {})
            if (change := self.changes.get(each.id)) is not None:
                lacking |= change.lacking(each, now)
            self._lacking[each.id] = lacking
            told.append(Withheld(each, lacking, known.ordered(each.id)))
        self._table.withhold(*told)

    def tell(self) -> PoolTold:
        """Return what the other gateways need to know."""
        members, known = self._table.backends(self._pool), self.known
        looked = [each for each in self._serving() if each.id in self._lacking]
        placed = {each.id: placed_on(each, self._lacking[each.id]) for each in looked}
        return PoolTold(
            {each.id: dict(each.adapter_requests) for each in members},
            frozenset(self._waiting & known.waits_since.keys()),
            {each.id: sorted(known.memory.loaded(each.id)) for each in members},
            {each.id: {} if known.left else known.memory.orders(each.id) for each in members},
            placed if self.leads else None,
            {each.id: {**known.memory.begun(each.id)} for each in members},
        )

    def hear(self, elsewhere: Elsewhere) -> None:
        """Take in the messages of the others. Any gateway that plans may unload what another one loaded."""
        self.known.hear(elsewhere, self._table.backends(self._pool))
        for each in self._serving():
            for name in elsewhere.loaded(each.id) & each.models.keys():
                self.known.memory.note(each.id, name)
        self.look()

    def _follow(self, placed: Mapping[str, Placed]) -> None:
        """Apply the leading gateway's placement here, and fetch a backend's model list again where it differs."""
        paths, told = self.known.paths(self._table.backends(self._pool)).keys(), list[Withheld]()
        for each in self._serving():
            unseen = dict.fromkeys(paths - each.models.keys(), Exclusion.ADAPTER_DUE)
            seen = placed.get(each.id) or placed_on(each, unseen)  # if it only just serves
            lacking = dict.fromkeys(paths & {*each.adapters} - seen.held, Exclusion.MODEL_MISSING)
            lacking |= dict.fromkeys(seen.held - each.models.keys(), Exclusion.ADAPTER_LOADING)
            if lacking:
                self._lists.read_again(each)
            lacking |= seen.exclusions
            if (change := self.changes.get(each.id)) is not None:  # begun while this one led
                lacking |= change.lacking(each, self._clock.now())
            told.append(Withheld(each, lacking, self.known.ordered(each.id)))
        self._table.withhold(*told)

    # --- inside -----------------------------------------------------------------------------------

    def _awaited(self, name: str, now: float) -> bool:
        """Note that requests wait for an adapter, if no backend has it; return whether that is new."""
        backends, known = self._serving(), self.known
        served = any(name in each.models and name not in each.lacking for each in backends)
        if served or name not in known.paths(backends):
            return False
        known.demand[name] = known.demand.get(name, 0.0) + 1.0 / _MEMORY_S
        return known.waits_since.setdefault(name, now) == now

    def _nowhere(self, backends: Sequence[Backend]) -> AbstractSet[str]:
        """Return the adapters that requests wait for here, and none of these backends lists."""
        listed = {name for each in backends for name in each.models}
        return (self._waiting & self.known.waits_since.keys()) - listed

    def _serving(self) -> list[Backend]:
        return self.known.serving(self._table.backends(self._pool), self._clock.now())

    def _begin(self, move: Move, now: float) -> None:
        backend = self._table.get(move.place)
        if backend is None:
            return
        change = self.changes[move.place] = Change(move, now, move.load in self.known.waits_since)
        self._tools.start(self._change(backend, change), f"adapters {backend.id}")

    async def _change(self, backend: Backend, change: Change) -> None:
        """Carry out a move. Cancel: the backend may still finish what it was asked to do."""
        move = change.move
        try:
            with closing(self._tools.connect(backend)) as server:
                gone = move.unload is None or await self._unload(backend, server, change)
                # A vLLM that mixes adapters up must not load while requests use some.
                alone = not mixes(backend)
                gone = gone and (alone or await self._unused(backend, {*backend.adapters}, change))
                if gone and move.load is not None:
                    await self._load(backend, server, change)
        finally:
            if self.changes.get(backend.id) is change:
                del self.changes[backend.id]
        if self._table.get(backend.id) is backend:
            self.look()

    async def _unload(self, backend: Backend, server: Server, change: Change) -> bool:
        """Wait until no request uses an adapter, then unload it; return whether it is gone."""
        move, name = change.move, str(change.move.unload)
        if not await self._unused(backend, {name}, change):
            return False
        try:
            await server.unload(name)
            await self._lists.read(backend, server)
        except AdapterError as error:
            self._failed(backend, name, error)
            return False
        extra = {"event": "adapter_unloaded", "backend": backend.id, "adapter": name}
        log.info("unloaded", extra=extra)
        self.done[Done.UNLOADED if move.load is None else Done.EVICTED] += 1
        self.known.failures.pop((backend.id, name), None)
        self.known.gone[backend.id, name] = self._clock.now() + _GONE_S
        return name not in backend.models

    async def _unused(self, backend: Backend, names: AbstractSet[str], change: Change) -> bool:
        """Wait until all gateways know of a change and no request uses these.

        False: it is too late, or not known, or nobody waits any more for what was to be loaded.
        """
        began = self._clock.now()
        heard_s = _HEARD_S if self.known.elsewhere else 0.0
        while (passed_s := self._clock.now() - began) < heard_s or names & (
            backend.adapter_requests.keys() | self.known.elsewhere.requests(backend.id).keys()
        ):
            late = passed_s > _UNUSED_S or self.known.elsewhere.stale
            for_nobody = change.awaited and change.move.load not in self.known.waits_since
            if late or for_nobody or self._table.get(backend.id) is not backend:
                return False
            await asyncio.sleep(_LOOK_S)
        return not self.known.elsewhere.stale

    async def _load(self, backend: Backend, server: Server, change: Change) -> None:
        name, began_at = str(change.move.load), self._clock.now()
        began = self._running.at(began_at)
        path = self.known.path_at(backend.id, name, self._table.backends(self._pool))
        if path is None:  # a reload removed the adapter
            return
        late_s = _LEAST_S + _USUALLY * (self.usual_s or _UNKNOWN_S)
        change.began_at, change.late_at = began_at, began_at + late_s
        self.known.memory.begin(backend.id, name, self._clock.wall())
        try:
            await server.load(name, path)
            seconds = self._running.at(self._clock.now()) - began
            self._table.forgive(self._clock.now(), backend)
            await self._lists.read(backend, server)
            held = held_by(backend).get(name)
            if held != path:
                where = "does not list it" if held is None else "has it from another path"
                raise AdapterError(f"the adapter {name} was loaded, but the server {where}")
            self.known.memory.note(backend.id, name)
        except AdapterError as error:
            self._failed(backend, name, error)
            return
        self.known.loaded(backend.id, name)
        self.loads_s.append(seconds)
        self.done[Done.LOADED] += 1
        self.all_loads_s += seconds
        now = self._clock.now()
        self.known.rest_until[backend.id] = now + _RESTS * seconds
        lost = min(_CATCHES_UP * backend.in_flight, _MOST_RESTS)
        self.known.caught_up_at[backend.id] = now + lost * seconds
        self.known.fresh_until[name] = now + max(_FRESH_S, _RESTS * seconds)
        detail = f"the adapter {name} is loaded"
        extra = {"event": "adapter_loaded", "backend": backend.id, "seconds": round(seconds, 3)}
        log.info(detail, extra=extra)
        if change.move.unload is None:  # a swap by demand is no event
            self._tools.events.note(self._clock, EventKind.ADAPTER, backend.id, name, detail)

    def _failed(self, backend: Backend, name: str, error: AdapterError) -> None:
        if self._table.get(backend.id) is not backend:
            return  # a reload replaced the backend; the list of the new one is read anew
        self.done[Done.FAILED] += 1
        if error.fatal and self.changes[backend.id].move.load == name:
            self.known.load_failed(backend.id, name)
        again_s = self.known.failed(backend.id, name, error, self._clock.now())
        detail = f"{error}; tried again in {again_s:.0f} s"
        self._tools.events.note(self._clock, EventKind.ADAPTER_FAILED, backend.id, name, detail)
