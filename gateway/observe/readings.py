"""Where a scrape of the metrics finds the values that others own: each scrape asks them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.core.gpu import GpuLoad
from gateway.core.prefix import KvEvents, PrefixIndex
from gateway.core.traffic import NOTHING_QUEUED, Queued
from gateway.core.types import LoadSample, Phase


class BackendReading(Protocol):
    """What a scrape reads of a backend; `pools.table.Backend` has it."""

    @property
    def pool(self) -> str:
        """Name of its pool."""

    @property
    def name(self) -> str:
        """Its name within the pool."""

    @property
    def phase(self) -> Phase:
        """Where it is in its life."""

    @property
    def kept_out(self) -> bool:
        """Whether it gets no new requests because those before it failed."""

    @property
    def in_flight(self) -> int:
        """Requests of this gateway on it."""

    @property
    def sample(self) -> LoadSample | None:
        """Its last load figures."""

    @property
    def kv_events(self) -> KvEvents | None:
        """How well its index follows the KV events of its engines; None: nobody asks for them."""

    @property
    def prefix_index(self) -> PrefixIndex | None:
        """What is known of its prefix cache; None: `prefix: off`."""

    def stale(self, now: float) -> bool:
        """Whether its last load figures are too old to count."""

    def allowed(self, now: float) -> int | None:
        """How many requests of this gateway it may have at a time; None: as many as there are."""


class Fellow(Protocol):
    """The last report of another worker; `store.replicas.Told` has it."""

    @property
    def in_flight(self) -> Mapping[str, int]:
        """Requests that it carries, by backend: `pool/name`."""

    @property
    def queued(self) -> Mapping[str, Queued]:
        """What waits in it, by pool."""


def carried_by(fellows: Iterable[Fellow]) -> Counter[str]:
    """Return how many requests other workers carry, by backend."""
    carried = Counter[str]()
    for each in fellows:
        carried.update(each.in_flight)
    return carried


def queued_in_all(own: Mapping[str, Queued], fellows: Iterable[Fellow]) -> dict[str, Queued]:
    """Return what waits in this worker and the others, by pool."""
    found = dict(own)
    for each in fellows:
        for pool, queued in each.queued.items():
            found[pool] = found.get(pool, NOTHING_QUEUED).beside(queued)
    return found


@dataclass(frozen=True, slots=True)
class Readings:
    """Where a scrape finds what others own. Called on the event loop."""

    backends: Callable[[], Iterable[BackendReading]] = tuple
    queues: Callable[[], Mapping[str, Queued]] = dict  # by pool
    fellows: Callable[[], Iterable[Fellow]] = tuple  # the other workers of this gateway
    gpus: Callable[[], Mapping[str, Sequence[GpuLoad]]] = dict  # by backend: `pool/name`
    bodies: Callable[[], tuple[int, int]] = lambda: (0, 0)  # bytes held, and most that may be
    # What others keep as it is exported: labels and values by the name of the metric.
    kept: Callable[[], Mapping[str, Mapping[tuple[str, ...], float]]] = dict
