"""The values of healing: causes and signs, facts in, decisions out."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from gateway.core.types import Phase
from gateway.launch.launcher import Incarnation, Seen


class Cause(Enum):
    """Why a backend is restarted, gravest first; closed, because it is a metric label."""

    EXITED = "exited"
    START_FAILED = "start_failed"  # exited while it started
    ENGINE_DEAD = "engine_dead"  # its process lives and does not serve
    START_HUNG = "start_hung"  # silent in a stage of its start
    FROZEN = "frozen"  # work runs without progress, or a canary failed
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


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of one backend now."""

    backend_id: str
    pool: str
    phase: Phase
    reason: str = ""  # of the phase, as `pools.health` words it
    since: float = 0.0  # when the phase began
    seen: Seen | None = None  # what its launcher sees; None: unknown now
    supervised: bool = True  # it has a launcher; others only count as members of their pool
    held: bool = False  # an operator cordoned or drains it
    restarting: bool = False  # it is drained, stopped or launched now; not: it starts
    starting: bool = False  # launched, and not yet verified
    asleep: bool = False
    saturated: bool = False  # takes no more of even the smallest requests
    moved_at: float = -math.inf  # when its counters, or one of our streams, last moved
    in_flight: int = 0
    running: int = 0
    waiting: int = 0
    age_s: float | None = None  # of its incarnation; None: unknown
    signs: tuple[Sign, ...] = ()  # of the judges, the start-up watch and the canary

    @property
    def exited(self) -> bool:
        """Whether nothing of it runs, for certain."""
        return self.seen is not None and self.seen.gone

    @property
    def serving(self) -> bool:
        """Whether it takes requests and can serve them."""
        up = self.phase is Phase.READY or self.phase is Phase.DEGRADED
        return up and not (self.exited or self.restarting or self.starting or self.asleep)

    @property
    def idle(self) -> bool:
        """Whether it has no work at all that we know of."""
        return self.in_flight == 0 and self.running == 0 and self.waiting == 0

    @property
    def gone_bad(self) -> bool:
        """Whether it ails in a way that our own blindness could look like, or has exited."""
        ill = any(sign.cause in (Cause.FROZEN, Cause.ERRORS) for sign in self.signs)
        down = self.phase is Phase.DOWN and not self.asleep
        return self.exited or ((down or ill) and not self.held)


# --- decisions ---------------------------------------------------------------------------------------


class Why(Enum):
    """Why a backend that calls for a restart is not restarted now; closed, because it is a label."""

    UNSEEN = "unseen"
    HELD = "held"
    BUSY = "busy"
    SUSPENDED = "suspended"
    MANUAL = "manual"
    ON_HOLD = "on_hold"
    FOLLOWER = "follower"
    ORDERED = "ordered"
    SUSPECTED = "suspected"
    WINDOW = "window"
    BACKOFF = "backoff"
    TURN = "turn"
    BUDGET = "budget"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Restart:
    """Restart this incarnation, or start anew where nothing runs.

    `planned`: cordon and drain it first. `attempt` counts the orders for this incarnation, from 1.
    """

    backend_id: str
    cause: Cause
    evidence: str
    incarnation: Incarnation | None
    planned: bool
    attempt: int


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


Decision = Restart | Suspend | Wait


@dataclass(frozen=True, slots=True)
class Moment:
    """What is known besides the backends."""

    now: float
    leads: Collection[str]  # pools whose lease this replica holds, with time enough left to act
    minute: int = 0  # of the local day
    # Until when automatic restarts are on hold, of a pool, a backend, or (None) all.
    holds: Mapping[str | None, float] = field(default_factory=dict)
