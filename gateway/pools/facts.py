"""What is known of one backend's health, and the thresholds by which `pools.health` judges it. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import msgspec
from msgspec.structs import replace

from gateway.core.types import Phase
from gateway.pools.progress import Progress


@dataclass(frozen=True, slots=True)
class Tending:
    """What the supervisor makes of a backend while it works on it.

    `phase` is DRAINING, STARTING or DOWN. On the way into STARTING all that was known of the server is
    forgotten. `fresh` forgets it again: another process begins, and the one before answered until now.
    """

    phase: Phase
    reason: str  # short closed word
    detail: str  # one sentence
    fresh: bool = False
    ready_at: float | None = None  # when it should serve, as its last start went; None: unknown


@dataclass(frozen=True, slots=True)
class Policy:
    """The thresholds. Times are seconds."""

    fall: int = 3  # failed probes in a row until DOWN
    rise: int = 2  # passed probes in a row until a backend that was DOWN serves again
    burst: int = 5  # failed requests in a row until DEGRADED; refused connects: DOWN
    progress_s: float = 30.0
    ejection_s: float = 30.0  # the first; as long without a failure ends DEGRADED by traffic
    longest_ejection_s: float = 300.0  # each that follows is twice as long as the one before
    forgiven_s: float = 300.0  # after so long in service an ejection is the first again
    least_ratio: float = 0.8  # of attempts that end well, until it is ejected
    least_sent: int = 10  # attempts in half a minute that make such a ratio
    metrics_stale_s: float = 10.0


class Accused(Enum):
    """What a backend is ejected for; closed, because it is a metric label."""

    IN_A_ROW = "traffic"  # its requests failed one after the other
    RATIO = "success_rate"  # too many of them failed


class Ejection(msgspec.Struct, frozen=True):
    """Why a backend that answers its health checks gets no new requests: see `pools.ejection`."""

    accused: Accused
    evidence: str  # a clause with the numbers
    times: int  # in a row, this one too
    until: float  # from then on one request at a time shows whether it works again
    probation: bool = False  # that time has come


class HealthState(msgspec.Struct, frozen=True):
    """What is known of one backend's health; `phase`, `reason`, `detail` follow from the rest.

    Each fact makes a new state, five times a second for each backend; a dataclass would take ten times as long.
    """

    since: float  # when the phase began
    phase: Phase = Phase.STARTING
    reason: str = "new"  # short closed word
    detail: str = "not checked yet"  # one sentence, with the numbers
    held: Phase | None = None  # what an order made of it
    tended: Tending | None = None  # what the supervisor makes of it
    started: bool = False  # seen healthy once
    up: bool = False  # the verdict of the probes
    models_known: bool = False  # the model list was read since it last came up
    trouble: str = "new"  # the latest failure while it is not up
    forgot_at: float = -math.inf  # when all was forgotten, as another process begins
    probed_at: float = -math.inf  # when the last probe that has ended was sent
    probe_failure: str = ""  # why that one failed; empty: it did not
    probe_passes: int = 0  # in a row
    probe_failures: int = 0  # in a row
    unheard_failures: int = 0  # of those, since the last sign of life
    heard_at: float = -math.inf  # the last byte of a reply that we know of
    connect_failures: int = 0  # requests in a row that found no connection
    traffic_failures: int = 0  # requests in a row that failed by the backend's fault
    traffic_reason: str = ""  # how the last of them failed, in words: it ...
    retry_at: float = 0.0  # when a backend that is DEGRADED by traffic is tried again
    ejection: Ejection | None = None
    ejections: int = 0  # in a row, the last one too
    cleared_at: float = -math.inf  # when the last one ended well
    asleep: bool = False
    progress: Progress = Progress()
    metrics_at: float | None = None
    metrics_lost: bool = False

    @property
    def settled(self) -> bool:
        """Whether the probes agree with each other; if not, it pays to look more often."""
        return self.up and self.probe_failures == 0

    def forgiven(self, at: float) -> HealthState:
        """Return the state in which nothing that did not come before `at` counts: this process stood still."""
        progress = self.progress
        if progress.stuck_since is not None:
            progress = replace(progress, stuck_since=at)
        metrics_at = self.metrics_at if self.metrics_at is None or self.metrics_lost else at
        return replace(self, progress=progress, metrics_at=metrics_at)


def carried_nowhere(backend_id: str, since: float) -> bool:
    """Stand in for `Replicas.carried_elsewhere` in a gateway of one process: no other carries requests."""
    return False
