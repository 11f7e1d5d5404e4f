"""The backends of one pool, as the policy sees them in one moment."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from gateway.config.supervision import LaunchConfig, Remedy
from gateway.core.types import SERVING, Phase
from gateway.heal.decisions import Sign
from gateway.heal.states import (
    Absent,
    Draining,
    Failed,
    Replacing,
    Serving,
    State,
    Suspended,
    in_service,
    under_way,
)
from gateway.launch.launcher import Incarnation

ALL_GPUS: Final = -1

_HELD: Final = frozenset({Phase.CORDONED, Phase.DRAINING})


@dataclass(frozen=True, slots=True)
class Member:
    """One backend of a pool, as the policy sees it now."""

    backend_id: str
    pool: str
    phase: Phase
    since: float = 0.0  # when the phase began
    state: State | None = None  # None: nobody here supervises it; it only counts in its pool
    sign: Sign | None = None  # what calls for its restart
    ordered: Sign | None = None  # an operator's order that has not begun
    visible: bool = True  # its launcher can tell what runs
    ours: bool = False  # we launched its incarnation
    held: bool = False  # an operator cordoned or drained it
    suspended: bool = False
    asleep: bool = False
    saturated: bool = False  # takes no more of even the smallest requests
    idle: bool = False  # it has no work at all that we know of
    age_s: float | None = None  # of its incarnation; None: unknown
    bad_at: float | None = None  # when it last ceased to serve, by itself
    gpus: Collection[int] = ()  # that its start uses
    drained_elsewhere: bool = False  # another replica drains it, to restart it

    @property
    def incarnation(self) -> Incarnation | None:
        """What runs, or ran last."""
        return self.state.incarnation if self.state is not None else None

    @property
    def ended(self) -> bool:
        """Whether nothing of it runs, for certain."""
        dead = isinstance(self.state, Failed | Suspended) and not self.state.lives
        return dead or isinstance(self.state, Absent)

    @property
    def serving(self) -> bool:
        """Whether it takes requests and can serve them."""
        may = self.state is None or in_service(self.state)
        return may and self.phase in SERVING and not self.asleep

    @property
    def taken_out(self) -> bool:
        """Whether an operator holds it; one that another replica drains waits for its turn."""
        return self.held or (self.phase in _HELD and not self.drained_elsewhere)

    @property
    def under_way(self) -> bool:
        """Whether a restart of it goes on, or its start."""
        return under_way(self.state)

    @property
    def under_restart(self) -> bool:
        """Whether a restart of it goes on that we ordered, until it serves or fails, or another replica did."""
        ordered = self.drained_elsewhere or isinstance(self.state, Draining | Replacing)
        return ordered or (self.under_way and self.ours)

    def well_s(self, now: float) -> float:
        """Return for how long it has served without anything against it."""
        if self.phase is not Phase.READY or not isinstance(self.state, Serving):
            return 0.0
        return now - max(self.since, self.state.since)


def gpus_of(launch: LaunchConfig | None, remedies: Collection[Remedy]) -> tuple[int, ...]:
    """Return the GPUs that a start uses. One that names none may see all, unless it runs on the CPU."""
    if launch is None:
        return ()
    if Remedy.SERIAL_START in remedies:
        return (ALL_GPUS,)
    hidden = launch.env.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    cpu = launch.args.get("device") == "cpu" or "VLLM_CPU_KVCACHE_SPACE" in launch.env
    if not launch.gpus and (hidden or cpu):
        return ()
    return launch.gpus or (ALL_GPUS,)


def overlap(gpus: Collection[int], others: Collection[int]) -> bool:
    """Return whether two servers use the same GPU."""
    if ALL_GPUS in gpus or ALL_GPUS in others:
        return bool(gpus and others)
    return not set(gpus).isdisjoint(others)


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What is known besides the backends."""

    now: float
    leads: Collection[str]  # pools whose lease this replica holds, with time enough left to act
    minute: int = 0  # of the local day
    # Until when automatic restarts are on hold, of a pool, a backend, or (None) all.
    holds: Mapping[str | None, float] = field(default_factory=dict)
    store_answers: bool = True  # else nobody can be sure to hold a lease
