"""The values of all metrics, and their exposition.

Settling a request costs a few dict updates: `prometheus_client`'s own counters take a lock and
1-2 us for each update, so values live in plain dicts here and become its families at a scrape.
Nothing is locked: one event loop writes and renders. Gauges of backends are read when scraped.
"""

from __future__ import annotations

import platform
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from gateway import __version__
from gateway.core.aio import Clock
from gateway.core.endings import Ending
from gateway.core.events import Event, EventKind
from gateway.core.types import Outcome, RequestRecord, ShedReason, Transition
from gateway.observe import instruments as table
from gateway.observe.departed import COUNTED_BY_BACKEND, Departed
from gateway.observe.exposition import pieces
from gateway.observe.families import Histogram, Labels, Sums, family, histogram_family
from gateway.observe.gathered import Gathered
from gateway.observe.instrument import Kind
from gateway.observe.instruments import INSTRUMENTS, OTHER, UNKNOWN
from gateway.observe.readings import Readings
from gateway.observe.scraped import KEPT_BY_OTHERS, read_gauges
from gateway.observe.waits import failed_elsewhere, resumes_of, waits_of

# Beyond this many (pool, model) pairs new ones share one series: adapters may come and go for ever.
MAX_NAMES: Final = 1000
_SUMMED: Final = 1000  # requests that are alike and summed up at once, which takes 0.2 ms
_CODES: Final = {0: "none", 499: "499"} | {each.value: str(each.value) for each in HTTPStatus}


class Metrics(Collector):
    """Every metric of one process, in its own registry. Single event loop only."""

    def __init__(self, readings: Readings, clock: Clock) -> None:
        self.before_reading: Callable[[], None] = lambda: None
        self.readings = readings
        self._clock = clock
        self._gathered = Gathered(secrets.token_hex(4), clock.now())
        self._elsewhere: defaultdict[str, dict[Labels, float]] = defaultdict(dict)
        self._values: dict[str, dict[Labels, float]] = {
            each.name: defaultdict(int) for each in INSTRUMENTS if each.kind is not Kind.HISTOGRAM
        }
        self._histograms = {
            each.name: Histogram(each.buckets)
            for each in INSTRUMENTS
            if each.kind is Kind.HISTOGRAM
        }
        # The hot path's own references: an attribute is cheaper than a look-up by name.
        self._requests = self._values[table.REQUESTS.name]
        self._tokens = self._values[table.TOKENS.name]
        self._usage_source = self._values[table.USAGE_SOURCE.name]
        self._attempts = self._values[table.ATTEMPTS.name]
        self._duration = self._histograms[table.REQUEST_DURATION.name]
        self._ttft = self._histograms[table.TTFT.name]
        self._backend_ttft = self._histograms[table.BACKEND_TTFT.name]
        self._inter_token = self._histograms[table.INTER_TOKEN.name]
        self._overhead = self._histograms[table.OVERHEAD.name]
        self._queue_wait = self._histograms[table.QUEUE_WAIT.name]
        self._lag = self._histograms[table.LOOP_LAG.name]
        self._names: dict[tuple[str | None, str | None], tuple[str, str]] = {}
        self._sums: dict[tuple[object, ...], Sums] = {}  # since the values were read last
        self._firsts = defaultdict[str | None, list[float]](list)  # since then, by backend
        self._waits = defaultdict[Labels, list[float]](list)  # since then, by pool
        self._departed = Departed()
        self._values[table.BUILD_INFO.name][__version__, platform.python_version()] = 1
        self._values[table.CONFIG_RELOADS.name].update({("success",): 0, ("failure",): 0})
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    # --- what happened -------------------------------------------------------------------------

    def settle(self, *settled: RequestRecord) -> None:
        """Count requests that ended. Of each, `ended_at` and `outcome` are set."""
        known = self._sums
        for record in settled:
            usage = record.usage
            kind = (
                record.pool, record.model, record.endpoint, record.outcome, record.status,
                None if usage is None else usage.source,
            )  # fmt: skip
            sums = known.get(kind) or self._begin(kind, record)
            sums.requests += 1
            if usage is not None:
                sums.prompt_tokens += usage.prompt_tokens
                sums.completion_tokens += usage.completion_tokens
                sums.cached_tokens += usage.cached_tokens or 0
                sums.expected_tokens += 0 if record.sent is None else record.sent.cached_tokens
            received_at, sent_at = record.received_at, record.sent_at
            if sent_at is not None:
                attempts = record.attempts
                sums.attempts += attempts
                sums.durations.append((record.ended_at or sent_at) - received_at)
                if attempts == 1:  # later ones include the failed ones' time, which is not ours
                    own_s = sent_at - (record.body_at or received_at) - record.queue_s
                    sums.overheads.append(own_s if own_s > 0.0 else 0.0)
                if record.stream and record.first_byte_at is not None:
                    sums.ttfts.append(record.first_byte_at - received_at)
                    # Below 0: another backend began the stream.
                    if (first_s := record.first_byte_at - sent_at) >= 0.0:
                        self._firsts[record.backend_id].append(first_s)
                    if (gap_s := record.token_gap_s) is not None:
                        sums.token_gaps.append(gap_s)
            if (
                sums.rare or record.queue_s or record.client_retry or record.unknown_fields
                or record.fallback is not None or record.resumed or record.failed
            ):  # fmt: skip
                self._count_rare(record, sums)
            if sums.requests >= _SUMMED:
                self._sum_up()

    def _count_rare(self, record: RequestRecord, sums: Sums) -> None:
        """Count what ordinary requests do not have."""
        pool, outcome = sums.names[0], record.outcome
        if outcome is Outcome.SHED:
            reason = record.shed_reason or ShedReason.ENGINE
            self._values[table.SHED.name][pool, reason.value] += 1
        elif outcome is Outcome.CLIENT_GONE:
            self._values[table.CLIENT_DISCONNECTS.name][pool, _stage(record)] += 1
        for wait in waits_of(record):
            self._waits[(wait.pool,)].append(wait.ended_at - wait.began_at)
        if record.client_retry:
            self._values[table.CLIENT_RETRIES.name][(pool,)] += 1
        if record.unknown_fields:
            self._values[table.UNKNOWN_FIELDS.name][pool, *sums.endpoint] += record.unknown_fields
        for cause, times in resumes_of(record):
            self._values[table.RESUMED.name][pool, cause] += times
        for elsewhere in failed_elsewhere(record):
            sums.attempts -= 1
            self._attempts[(elsewhere,)] += 1
        if (fallback := record.fallback) is not None:
            self._values[table.FALLBACKS.name][fallback.pool, pool, fallback.cause.value] += 1

    def _begin(self, kind: tuple[object, ...], record: RequestRecord) -> Sums:
        """Begin to sum up requests that are alike."""
        if len(self._sums) >= MAX_NAMES:
            self._sum_up()
        names = self._names.get((record.pool, record.model)) or self._name(record)
        endpoint = UNKNOWN if record.endpoint is None else record.endpoint.value
        outcome = record.outcome or Outcome.BUG
        sums = self._sums[kind] = Sums(
            names=names,
            endpoint=(endpoint,),
            ending=(outcome.value, _CODES.get(record.status, OTHER)),
            source=None if record.usage is None else record.usage.source.value,
            rare=outcome in (Outcome.SHED, Outcome.CLIENT_GONE),
        )
        return sums

    def _sum_up(self) -> None:
        """Add to the values what was counted since the last time."""
        for sums in self._sums.values():
            names, tokens = sums.names, self._tokens
            self._requests[*names, *sums.endpoint, *sums.ending] += sums.requests
            if sums.attempts:
                self._attempts[names[:1]] += sums.attempts
            if sums.source is not None:
                self._usage_source[(sums.source,)] += sums.requests
                tokens[*names, "prompt"] += sums.prompt_tokens
                tokens[*names, "completion"] += sums.completion_tokens
            if sums.cached_tokens:
                tokens[*names, "cached"] += sums.cached_tokens
            if sums.expected_tokens:
                tokens[*names, "expected"] += sums.expected_tokens
            self._duration.observe(names, *sums.durations)
            self._ttft.observe(names, *sums.ttfts)
            self._inter_token.observe(names, *sums.token_gaps)
            self._overhead.observe(sums.endpoint, *sums.overheads)
        self._sums.clear()
        self._queue_wait.take_in(self._waits)
        for backend_id, firsts in self._firsts.items():
            pool, _, name = (backend_id or UNKNOWN).rpartition("/")
            self._backend_ttft.observe((pool, name), *firsts)
        self._firsts.clear()

    def _name(self, record: RequestRecord) -> tuple[str, str]:
        """Return the labels for a pair of names seen for the first time, within the cap."""
        pool, model = record.pool, record.model
        if pool is None or model is None:
            return (pool or UNKNOWN, UNKNOWN)
        if len(self._names) >= MAX_NAMES:
            return (pool, OTHER)
        self._names[pool, model] = names = (pool, model)
        return names

    def transition(self, seen: Transition) -> None:
        """Count a change of a backend's phase."""
        pool, _, name = seen.backend_id.rpartition("/")
        self._values[table.TRANSITIONS.name][pool, name, seen.after.value, seen.reason] += 1

    def event(self, seen: Event) -> None:
        """Count what supervision did or saw; a restart by its cause, too."""
        pool, _, name = seen.backend_id.rpartition("/")
        self._values[table.SUPERVISION.name][pool, name, seen.kind.value] += 1
        if seen.kind is EventKind.RESTART:
            self._values[table.RESTARTS.name][pool, name, seen.label] += 1

    def limit_cut(self, backend_id: str, sign: str) -> None:
        """Count that a backend's concurrency limit was lowered; `sign` is a closed word."""
        pool, _, name = backend_id.rpartition("/")
        self._values[table.LIMIT_CUTS.name][pool, name, sign] += 1

    def retried(self, pool: str, what: str) -> None:
        """Count what followed a failed attempt that may be repeated; `what` is a closed word."""
        self._values[table.RETRIES.name][pool, what] += 1

    def quarantined(self, pool: str) -> None:
        """Count a request that was refused because backends died as it was worked on."""
        self._values[table.QUARANTINED.name][(pool,)] += 1

    def upstream_failed(self, backend_id: str, ending: Ending) -> None:
        """Count an attempt that failed at a backend."""
        pool, _, name = backend_id.rpartition("/")
        self._values[table.UPSTREAM_FAILURES.name][pool, name, ending.value] += 1

    def shadowed(self, pool: str, to: str, outcome: str, first_s: float | None) -> None:
        """Count a copy of a request; `outcome` is a closed word."""
        self._values[table.SHADOWS.name][pool, to, outcome] += 1
        if first_s is not None:
            self._histograms[table.SHADOW_TTFT.name].observe((pool, to), first_s)

    def failed_key(self, listener: str, result: str) -> None:
        """Count a request without a valid key; both are closed words."""
        self._values[table.FAILED_KEYS.name][listener, result] += 1

    def shared(self, result: str, hashes: int) -> None:
        """Count hashes of prompts that gateways tell each other; `result` is a closed word."""
        self._values[table.PREFIX_SHARED.name][(result,)] += hashes

    def loop_lag(self, late_s: float) -> None:
        """Count how late one timer ran."""
        self._lag.observe((), late_s)

    def configured(self, config_hash: str, shared_hash: str) -> None:
        """Show which configuration is in force from now on; `shared_hash`: of what all gateways have alike."""
        info = self._values[table.CONFIG_INFO.name]
        info.clear()
        info[config_hash, shared_hash] = 1
        self._values[table.CONFIG_RELOADED.name][()] = self._clock.wall()

    @property
    def config_hash(self) -> str | None:
        """The hash of the configuration in force; None before `configured`."""
        return next((labels[0] for labels in self._values[table.CONFIG_INFO.name]), None)

    def reloaded(self, *, ok: bool) -> None:
        """Count a reload that was asked for. After a success call `configured` too."""
        self._values[table.CONFIG_RELOADS.name][("success" if ok else "failure",)] += 1

    def judged(self, states: Iterable[Labels], problems: Iterable[Labels]) -> None:
        """Show what operators are told: states of backends, and problems, by their labels."""
        for instrument, labels in ((table.BACKEND_STATE, states), (table.PROBLEM, problems)):
            self._values[instrument.name] = dict.fromkeys(labels, 1.0)

    def total_requests(self) -> dict[str, int]:
        """Return how many requests ended since the start, by outcome."""
        self._catch_up()
        totals: dict[str, int] = {}
        for labels, count in self._requests.items():
            totals[labels[3]] = totals.get(labels[3], 0) + int(count)
        return totals

    def counted(self) -> tuple[Mapping[str, Mapping[Labels, float]], Mapping[str, Histogram]]:
        """Return the live values, brought up to now, and the histograms, by the instrument's name."""
        self._catch_up()
        return self._values, self._histograms

    def _catch_up(self) -> None:
        """Count what ended until now, and drop the series of backends that left long ago."""
        self.before_reading()
        self._sum_up()
        by_backend = [
            self._histograms[name].cells if name in self._histograms else self._values[name]
            for name in COUNTED_BY_BACKEND
        ]
        self._departed.drop(by_backend, self.readings.backends(), self._clock.now())

    # --- several workers -----------------------------------------------------------------------

    def tell(self) -> Any:
        """Return what this process counted, for the worker that serves operators."""
        self._read()
        cells = {name: histogram.cells for name, histogram in self._histograms.items()}
        return self._gathered.tell(self._values, cells)

    def hear(self, reports: Iterable[Any]) -> None:
        """Add what other workers counted since their last reports; a report is what their `tell` returns."""
        values, cells = self._gathered.hear(reports)
        for name, more in values.items():
            sums = self._elsewhere[name] if name in KEPT_BY_OTHERS else self._values[name]
            for labels, value in more.items():
                sums[labels] = sums.get(labels, 0) + value
        for name, found in cells.items():
            for labels, cell in found.items():
                self._histograms[name].add(labels, cell)

    def bodies(self) -> tuple[int, int]:
        """Return the bytes that request bodies hold in all workers, and the most that may be."""
        return self._gathered.bodies(self.readings.bodies())

    def _read(self) -> None:
        self._catch_up()
        read_gauges(self._values, self.readings, self._clock.now())

    def _all(self, name: str) -> dict[Labels, float]:
        """Return the values of a counter or gauge, with those that only other workers have."""
        values = self._values[name]
        more = [*self._elsewhere[name].items(), *self._gathered.parts(name)]
        if more:
            values = dict(values)
            for labels, value in more:
                values[labels] = values.get(labels, 0) + value
        return values

    # --- exposition ---------------------------------------------------------------------------

    def pieces(self, accept: str = "") -> tuple[Iterator[bytes], str]:
        """Return the exposition in pieces that are quick to make, and its content type."""
        return pieces(self.registry, accept)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: names are checked by tests, and collecting is for scrapes."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield every instrument of the table, in its order."""
        self._read()
        for each in INSTRUMENTS:
            if each.kind is Kind.HISTOGRAM:
                yield histogram_family(each, self._histograms[each.name])
            else:
                yield family(each, self._all(each.name))


def _stage(record: RequestRecord) -> str:
    begun = "before_first_byte" if record.first_byte_at is None else "streaming"
    return "before_send" if record.sent_at is None else begun
