"""Judge a canary: is its revision worse than the other backends of the pool, or no worse? Pure.

Three figures are compared, each with a margin: the share of failed requests, the time to first token, and
the time between tokens. A figure is WORSE once it exceeds the margin with confidence, FINE once it stays
within the margin with confidence, and OPEN until then. So the number of samples needs no setting.

- Shares: Newcombe's score interval for a difference of proportions (R. G. Newcombe, "Interval estimation
  for the difference between independent proportions", Statistics in Medicine 17, 1998, method 10).
- Times: the rank-sum test of Mann and Whitney (1947), in its normal approximation, after the times of the
  canary were divided by the margin. Ranks assume no distribution. Kayenta, the canary judge of Netflix and
  Google, uses the same test. Times are counted in narrow buckets, so what several gateways saw adds up, and
  the test takes the same few microseconds for any number of samples.

Repeated tests find a difference by chance. So each test waits for twice the samples of the one
before, and the k-th may be wrong with probability ERROR / (k * (k + 1)). These add up to ERROR: a revision
that is no worse is called worse in at most that share of all canaries, and a worse one is called fine in
no more. One figure suffices for WORSE, so the three share the error. FINE needs all three, so each may use
all of it.

The interval assumes independent failures, but the end of one server fails all requests that it carries. So failures
in fewer than three moments prove nothing: neither that the canary is worse, nor that it fails less than others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from math import floor, log, sqrt
from statistics import NormalDist
from typing import Final, NamedTuple

import msgspec

ERROR: Final = 0.05  # share of canaries of equal revisions that may end with a wrong verdict
FAILED_MARGIN: Final = 0.01  # so much more of the requests may fail
TIME_MARGIN: Final = 1.2  # times may be so many times longer
MOMENTS: Final = 3  # in which requests have to fail
TOGETHER_S: Final = 5.0  # what fails within that time is of one moment
FEWEST: Final = 20  # samples on each side; with fewer the normal approximation does not hold
_MARGIN_BUCKETS: Final = 4  # a bucket of times is 4.7 % wide
_BUCKET: Final = log(TIME_MARGIN) / _MARGIN_BUCKETS
_SHORTEST_S: Final = 1e-6
_FIGURES: Final = 3
_NORMAL: Final = NormalDist()


class Finding(Enum):
    """The verdict on one figure, or on all of them."""

    WORSE = "worse"
    FINE = "fine"
    OPEN = "open"


class Arm(msgspec.Struct):
    """The samples of one side. Times are of streams: how many there were in each bucket."""

    requests: int = 0
    failed: int = 0
    refused: int = 0  # of `failed`: by an error of a backend that lives
    moments: list[float] = []  # in which the other ones failed: the last few, `TOGETHER_S` apart
    first: dict[int, int] = {}
    gap: dict[int, int] = {}

    def fail(self, now: float) -> None:
        """Count a request that failed, as others may have at the same moment and for the same cause."""
        self.requests += 1
        self.failed += 1
        self.moments = _apart([*self.moments, now])

    def refuse(self) -> None:
        """Count a request that the backend answered with an error of its own."""
        self.requests += 1
        self.failed += 1
        self.refused += 1

    def serve(self, first_s: float | None = None, gap_s: float | None = None) -> None:
        """Count a request that was served, with the times that are known."""
        self.requests += 1
        for times, seconds in ((self.first, first_s), (self.gap, gap_s)):
            if seconds is not None:
                bucket = floor(log(max(seconds, _SHORTEST_S)) / _BUCKET)
                times[bucket] = times.get(bucket, 0) + 1

    @property
    def spread(self) -> int:
        """In how many separate moments requests failed.

        Each refused request is one; of others only the last `MOMENTS` are kept.
        """
        return self.refused + len(self.moments)

    def later(self, seconds: float) -> Arm:
        """Return the same, with moments by a clock that is ahead by so much."""
        return msgspec.structs.replace(self, moments=[each + seconds for each in self.moments])

    def told(self) -> str:
        """Return its figures in words."""
        parts = [f"{self.failed} of {self.requests} failed"]
        for name, times in (("first token", self.first), ("between tokens", self.gap)):
            if times:
                parts.append(f"{name} {_median_s(times) * 1e3:.3g} ms")
        return ", ".join(parts)


def together(arms: Iterable[Arm]) -> Arm:
    """Return the sum of what several gateways saw. They all see the end of a server, in one moment."""
    whole, moments = Arm(), []
    for arm in arms:
        whole.requests += arm.requests
        whole.failed += arm.failed
        whole.refused += arm.refused
        moments += arm.moments
        for mine, theirs in ((whole.first, arm.first), (whole.gap, arm.gap)):
            for bucket, count in theirs.items():
                mine[bucket] = mine.get(bucket, 0) + count
    whole.moments = _apart(sorted(moments))
    return whole


def _apart(times: list[float]) -> list[float]:
    """Return the last few of ascending times, without those that follow another within `TOGETHER_S`."""
    kept: list[float] = []
    for each in times:
        if not kept or each - kept[-1] >= TOGETHER_S:
            kept.append(each)
    return kept[-MOMENTS:]


def _median_s(times: Mapping[int, int]) -> float:
    """Return the middle of the bucket that has the median."""
    left = sum(times.values()) / 2
    for bucket in sorted(times):
        left -= times[bucket]
        if left <= 0:
            break
    return float(TIME_MARGIN ** ((bucket + 0.5) / _MARGIN_BUCKETS))


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
        pairs = (trial.first, stable.first), (trial.gap, stable.gap)
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
        return Finding.WORSE if trial.spread >= MOMENTS else Finding.OPEN
    if stable.spread < MOMENTS:
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


def slowness(trial: Mapping[int, int], stable: Mapping[int, int], z: Sure) -> Finding:
    """Compare times, by their ranks; those of one bucket are equal."""
    n, m = sum(trial.values()), sum(stable.values())
    if min(n, m) < FEWEST:
        return Finding.OPEN
    shifted = {bucket - _MARGIN_BUCKETS: count for bucket, count in trial.items()}
    longer = equal = 0.0  # pairs in which the trial's time is the longer one
    shorter_ones = 0
    for bucket in sorted(shifted.keys() | stable.keys()):
        mine, others = shifted.get(bucket, 0), stable.get(bucket, 0)
        longer += mine * (shorter_ones + others / 2)
        equal += (mine + others) ** 3 - (mine + others)
        shorter_ones += others
    spread = n * m / 12 * (n + m + 1 - equal / ((n + m) * (n + m - 1)))
    if not spread:  # all are equal
        return Finding.OPEN
    score = (longer - n * m / 2) / sqrt(spread)
    if score > z.worse:
        return Finding.WORSE
    return Finding.FINE if score < -z.fine else Finding.OPEN


def look_at(look: int) -> int:
    """Return how many requests of the canary the `look`th test needs."""
    return int(FEWEST * 2 ** (look - 1))
