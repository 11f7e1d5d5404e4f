"""How fast one backend writes its streams, and how much slower than its peers that is. Pure.

Measured is the time between two tokens of a stream, by what the scrapes show of all that run. A larger
batch writes each stream slower, so a backend is compared with a peer by what is sure of both, as a
batch that grows makes no fewer tokens in all:

    with fewer running than the peer     the time between two tokens of a stream
    with more                            the tokens of all streams in a second

What is not measured for a while is forgotten, so that a slow one is tried again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from heapq import nsmallest
from typing import Final

from gateway.core.types import LoadSample

UNKNOWN_AFTER_S: Final = 10.0  # between two scrapes: what happened in between is not known

_MEMORY_S: Final = 5.0  # weighs 1/e after it: 20 s show what changed
_FORGETS_S: Final = 5.0  # half of a slowness, once it is measured no more
_LEAST_STREAM_S: Final = 2.0  # of streams that ran, from which a pace is known
_LEAST_TOKENS: Final = 20.0  # of a peer; fewer are no pace to compare with
_CLEARLY: Final = 1.5  # less is how equal servers differ
_MOST: Final = 10.0
_PEERS: Final = 8  # the fastest; one is compared with


@dataclass(slots=True)
class Speed:
    """The pace of one backend. Its one owner feeds it."""

    _tokens: float = 0.0  # these three fade alike
    _stream_s: float = 0.0
    _busy_s: float = 0.0
    _at: float = -math.inf

    def observe(self, before: LoadSample, sample: LoadSample) -> None:
        """Take in two scrapes in a row; those between which nothing ran say nothing."""
        passed_s = sample.at - before.at
        tokens = sample.generation_tokens - before.generation_tokens
        running = min(before.running, sample.running)
        if tokens < 0:  # another process
            self._tokens = self._stream_s = self._busy_s = 0.0
        elif 0 < passed_s <= UNKNOWN_AFTER_S and running:
            kept = math.exp((self._at - sample.at) / _MEMORY_S)
            self._tokens = kept * self._tokens + tokens
            self._stream_s = kept * self._stream_s + running * passed_s
            self._busy_s = kept * self._busy_s + passed_s
            self._at = sample.at

    @property
    def gap_s(self) -> float:
        """The time between two tokens of a stream."""
        return self._stream_s / max(self._tokens, 1.0)

    @property
    def running(self) -> float:
        """How many streams it was measured with, on average."""
        return self._stream_s / self._busy_s if self._busy_s else 0.0

    @property
    def is_pace(self) -> bool:
        """Whether others may be compared with it."""
        return self._tokens >= _LEAST_TOKENS

    def slowness(self, peers: Iterable[Speed], now: float) -> float:
        """Return how many times slower it surely is than the fastest of its peers; 1 for as fast."""
        if self._stream_s < _LEAST_STREAM_S:
            return 1.0
        others = (each for each in peers if each is not self)
        ratios = (
            self.gap_s / each.gap_s * min(1.0, each.running / self.running) for each in others
        )
        most = min(max(ratios, default=1.0), _MOST)
        known = math.exp2(-max(0.0, now - self._at - UNKNOWN_AFTER_S / 2) / _FORGETS_S)
        found = max(1.0, most) ** known
        return found if found >= _CLEARLY else 1.0


def slownesses(speeds: Collection[Speed], now: float) -> list[float]:
    """Return of each backend of a pool how many times slower it is than its fastest peer."""
    paces = nsmallest(
        _PEERS, (each for each in speeds if each.is_pace), key=lambda each: each.gap_s
    )
    return [each.slowness(paces, now) for each in speeds]
