"""Which names lead where: pools, their aliases, and the LoRA adapters their backends hold.

A catalog is an immutable picture, rebuilt when the pool table's epoch changes (membership, models,
adapters, windows, endpoints), so a look-up on the request path is one dict access.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.config.launched import adapters_of
from gateway.config.models import PoolConfig, PrefixCache
from gateway.core.aio import Clock
from gateway.core.asked import ALL_MODELS
from gateway.core.errors import NO_MODEL, EndpointNotServed, MissingModel, ModelNotFound
from gateway.core.exclusion import AWAITS_ADAPTER
from gateway.core.printable import shown
from gateway.core.types import SERVING, Call, Caller, Endpoint, Phase, Route
from gateway.pools.table import Backend, PoolTable
from gateway.routing.near import NearNames

log = logging.getLogger("gateway.routing")

_SHOWN_CHARS: Final = 128  # of a name in an error
_HELD_TWICE: Final = (
    "the adapter %s is held by the pools %s and %s: requests for it go to %s."
    " List `adapters` of each pool, or rename one"
)
_TAKEN: Final = (
    "the adapter %s has the name of the pool %s, or of an alias of it, and is held by the pool %s: requests go to"
    " the model of %s, and none to the adapter. Rename one"
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One name that clients may use, with what the model list says of it."""

    route: Route
    parent: str | None  # the pool, for adapters
    endpoints: frozenset[Endpoint] | None  # None: not known


class Catalog:
    """Name -> Entry. Build with `build`.

    `clashes` are the adapters whose requests go elsewhere: name, the pool that gets these, one that holds it too.
    It is the same pool where that, or an alias of it, has the adapter's name.
    """

    def __init__(
        self, entries: Mapping[str, Entry], clashes: Iterable[tuple[str, str, str]] = ()
    ) -> None:
        self.entries = dict(entries)
        self.clashes = frozenset(clashes)
        self._defaults: dict[tuple[tuple[str, ...], ...], str] = {}  # by what callers may use
        self._near: NearNames | None = None  # made by the first name that is not found

    @classmethod
    def build(cls, pools: Mapping[str, PoolConfig], table: PoolTable) -> Catalog:
        """Read the configuration and the table once. Pool names win over aliases, aliases over adapters.

        In that order, and the file's, they are listed: clients take the first model of a list.
        """
        backends = {name: table.backends(name) for name in pools}
        entries = {
            name: _entry(name, name, config, backends[name]) for name, config in pools.items()
        }
        for name, config in pools.items():
            for alias in config.aliases:
                entries.setdefault(alias, _entry(alias, name, config, backends[name]))
        clashes = []
        for name, config in pools.items():
            for adapter, entry in _adapters(name, config, backends[name]).items():
                first = entries.setdefault(adapter, entry)
                if first is not entry:
                    clashes.append((adapter, first.route.pool, name))
        return cls(entries, clashes)

    def adapters(self) -> dict[str, list[str]]:
        """Return the names of the adapters of each pool that has any."""
        found: dict[str, list[str]] = {}
        for name, entry in self.entries.items():
            if entry.parent is not None:
                found.setdefault(entry.parent, []).append(name)
        return found

    def resolve(self, call: Call, caller: Caller) -> Route:
        """Return where the call's model name leads; without one, where all that the caller sees leads.

        Raises:
            MissingModel: no model is named, and the caller sees several pools (400).
            ModelNotFound: unknown, or not for this caller: the same words for both (404).
            EndpointNotServed: the model's backends do not serve the endpoint (404).
        """
        entry = self.admit(call.model, caller)
        if entry.endpoints is not None and call.endpoint not in entry.endpoints:
            raise EndpointNotServed(
                f"The model `{entry.route.requested}` does not serve the {call.endpoint.value} endpoint. "
                f"It serves: {', '.join(sorted(each.value for each in entry.endpoints))}.",
                param="model",
            )
        return entry.route

    def admit(self, model: str, caller: Caller) -> Entry:
        """Return what a name stands for; without one, the only pool that the caller sees.

        Raises:
            MissingModel: no model is named, and the caller sees several pools (400).
            ModelNotFound: unknown, or not for this caller: the same words for both (404).
        """
        model = model or self._default(caller)
        entry = self.entries.get(model)
        everything = caller.models == ALL_MODELS and not caller.denied
        if entry is None or not (everything or is_open(entry, caller)):
            raise self._not_found(model, caller)
        return entry

    def _default(self, caller: Caller) -> str:
        """Return the model that is meant where none is named: vLLM takes the base model it serves.

        A caller who sees one pool only means that pool; by its name if that is visible, else by what is.
        """
        may_use = (caller.models, caller.denied)
        known = self._defaults.get(may_use)
        if known is None:
            seen = self.visible(caller)
            pools = {entry.route.pool for entry in seen.values()}
            bases = [name for name, entry in seen.items() if entry.parent is None]
            clear = len(pools) == 1 and (bases or len(seen) == 1)
            known = self._defaults[may_use] = next(iter(seen)) if clear else ""
        if not known:
            raise MissingModel(NO_MODEL, param="model")
        return known

    def visible(self, caller: Caller) -> dict[str, Entry]:
        """Return what the caller may use, by name."""
        return {name: entry for name, entry in self.entries.items() if is_open(entry, caller)}

    def _not_found(self, model: str, caller: Caller) -> ModelNotFound:
        if self._near is None:
            self._near = NearNames(self.entries)

        def allowed(name: str) -> bool:
            return name in self.entries and is_open(self.entries[name], caller)

        near = self._near.find(model, allowed, [each for each in caller.models if allowed(each)])
        hint = f" Did you mean `{near}`?" if near else ""
        named = shown(model, _SHOWN_CHARS) + ("..." if len(model) > _SHOWN_CHARS else "")
        return ModelNotFound(
            f"The model `{named}` does not exist or you do not have access to it.{hint} "
            "GET /v1/models lists what this key can use.",
            param="model",
        )


class Catalogs:
    """The catalog in force, built anew when the configuration or the table's epoch changed."""

    def __init__(self, table: PoolTable, clock: Clock) -> None:
        self._table = table
        self._clock = clock
        self._first_seen: dict[str, int] = {}
        self._pools: Mapping[str, PoolConfig] | None = None
        self._epoch = -1
        self._built = Catalog({})
        self._clashes_told: set[tuple[str, str, str]] = set()

    def current(self, pools: Mapping[str, PoolConfig]) -> Catalog:
        """Return the catalog of `pools` as the table is now."""
        if self._epoch != self._table.epoch or self._pools is not pools:
            self._built = Catalog.build(pools, self._table)
            self._epoch, self._pools = self._table.epoch, pools
            now, before = int(self._clock.wall()), self._first_seen
            self._first_seen = {name: before.get(name, now) for name in self._built.entries}
            self._tell_clashes()
        return self._built

    def of(self, pools: Mapping[str, PoolConfig]) -> Catalog:
        """Return the catalog of `pools`, which a reload may have replaced. Names of its own are not remembered."""
        return self.current(pools) if pools is self._pools else Catalog.build(pools, self._table)

    def first_seen(self, name: str) -> int:
        """Return when a name of the catalog came into use, in seconds since the epoch.

        vLLM's own `created` is the time of the question, and changes with each.
        """
        return self._first_seen[name]

    def _tell_clashes(self) -> None:
        """Log each clash of adapters when it is first seen."""
        for clash in sorted(self._built.clashes - self._clashes_told):
            self._clashes_told.add(clash)
            log.warning(
                _TAKEN if self._built.entries[clash[0]].parent is None else _HELD_TWICE,
                *(*clash, clash[1]),
                extra={"event": "adapter_clash"},
            )


def is_open(entry: Entry, caller: Caller) -> bool:
    """Whether a caller may use a name. A pool that is denied is so by each of its aliases, too."""
    route = entry.route
    by_another_name = entry.parent is None and caller.denies(route.pool)
    return caller.may_use(route.requested) and not by_another_name


def _entry(
    name: str,
    pool: str,
    config: PoolConfig,
    backends: Sequence[Backend],
    adapter: str | None = None,
) -> Entry:
    parent = None if adapter is None else pool
    route = _route(name, pool, adapter, config, backends)
    return Entry(route, parent, _endpoints(config, backends))


def _adapters(pool: str, config: PoolConfig, backends: Sequence[Backend]) -> dict[str, Entry]:
    """Return an entry for each adapter that a backend holds, or that is meant to be there."""
    if config.adapters == "auto":
        names = [name for each in backends for name in (*each.adapters, *each.awaited)]
        names += [name for each in backends for name, wanted in each.ordered if wanted]
    else:
        names = [adapter.name for adapter in config.adapters]
    names += adapters_of(config)  # on the command line of its servers, so meant to be served
    return {name: _entry(name, pool, config, backends, name) for name in dict.fromkeys(names)}


def _route(
    name: str, pool: str, adapter: str | None, config: PoolConfig, backends: Sequence[Backend]
) -> Route:
    """Return where a name leads, with the windows that backends told, and with the cap on them."""
    told = [backend.window_tokens for backend in backends if backend.window_tokens is not None]
    cap = [] if config.max_context is None else [config.max_context]
    widest = [max(told)] if told else []
    return Route(
        name,
        pool,
        served_model=adapter or pool,
        adapter=adapter,
        window_tokens=min([*told, *cap], default=None),
        engine_tokens=min(told, default=None),
        widest_tokens=min([*widest, *cap], default=None),
        widest_engine_tokens=max(told, default=None),
        tenants_apart=config.prefix_cache is PrefixCache.PER_TENANT,
        trial=config.canary.trial() if config.canary is not None else None,
        shadow=config.shadow.shadow() if config.shadow is not None else None,
    )


def _endpoints(config: PoolConfig, backends: Sequence[Backend]) -> frozenset[Endpoint] | None:
    """Return what any backend serves; None when one of them does not tell."""
    if config.endpoints is not None:
        return frozenset(config.endpoints)
    known = [backend.endpoints for backend in backends if backend.endpoints is not None]
    return frozenset().union(*known) if known and len(known) == len(backends) else None


def status(entry: Entry, backends: Iterable[Backend]) -> str:
    """Return what a request for the name meets, at best.

    ready: a backend that is. degraded: one that is second choice, or has to load the adapter first.
    """
    name, found = entry.route.adapter, "unavailable"
    for backend in backends:
        why = None if name is None else backend.lacking.get(name)
        has = why is None and (name is None or name in backend.models)
        if has and backend.phase is Phase.READY:
            return "ready"
        if backend.phase in SERVING and (has or why in AWAITS_ADAPTER):
            found = "degraded"
    return found
