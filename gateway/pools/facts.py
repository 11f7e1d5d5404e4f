"""What is known of one backend's health, and the thresholds that judge it. `pools.health` does. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gateway.core.types import Phase
from gateway.pools.progress import Progress


@dataclass(frozen=True, slots=True)
class Tending:
    """What the supervisor makes of a backend while it works on it.

    `phase` is DRAINING, STARTING or DOWN; coming to STARTING also forgets what was known of the server
    before, and `fresh` does so again: another process begins, and the last one answered until just now.
    """

    phase: Phase
    reason: str  # short closed word
    detail: str  # one sentence
    fresh: bool = False
    ready_at: float | None = (
        None  # when it is expected to serve, as its last start went; None: unknown
    )


@dataclass(frozen=True, slots=True)
class Policy:
    """The thresholds. Times are seconds."""

    fall: int = 3  # failed probes in a row until DOWN
    rise: int = 2  # passed probes in a row until a backend that was DOWN serves again
    burst: int = 5  # failed requests in a row until DEGRADED; refused connects: DOWN
    progress_s: float = 30.0
    ejection_s: float = 30.0  # without a failure, until DEGRADED by traffic is tried again
    metrics_stale_s: float = 10.0


@dataclass(frozen=True, slots=True)
class HealthState:
    """What is known of one backend's health; `phase`, `reason`, `detail` follow from the rest."""

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
    probe_passes: int = 0  # in a row
    probe_failures: int = 0  # in a row
    unheard_failures: int = 0  # of those, since the last sign of life
    heard_at: float = -math.inf  # the last byte of a reply that we know of
    connect_failures: int = 0  # requests in a row that found no connection
    traffic_failures: int = 0  # requests in a row that failed by the backend's fault
    traffic_reason: str = ""
    retry_at: float = 0.0  # when a backend that is DEGRADED by traffic is tried again
    asleep: bool = False
    progress: Progress = Progress()
    metrics_at: float | None = None
    metrics_lost: bool = False

    @property
    def settled(self) -> bool:
        """Whether the probes agree with each other; if not, it pays to look more often."""
        return self.up and self.probe_failures == 0
