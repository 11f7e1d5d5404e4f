"""How a GPU is, as its driver tells."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuLoad:
    """One GPU that a backend may use."""

    index: int  # as nvidia-smi counts
    used_bytes: int  # of its memory, by all processes
    total_bytes: int
    busy_ratio: float | None  # of the last moment, in which it computed anything; None: not told
    planned_ratio: float  # of its memory, that launched backends take by their settings

    @property
    def used_ratio(self) -> float:
        """The part of its memory that is in use."""
        return self.used_bytes / self.total_bytes

    @property
    def rest_used_ratio(self) -> float:
        """The part that is in use of what the settings leave free; below 0: not even those have all of theirs."""
        rest = 1.0 - self.planned_ratio
        return (self.used_ratio - self.planned_ratio) / rest if rest > 0 else 0.0
