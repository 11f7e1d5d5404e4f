"""What a metric is: its name, its kind, its labels. `observe.instruments` has all of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """Prometheus metric types in use."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Instrument:
    """One metric. `buckets` are upper bounds, `+Inf` not among them."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def counter(name: str, help_: str, *labels: str) -> Instrument:
    """Return the instrument of what is counted."""
    return Instrument(name, Kind.COUNTER, help_, labels)


def gauge(name: str, help_: str, *labels: str) -> Instrument:
    """Return the instrument of what goes up and down."""
    return Instrument(name, Kind.GAUGE, help_, labels)


def histogram(name: str, buckets: tuple[float, ...], help_: str, *labels: str) -> Instrument:
    """Return the instrument of how long something takes."""
    return Instrument(name, Kind.HISTOGRAM, help_, labels, buckets)
