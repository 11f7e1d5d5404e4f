"""The owner of one pool's adapters: it asks `placement` what to do, has it done, and notes what came of it.

    look      twice a second, and when a request comes for an adapter that no backend has
     `- change   one for each backend at a time: wait until what goes is unused, unload, load, verify

What a change concerns is kept from requests from its first moment on; so no request goes to an adapter
that is about to leave, or that is not there yet. Everything here is synchronous but the change.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Coroutine
from collections.abc import Set as AbstractSet
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

from gateway.adapters.memory import Memory
from gateway.adapters.placement import Move, lacks, plan
from gateway.adapters.seen import SERVING, Failure, Known, mixes
from gateway.adapters.server import Server
from gateway.config.models import PoolConfig
from gateway.core.aio import Clock
from gateway.core.events import EventKind, Events
from gateway.core.exclusion import Exclusion
from gateway.core.types import ModelsSeen
from gateway.pools.table import Backend, PoolTable
from gateway.watch.adapters import AdapterError, held_by

log = logging.getLogger("gateway.adapters")

_UNUSED_S: Final = 600.0  # until the requests for what goes have ended
_LOOK_S: Final = 0.02  # between two looks whether they have
_GONE_S: Final = 5.0  # a model list that was asked for before may still name it
_RETRY_S: Final = 5.0
_RETRY_MOST_S: Final = 600.0
_FRESH_S: Final = 1.0  # what was loaded stays at least so long, so that its requests find it
_MEMORY_S: Final = 60.0  # of demand
_FORGOTTEN: Final = 0.001  # requests at a time
_RESTS: Final = 4.0  # times a load, before the next that is not urgent, and before it goes again
_LOADS_KEPT: Final = 16
_USUALLY: Final = 2.0  # times the slowest load of late; then it counts as failed until it ends
_UNKNOWN_S: Final = 30.0  # while none is known
_LEAST_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Means:
    """What all keepers work with. `start` runs a change beside everything else, to its end."""

    table: PoolTable
    clock: Clock
    events: Events
    memory: Memory
    connect: Callable[[Backend], Server]
    start: Callable[[Coroutine[Any, Any, None], str], None]


@dataclass(frozen=True, slots=True)
class Change:
    """What is being done to a backend."""

    move: Move
    began_at: float
    late_at: float = math.inf  # from then on its load takes too long to wait for it


class PoolAdapters:
    """One pool's adapters. One event loop."""

    def __init__(self, pool: str, settings: PoolConfig, means: Means) -> None:
        self.known = Known(means.memory, settings)
        self.changes: dict[str, Change] = {}  # by backend
        self.loads_s: deque[float] = deque(maxlen=_LOADS_KEPT)
        self._pool, self._table, self._clock, self._means = pool, means.table, means.clock, means
        self._looked_at = means.clock.now()

    # --- asked ------------------------------------------------------------------------------------

    @property
    def usual_s(self) -> float | None:
        """How long a load takes at most, as learnt; None while nobody knows."""
        return max(self.loads_s, default=None)

    def want(self, name: str) -> None:
        """A request came for an adapter: see that it gets a place, in this same turn."""
        backends = self._serving()
        if any(name in each.models and name not in each.lacking for each in backends):
            return
        known = self.known
        if name in known.paths(backends):
            known.demand[name] = known.demand.get(name, 0.0) + 1.0 / _MEMORY_S
            if name not in known.waits_since:
                known.waits_since[name] = self._clock.now()
                self.look()

    def turn(self, awaited: AbstractSet[str]) -> None:
        """Learn what is asked for, and look what is to be done; about twice a second.

        `awaited` are the adapters of requests that wait.
        """
        now, known = self._clock.now(), self.known
        fades = math.exp((self._looked_at - now) / _MEMORY_S)
        self._looked_at = now
        present: dict[str, int] = {}
        for each in self._table.backends(self._pool):
            for name, count in each.riding.items():
                present[name] = present.get(name, 0) + count
        for name in known.demand.keys() | present.keys():
            faded = known.demand.get(name, 0.0) * fades + present.get(name, 0) * (1 - fades)
            known.demand[name] = faded
            if faded < _FORGOTTEN:
                del known.demand[name]
        for name in known.waits_since.keys() - awaited:
            del known.waits_since[name]
        self.look()

    def look(self) -> None:
        """Begin what placement says is to be done now, and keep from requests what they cannot have."""
        now, known = self._clock.now(), self.known
        backends = self._serving()
        for each in backends:
            if each.models_known and each.id not in self.changes:
                known.memory.only(each.id, each.models)
        known.gone = {key: until for key, until in known.gone.items() if until > now}
        paths, wanted = known.paths(backends), known.wanted(backends, now)
        for move in plan(wanted, [known.place(each, paths, now) for each in backends]):
            self._begin(move, now)
        told = lacks(wanted, [known.place(each, paths, now) for each in backends])
        for each in self._table.backends(self._pool):
            gone = (name for place, name in known.gone if place == each.id)
            lacking = dict.fromkeys(gone, Exclusion.MODEL_MISSING) | told.get(each.id, {})
            if (change := self.changes.get(each.id)) is not None:
                lacking |= self._during(each, change, now)
            self._table.withhold(each, lacking)

    # --- inside -----------------------------------------------------------------------------------

    def _serving(self) -> list[Backend]:
        members = self._table.backends(self._pool)
        return [each for each in members if each.phase in SERVING and each.models_known]

    def _during(self, backend: Backend, change: Change, now: float) -> dict[str, Exclusion]:
        """Return what else requests cannot have while a change is under way."""
        move, found = change.move, dict[str, Exclusion]()
        if mixes(backend) and move.load is not None:
            found = dict.fromkeys(backend.adapters, Exclusion.ADAPTER_LOADING)
        if move.unload is not None and move.load is None:
            found[move.unload] = Exclusion.MODEL_MISSING
        if move.load is not None and now > change.late_at:
            found[move.load] = Exclusion.ADAPTER_FAILED
        return found

    def _begin(self, move: Move, now: float) -> None:
        backend = self._table.get(move.place)
        if backend is None:
            return
        names = frozenset(name for name in (move.unload, move.load) if name is not None)
        self.changes[move.place] = Change(move, now)
        self.known.changing[move.place] = names
        self._means.start(self._change(backend, move), f"adapters {backend.id}")

    async def _change(self, backend: Backend, move: Move) -> None:
        """Carry a move out. Cancel: what was ordered may still happen at the backend."""
        try:
            with closing(self._means.connect(backend)) as server:
                gone = move.unload is None or await self._unload(backend, server, move.unload)
                if gone and move.load is not None:
                    await self._load(backend, server, move)
        finally:
            del self.changes[move.place], self.known.changing[move.place]
        self.look()

    async def _unload(self, backend: Backend, server: Server, name: str) -> bool:
        """Wait until nobody uses an adapter, and unload it; returns whether it is gone."""
        deadline = self._clock.now() + _UNUSED_S
        while backend.riding.get(name):
            if self._clock.now() > deadline or self._table.get(backend.id) is not backend:
                return False
            await asyncio.sleep(_LOOK_S)
        try:
            await server.unload(name)
            await self._see(backend, server)
        except AdapterError as error:
            self._failed(backend, name, str(error))
            return False
        log.info(
            "unloaded", extra={"event": "adapter_unloaded", "backend": backend.id, "adapter": name}
        )
        self.known.gone[backend.id, name] = self._clock.now() + _GONE_S
        return name not in backend.models

    async def _load(self, backend: Backend, server: Server, move: Move) -> None:
        name, began_at = str(move.load), self._clock.now()
        path = self.known.paths(self._table.backends(self._pool)).get(name)
        if path is None:  # a reload took it away
            return
        late_s = _LEAST_S + _USUALLY * (self.usual_s or _UNKNOWN_S)
        self.changes[backend.id] = Change(move, began_at, began_at + late_s)
        try:
            await server.load(name, path)
            seconds = self._clock.now() - began_at
            self._table.forgive(self._clock.now(), backend)
            self.known.memory.note(backend.id, name)
            await self._see(backend, server)
            held = held_by(backend).get(name)
            if held != path:
                where = "does not list it" if held is None else "has it from another path"
                raise AdapterError(f"the adapter {name} was loaded, but the server {where}")
        except AdapterError as error:
            self._failed(backend, name, str(error))
            return
        self.known.gone.pop((backend.id, name), None)
        self.loads_s.append(seconds)
        self.known.failures.pop((backend.id, name), None)
        self.known.rest_until[backend.id] = self._clock.now() + _RESTS * seconds
        self.known.waits_since.pop(name, None)
        self.known.fresh_until[name] = self._clock.now() + max(_FRESH_S, _RESTS * seconds)
        said = f"the adapter {name} is loaded"
        log.info(
            said,
            extra={"event": "adapter_loaded", "backend": backend.id, "seconds": round(seconds, 3)},
        )
        if move.unload is None:  # what only follows demand is no news
            self._means.events.note(self._clock, EventKind.ADAPTER, backend.id, name, said)

    def _failed(self, backend: Backend, name: str, why: str) -> None:
        before = self.known.failures.get((backend.id, name))
        tries = 1 if before is None else before.tries + 1
        again_s = min(_RETRY_S * 2 ** (tries - 1), _RETRY_MOST_S)
        self.known.failures[backend.id, name] = Failure(tries, self._clock.now() + again_s, why)
        detail = f"{why}; tried again in {again_s:.0f} s"
        self._means.events.note(self._clock, EventKind.ADAPTER_FAILED, backend.id, name, detail)

    async def _see(self, backend: Backend, server: Server) -> None:
        """Read the model list of a backend; the pool table has it then.

        Raises:
            AdapterError: it cannot be read.
        """
        models = tuple(await server.models())
        if self._table.get(backend.id) is backend:
            seen = ModelsSeen(self._clock.now(), models, backend.endpoints, backend.version)
            self._table.observe(backend.id, seen)
