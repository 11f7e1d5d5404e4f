"""The LoRA adapters of all pools: one keeper per pool, operators' orders, and the status of each adapter."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from gateway.adapters.keeper import PoolAdapters, Tools
from gateway.adapters.memory import Memory, Order
from gateway.adapters.seen import NOT_VLLM, unloaded_by_operator
from gateway.adapters.server import Server, VllmServer
from gateway.adapters.together import Together
from gateway.adapters.weights import sizes
from gateway.config.models import PoolConfig
from gateway.core.aio import Clock, guarded, periodic
from gateway.core.events import Event, EventKind, Events
from gateway.core.exclusion import Exclusion
from gateway.core.types import SERVING, Phase, Route
from gateway.heal.orders import OrderRefused
from gateway.pools.table import Backend, PoolTable
from gateway.watch.adapters import AdapterError

_EVERY_S: Final = 0.5
_ENDS: Final = frozenset({EventKind.EXITED, EventKind.START_FAILED})
# For the sizes of adapters: a file server that hangs must not hold up the rest.
_MEASURED_S: Final = 2.0
# Of several gateways only one loads and unloads; the others hear from it.
_ELSEWHERE: Final[Mapping[Exclusion | None, str]] = {
    Exclusion.ADAPTER_LOADING: "the gateway that places adapters is loading it",
    Exclusion.ADAPTER_FAILED: "the gateway that places adapters could not load it; its own list says why",
}


@dataclass(frozen=True, slots=True)
class AdapterStatus:
    """One adapter on one backend, or why it is not there; for people."""

    adapter: str
    backend_id: str
    state: str  # loaded, loading, unloading, or not_loaded
    path: str | None  # as the server reports it, or where it would be loaded from
    loaded_by: str | None  # gateway, or other: the server itself or somebody else; None: not loaded
    wanted_by: str | None  # operator: an order keeps it there; settings: the pool lists it
    order: str | None  # load or unload: the operator's order that holds; None: the settings decide
    in_flight: int
    detail: str


@dataclass(frozen=True, slots=True)
class _Sight:
    """What holds for all adapters of a backend; computed once, not for each of them."""

    backend: Backend
    loaded: AbstractSet[str]  # by gateways
    orders: Mapping[str, Order]
    paths: Mapping[str, str]  # from where it loads them
    why_not: Mapping[str, str]  # for people: why it does not load those that it lacks


class Adapters:
    """The keepers. `run` is their background work; everything else is synchronous.

    `awaited` returns the adapters that queued requests of a pool want.
    """

    def __init__(
        self,
        table: PoolTable,
        clock: Clock,
        events: Events,
        memory: Memory,
        awaited: Callable[[str], AbstractSet[str]],
        connect: Callable[[Backend], Server] = VllmServer,
    ) -> None:
        self.together: Together | None = None  # None: no other gateway has these backends
        self.pools: dict[str, PoolAdapters] = {}
        self.memory = memory
        self._table, self._clock, self._events = table, clock, events
        self._tools = Tools(table, clock, events, memory, connect, self._start)
        self._group: asyncio.TaskGroup | None = None
        self._awaited = awaited
        self._changed = True
        self._measuring: asyncio.Task[None] | None = None
        events.on_event.append(self._heard)

    def apply(self, pools: Mapping[str, PoolConfig]) -> None:
        """Apply settings. A pool that stays keeps its state."""
        for name in self.pools.keys() - pools.keys():
            del self.pools[name]
        for name, settings in pools.items():
            if name in self.pools:
                self.pools[name].known.apply(settings)
            else:
                keeper = self.pools[name] = PoolAdapters(name, settings, self._tools)
                keeper.leads = self.together is None  # `Together` decides which of several leads
        self._changed = True

    def changes(self) -> dict[tuple[str, ...], int]:
        """Return how many changes each pool has made, by result; none where none was tried."""
        return {
            (name, done.value): count
            for name, keeper in self.pools.items()
            for done, count in keeper.done.items()
        }

    def load_s(self) -> dict[tuple[str, ...], float]:
        """Return how many seconds the loads of each pool took together."""
        return {(name,): keeper.all_loads_s for name, keeper in self.pools.items() if keeper.done}

    def want(self, route: Route, leaving: str = "") -> None:
        """Plan at once for a request that found no room at its adapter; the backend `leaving` shuts down."""
        keeper = self.pools.get(route.pool)
        if keeper is not None and route.adapter is not None and self._group is not None:
            if leaving:
                keeper.known.leaving[leaving] = self._clock.now()
            keeper.want(route.adapter)

    async def run(self) -> None:
        """Look after all pools until cancelled. Cancel: backends may still finish a change that is under way."""
        for each in self.pools.values():
            each.begin()
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                if self.together is not None:
                    await self.together.turn(self.pools)  # it decides who plans, before any plan
                    of_all = self.together.run(self.pools)
                    group.create_task(of_all, name="adapters of all gateways")
                await periodic(self._turn, every_s=_EVERY_S, name="adapters")
            finally:
                self._group = None  # `want` does nothing until `run` is called again

    async def _turn(self) -> None:
        under_way = self._measuring is not None and not self._measuring.done()
        if self._changed and not under_way and self._group is not None:
            self._changed, name = False, "sizes of adapters"
            measuring = guarded(self._measure(), name=name)
            self._measuring = self._group.create_task(measuring, name=name)
            await asyncio.wait({self._measuring}, timeout=_MEASURED_S)
        for name, keeper in self.pools.items():
            keeper.turn(self._awaited(name))

    async def _measure(self) -> None:
        """Read how large adapters are. Cancel: the thread goes on, and its result is dropped."""
        try:
            found = await asyncio.to_thread(sizes, self._paths())
        except asyncio.CancelledError:
            self._changed = True
            raise
        for keeper in self.pools.values():
            keeper.known.sizes = found

    def _paths(self) -> list[str]:
        return [
            path
            for name, keeper in self.pools.items()
            for path in keeper.known.paths(self._table.backends(name)).values()
        ]

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        assert self._group is not None
        task = self._group.create_task(guarded(work, name=name), name=name)
        task.add_done_callback(lambda _: work.close())  # one that was cancelled may not have begun

    def _heard(self, event: Event) -> None:
        """Note the adapters that supervision loaded on a restarted server, and the servers that ended."""
        backend = self._table.get(event.backend_id)
        keeper = self.pools.get(backend.pool) if backend is not None else None
        if event.kind is EventKind.ADAPTER:
            self.memory.note(event.backend_id, event.label)
        elif keeper is None:
            return
        elif event.kind is EventKind.ADAPTER_FAILED:
            if event.backend_id not in keeper.changes:  # the keeper knows of its own failures
                keeper.known.load_failed(event.backend_id, event.label)
                error = AdapterError(event.detail, refused=True)  # another start may load it
                keeper.known.failed(event.backend_id, event.label, error, self._clock.now())
        elif event.kind in _ENDS:
            keeper.known.deadly.ended(event.backend_id)
            if self._group is not None:  # at once: a restart that follows must not load the adapter
                keeper.look()

    # --- operators --------------------------------------------------------------------------------

    def order(
        self, backend_id: str, name: str, order: Order | None, *, dry_run: bool = False
    ) -> str:
        """Keep an operator's order, or end it with None; return the effect, for people.

        With `dry_run` nothing is done.

        Raises:
            KeyError: no such backend (404).
            OrderRefused: it could never be carried out (409).
        """
        backend = self._table.get(backend_id)
        if backend is None:
            raise KeyError(backend_id)
        keeper = self.pools[backend.pool]
        before = keeper.known.orders(backend_id).get(name)
        if order is not None and backend.plain:
            raise OrderRefused("not_vllm", f"{backend_id}: {NOT_VLLM}.")
        if order is not None and order.keep:
            self._check(backend, name, order, keeper.known.settings)
            if order.path is None and name not in keeper.known.listed_paths:
                # Nothing else tells where it is, once the server has lost it.
                order = msgspec.structs.replace(order, path=backend.models[name].root)
        if order is None and before is None:
            return f"No order holds for {name} on {backend_id}; nothing changes."
        if order is None and before is not self.memory.orders(backend_id).get(name):
            return (
                f"Another gateway was given the order that holds for {name} on {backend_id}; nothing changes."
                " End it there, or give another one here."
            )
        if dry_run:
            return self._effect(backend, name, order)
        self.memory.order(backend_id, name, order)
        keeper.known.obey(backend_id, name, order)
        self._changed = True
        effect = self._effect(backend, name, order)
        if self._group is not None:
            keeper.look()
        why = f" {order.why}" if order is not None and order.why else ""
        self._events.note(self._clock, EventKind.OPERATOR, backend_id, "adapter", effect + why)
        if self.memory.saved:
            return effect
        return f"{effect} This is not saved, and ends with this gateway: see its log."

    def _effect(self, backend: Backend, name: str, order: Order | None) -> str:
        """Return the effect of an order, for people."""
        keeper, held = self.pools[backend.pool], name in backend.adapters
        earlier = keeper.known.elsewhere.orders(backend.id, {}).get(name)
        if order is None and earlier is not None:
            verb = "load" if earlier.keep else "unload"
            effect = f"An earlier order to {verb} {name} on {backend.id}, given to another gateway, holds again."
        elif order is None:
            effect = f"No order holds for {name} on {backend.id} any more: the settings decide."
            if not held and name not in keeper.known.paths(self._table.backends(backend.pool)):
                effect += " They have no path for it, so it stays unloaded."
        elif order.keep:
            verb = "keeps" if held else "loads"
            effect = f"{backend.id} {verb} {name}, until another order comes."
        else:
            effect = f"{backend.id} {'unloads' if held else 'does not load'} {name}, until another order comes."
            if (
                held
                and name not in keeper.known.listed_paths
                and (root := backend.models[name].root)
            ):
                effect += f" To bring it back: vllm-gateway adapters load {backend.id} {name} --path {root}"
            if held and (count := backend.adapter_requests.get(name, 0)):
                ends = "comes" if count == 1 else "come"
                effect += f" {count} in flight there {ends} to an end first."
        return effect

    def _check(self, backend: Backend, name: str, order: Order, settings: PoolConfig) -> None:
        listed = (
            None if settings.adapters == "auto" else {each.name: each for each in settings.adapters}
        )
        known = backend.models.get(name)
        if known is not None and known.parent is None:
            raise OrderRefused("not_an_adapter", f"{name} is the base model of {backend.id}.")
        if listed is not None and name not in listed:
            raise OrderRefused(
                "not_listed",
                f"{name} is not in `pools.{backend.pool}.adapters`, so no request could reach it. Add it and reload.",
            )
        path = listed[name].path if listed is not None else None
        if path is not None and order.path not in (None, path):
            raise OrderRefused(
                "other_path",
                f"The settings have {name} from {path}. Change its path there and reload.",
            )
        if path is None and order.path is None and (known is None or known.root is None):
            peers = self._table.backends(backend.pool)
            roots = {each.id: each.models[name].root for each in peers if name in each.adapters}
            hint = "".join(f" {peer} has it from {root}." for peer, root in roots.items() if root)
            raise OrderRefused(
                "no_path",
                f"Nobody said where {name} is on {backend.id}: give its path there (`--path`).{hint}",
            )

    def statuses(self) -> list[AdapterStatus]:
        """Return every adapter on every backend, and why it is not on others."""
        found, now = [], self._clock.now()
        for pool, keeper in self.pools.items():
            backends, known = self._table.backends(pool), keeper.known
            paths, listed = known.paths(backends), known.listed_paths.keys()
            names = dict.fromkeys((*paths, *(name for each in backends for name in each.adapters)))
            sights = [
                _Sight(
                    *(each, known.memory.loaded(each.id), known.orders(each.id)),
                    *(there := known.paths_at(each.id, paths), known.why_not(each, there, now)),
                )
                for each in backends
            ]
            found += [
                self._status(keeper, each, name, in_settings=name in listed)
                for name in names
                for each in sights
            ]
        return found

    def _status(
        self, keeper: PoolAdapters, sight: _Sight, name: str, *, in_settings: bool
    ) -> AdapterStatus:
        backend, wanted = sight.backend, sight.paths.get(name)
        now, model = self._clock.now(), backend.models.get(name)
        change, order = keeper.changes.get(backend.id), sight.orders.get(name)
        loaded_by = None
        if change is not None and name in (change.move.load, change.move.unload):
            state = "loading" if change.move.load == name else "unloading"
            usual = "" if keeper.usual_s is None else f", usually at most {keeper.usual_s:.1f} s"
            detail = f"for {now - change.began_at:.1f} s{usual}"
            waited_for = backend.adapter_requests.get(change.move.unload or "", 0)
            if waited_for and change.late_at == math.inf:  # the server was asked for nothing yet
                detail = f"waits until {waited_for} in flight of {change.move.unload} have ended"
        elif model is not None:
            state = "loaded"
            loaded_by = "gateway" if name in sight.loaded else "other"
            stale = wanted is not None and model.root not in (None, wanted)
            detail = f"wanted from {wanted}" if stale else ""
            if backend.phase is Phase.DOWN:
                detail = "as last seen: the backend is down"
        else:
            state = "not_loaded"
            detail = _ELSEWHERE.get(backend.lacking.get(name), "not asked for there")
            if backend.phase not in SERVING:
                detail = f"the backend is {backend.phase.value}"
            elif order is not None and not order.keep:
                detail = unloaded_by_operator(order)
            elif wanted is None:
                detail = "the gateway has no path for it"
            elif why := sight.why_not[name]:
                detail = why
        wanted_by, ordered = "settings" if in_settings else None, None
        if order is not None:
            wanted_by, ordered = ("operator", "load") if order.keep else (None, "unload")
        path = model.root if model is not None else wanted
        in_flight = backend.adapter_requests.get(name, 0)
        return AdapterStatus(
            name, backend.id, state, path, loaded_by, wanted_by, ordered, in_flight, detail
        )
