"""Which backends may take a request, and why each other may not: pure rules over the pool's state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from gateway.core.endpoints import NO_ENGINE
from gateway.core.types import Ask, Exclusion, Phase
from gateway.pools.table import Backend

# Looked up once: before Python 3.12 a member that is looked up in its enum costs 0.15 us.
_READY: Final = Phase.READY
_DEGRADED: Final = Phase.DEGRADED

NOTHING_CLAIMED: Final[frozenset[str]] = frozenset()


def unfit(backend: Backend, ask: Ask) -> Exclusion | None:
    """Return why `backend` does not suit the request however idle it is; None when it does."""
    route = ask.route
    if route.adapter is None:
        missing = backend.base_model is None
    else:
        held = backend.models.get(route.adapter)
        missing = held is None or held.parent is None
    if missing:
        return Exclusion.MODEL_MISSING
    if backend.endpoints is not None and ask.call.endpoint not in backend.endpoints:
        return Exclusion.ENDPOINT_MISSING
    window, demand = backend.window_tokens, ask.demand
    if window is not None and demand.exact and demand.total_tokens > window:
        return Exclusion.WINDOW_TOO_SMALL
    return None


def exclusion(
    backend: Backend, ask: Ask, now: float, claimed: AbstractSet[str] = NOTHING_CLAIMED
) -> Exclusion | None:
    """Return why `backend` cannot take the request now, None when it can (phase aside: `eligible`)."""
    found = unfit(backend, ask)
    if found is not None or ask.call.endpoint in NO_ENGINE:
        return found
    need = ask.need
    tokens = need.prompt_tokens + need.output_tokens
    if need.batch:
        tokens = backend.room.enough(tokens)
    caller = ask.caller
    found = backend.obstacle(tokens, now, caller.priority, ask.top_priority, caller.tenant)
    if found is None and claimed and backend.id in claimed:
        return Exclusion.CLAIMED
    return found


def was_tried(backend: Backend, ask: Ask) -> bool:
    """Whether an attempt failed there, and it has not come back since."""
    at = ask.tried.get(backend.id)
    return at is not None and not (backend.phase is Phase.READY and backend.since > at)


def eligible(
    backends: Sequence[Backend], ask: Ask, now: float, claimed: AbstractSet[str] = NOTHING_CLAIMED
) -> list[Backend]:
    """Return the backends that may take the request: READY ones, else DEGRADED ones."""
    ready: list[Backend] = []
    degraded: list[Backend] = []
    for backend in backends:
        phase = backend.phase
        if phase is not _READY and phase is not _DEGRADED:
            continue
        if ask.tried and was_tried(backend, ask):
            continue
        if exclusion(backend, ask, now, claimed) is None:
            (ready if phase is _READY else degraded).append(backend)
    return ready or degraded


def reasons(
    backends: Iterable[Backend],
    ask: Ask,
    now: float,
    claimed: AbstractSet[str] = NOTHING_CLAIMED,
) -> dict[str, Exclusion]:
    """Return why each backend that is not eligible is not, by id."""
    found: dict[str, Exclusion] = {}
    for backend in backends:
        if was_tried(backend, ask):
            found[backend.id] = Exclusion.ALREADY_TRIED
        elif backend.phase not in (Phase.READY, Phase.DEGRADED):
            found[backend.id] = Exclusion.NOT_SERVING
        else:
            reason = exclusion(backend, ask, now, claimed)
            if reason is not None:
                found[backend.id] = reason
    return found
