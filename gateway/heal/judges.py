"""What shows over time that a backend is ill though it serves: three judges.

The judges are fed by their one owner, hold a bounded state, and do the same small work at each call.
Make new ones for each incarnation: what is held against a process ends with it, and a restart that
did not help is not ordered again for the same reason before there is a new past to compare with.

    Pace     makes far fewer tokens than before and than its peers, at the same load, for minutes
    Errors   fails most of its requests, and its peers do not
    Memory   its processes hold more host memory than they may

Times are monotonic seconds. A gap in what is seen is no evidence of anything: it is left out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from gateway.core.types import LoadSample, Phase
from gateway.heal.decisions import Cause, Sign
from gateway.pools.facts import Ejection
from gateway.pools.speed import UNKNOWN_AFTER_S
from gateway.pools.table import Backend

# --- throughput -----------------------------------------------------------------------------------

_BUSY: Final = 4  # running requests from which a pace says something about the engine
_MINUTE_S: Final = 60.0  # of busy time: one measurement
_STALE_S: Final = 180.0  # a measurement that took or is longer ago tells nothing about now
_SLOW_MIN: Final = 5  # slow minutes in a row that make a collapse
_ALONE_MIN: Final = 10  # where no peer shows whether it is the workload
_ALONE_PART: Final = 0.5  # of `slow_ratio`, likewise
_KNOWN_MIN: Final = 10  # minutes at a load until its usual pace there is known
# The usual pace follows a better one within half an hour, a worse one within hours: else a slow
# decline would pass for the usual.
_RISES, _FALLS = 1 / 30, 1 / 240


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens per second, made with so many requests running."""

    running: float
    tokens_per_s: float
    at: float = 0.0
    minutes: int = 1  # measured

    def at_load(self, running: float) -> float:
        """Return what it makes at least with another load.

        A batch that grows makes no fewer tokens in all and no more for each request: the rate over
        the load is rising and concave.
        """
        return self.tokens_per_s * min(1.0, running / self.running)


@dataclass(slots=True)
class Pace:
    """How fast one backend works under load, in minutes of busy time."""

    recent: Throughput | None = None  # the last minute
    _last: LoadSample | None = None
    _began: float = 0.0  # the minute that is measured
    _busy_s: float = 0.0
    _tokens: float = 0.0
    _running_s: float = 0.0
    _usual: dict[int, Throughput] = field(default_factory=dict)  # by bit length of running
    _expected: float | None = None  # tokens per second in the last minute, by its own past
    _judged: bool = True  # the last minute was
    _slow_min: int = 0  # in a row
    _evidence: str = ""

    def observe(self, sample: LoadSample, *, warm: bool) -> None:
        """Take in a scrape; `warm`: it is in service and its slow start is over."""
        last, self._last = self._last, sample
        if not warm or sample.asleep or last is None:
            self._busy_s, self._slow_min = 0.0, 0
            return
        passed_s, tokens = sample.at - last.at, sample.progress - last.progress
        if tokens < 0:  # another process: nothing that was learnt holds
            self._usual, self._expected, self.recent = {}, None, None
            self._busy_s, self._slow_min = 0.0, 0
            return
        running = min(last.running, sample.running)
        if not 0 < passed_s <= UNKNOWN_AFTER_S or running < _BUSY:
            return
        if self._busy_s == 0.0 or sample.at - self._began > _STALE_S:
            self._began, self._busy_s, self._tokens, self._running_s = last.at, 0.0, 0.0, 0.0
        self._busy_s += passed_s
        self._tokens += tokens
        self._running_s += running * passed_s
        if self._busy_s >= _MINUTE_S:
            self._end_minute(sample.at)

    def _end_minute(self, at: float) -> None:
        if self.recent is not None and at - self.recent.at > _STALE_S + _MINUTE_S:
            self._slow_min = 0  # too long ago to be one collapse
        minute = Throughput(self._running_s / self._busy_s, self._tokens / self._busy_s, at)
        self.recent, self._busy_s, self._judged = minute, 0.0, False
        bucket = int(minute.running).bit_length()
        known = [(abs(bucket - each), each) for each in self._usual if self._is_known(each)]
        self._expected = self._usual[min(known)[1]].at_load(minute.running) if known else None
        self._usual[bucket] = _learned(self._usual.get(bucket), minute)

    def _is_known(self, bucket: int) -> bool:
        return self._usual[bucket].minutes >= _KNOWN_MIN

    def judge(self, peers: Sequence[Pace], slow_ratio: float, now: float) -> Sign | None:
        """Return the sign of a collapse while it lasts. `peers`: the others of its pool, idle or not.

        A minute in which no peer has had work says nothing; a pool of one goes by its past alone.
        """
        minute, expected = self.recent, self._expected
        if minute is None or now - minute.at > _STALE_S:
            return None
        if not self._judged and expected is not None:
            self._judge(minute, expected, peers, slow_ratio)
        self._judged = True
        needed = _SLOW_MIN if peers else _ALONE_MIN
        return Sign(Cause.SLOW, self._evidence) if self._slow_min >= needed else None

    def _judge(
        self, minute: Throughput, expected: float, peers: Sequence[Pace], slow_ratio: float
    ) -> None:
        rates = [each.recent for each in peers if each.recent is not None]
        fresh = [rate for rate in rates if minute.at - rate.at <= _STALE_S]
        if peers and not fresh:
            return
        theirs = median(rate.at_load(minute.running) for rate in fresh) if fresh else math.inf
        part = slow_ratio if peers else slow_ratio * _ALONE_PART
        if minute.tokens_per_s >= part * min(expected, theirs):
            self._slow_min = 0
            return
        self._slow_min += 1
        others = f" and its peers' {theirs:.0f}" if peers else ""
        self._evidence = (
            f"{minute.tokens_per_s:.0f} tokens/s with {minute.running:.0f} running, under"
            f" {part:.2f} of its usual {expected:.0f}{others}, for {self._slow_min} min"
        )


def _learned(usual: Throughput | None, minute: Throughput) -> Throughput:
    if usual is None:
        return minute
    weight = _RISES if minute.tokens_per_s > usual.tokens_per_s else _FALLS
    minutes = usual.minutes + 1
    if minutes <= _KNOWN_MIN:
        weight = 1 / minutes
    return Throughput(
        usual.running + weight * (minute.running - usual.running),
        usual.tokens_per_s + weight * (minute.tokens_per_s - usual.tokens_per_s),
        minute.at,
        minutes,
    )


# --- errors ---------------------------------------------------------------------------------------

_SLOT_S: Final = 10.0
_SLOTS: Final = 30
_ENOUGH: Final = 10  # requests: a backend that fails gets few
_FAILED_RATIO: Final = 0.5
_LATEST_S: Final = 60.0  # since the last failure: it fails still


@dataclass(slots=True)
class Errors:
    """The share of one backend's requests that failed by its fault, over five minutes."""

    _slots: deque[list[float]] = field(default_factory=lambda: deque(maxlen=_SLOTS))
    _failed_at: float = -math.inf

    def observe(self, now: float, *, failed: bool) -> None:
        """Count one request that ended; neither a client's fault nor a refusal for capacity."""
        slot = now // _SLOT_S
        if not self._slots or self._slots[-1][0] < slot:
            self._slots.append([slot, 0, 0])
        self._slots[-1][1] += 1
        if failed:
            self._slots[-1][2] += 1
            self._failed_at = now

    def counts(self, now: float) -> tuple[int, int]:
        """Return how many requests ended in the window, and how many of them failed."""
        oldest = now // _SLOT_S - _SLOTS
        slots = [each for each in self._slots if each[0] > oldest]
        return int(sum(each[1] for each in slots)), int(sum(each[2] for each in slots))

    def judge(self, peers: Sequence[Errors], now: float) -> Sign | None:
        """Return the sign while most requests fail here, and not half as large a share at its peers."""
        total, failed = self.counts(now)
        if total < _ENOUGH or failed < _FAILED_RATIO * total or now - self._failed_at > _LATEST_S:
            return None
        others = [each.counts(now) for each in peers]
        shares = [theirs / all_ for all_, theirs in others if all_ >= _ENOUGH]
        if shares and median(shares) >= failed / total / 2:
            return None  # it is what is asked, or the way to all of them
        return Sign(Cause.ERRORS, f"{failed} of {total} requests failed in the last 5 min")


_EJECTIONS: Final = 3  # in a row: the trials failed after 30 and after 60 s


def _ejected(ejection: Ejection | None) -> Sign | None:
    """Return the sign of one that gets too few requests to be judged by their share, as each trial fails."""
    if ejection is None or ejection.times < _EJECTIONS:
        return None
    return Sign(
        Cause.ERRORS, f"{ejection.evidence}; {ejection.times - 1} trials after it failed too"
    )


# --- memory ---------------------------------------------------------------------------------------

_OVER_S: Final = 30.0  # a peak while a prompt is read is no leak


@dataclass(slots=True)
class Memory:
    """Host memory of one backend's processes."""

    _last_at: float = -math.inf
    _over_since: float | None = None
    _held_bytes: int = 0

    def observe(self, now: float, held_bytes: int, max_bytes: int | None) -> None:
        """Take in a reading."""
        over = max_bytes is not None and held_bytes > max_bytes
        if not over or now - self._last_at > _OVER_S:
            self._over_since = now if over else None
        elif self._over_since is None:
            self._over_since = now
        self._last_at, self._held_bytes = now, held_bytes

    def judge(self) -> Sign | None:
        """Return the sign once it was over its limit at every reading for 30 s."""
        if self._over_since is None or self._last_at - self._over_since < _OVER_S:
            return None
        held = f"{self._held_bytes / (1 << 30):.1f} GiB"
        return Sign(Cause.MEMORY, f"its processes use {held} of host memory, more than max_memory")


# --- all of them ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Judges:
    """The judges of one incarnation."""

    pace: Pace = field(default_factory=Pace)
    errors: Errors = field(default_factory=Errors)
    memory: Memory = field(default_factory=Memory)
    sampled_at: float = -math.inf

    def scraped(self, backend: Backend, now: float) -> None:
        """Take in the last scrape, if it is a new one."""
        sample = backend.sample
        if sample is None or sample.at == self.sampled_at:
            return
        self.sampled_at = sample.at
        warm = backend.phase is Phase.READY and not backend.limit.starts(now)
        self.pace.observe(sample, warm=warm)

    def found(
        self,
        peers: Sequence[Judges],
        slow_ratio: float,
        now: float,
        ejection: Ejection | None = None,
    ) -> dict[Cause, Sign]:
        """Return what is against it, beside its pool's other backends; `ejection` if it is left out."""
        signs = (
            self.pace.judge([each.pace for each in peers], slow_ratio, now) if slow_ratio else None,
            self.errors.judge([each.errors for each in peers], now) or _ejected(ejection),
            self.memory.judge(),
        )
        return {sign.cause: sign for sign in signs if sign is not None}
