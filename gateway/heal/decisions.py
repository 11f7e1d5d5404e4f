"""The values of healing: causes and signs, what calls for a restart, and what is decided about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from gateway.launch.launcher import Incarnation, LaunchError, Obstacle


class Cause(Enum):
    """Why a backend is restarted, gravest first; closed, because it is a metric label."""

    EXITED = "exited"
    START_FAILED = "start_failed"  # it ended while it started, or could not be started
    ENGINE_DEAD = "engine_dead"  # its process lives and does not serve
    START_HUNG = "start_hung"  # silent in a stage of its start, or no first token
    FROZEN = "frozen"  # its engine computes no token
    ERRORS = "errors"
    MEMORY = "memory"
    SLOW = "slow"
    SCHEDULED = "scheduled"
    OPERATOR = "operator"

    @property
    def planned(self) -> bool:
        """Whether it serves meanwhile: what it carries may finish first, and others must serve."""
        return self in _PLANNED


_PLANNED: Final = frozenset(
    {Cause.ERRORS, Cause.MEMORY, Cause.SLOW, Cause.SCHEDULED, Cause.OPERATOR}
)
GRAVITY: Final = {cause: place for place, cause in enumerate(Cause)}


@dataclass(frozen=True, slots=True)
class Sign:
    """One cause for a restart, with its evidence in one sentence with the numbers."""

    cause: Cause
    evidence: str


CHANGED: Final = Sign(Cause.OPERATOR, "its `launch` settings changed")


class Why(Enum):
    """Why a backend that calls for a restart is not restarted now; closed, because it is a label."""

    UNSEEN = "unseen"
    HELD = "held"
    BUSY = "busy"
    SUSPENDED = "suspended"
    MANUAL = "manual"
    ON_HOLD = "on_hold"
    NO_STORE = "no_store"
    FOLLOWER = "follower"
    ORDERED = "ordered"
    SUSPECTED = "suspected"
    WINDOW = "window"
    BACKOFF = "backoff"
    TURN = "turn"
    BUDGET = "budget"
    LAST = "last"
    GPU = "gpu"


@dataclass(frozen=True, slots=True)
class Restart:
    """Restart this incarnation, or start anew where nothing runs.

    `planned`: drain it first. `attempt` counts the orders for this incarnation, from 1.
    """

    backend_id: str
    cause: Cause
    evidence: str
    incarnation: Incarnation | None
    planned: bool
    attempt: int


Tries = tuple[Incarnation | None, int]  # how often a restart of one was begun


@dataclass(frozen=True, slots=True)
class Suspend:
    """Leave it as it is until an operator clears it; told once."""

    backend_id: str
    cause: Cause
    evidence: str


@dataclass(frozen=True, slots=True)
class Wait:
    """It calls for a restart, but not now; for display. `until` is None where time does not end it."""

    backend_id: str
    why: Why
    until: float | None
    cause: Cause
    evidence: str
    waits_for: str = ""  # until whose start is over, where it waits for its GPUs


Decision = Restart | Suspend | Wait


class Setback(Enum):
    """What became of a restart that was decided on, where it did not come to a start."""

    GIVEN_UP = "given up"  # nothing was done, and nothing claimed: as if it had not been decided
    ANOTHERS = "another's"  # another replica does it
    FAILED = "failed"  # its launcher could not do it; it stays due
    NOT_NOW = "not now"  # the same, by no fault of the server's: it counts for backoff only


def setback_of(error: LaunchError) -> Setback:
    """Return what an order came to that its launcher could not carry out."""
    for_good = error.obstacle is Obstacle.CANNOT_HELP
    return Setback.FAILED if for_good else Setback.NOT_NOW
