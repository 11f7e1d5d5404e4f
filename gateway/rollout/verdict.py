"""Is a revision on trial worse than the one beside it, or good enough? Pure.

Three figures are compared, each against a margin: the part of requests that failed, the time to the
first token, the time between tokens. A figure is WORSE when it surely exceeds the margin, FINE when it
surely does not, and OPEN until then: "enough samples" is where one of the two is sure.

- Parts: Newcombe's score interval for a difference of proportions (R. G. Newcombe, "Interval estimation
  for the difference between independent proportions", Statistics in Medicine 17, 1998, method 10).
- Times: the rank-sum test of Mann and Whitney (1947), in its normal approximation, after the times of the
  revision on trial were divided by the margin. Ranks need no shape of the times; netflix's and google's
  Kayenta judges canaries by the same test.

Looking again and again finds something by chance. So looks come at twice the samples of the one before,
and the k-th of them may be wrong with a probability of ERROR / (k * (k + 1)): over all looks together, a
revision that is no worse than the margin is called worse in at most ERROR of all trials, and one that is
worse by any figure is called fine in no more. Being worse is enough in one figure, so they share that error;
fine must be all of them, and each has all of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from math import sqrt
from statistics import NormalDist, median
from typing import Final, NamedTuple

ERROR: Final = 0.05  # of all trials of a revision that is no worse
FAILED_MARGIN: Final = 0.01  # more of the requests may fail
TIME_MARGIN: Final = 1.2  # times as long may it take
FEWEST: Final = 20  # samples on each side; below, the normal approximation is no good
MOST_TIMES: Final = (
    1280  # the newest; ranking twice as many stops the event loop for about a millisecond
)
_FIGURES: Final = 3
_NORMAL: Final = NormalDist()


class Finding(Enum):
    """What is sure of a figure, or of all of them."""

    WORSE = "worse"
    FINE = "fine"
    OPEN = "open"


@dataclass(slots=True)
class Arm:
    """What is known of one side. Times are of streams, in seconds."""

    requests: int = 0
    failed: int = 0
    first_s: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_TIMES))
    gap_s: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_TIMES))

    def told(self) -> str:
        """Return its figures in words."""
        parts = [f"{self.failed} of {self.requests} failed"]
        for name, times in (("first token", self.first_s), ("between tokens", self.gap_s)):
            if times:
                parts.append(f"{name} {median(times) * 1e3:.3g} ms")
        return ", ".join(parts)


class Sure(NamedTuple):
    """From how many standard deviations on a figure is surely one or the other."""

    worse: float
    fine: float


def judge(trial: Arm, stable: Arm, look: int, *, times: bool = True) -> Finding:
    """Return what is sure at the `look`th look (from 1); WORSE if any figure is, FINE if all are.

    Without `times` only failures are compared: who was not chosen by chance may ask for other things.
    A figure of which a side has too few samples says nothing.
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
    """Compare the parts that failed."""
    if min(trial.requests, stable.requests) < FEWEST:
        return Finding.OPEN
    one, other = trial.failed / trial.requests, stable.failed / stable.requests
    low, _ = _wilson(one, trial.requests, z.worse)
    _, high = _wilson(other, stable.requests, z.worse)
    if one - other - sqrt((one - low) ** 2 + (high - other) ** 2) > FAILED_MARGIN:
        return Finding.WORSE
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
    """Return how many samples of the revision on trial the `look`th look needs."""
    return int(FEWEST * 2 ** (look - 1))
