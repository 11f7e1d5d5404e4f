"""What a simulated engine shows of itself: counters, and gauges as its last step wrote them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

FINISH_REASONS: Final = ("stop", "length", "abort", "error", "repetition")


@dataclass(slots=True)
class Totals:
    """Counters since the start; none ever falls."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    iterations: int = 0  # steps from which a token came out
    iteration_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    first_tokens: int = 0
    ttft_s: float = 0.0


@dataclass(slots=True)
class Gauges:
    """The load at the end of the last step; what came since is not in it."""

    running: int = 0
    waiting: int = 0
    kv_usage_ratio: float = 0.0
    running_adapters: list[str] = field(default_factory=list)
    waiting_adapters: list[str] = field(default_factory=list)
    steps: int = 0  # that wrote gauges
