"""Judge a canary: is its revision worse than the other backends of the pool, or no worse? Pure.

Three figures are compared, each with a margin: the share of failed requests, the time to first token, and
the time between tokens. A figure is WORSE once it exceeds the margin with confidence, FINE once it stays
within the margin with confidence, and OPEN until then. So the number of samples needs no setting.

- Shares: Newcombe's score interval for a difference of proportions (R. G. Newcombe, "Interval estimation
  for the difference between independent proportions", Statistics in Medicine 17, 1998, method 10).
- Times: the rank-sum test of Mann and Whitney (1947), in its normal approximation, after the times of the
  canary were divided by the margin. Ranks assume no distribution. Kayenta, the canary judge of Netflix and
  Google, uses the same test.

Who tests again and again finds a difference by chance. So each test waits for twice the samples of the one
before, and the k-th may be wrong with probability ERROR / (k * (k + 1)). These add up to ERROR: a revision
that is no worse is called worse in at most that share of all canaries, and a worse one is called fine in
no more. One figure suffices for WORSE, so the three share the error. FINE needs all three, so each may use
all of it.

The interval takes failures for independent, and the end of one server fails all that it carries. So failures
of less than three moments prove nothing: neither that the canary is worse, nor that it fails less than others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from math import inf, sqrt
from statistics import NormalDist, median
from typing import Final, NamedTuple

ERROR: Final = 0.05  # share of canaries of equal revisions that may end with a wrong verdict
FAILED_MARGIN: Final = 0.01  # so much more of the requests may fail
TIME_MARGIN: Final = 1.2  # times may be so many times longer
MOMENTS: Final = 3  # in which requests have to fail
TOGETHER_S: Final = 5.0  # what fails within that time is of one moment
FEWEST: Final = 20  # samples on each side; with fewer the normal approximation does not hold
MOST_TIMES: Final = (
    1280  # the newest; ranking twice as many stops the event loop for about a millisecond
)
_FIGURES: Final = 3
_NORMAL: Final = NormalDist()


class Finding(Enum):
    """The verdict on one figure, or on all of them."""

    WORSE = "worse"
    FINE = "fine"
    OPEN = "open"


@dataclass(slots=True)
class Arm:
    """The samples of one side. Times are of streams, in seconds."""

    requests: int = 0
    failed: int = 0
    moments: int = 0  # in which they failed, and
    failed_at: float = -inf  # when the last of these began
    first_s: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_TIMES))
    gap_s: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_TIMES))

    def fail(self, now: float) -> None:
        """Count a request that failed, as others may have at the same moment and for the same cause."""
        self.requests += 1
        self.failed += 1
        if now - self.failed_at >= TOGETHER_S:
            self.failed_at = now
            self.moments += 1

    def told(self) -> str:
        """Return its figures in words."""
        parts = [f"{self.failed} of {self.requests} failed"]
        for name, times in (("first token", self.first_s), ("between tokens", self.gap_s)):
            if times:
                parts.append(f"{name} {median(times) * 1e3:.3g} ms")
        return ", ".join(parts)


class Sure(NamedTuple):
    """How many standard deviations it takes for each verdict."""

    worse: float
    fine: float


def judge(trial: Arm, stable: Arm, look: int, *, times: bool = True) -> Finding:
    """Return the verdict at the `look`th test (from 1): WORSE if any figure is, FINE if all are.

    Without `times` only failures are compared: requests that were not assigned at random may differ in
    what they ask for. A figure with too few samples stays OPEN.
    """
    error = ERROR / (look * (look + 1))
    z = Sure(_NORMAL.inv_cdf(1 - error / _FIGURES), _NORMAL.inv_cdf(1 - error))
    found = [failures(trial, stable, z)]
    if times:
        pairs = (trial.first_s, stable.first_s), (trial.gap_s, stable.gap_s)
        found += [slowness(one, other, z) for one, other in pairs if one or other]
    if Finding.WORSE in found:
        return Finding.WORSE
    return Finding.FINE if set(found) == {Finding.FINE} else Finding.OPEN


def failures(trial: Arm, stable: Arm, z: Sure) -> Finding:
    """Compare the shares of failed requests."""
    if min(trial.requests, stable.requests) < FEWEST:
        return Finding.OPEN
    one, other = trial.failed / trial.requests, stable.failed / stable.requests
    low, _ = _wilson(one, trial.requests, z.worse)
    _, high = _wilson(other, stable.requests, z.worse)
    if one - other - sqrt((one - low) ** 2 + (high - other) ** 2) > FAILED_MARGIN:
        return Finding.WORSE if trial.moments >= MOMENTS else Finding.OPEN
    if stable.moments < MOMENTS:
        other = 0.0
    _, high = _wilson(one, trial.requests, z.fine)
    low, _ = _wilson(other, stable.requests, z.fine)
    fine = one - other + sqrt((high - one) ** 2 + (other - low) ** 2) < FAILED_MARGIN
    return Finding.FINE if fine else Finding.OPEN


def _wilson(part: float, of: int, z: float) -> tuple[float, float]:
    """Return the score interval of a proportion (E. B. Wilson, 1927)."""
    middle = part + z * z / (2 * of)
    half = z * sqrt(part * (1 - part) / of + z * z / (4 * of * of))
    return (middle - half) / (1 + z * z / of), (middle + half) / (1 + z * z / of)


def slowness(trial: Sequence[float], stable: Sequence[float], z: Sure) -> Finding:
    """Compare times, by their ranks."""
    n, m = len(trial), len(stable)
    if min(n, m) < FEWEST:
        return Finding.OPEN
    ranked = sorted(
        chain(((each / TIME_MARGIN, 1) for each in trial), ((each, 0) for each in stable))
    )
    above = sum(rank for rank, (_, of_trial) in enumerate(ranked, start=1) if of_trial)
    u = above - n * (n + 1) / 2  # pairs in which the trial's time is the longer one
    score = (u - n * m / 2) / sqrt(n * m * (n + m + 1) / 12)
    if score > z.worse:
        return Finding.WORSE
    return Finding.FINE if score < -z.fine else Finding.OPEN


def look_at(look: int) -> int:
    """Return how many requests of the canary the `look`th test needs."""
    return int(FEWEST * 2 ** (look - 1))
