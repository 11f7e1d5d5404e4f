"""Drop the series of backends that have left, an hour later.

Pods come and go, each with a name of its own, so their series would fill the memory. They stay for an hour: the
next scrape has to find the last value of a counter, and the dashboard looks back that far (`observe.series`).
A backend that comes back within the hour goes on counting.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

from gateway.observe.families import Labels
from gateway.observe.instrument import Kind
from gateway.observe.instruments import INSTRUMENTS
from gateway.observe.readings import BackendReading

KEPT_S: Final = 3600.0
MOST: Final = 1000  # backends that have left; beyond that, the series of the earliest are dropped
LOOK_EVERY_S: Final = 60.0

COUNTED_BY_BACKEND: Final = tuple(
    each.name
    for each in INSTRUMENTS
    if each.kind is not Kind.GAUGE and each.labels[:2] == ("pool", "backend")
)


class Departed:
    """Which backends have left, and when. One owner."""

    def __init__(self) -> None:
        self._since: dict[Labels, float] = {}  # by pool and name
        self._looked_at = -math.inf

    def drop(
        self, series: Sequence[dict[Labels, Any]], backends: Iterable[BackendReading], now: float
    ) -> None:
        """Drop what belongs to backends that left long ago; the labels of all `series` begin with pool and backend."""
        if now - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = now
        # Events of a pool, or of the gateway, have no pool before their name.
        counted = {labels[:2] for each in series for labels in each if labels[0]}
        gone = counted - {(each.pool, each.name) for each in backends}
        since = {labels: self._since.get(labels, now) for labels in gone}
        newest = sorted(gone, key=since.__getitem__, reverse=True)
        self._since = {each: since[each] for each in newest[:MOST] if now - since[each] < KEPT_S}
        due = gone - self._since.keys()
        for each in series if due else ():
            for labels in [labels for labels in each if labels[:2] in due]:
                del each[labels]
