"""Gather what the workers of one gateway counted, in the worker that serves operators.

Each other worker reports all that it counted since it began. The growth since its last report is added here, as if
it had been counted here. So no sum shrinks when a worker dies; what it counted in its last second is lost.
The first report of a worker that is older than this process adds nothing: that was counted before this one began.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any, Final

import msgspec

from gateway.observe import instruments as table
from gateway.observe.families import Labels, grown, moved
from gateway.observe.instrument import Kind
from gateway.observe.instruments import INSTRUMENTS

# All workers see these happen to the same backends and files: they count once.
_SEEN_BY_ALL: Final = frozenset(
    each.name
    for each in (
        table.TRANSITIONS,
        table.LIMIT_CUTS,
        table.CONFIG_RELOADS,
        table.EVENTS_LOSSES,
        table.EVENTS_GARBLED,
    )
)
# Gauges that are the sum of all workers. Any other is that of the worker that is asked.
_PARTS: Final = frozenset(
    each.name
    for each in (
        table.IN_FLIGHT,
        table.QUEUED,
        table.QUEUED_TOKENS,
        table.OPEN_CONNECTIONS,
        table.BODY_BYTES,
        table.BODY_BYTES_LIMIT,
        table.KEPT_BODY_BYTES,
    )
)
COUNTED: Final = frozenset(
    each.name
    for each in INSTRUMENTS
    if each.kind is not Kind.GAUGE and each.name not in _SEEN_BY_ALL
)
_REPORTED: Final = COUNTED | _PARTS
_CELLS: Final = {  # numbers in a cell of each histogram: its buckets, `+Inf` and the sum
    each.name: len(each.buckets) + 2 for each in INSTRUMENTS if each.kind is Kind.HISTOGRAM
}

_LIVES_KEPT: Final = 256  # processes: one that misses a few reports is not taken for a new one

Values = dict[str, dict[Labels, float]]
Cells = dict[str, dict[Labels, list[float]]]


class Counted(msgspec.Struct):
    """What one worker counted since it began, and its part of some gauges. `life` names its process."""

    life: str
    began: float  # monotonic, a clock that all processes of a machine share
    values: dict[str, list[tuple[Labels, float]]]
    cells: dict[str, list[tuple[Labels, list[float]]]]  # of histograms
    number: int = 0  # of the report: who asks twice may hear the second one first


class Gathered:
    """The reports of other workers. One owner. `life` and `began` are those of this process."""

    def __init__(self, life: str, began: float) -> None:
        self.life, self.began = life, began
        self._before: dict[str, Counted] = {}  # by life
        self._alive: list[str] = []
        self._told = 0  # reports

    def tell(
        self, values: Mapping[str, Mapping[Labels, float]], cells: Mapping[str, Mapping[Labels, list[float]]]
    ) -> Any:  # fmt: skip
        """Return what this process counted, to be sent to another."""
        self._told += 1
        report = Counted(
            self.life,
            self.began,
            {name: [*of.items()] for name, of in values.items() if name in _REPORTED and of},
            {name: [*of.items()] for name, of in cells.items() if name in _REPORTED and of},
            self._told,
        )
        return msgspec.to_builtins(report)

    def hear(self, reports: Iterable[Any]) -> tuple[Values, Cells]:
        """Take in the reports of the workers that answered; return what they counted since their last ones.

        A report in the form of another version is left out.
        """
        values: Values = {}
        cells: Cells = {}
        self._alive = []
        for one in reports:
            try:
                each = msgspec.convert(one, Counted)
            except msgspec.ValidationError:
                continue
            self._alive.append(each.life)
            before = self._before.get(each.life)
            if before is not None and each.number < before.number:
                continue
            self._before.pop(each.life, None)  # so that the dictionary's order is that of time
            self._before[each.life] = each
            if before is None and each.began < self.began:
                continue
            _add_up(values, cells, before or Counted(each.life, each.began, {}, {}), each)
        while len(self._before) > _LIVES_KEPT:
            del self._before[next(iter(self._before))]
        return values, cells

    def parts(self, name: str) -> list[tuple[Labels, float]]:
        """Return the others' parts of a gauge, as of their last reports."""
        if name not in _PARTS:
            return []
        return [part for life in self._alive for part in self._before[life].values.get(name, ())]

    def bodies(self, own: tuple[int, int]) -> tuple[int, int]:
        """Return the bytes that request bodies hold, and may hold, in all workers; `own` are those of this one."""
        held, most = (
            sum(int(value) for _, value in self.parts(each.name))
            for each in (table.BODY_BYTES, table.BODY_BYTES_LIMIT)
        )
        return own[0] + held, own[1] + most


def _add_up(values: Values, cells: Cells, before: Counted, after: Counted) -> None:
    """Add what a worker counted between two reports."""
    for name in COUNTED & after.values.keys():
        sums = values.setdefault(name, {})
        for labels, more in grown(dict(before.values.get(name, ())), dict(after.values[name])):
            sums[labels] = sums.get(labels, 0) + more
    for name, reported in after.cells.items():
        known, every = dict(before.cells.get(name, ())), cells.setdefault(name, {})
        # A worker of another version may have other buckets.
        fitting = {labels: cell for labels, cell in reported if len(cell) == _CELLS.get(name)}
        for labels, rise in moved(known, fitting):
            every[labels] = [
                a + b for a, b in zip_longest(every.get(labels, ()), rise, fillvalue=0)
            ]
