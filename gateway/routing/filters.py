"""Which backends may take a request, and why each other may not: pure rules over the pool's state."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from gateway.core.types import Call, Demand, Exclusion, Phase, Route
from gateway.pools.table import Backend


def exclusion(
    backend: Backend, route: Route, call: Call, demand: Demand, now: float
) -> Exclusion | None:
    """Return why `backend` cannot take the request, None when it can (its phase aside: `eligible`)."""
    if route.adapter is None:
        missing = backend.base_model is None
    else:
        held = backend.models.get(route.adapter)
        missing = held is None or held.parent is None
    if missing:
        return Exclusion.MODEL_MISSING
    if backend.endpoints is not None and call.endpoint not in backend.endpoints:
        return Exclusion.ENDPOINT_MISSING
    window = backend.window_tokens
    if window is not None and demand.exact and demand.total_tokens > window:
        return Exclusion.WINDOW_TOO_SMALL
    if backend.saturated(now):
        return Exclusion.SATURATED
    return None


def eligible(
    backends: Sequence[Backend],
    route: Route,
    call: Call,
    demand: Demand,
    tried: Collection[str],
    now: float,
) -> list[Backend]:
    """Return the backends that may take the request: READY ones, else DEGRADED ones."""
    ready: list[Backend] = []
    degraded: list[Backend] = []
    for backend in backends:
        phase = backend.phase
        if phase is not Phase.READY and phase is not Phase.DEGRADED:
            continue
        if backend.id not in tried and exclusion(backend, route, call, demand, now) is None:
            (ready if phase is Phase.READY else degraded).append(backend)
    return ready or degraded


def reasons(
    backends: Iterable[Backend],
    route: Route,
    call: Call,
    demand: Demand,
    tried: Collection[str],
    now: float,
) -> dict[str, Exclusion]:
    """Return, for a request that found no backend, why each was not eligible."""
    found: dict[str, Exclusion] = {}
    for backend in backends:
        if backend.id in tried:
            found[backend.id] = Exclusion.ALREADY_TRIED
        elif backend.phase not in (Phase.READY, Phase.DEGRADED):
            found[backend.id] = Exclusion.NOT_SERVING
        else:
            reason = exclusion(backend, route, call, demand, now)
            if reason is not None:
                found[backend.id] = reason
    return found
