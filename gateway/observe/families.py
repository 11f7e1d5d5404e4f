"""Values of one metric by their labels, and the family that `prometheus_client` exposes them as."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from gateway.observe.instrument import Instrument, Kind

Labels = tuple[str, ...]


class Histogram:
    """Counts by bucket for each set of labels; the last two numbers are `+Inf` and the sum."""

    __slots__ = ("bounds", "cells")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.cells: dict[Labels, list[float]] = {}

    def observe(self, labels: Labels, *values: float) -> None:
        """Count values; together they cost less each than one at a time."""
        if not values:
            return
        if (cell := self.cells.get(labels)) is None:
            cell = self.cells[labels] = [0] * (len(self.bounds) + 2)
        cell[-1] += sum(values)
        ordered = sorted(values)
        counted = 0
        for bucket, bound in enumerate(self.bounds):
            upto = bisect_right(ordered, bound, counted)
            cell[bucket] += upto - counted
            counted = upto
        cell[-2] += len(ordered) - counted

    def take_in(self, waiting: dict[Labels, list[float]]) -> None:
        """Count the values that wait, and empty `waiting`."""
        for labels, values in waiting.items():
            self.observe(labels, *values)
        waiting.clear()

    def add(self, labels: Labels, more: Sequence[float]) -> None:
        """Count what another histogram of the same bounds has counted."""
        cell = self.cells.get(labels) or [0.0] * len(more)
        self.cells[labels] = [a + b for a, b in zip(cell, more, strict=True)]


@dataclass(slots=True)
class Sums:
    """What requests with the same labels add up to."""

    names: tuple[str, str]  # pool and model
    endpoint: tuple[str]
    ending: tuple[str, str]  # outcome and code
    source: str | None  # of their usage
    rare: bool  # their outcome has a counter of its own
    requests: int = 0
    attempts: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    expected_tokens: int = 0  # to be found cached
    durations: list[float] = field(default_factory=list)  # seconds, as the others
    overheads: list[float] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)
    token_gaps: list[float] = field(default_factory=list)


def grown(
    before: Mapping[Labels, float], after: Mapping[Labels, float]
) -> Iterator[tuple[Labels, float]]:
    """Yield by how much a counter grew, by labels. One that shrank was dropped (`departed`) and began again at 0."""
    for labels, value in after.items():
        was = before.get(labels, 0)
        if more := value - was if value >= was else value:
            yield labels, more


def moved(
    before: Mapping[Labels, Sequence[float]], after: Mapping[Labels, Sequence[float]]
) -> Iterator[tuple[Labels, list[float]]]:
    """Yield by how much a histogram grew: counts by bucket; the last two numbers are `+Inf` and the sum."""
    for labels, cell in after.items():
        was = before.get(labels, ())
        if cell != was:
            was = () if sum(cell[:-1]) < sum(was[:-1]) else was
            yield labels, [now - then for now, then in zip_longest(cell, was, fillvalue=0)]


def family(each: Instrument, values: Mapping[Labels, float]) -> Metric:
    """Return a counter or gauge with its values, as `prometheus_client` exposes it."""
    make = CounterMetricFamily if each.kind is Kind.COUNTER else GaugeMetricFamily
    made = make(each.name, each.help, labels=each.labels)
    for labels, value in values.items():
        made.add_metric(labels, value)
    return made


def histogram_family(each: Instrument, histogram: Histogram) -> Metric:
    """Return a histogram with its values, as `prometheus_client` exposes it."""
    made = HistogramMetricFamily(each.name, each.help, labels=each.labels)
    bounds = [*(str(bound) for bound in each.buckets), "+Inf"]
    for labels, cell in histogram.cells.items():
        total = 0.0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip(bounds, cell, strict=False):  # the cell ends with the sum
            total += count
            buckets.append((bound, total))
        made.add_metric(labels, buckets, sum_value=cell[-1])
    return made
