"""The status of each adapter on each backend, for people. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from gateway.adapters.keeper import PoolAdapters
from gateway.adapters.memory import Order
from gateway.adapters.seen import unloaded_by_operator
from gateway.core.exclusion import Exclusion
from gateway.core.types import SERVING, Phase
from gateway.pools.table import Backend, PoolTable

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


def statuses(
    pools: Mapping[str, PoolAdapters], table: PoolTable, now: float
) -> list[AdapterStatus]:
    """Return every adapter on every backend, and why it is not on others."""
    found = []
    for pool, keeper in pools.items():
        backends, known = table.backends(pool), keeper.known
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
            _status(keeper, each, name, now, in_settings=name in listed)
            for name in names
            for each in sights
        ]
    return found


def _status(
    keeper: PoolAdapters, sight: _Sight, name: str, now: float, *, in_settings: bool
) -> AdapterStatus:
    backend, wanted = sight.backend, sight.paths.get(name)
    model = backend.models.get(name)
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
