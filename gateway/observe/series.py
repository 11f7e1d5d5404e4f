"""The last hour in memory: one bucket each 10 s, for every pool and backend.

Counts of requests are the difference of two `Mark`s; gauges of backends are read as a bucket
ends. Memory is fixed: 13 KB for a pool and 12 KB for a backend, at most 500 of each, and the marks of
the last five minutes.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Final

from gateway.core.aio import Clock, periodic
from gateway.core.errors import ModelNotFound
from gateway.core.traffic import NOTHING_QUEUED
from gateway.core.types import Outcome, Phase, RequestRecord
from gateway.observe import instruments as table
from gateway.observe.buckets import TTFT_BUCKETS
from gateway.observe.families import Histogram, Labels
from gateway.observe.metrics import Metrics
from gateway.observe.readings import BackendReading, carried_by, queued_in_all
from gateway.observe.recent import Mark, Tally, Window, quantile

STEP_S: Final = 10.0
BUCKETS: Final = 360
RECENT_S: Final = 300.0
POOL_COLUMNS: Final = (
    "requests", "errors", "shed", "ttft_p50_s", "ttft_p95_s", "gap_p95_s", "tokens", "queued", "in_flight",
)  # fmt: skip
BACKEND_COLUMNS: Final = (
    "phase", "kv", "running", "waiting", "in_flight", "ttft_p50_s", "ttft_p95_s", "tokens",
)  # fmt: skip
PHASES: Final = tuple(Phase)
# The next bucket may end while the hour is written out, in several turns.
_SLOTS: Final = BUCKETS + 1
_MOST_TRACKS: Final = 500
_MOST_CALLERS: Final = 200  # of one bucket
_NONE: Final = math.nan
_OK: Final = Outcome.OK  # looked up once: 0.15 us before Python 3.12
_NOTHING: Final = Mark(0.0, {}, {}, {}, {}, {}, {}, {})  # was counted before the first mark

Values = Mapping[str, float | None]


class Track:
    """The buckets of one pool or backend. A value that is not known is NaN here, and None to readers."""

    __slots__ = ("_columns", "pool", "seen")

    def __init__(self, names: Iterable[str], pool: str) -> None:
        self._columns = {name: array("f", [_NONE]) * _SLOTS for name in names}
        self.pool = pool
        self.seen = 0  # the turn that last had values for it

    def put(self, turn: int, values: Values) -> None:
        """Write the bucket of a turn."""
        for name, column in self._columns.items():
            value = values.get(name)
            column[turn % _SLOTS] = _NONE if value is None else value

    def read(self, name: str, turn: int, count: int) -> list[float | None]:
        """Return the last buckets of a column up to a turn, the oldest first."""
        column = self._columns[name]
        found = (column[each % _SLOTS] for each in range(turn - count + 1, turn + 1))
        return [None if math.isnan(value) else round(value, 4) for value in found]


class Series:
    """The buckets of the last hour, and the counts of the last minutes. One owner, on the event loop."""

    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        self.pools: dict[str, Track] = {}
        self.backends: dict[str, Track] = {}
        self.turn = 0
        self.ended_wall = clock.wall()  # when the last bucket ended
        self._metrics, self._clock = metrics, clock
        self._began_at = clock.now()
        # The backend, and the tokens that its engine had written: another one may have its name.
        self._written: dict[str, tuple[BackendReading, float]] = {}
        self._callers = Counter[tuple[str, Outcome]]()  # of this bucket
        self._recent_callers: deque[Mapping[tuple[str, Outcome], int]] = deque(
            maxlen=int(RECENT_S / STEP_S)
        )
        self._unknown_models = 0  # requests of this bucket for models that nobody serves
        self._recent_unknown = deque[int](maxlen=int(RECENT_S / STEP_S))
        self._marks: deque[Mark] = deque(maxlen=int(RECENT_S / STEP_S) + 1)
        self._marks.append(self._mark())

    async def run(self) -> None:
        """End a bucket each 10 s, for ever. Cancel: what is kept stays."""

        async def turn() -> None:
            if self._clock.now() >= self._next_at():
                self.end_bucket()

        await periodic(
            turn,
            every_s=lambda: max(0.0, self._next_at() - self._clock.now()),
            name="series",
            jitter_ratio=0.0,
        )

    def posted(self, records: Sequence[RequestRecord]) -> None:
        """Count requests whose end concerns their caller."""
        for record in records:
            if (outcome := record.outcome) is not _OK and (
                outcome is Outcome.CLIENT_STALLED or record.status == HTTPStatus.TOO_MANY_REQUESTS
            ):
                self._note_caller(record, outcome or Outcome.BUG)
            elif outcome is Outcome.REJECTED and record.error_code == ModelNotFound.default_code:
                self._unknown_models += 1

    def end_bucket(self) -> None:
        """Write the bucket that ends now, and begin the next."""
        now, before = self._clock.now(), self._marks[-1]
        mark = self._mark()
        passed = max(1, round((now - self._began_at) / STEP_S) - self.turn)
        for skipped in range(self.turn + max(1, passed - BUCKETS), self.turn + passed):
            self._write(skipped, {}, {})
        self.turn += passed
        carried = carried_by(self._metrics.readings.fellows())
        window = Window(before, mark)
        pools = self._of_pools(window, carried)
        self._write(self.turn, pools, self._of_backends(window, now, carried))
        self.ended_wall = self._clock.wall()
        self._marks.append(mark)
        self._recent_callers.append(self._callers)
        self._callers = Counter()
        self._recent_unknown.append(self._unknown_models)
        self._unknown_models = 0

    def windows(self, lengths_s: Iterable[float]) -> dict[float, Window]:
        """Return what was counted in about the last seconds, at most 300, by these; each begins with a bucket."""
        now = self._mark()
        return {seconds: Window(self._mark_before(seconds), now) for seconds in lengths_s}

    def steps(self, until: Mark) -> list[Window]:
        """Return the last 300 s, to a mark, in steps of 10 s, the oldest first."""
        return [*itertools.starmap(Window, itertools.pairwise((*self._marks, until)))]

    def _mark_before(self, seconds: float) -> Mark:
        oldest = self._clock.now() - seconds - STEP_S / 2
        return next((mark for mark in self._marks if mark.at >= oldest), self._marks[-1])

    def callers(self, outcome: Outcome) -> dict[str, int]:
        """Return the ids of the keys whose requests lately ended so, and how many; 429 is `REJECTED`."""
        found = Counter[str]()
        for counts in (*self._recent_callers, self._callers):
            found.update({key: times for (key, ended), times in counts.items() if ended is outcome})
        return found

    def unknown_models(self) -> int:
        """Return how many requests lately asked for a model that nobody serves."""
        return sum(self._recent_unknown) + self._unknown_models

    def _note_caller(self, record: RequestRecord, outcome: Outcome) -> None:
        key = ("" if record.caller is None else record.caller.key_id, outcome)
        if key in self._callers or len(self._callers) < _MOST_CALLERS:
            self._callers[key] += 1

    def _next_at(self) -> float:
        return self._began_at + (self.turn + 1) * STEP_S

    def _write(
        self, turn: int, pools: Mapping[str, Values], backends: Mapping[str, Values]
    ) -> None:
        for tracks, found, names in (
            (self.pools, pools, POOL_COLUMNS),
            (self.backends, backends, BACKEND_COLUMNS),
        ):
            for name in found.keys() - tracks.keys():
                if len(tracks) < _MOST_TRACKS:
                    tracks[name] = Track(names, name.rpartition("/")[0])
            for name, track in list(tracks.items()):
                track.put(turn, found.get(name, {}))
                if name in found:
                    track.seen = turn
                elif turn - track.seen >= BUCKETS:
                    del tracks[name]

    def _of_pools(self, window: Window, carried: Counter[str]) -> dict[str, Values]:
        readings, in_flight = self._metrics.readings, Counter[str]()
        for backend in readings.backends():
            in_flight[backend.pool] += backend.in_flight
        for backend_id, elsewhere in carried.items():  # once, though two backends may have the name
            pool = backend_id.rpartition("/")[0]
            if pool in in_flight:
                in_flight[pool] += elsewhere
        own = readings.queues()  # of every pool; one may have no backend
        queues = queued_in_all(own, readings.fellows())
        tallies = window.pools()
        found: dict[str, Values] = {}
        for pool in {**dict.fromkeys(own), **in_flight}:
            tally = tallies.get(pool) or Tally()
            found[pool] = {
                "queued": queues.get(pool, NOTHING_QUEUED).requests,
                "in_flight": in_flight[pool],
                "requests": tally.requests,
                "errors": tally.errors,
                "shed": tally.shed,
                "tokens": tally.tokens,
                "ttft_p50_s": tally.ttft_s(0.5),
                "ttft_p95_s": tally.ttft_s(0.95),
                "gap_p95_s": tally.gap_s(0.95),
            }
        return found

    def _of_backends(self, window: Window, now: float, carried: Counter[str]) -> dict[str, Values]:
        found: dict[str, Values] = {}
        firsts = window.backend_ttfts()
        written, self._written = self._written, {}
        for backend in self._metrics.readings.backends():
            backend_id = f"{backend.pool}/{backend.name}"
            if backend_id not in found:  # a leaving one whose name has a new owner does not count
                values = self._of_backend(backend_id, backend, now, written)
                ttfts = firsts.get(backend_id, ())
                values["ttft_p50_s"] = quantile(ttfts, TTFT_BUCKETS, 0.5)
                values["ttft_p95_s"] = quantile(ttfts, TTFT_BUCKETS, 0.95)
                values["in_flight"] = backend.in_flight + carried[backend_id]
                found[backend_id] = values
        return found

    def _of_backend(
        self,
        backend_id: str,
        backend: BackendReading,
        now: float,
        written: Mapping[str, tuple[BackendReading, float]],
    ) -> dict[str, float | None]:
        values: dict[str, float | None] = {"phase": PHASES.index(backend.phase)}
        sample = backend.sample
        if sample is None or backend.stale(now):
            return values
        values |= {
            "kv": sample.kv_usage_ratio,
            "running": sample.running,
            "waiting": sample.waiting,
        }
        total = sample.generation_tokens
        self._written[backend_id] = backend, total
        whose, before = written.get(backend_id, (None, 0.0))
        if whose is backend and total >= before:  # less: another process began anew
            values["tokens"] = total - before
        return values

    def _mark(self) -> Mark:
        """Copy what the metrics have counted. A histogram that did not move is the one before."""
        counters, histograms = self._metrics.counted()
        last = self._marks[-1] if self._marks else _NOTHING
        return Mark(
            at=self._clock.now(),
            requests=dict(counters[table.REQUESTS.name]),
            shed=dict(counters[table.SHED.name]),
            tokens=dict(counters[table.TOKENS.name]),
            failures=dict(counters[table.UPSTREAM_FAILURES.name]),
            ttfts=_copied(histograms[table.TTFT.name], last.ttfts),
            gaps=_copied(histograms[table.INTER_TOKEN.name], last.gaps),
            backend_ttfts=_copied(histograms[table.BACKEND_TTFT.name], last.backend_ttfts),
        )


def _copied(
    histogram: Histogram, before: Mapping[Labels, Sequence[float]]
) -> dict[Labels, Sequence[float]]:
    found: dict[Labels, Sequence[float]] = {}
    for labels, cell in histogram.cells.items():
        made, known = tuple(cell), before.get(labels)
        found[labels] = known if known == made and known is not None else made
    return found
