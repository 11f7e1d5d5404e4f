"""The LoRA adapters of all pools: one keeper per pool, and operators' orders."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any, Final

import msgspec

from gateway.adapters.keeper import PoolAdapters, Tools
from gateway.adapters.memory import Memory, Order
from gateway.adapters.seen import NOT_VLLM
from gateway.adapters.server import Server, VllmServer
from gateway.adapters.status import AdapterStatus, statuses
from gateway.adapters.together import Together
from gateway.adapters.weights import sizes
from gateway.config.models import PoolConfig
from gateway.core.aio import Clock, apart, guarded, periodic
from gateway.core.events import Event, EventKind, Events
from gateway.core.types import SERVING, Route, Transition
from gateway.heal.orders import OrderRefused
from gateway.pools.table import Backend, PoolTable
from gateway.watch.adapters import AdapterError

_EVERY_S: Final = 0.5
_ENDS: Final = frozenset({EventKind.EXITED, EventKind.START_FAILED})
# For the sizes of adapters: a file server that hangs must not hold up the rest.
_MEASURED_S: Final = 2.0


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
        # By pool, what the last requests of the process before wait for; empty once it has ended.
        self.awaited_before: Mapping[str, AbstractSet[str]] = {}
        self._changed = True
        self._measuring: asyncio.Task[None] | None = None
        events.on_event.append(self._heard)
        table.on_transition.append(self._changed_phase)
        table.on_models.append(self._changed_models)

    def apply(self, pools: Mapping[str, PoolConfig]) -> None:
        """Apply settings. A pool that stays keeps its state."""
        named = [(pool, each) for pool, settings in pools.items() for each in settings.backends]
        self.memory.apply({f"{pool}/{each.name}": each.url for pool, each in named})
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

    def awaited(self, pool: str) -> AbstractSet[str]:
        """Return the adapters that requests of a pool wait for, here and at the process before."""
        return self._awaited(pool) | self.awaited_before.get(pool, frozenset())

    def hand_over(self) -> None:
        """Another process took over: from now on load, unload and save nothing. Then `run`, to go by what it does."""
        self.memory.leave()
        if self.together is not None:
            self.together.may_lead = False
        for keeper in self.pools.values():
            keeper.hand_over()

    async def _turn(self) -> None:
        under_way = self._measuring is not None and not self._measuring.done()
        if self._changed and not under_way and self._group is not None:
            self._changed, name = False, "sizes of adapters"
            measuring = guarded(self._measure(), name=name)
            self._measuring = self._group.create_task(measuring, name=name)
            await asyncio.wait({self._measuring}, timeout=_MEASURED_S)
        for name, keeper in self.pools.items():
            keeper.turn(self.awaited(name))

    async def _measure(self) -> None:
        """Read how large adapters are. Cancel: the thread goes on, and its result is dropped."""
        try:
            found = await apart(partial(sizes, self._paths()))
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

    def _changed_phase(self, transition: Transition) -> None:
        if transition.after in SERVING:
            self._changed_models(transition.backend_id)

    def _changed_models(self, backend_id: str) -> None:
        """Tell at once what a server will load that begins to serve, or has lost an adapter.

        Whoever waits for an adapter that is nowhere, and will be nowhere, is refused. Where it is loaded is planned
        later: other servers that begin to serve may have it.
        """
        keeper = self._keeper(backend_id)
        if keeper is not None and self._group is not None:
            keeper.look(plans=False)

    def _keeper(self, backend_id: str) -> PoolAdapters | None:
        backend = self._table.get(backend_id)
        return None if backend is None else self.pools.get(backend.pool)

    def _heard(self, event: Event) -> None:
        """Note the adapters that supervision loaded on a restarted server, and the servers that ended."""
        keeper = self._keeper(event.backend_id)
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
        return statuses(self.pools, self._table, self._clock.now())
