"""How far what is expected of a KV cache can be trusted, as scrapes show. Pure.

Prompts may share blocks (prefix caching), and expectations err: what requests are credited with is an upper
bound. Those that a scrape shows tell by how much, and others are believed to be alike.

A preemption proves that more was expected to fit than does, whatever the cause. So a part of the cache is left
free from then on, and given back little by little.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from gateway.core.types import LoadSample

_LEAST_SHARE: Final = 0.1  # when prompts cease to share, one scrape's overrun stays bounded
_TELLING_RATIO: Final = 0.2  # of the capacity: if less is expected in use, that shows no sharing
_FORGETS: Final = 0.1  # of what was learnt of sharing, per scrape that tells nothing of it
_SPARED: Final = 0.05  # of the capacity, by a scrape that shows preemptions
_MOST_SPARED: Final = 0.15
_STAYS: Final = 0.95  # of what is spared, after a scrape that shows none: half of it for 14 s


@dataclass(slots=True)
class Trust:
    """What was learnt of one backend."""

    share: float = 1.0  # what a credited token really takes
    spared_ratio: float = 0.0  # of the capacity, to be left free
    _preemptions: float = math.inf  # the first scrape is the base

    def scraped(self, sample: LoadSample, capacity: int | None, credited_tokens: float) -> None:
        """Learn from a scrape that shows requests which are credited with so much."""
        preempted = sample.preemptions > self._preemptions
        self._preemptions = sample.preemptions
        more = min(self.spared_ratio + _SPARED, _MOST_SPARED)
        self.spared_ratio = more if preempted else _STAYS * self.spared_ratio
        usage = sample.kv_usage_ratio
        known = capacity is not None and usage is not None
        expected = credited_tokens if known else 0.0
        self.share = learnt(self.share, (usage or 0.0) * (capacity or 0), expected, capacity or 0)


def learnt(share: float, shown_tokens: float, expected_tokens: float, capacity: int) -> float:
    """Return what share of expected tokens a cache holds, after a scrape that shows so many."""
    if expected_tokens <= _TELLING_RATIO * capacity:
        return share + _FORGETS * (1.0 - share)
    return min(1.0, max(_LEAST_SHARE, shown_tokens / expected_tokens))
