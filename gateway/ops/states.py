"""What state a backend and a pool are in, in an operator's words, the worst first. Pure.

A phase says what may be sent to a backend. A state says what is the matter with it: one that crashes
again and again, or that nobody can reach, is not `starting`, whatever is being tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, get_args

from gateway.core.types import Phase
from gateway.pools.facts import Accused
from gateway.pools.table import Backend
from gateway.watch.fetch import DENIED, OF_TLS

BackendState = Literal[  # the worst first
    "suspended",  # restarts did not help; it is left alone until an operator acts
    "crash-looping",  # its service manager restarts it again and again
    "failed",  # its process ended, or its start failed; it will be started again
    "unreachable",  # nothing answers at its address, or what answers is no vLLM that lets us in
    "frozen",  # its process lives, and its engine makes no progress
    "down",  # its health checks fail, or it reports that its engine is dead
    "failing",  # it answers, and the requests sent to it fail
    "asleep",  # its engine sleeps
    "cordoned",  # an operator keeps new requests from it
    "draining",  # an operator, or a reload, lets its requests finish
    "pending",  # its service manager makes, stops or restarts it
    "restarting",  # it is being drained and restarted
    "starting",
    "degraded",  # it serves, with something wrong
    "ready",
]
BACKENDS_WORST_FIRST: Final[tuple[BackendState, ...]] = get_args(BackendState)

PoolState = Literal[  # the worst first
    "down",  # no backend serves, and none is on its way; or requests fail wherever they are sent
    "saturated",  # those that serve can take no more: requests wait, or are shed
    "starting",  # no backend serves yet, and one is on its way
    "degraded",  # it serves, but not every backend is ready
    "ready",  # every backend is ready
]
POOLS_WORST_FIRST: Final[tuple[PoolState, ...]] = get_args(PoolState)

_ON_THEIR_WAY: Final = frozenset[BackendState]({"pending", "restarting", "starting"})
SERVING: Final = frozenset[BackendState]({"ready", "degraded"})
_BY_REASON: Final[dict[str, BackendState]] = {
    "suspended": "suspended",
    "exited": "failed",
    "start_failed": "failed",
    "frozen": "frozen",
    "suspect": "frozen",
    "no_progress": "frozen",
    "asleep": "asleep",
    "restart": "restarting",
    "pending": "pending",
    "new": "starting",
}
_FAILING: Final = frozenset(each.value for each in Accused)
# Why a check of its health or its model list fails (`watch.fetch.FetchError`); or its requests do.
_UNREACHABLE: Final = (
    OF_TLS
    | DENIED
    | {
        *("ours", "refused", "connect", "dns", "unreachable"),
        *("timeout", "reset", "garbage", "too_large"),
    }
)


def backend_state(
    phase: Phase,
    reason: str,
    *,
    suspended: bool = False,
    crash_loops: bool = False,
    starting: bool = False,
) -> BackendState:
    """Return the state of a backend.

    Args:
        phase: as routing sees it.
        reason: the short word of its phase.
        suspended: supervision leaves it alone.
        crash_loops: its service manager restarted it several times within minutes.
        starting: supervision watches its start, so that nothing answers yet is in order.
    """
    match phase:
        case Phase.READY:
            return "ready"
        case Phase.DEGRADED:
            return "failing" if reason in _FAILING else "degraded"
        case Phase.CORDONED:
            return "cordoned"
        case Phase.DRAINING | Phase.STOPPED:
            return "restarting" if reason == "restart" else "draining"
        case Phase.STARTING | Phase.DOWN:
            if suspended:
                return "suspended"
            if crash_loops:
                return "crash-looping"
            if reason in _BY_REASON:
                return _BY_REASON[reason]
            if starting:
                return "starting"
            asked = reason.removeprefix("models_")
            return "unreachable" if asked in _UNREACHABLE else "down"


def pool_state(states: Sequence[BackendState], *, saturated: Sequence[bool]) -> PoolState:
    """Return the state of a pool; `saturated` says of each backend whether it takes no more."""
    serving = [full for state, full in zip(states, saturated, strict=True) if state in SERVING]
    if serving and all(serving):
        return "saturated"
    if serving:
        return "ready" if all(state == "ready" for state in states) else "degraded"
    if "failing" in states:
        return "down"
    return "starting" if not _ON_THEIR_WAY.isdisjoint(states) else "down"


def detail_of(backend: Backend, why_drained: str) -> str:
    """Return in a sentence why a backend is in its phase; `why_drained`: what the operator said."""
    told, ejection = backend.health.detail, backend.health.ejection
    if backend.health.held is not None and why_drained:
        return f"{told}: {why_drained}"
    if ejection is None or backend.kept_out or backend.phase is not Phase.DEGRADED:
        return told
    why = "it still gets requests, as fewer than half of its pool would be left"
    return f"{ejection.evidence}; {why}"
