"""The input of placement: one pool's adapters and backends, read from settings, live state and memory.

Nothing here changes or awaits anything.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from gateway.adapters.change import Change, mixes
from gateway.adapters.deadly import Deadly, barred
from gateway.adapters.elsewhere import Elsewhere
from gateway.adapters.memory import Memory, Order
from gateway.adapters.placement import NOBODY, Place, Wanted
from gateway.adapters.weights import Size
from gateway.config.launched import AdapterLimits, adapter_limits, adapters_at
from gateway.config.models import PoolConfig
from gateway.core.types import SERVING
from gateway.pools.table import Backend
from gateway.watch.adapters import AdapterError

_RETRY_S: Final = 5.0
_LEAVES_S: Final = 10.0  # a backend counts as shutting down, from the last request that it refused
_RETRY_MOST_S: Final = 600.0
NOT_VLLM: Final = "it is not vLLM (`engine: openai`), so it is not asked to load or unload adapters"


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed load or unload: when it may be tried again, and what vLLM said."""

    tries: int
    until: float
    why: str
    refused: bool = False  # by the server, which lives


@dataclass(slots=True)
class Known:
    """The state of one pool's adapters. Only the pool's keeper changes it."""

    memory: Memory
    settings: PoolConfig
    deadly: Deadly
    demand: dict[str, float] = field(default_factory=dict)  # requests in flight, averaged
    waits_since: dict[str, float] = field(default_factory=dict)  # of adapters that no backend has
    fresh_until: dict[str, float] = field(default_factory=dict)
    failures: dict[tuple[str, str], Failure] = field(default_factory=dict)
    rest_until: dict[str, float] = field(default_factory=dict)
    caught_up_at: dict[str, float] = field(default_factory=dict)
    gone: dict[tuple[str, str], float] = field(default_factory=dict)  # unloaded until a moment ago
    changes: dict[str, Change] = field(default_factory=dict)  # under way, by backend
    sizes: Mapping[str, Size] = field(default_factory=dict)  # by path
    elsewhere: Elsewhere = field(default_factory=Elsewhere)
    leaving: dict[str, float] = field(default_factory=dict)  # when each said that it shuts down
    servers: Mapping[str, Backend] = field(default_factory=dict)  # as of the last look, by id
    left: bool = False  # another process took over, and what it loads is not in our memory

    def apply(self, settings: PoolConfig) -> None:
        """Apply new settings. A load that failed from another path than the new one may be tried at once."""
        before, self.settings = self.listed_paths, settings
        paths = self.listed_paths
        for key in [key for key in self.failures if before.get(key[1]) != paths.get(key[1])]:
            del self.failures[key]

    def failed(self, backend_id: str, name: str, error: AdapterError, now: float) -> float:
        """Note a load or unload that failed; return in how many seconds it is tried again."""
        before = self.failures.get((backend_id, name))
        tries = 1 if before is None else before.tries + 1
        again_s = min(_RETRY_S * 2.0 ** min(tries - 1, 16), _RETRY_MOST_S)
        self.failures[backend_id, name] = Failure(tries, now + again_s, str(error), error.refused)
        return again_s

    def serving(self, backends: Collection[Backend], now: float) -> list[Backend]:
        """Return the backends that serve, without those that shut down and so lose their adapters."""
        return [
            each
            for each in backends
            if each.phase in SERVING
            and each.health.models_known
            and now - self.leaving.get(each.id, -math.inf) > _LEAVES_S
        ]

    def loaded(self, backend_id: str, name: str) -> None:
        """Note a load that succeeded: forget all earlier failures of the adapter."""
        self.gone.pop((backend_id, name), None)
        self.failures.pop((backend_id, name), None)
        self.waits_since.pop(name, None)
        self.deadly.clear(name)

    def hear(self, elsewhere: Elsewhere, backends: Collection[Backend]) -> None:
        """Take in what other gateways tell; what operators ordered there holds here, too."""
        before, self.elsewhere = self.elsewhere, elsewhere
        wall = self.deadly.clock.wall()
        for each in backends:
            begun = elsewhere.begun(each.id).items()
            unlisted = {name: since for name, since in begun if name not in each.models}
            self.memory.hear(each.id, unlisted, wall)
            known = before.orders(each.id, {})
            for name, order in elsewhere.orders(each.id, {}).items():
                if order != known.get(name):
                    self.obey(each.id, name, order)

    def obey(self, backend_id: str, name: str, order: Order | None) -> None:
        """Note an operator's new order: what has failed until then is tried at once."""
        self.failures.pop((backend_id, name), None)
        if order is not None and order.keep:
            self.deadly.clear(name, order.at)

    def load_failed(self, backend_id: str, name: str) -> None:
        """Note a load that may have ended its server."""
        self.deadly.failed(backend_id, name, self.listed_paths.get(name, ""))

    def forget(self, backends: Collection[Backend], now: float) -> None:
        """Forget unloads that model lists show by now, and refusals of servers that are gone.

        A server that comes in their place may have the flags that were missing. Of one that a reload replaced or
        removed all is forgotten, what is under way there, too.
        """
        self.gone = {key: until for key, until in self.gone.items() if until > now}
        before, self.servers = self.servers, {each.id: each for each in backends}
        left = {key for key, each in before.items() if self.servers.get(key) is not each}
        away = {each.id for each in backends if not each.health.models_known}
        for each_id in left:
            self.changes.pop(each_id, None)
        for each_id in left | away:
            self.rest_until.pop(each_id, None)
            self.caught_up_at.pop(each_id, None)
        self.failures = {
            key: failed
            for key, failed in self.failures.items()
            if key[0] not in left and not (failed.refused and key[0] in away)
        }

    def orders(self, backend_id: str) -> Mapping[str, Order]:
        """Return the operators' orders for a backend, whichever gateway they were given to."""
        return self.elsewhere.orders(backend_id, self.memory.orders(backend_id))

    def ordered(self, backend_id: str) -> tuple[tuple[str, bool], ...]:
        """Return which adapters an operator ordered to be on a backend (True), or not to be (False).

        Adapters that may have ended a server count as not ordered there: a restarted one serves before it loads them.
        """
        ordered = ((name, order.keep) for name, order in self.orders(backend_id).items())
        suspects = self.deadly.suspects(self.listed_paths) if self.deadly else ()
        return (*ordered, *((name, False) for name in suspects))

    def in_use(self, backend: Backend, now: float) -> frozenset[str]:
        """Return the adapters with requests on a backend, of any gateway."""
        return adapters_in_use(backend, now) | self.elsewhere.requests(backend.id).keys()

    def paths(self, backends: Collection[Backend]) -> dict[str, str]:
        """Return the adapters that can be loaded, with their paths. Settings win over operators' orders."""
        found: dict[str, str] = {}
        for each in backends:
            for name, order in self.orders(each.id).items():
                if order.keep and order.path is not None:
                    found[name] = order.path
        return found | self.listed_paths

    def paths_at(self, backend_id: str, paths: Mapping[str, str]) -> Mapping[str, str]:
        """Return all `paths` as they are on one backend: an order for it may name another than those for others."""
        own = {
            name: order.path
            for name, order in self.orders(backend_id).items()
            if order.keep and order.path is not None
        }
        return {**paths, **own, **self.listed_paths} if own else paths

    def path_at(self, backend_id: str, name: str, backends: Collection[Backend]) -> str | None:
        """Return from where a backend loads an adapter; None: nobody wants it any more."""
        return self.paths_at(backend_id, self.paths(backends)).get(name)

    @property
    def listed_paths(self) -> dict[str, str]:
        """The adapters that the settings have the gateway load, with their paths."""
        listed = () if self.settings.adapters == "auto" else self.settings.adapters
        return {each.name: each.path for each in listed if each.path is not None}

    def wanted(self, backends: Collection[Backend], now: float) -> list[Wanted]:
        """Return the adapters that are wanted, in the order of the settings."""
        pins: dict[str, set[str]] = {}
        for each in backends:
            for name, order in self.orders(each.id).items():
                if order.keep:
                    pins.setdefault(name, set()).add(each.id)
        listed = () if self.settings.adapters == "auto" else self.settings.adapters
        copies: dict[str, int | None] = {}
        for adapter in listed:
            copies[adapter.name] = adapter.replicas
            own = {each.id for each in backends if each.name in adapter.pin}
            pins[adapter.name] = pins.get(adapter.name, set()) | own
        paths = self.paths(backends)
        return [
            Wanted(
                name,
                # An adapter that is not listed is wanted only where an operator ordered it.
                copies=copies[name] if name in copies else len(pins[name]),
                pins=frozenset(pins.get(name, ())),
                demand=self.demand.get(name, 0.0),
                waits_since=self.waits_since.get(name),
                fresh=self.fresh_until.get(name, 0.0) > now,
                waits=self.deadly.undecided(name),
                weight=self._weight(paths[name]),
            )
            for name in paths
        ]

    def place(self, backend: Backend, paths: Mapping[str, str], now: float) -> Place:
        """Return a backend as placement sees it."""
        paths = self.paths_at(backend.id, paths)
        gone = {name for place, name in self.gone if place == backend.id}
        held = frozenset(backend.adapters) - gone
        unloads = not self.elsewhere.stale  # when stale, others may use what is unused here
        out = frozenset(name for name, each in self.orders(backend.id).items() if not each.keep)
        ahead_s, in_use = backend.weighed().ahead_s, self.in_use(backend, now)
        change = self.changes.get(backend.id)
        return Place(
            id=backend.id,
            room=self.limits(backend).most,
            held=held,
            stale=frozenset(
                name
                for name in held & paths.keys()
                if backend.models[name].root not in (None, paths[name])
            ),
            ours=self.ours(backend) | out if unloads else frozenset(),
            in_use=in_use,
            out=out if unloads else frozenset(),
            failed=frozenset(name for place, name in self.failures if place == backend.id),
            stuck=frozenset(
                name
                for (place, name), failed in self.failures.items()
                if place == backend.id and failed.until > now
            ),
            changing=NOBODY if change is None else change.names,
            held_up=NOBODY if change is None else change.held_up(backend, in_use),
            barred=self._barred(backend, paths, now),
            closed=self.deadly.doubts(backend) or (mixes(backend) and self.elsewhere.stale),
            alone=mixes(backend),
            reserve=backend.in_reserve,
            rested=self.rest_until.get(backend.id, 0.0) <= now or ahead_s == 0,
            caught_up=self.caught_up_at.get(backend.id, 0.0) <= now or not backend.in_flight,
            load_s=ahead_s,
        )

    def ours(self, backend: Backend) -> frozenset[str]:
        """Return the adapters that the gateway loaded on a backend, and so may unload.

        Once another process has taken over: those that it may have loaded.
        """
        if self.settings.adapters == "auto":
            return frozenset()
        config = next((b for b in self.settings.backends if b.name == backend.name), None)
        launch = config.launch if config is not None else None
        own = frozenset() if launch is None else frozenset(adapters_at(launch))
        unlisted = {each.name for each in self.settings.adapters if each.path is None}
        loaded = self.memory.loaded(backend.id)
        if self.left:
            loaded |= self.listed_paths.keys()
        return loaded & frozenset(backend.adapters) - own - unlisted

    def limits(self, backend: Backend) -> AdapterLimits:
        """Return how many adapters a backend can keep, and of which rank, as far as known."""
        if backend.plain:
            return AdapterLimits(why_none=NOT_VLLM)
        found = (b for b in self.settings.backends if b.name == backend.name)
        return next((adapter_limits(config) for config in found), AdapterLimits())

    def why_not(self, backend: Backend, paths: Mapping[str, str], now: float) -> dict[str, str]:
        """Return, for people, why a backend does not load each adapter that it lacks; empty: it may load it."""
        limits, why = self.limits(backend), ""
        if limits.most is not None and len(backend.adapters) >= limits.most:
            why = (
                f"it keeps {limits.most} adapters, and has as many"
                if limits.most
                else limits.why_none
            )
        elif self.deadly.doubts(backend):
            why = "it is not known whether it lives; it loads none before it answers /health again"
        elif self._closed(backend, now):
            version = backend.version or "which tells no version"
            why = f"vLLM {version} may mix adapters up: it loads none while requests for others run"
        return dict.fromkeys(paths, why) | self._barred(backend, paths, now)

    def _closed(self, backend: Backend, now: float) -> bool:
        """Whether a load could mix up running requests, ours or those of other gateways."""
        return mixes(backend) and (self.elsewhere.stale or bool(self.in_use(backend, now)))

    def _barred(self, backend: Backend, paths: Mapping[str, str], now: float) -> dict[str, str]:
        found = {}
        limits, orders = self.limits(backend), self.orders(backend.id)
        listed = self.listed_paths if self.deadly else {}
        for name, path in paths.items():
            size, failed = self.sizes.get(path), self.failures.get((backend.id, name))
            rank = size.rank if size is not None else None
            if not orders.get(name, _KEEP).keep:
                found[name] = unloaded_by_operator(orders[name])
            elif limits.why_none:
                found[name] = limits.why_none
            elif rank is not None and limits.most_rank is not None and rank > limits.most_rank:
                found[name] = f"its rank is {rank}, the server allows {limits.most_rank}"
            elif why := barred(self.deadly.deaths(name, listed.get(name, ""))):
                found[name] = why
            elif failed is not None and failed.until > now:
                found[name] = failed.why
        return found

    def _weight(self, path: str) -> float:
        size = self.sizes.get(path)
        return (
            16.0 if size is None else size.bytes / 2**20 if size.bytes else float(size.rank or 16)
        )


_KEEP: Final = Order(keep=True)


def unloaded_by_operator(order: Order) -> str:
    """Return, for people, why an adapter is not loaded on a backend: an order keeps it out."""
    return f"an operator unloaded it there{f': {order.why}' if order.why else ''}"


def adapters_in_use(backend: Backend, now: float) -> frozenset[str]:
    """Return the adapters with requests on a backend: ours, and those that its metrics show."""
    sample = backend.sample
    shown = sample.running_adapters if sample is not None and sample.running else ()
    return frozenset(backend.adapter_requests) | (
        frozenset() if backend.stale(now) else frozenset(shown)
    )
