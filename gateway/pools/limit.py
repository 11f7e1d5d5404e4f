"""The adaptive concurrency limit of one backend: how many of our requests it may hold at a time.

Additive increase, multiplicative decrease (as in Netflix's concurrency-limits), judged once a window.
A window lasts from one scrape to the next, about one second:

    a sign of congestion, and the last cut has worked    cut: x 0.9, or to the share that does well
    no sign, and at least half of the limit was used     grow: x 1.25 + 1 until the first sign, then + 1;
                                                         in time faster after a late or slow one
    otherwise                                            as it is: disuse neither earns nor costs

A cut works only through what is not admitted, so it has worked once a whole window passed with no
more in flight than the limit. Until then a second cut would punish the same burst twice, and let no
request leave sooner. For the same reason a first token is judged only if its request went in after
the last cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from gateway.core.types import LoadSample
from gateway.pools.rate import Rate
from gateway.pools.reading import Reading

# An unknown engine: the largest max_num_seqs that vLLM chooses itself (GPU >= 70 GiB). Less makes
# requests wait for nothing on a large engine; on a small one the first burst waits in its queue, which
# shows in two scrapes, and the cut goes to what it really runs.
START: Final = 1024
UNSEEN: Final = 16  # without metrics only first tokens tell that it is full
CEILING: Final = 8192  # beyond any engine: more is a mistake somewhere
GAP_OBJECTIVE_S: Final = 0.08  # between two tokens, the default of `slo.itl`: nobody reads as fast
OBJECTIVE_S: Final = 2.5  # time to first token of a short prompt, the default of `slo.ttft`

_CUT: Final = 0.9  # Netflix AIMD: clears the queue, costs a tenth of the throughput at most
_DEEPEST: Final = 0.5  # TCP halves: one bad window must not throw away all that was learnt
_REFUSED_LEAST: Final = 16  # what refuses guards itself; and the 503 may be another's
_FAST: Final = 1.25  # signs lag by two scrapes, so it overshoots by two steps: 1.6 times at most
# After so many quiet windows of full use it grows by a twentieth. First tokens tell windows later that
# they are late (five, if they take 4 s), so it overshoots by as many steps: 1.3 times.
_CLEARING, _BOLDER = 10, 1.05
_QUEUE_SHARE: Final = 0.1  # of running; fewer waiting are prompts in turn for the next steps
_FULL: Final = 2  # scrapes in which some wait and as many run as ever; none between with fewer
_ABOUT_MOST: Final = 0.93  # of it; the gauge is written when some of the batch have just ended
# Then it is tried whether the batch holds more after all; twice as long each time that it does not.
_BELIEVED_S, _BELIEVED_MOST_S = 60.0, 960.0
_JUDGED: Final = 10  # first tokens that make a verdict: one slow one alone is not yet p90
SLOWER: Final = 1.5  # times the best gap: a full batch decodes slower than a small one, and may
_LATE_RATIO: Final = 0.1  # the objective holds for p90
_RESERVE_RATIO: Final = 0.1
_SLOW_START_RATIO: Final = 0.1  # Envoy's slow_start: min_weight_percent 10, then linear


class Sign(Enum):
    """Why a limit was cut; closed, because it is a metric label."""

    WAITING = "waiting"  # the engine's queue was long in two scrapes running, or its batch is full
    PREEMPTED = "preempted"  # it threw sequences out of its KV cache, whose size nobody knows
    REFUSED = "refused"  # the engine's own admission control answered 503
    LATE = "late"  # more than a tenth of the first tokens came after their objective
    SLOW = "slow"  # more than a tenth of the streams had more time between tokens than theirs


_DOUBTFUL: Final = frozenset({Sign.LATE, Sign.SLOW})


def late(
    ttft_s: float, prompt_tokens: int, objective_s: float, prefill_tokens_per_s: float | None
) -> bool:
    """Whether a first token came too late for its prompt.

    The objective is for short prompts; a long one also gets the time it takes to read it at
    `prefill_tokens_per_s`. Without a known rate the objective stands alone.
    """
    reading_s = prompt_tokens / prefill_tokens_per_s if prefill_tokens_per_s else 0.0
    return ttft_s > objective_s + reading_s


@dataclass(slots=True)
class Limit:
    """The limit of one backend. Its one owner feeds it, asks `effective`, and may change the settings.

    `value` is always within 1 and the ceiling. A fixed limit is the ceiling and the start: the
    operator knows the engine; what the engine shows may still lower it. Set it through `fix`.
    """

    fixed: int | None = None
    objective_s: float = OBJECTIVE_S
    slow_start_s: float = 60.0  # 0: none
    ready_at: float | None = None  # when it came up again; None: it was up when we started
    gap_objective_s: float = GAP_OBJECTIVE_S
    reading: Reading = field(default_factory=Reading)
    decode: Rate = field(default_factory=Rate)
    whole: Rate = field(default_factory=Rate)  # of plain replies, where no metrics tell of the load
    cut_at: float = -math.inf
    value: int = field(init=False)  # when it neither starts slowly nor is shared out
    _fast: bool = True
    _seen: bool | None = None  # whether a scrape has shown anything yet; None: none was tried
    _clean: int = 0  # windows in which it grew since the last sign
    _doubted: bool = False  # that sign may have come of something else than the engine
    _queued: bool = False  # the last scrape showed a long queue
    _most_running: int = 0  # in any scrape
    _full: int = 0  # scrapes that showed about as many, and some waiting
    _batch: int | None = None  # how many the engine runs at a time, when it was seen to be full
    _batch_at: float = -math.inf  # and when that was
    _batch_before: int = 0  # the last that was seen
    _believed_s: float = _BELIEVED_S
    _preemptions: float = math.inf
    _refused: int = 0
    _in_time: int = 0
    _late: int = 0
    _smooth: int = 0
    _slow: int = 0
    _late_before_cut: bool = False  # in this window came a late first token of the time before

    def __post_init__(self) -> None:
        self.value = self.fixed or START

    # --- asked ---

    def effective(self, now: float) -> int:
        """Return how many requests may be in flight; at least 1."""
        ready_at, window_s = self.ready_at, self.slow_start_s
        if ready_at is None or now >= ready_at + window_s:
            return self.value
        passed = max(0.0, (now - ready_at) / window_s)
        return max(1, int(self.value * (_SLOW_START_RATIO + (1 - _SLOW_START_RATIO) * passed)))

    def starts(self, now: float) -> bool:
        """Whether the backend starts slowly: it came up a short while ago."""
        return self.ready_at is not None and now < self.ready_at + self.slow_start_s

    # --- fed ---

    def fix(self, fixed: int | None) -> None:
        """Change the configured limit; another one holds at once, unless the engine's signs hold it lower."""
        if fixed == self.fixed:
            return
        is_lowered = self.value < self._start
        self.fixed = fixed
        self._move_to(self.value if is_lowered else self._start)

    def restarted(self, now: float) -> None:
        """Start slowly: it is another process, with cold caches and maybe other settings."""
        self.trusted_again(now)
        self._most_running, self._full, self._batch = 0, 0, None
        self.decode = Rate()

    def trusted_again(self, now: float) -> None:
        """Start slowly: it is the same process, of which it is not known how much it bears."""
        self.ready_at = now

    def refused(self) -> None:
        """Note a 503 of the engine's own admission control."""
        self._refused += 1

    def first_token(self, now: float, ttft_s: float, prompt_tokens: int) -> None:
        """Judge a first token that came `ttft_s` after the request was sent to the backend.

        It may take the time to read the whole prompt, for how much is cached is a guess. One of a backend
        that starts slowly is not judged: it is slow because it is cold, not full.
        """
        if self.starts(now):
            return
        objective_s = self.objective_s
        is_late = ttft_s > objective_s and late(
            ttft_s, prompt_tokens, objective_s, self.reading.rate.at(now)
        )
        if now - ttft_s < self.cut_at:
            self._late_before_cut |= is_late
        elif is_late:
            self._late += 1
        else:
            self._in_time += 1

    def token_gap(self, now: float, began: float, gap_s: float) -> None:
        """Judge the mean time between two tokens of a stream that began then and came to its end now.

        An engine that is slower than the objective when it has little to do is not slow for its load:
        only half as much again as its best counts.
        """
        best = self.decode.learn(now, gap_s, 1)
        if best:
            self.reading.wrote(gap_s, 1 / best)
        if began < self.cut_at or self.starts(now):
            return
        if gap_s > self.gap_objective_s and not (best and gap_s <= SLOWER / best):
            self._slow += 1
        else:
            self._smooth += 1

    def observe(
        self, now: float, sample: LoadSample | None, in_flight: int, *, beside_highest: bool = False
    ) -> Sign | None:
        """End a window and move the limit; returns the sign for which it was cut, None when it was not.

        Args:
            now: when the window ends.
            sample: the scrape that ends it; None when that failed, which is no sign of room.
            in_flight: the most of our requests at a time since the last call.
            beside_highest: the highest of several priorities sends requests. Then the limit rarely grows beyond a
                full batch to see whether it holds more: what it does not hold waits in the engine, ahead of them.
        """
        judged = self._in_time + self._late
        self._meet(sample)
        if now >= self._batch_at + (_BELIEVED_MOST_S if beside_highest else self._believed_s):
            self._batch = None
        sign = self._sign(sample, judged)
        if sample is not None and self._fills(sample, now, in_flight):
            sign = sign or Sign.WAITING
        cut = sign if 0 < in_flight <= self.value else None
        if cut is not None:
            self._cut(now, cut, sample, in_flight)
        elif sign is None and self._may_grow(sample, judged) and in_flight * 2 >= self.value:
            self._clean += 1
            self._move_to(self.value * self._growth() + 1.0)
        if sign is not None:
            self._fast, self._clean, self._doubted = False, 0, sign in _DOUBTFUL
        self._refused, self._late_before_cut = 0, False
        if judged >= _JUDGED or cut is not None:
            self._in_time = self._late = 0
        if self._smooth + self._slow >= _JUDGED or cut is not None:
            self._smooth = self._slow = 0
        return cut

    def forgive(self, now: float) -> None:
        """Judge nothing that began before: this process itself stood still, not the backend."""
        self._in_time = self._late = self._smooth = self._slow = 0
        self._late_before_cut = False
        self.cut_at = now

    @property
    def _start(self) -> int:
        """Where it begins, by all that is known but the engine's signs."""
        return self.fixed or (UNSEEN if self._seen is False else START)

    def _meet(self, sample: LoadSample | None) -> None:
        """Hold the limit low without metrics, until there are some or first tokens in time let it grow."""
        if sample is not None:
            if self._seen is False and self._fast:  # no sign so far: as if it had been seen at once
                self._move_to(self.fixed or max(self.value, START))
            self._seen = True
        elif self._seen is None:
            self._seen = False
            self._move_to(self.fixed or min(self.value, UNSEEN))

    def _growth(self) -> float:
        """Return the factor of growth: the longer no sign comes, the likelier the last was a false one.

        The engine's own signs are never false: near what it holds, every step is to be small.
        """
        if self._fast:
            return _FAST
        return _BOLDER if self._doubted and self._clean > _CLEARING else 1.0

    def _may_grow(self, sample: LoadSample | None, judged: int) -> bool:
        """Whether the window shows room; anything that may become a sign forbids it.

        Without a scrape only enough first tokens in time show room. They tell late that they are late: to
        grow meanwhile would undo the cut before.
        """
        doubtful = self._queued or self._late_before_cut or self._late > _LATE_RATIO * judged
        if sample is None:
            return not doubtful and judged >= _JUDGED
        return not doubtful and not sample.waiting

    def _sign(self, sample: LoadSample | None, judged: int) -> Sign | None:
        queued, preempted = False, False
        if sample is None:
            self._queued = False  # how long it is now, nobody knows
        else:
            was_queued, self._queued = self._queued, _long_queue(sample)
            queued = was_queued and self._queued
            # The first scrape is the base; a counter that fell is a new process, and the base anew.
            # Where a cache's size is known, less is let into it from then on: see `Trust`.
            preempted = sample.preemptions > self._preemptions and not sample.kv_capacity_tokens
            self._preemptions = sample.preemptions
        if queued:
            return Sign.WAITING
        if preempted:
            return Sign.PREEMPTED
        if self._refused:
            return Sign.REFUSED
        if judged >= _JUDGED and self._late > _LATE_RATIO * judged:
            return Sign.LATE
        streams = self._smooth + self._slow
        if streams >= _JUDGED and self._slow > _LATE_RATIO * streams:
            return Sign.SLOW
        return None

    def _fills(self, sample: LoadSample, now: float, in_flight: int) -> bool:
        """Whether the engine's batch is full: some wait, and it runs its most time and again.

        Then each further request waits for another to end, however few wait. Where they wait for
        something else, for cache or for a step to read them, it runs now more and now fewer. Where we
        have fewer in flight than it runs, others fill it, and the length of its queue alone tells.
        """
        running, most = sample.running, self._most_running
        self._most_running = max(running, most)
        if running > most:
            self._full = 0
        if sample.waiting > 0:
            self._full = self._full + 1 if running >= _ABOUT_MOST * most else 0
        if self._full < _FULL or not running < in_flight <= running / _DEEPEST:
            return False
        again = self._most_running == self._batch_before
        longer_s = min(2 * self._believed_s, _BELIEVED_MOST_S)
        self._believed_s = longer_s if again else _BELIEVED_S
        self._full, self._batch, self._batch_at = 0, self._most_running, now
        self._batch_before = self._batch
        return True

    def _cut(self, now: float, sign: Sign, sample: LoadSample | None, in_flight: int) -> None:
        factor = _CUT
        if sign is Sign.WAITING and self._batch is not None and self._batch_at == now:
            factor = min(1.0, self._batch / in_flight)
        elif sign is Sign.WAITING and sample is not None:
            factor = min(factor, sample.running / (sample.running + sample.waiting))
        elif sign is Sign.LATE:
            factor = min(factor, self._in_time / (self._in_time + self._late))
        least = min(_REFUSED_LEAST, self.value) if sign is Sign.REFUSED else 1
        self._move_to(max(in_flight * max(factor, _DEEPEST), least))
        self._queued = False
        self.cut_at = now

    def _move_to(self, value: float) -> None:
        self.value = max(1, min(int(value), self._batch or CEILING, self.fixed or CEILING))


def unreserved(allowed: int, reserves: int) -> int:
    """Return how many of the allowed places so many reserves leave; of few places none is kept.

    A reserve is the last tenth: a flood of others never makes those it is kept for wait for a whole
    reply.
    """
    if allowed <= 4:
        return allowed
    return allowed - reserves * max(1, int(allowed * _RESERVE_RATIO))


def _long_queue(sample: LoadSample) -> bool:
    """Whether more wait than come in with the next steps.

    vLLM's gauge is written at the end of a step and counts what did not fit into it, so some wait
    whenever a step is full of prompts, however healthy the engine.
    """
    return sample.waiting > _QUEUE_SHARE * sample.running
