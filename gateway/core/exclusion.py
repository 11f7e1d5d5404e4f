"""Why a backend may not take a request: one closed list, for the choice, refusals and people."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Exclusion(Enum):
    """Why a backend was not eligible for a request."""

    NOT_SERVING = "not_serving"  # its phase takes no work
    MODEL_MISSING = "model_missing"  # it does not hold the model or adapter
    ADAPTER_LOADING = "adapter_loading"  # it loads the adapter, or another in its place, right now
    ADAPTER_DUE = "adapter_due"  # it will, once it has room for it and may
    ADAPTER_FAILED = "adapter_failed"  # it could not, or never can
    ENDPOINT_MISSING = "endpoint_missing"
    EJECTED = "ejected"  # too many of its requests failed, and others can serve
    PROBATION = "probation"  # it was ejected, and is tried by another request right now
    IN_RESERVE = "in_reserve"  # its weight is 0, or it lost a trial; and another can serve
    WINDOW_TOO_SMALL = "window_too_small"
    AT_LIMIT = "at_limit"  # as many requests as its concurrency limit allows
    READING = "reading"  # it still reads prompts; the highest priority is not to wait behind more
    ENGINE_QUEUED = "engine_queued"  # the engine's own queue is long
    KV_FULL = "kv_full"  # its KV cache reached the ratio from which it takes nothing
    NO_KV_ROOM = "no_kv_room"  # the request needs more KV cache than is free
    CLAIMED = "claimed"  # what is free is kept for a request that has waited longer
    TOO_LARGE = "too_large"  # the request is larger than its whole KV cache
    ALREADY_TRIED = "already_tried"

    __hash__ = object.__hash__  # members are single objects; Enum's own hash is a call into Python

    @property
    def passes(self) -> bool:
        """Whether waiting cures it: the backend is well and suits the request, but has no room."""
        return self in _PASSING


# A request that waits for an adapter waits for no room, and so holds no other up.
AWAITS_ADAPTER = frozenset({Exclusion.ADAPTER_LOADING, Exclusion.ADAPTER_DUE})
_PASSING = frozenset(
    {
        Exclusion.ADAPTER_LOADING,
        Exclusion.ADAPTER_DUE,
        Exclusion.PROBATION,
        Exclusion.AT_LIMIT,
        Exclusion.READING,
        Exclusion.ENGINE_QUEUED,
        Exclusion.KV_FULL,
        Exclusion.NO_KV_ROOM,
        Exclusion.CLAIMED,
    }
)


@dataclass(slots=True)
class Choice:
    """Why a request goes where it goes: what each backend of its pool would cost it now.

    One that is neither in `expected_s` nor excluded is a later choice, while an earlier one is free.
    """

    backend_id: str | None = None
    expected_s: dict[str, float] = field(default_factory=dict)  # of those that may take it
    excluded: dict[str, Exclusion] = field(default_factory=dict)  # why each other may not


class Chance(Enum):
    """When a backend can take a request that was tried elsewhere."""

    NOW = "now"
    LATER = "later"  # once others have ended
    NEVER = "never"
