"""How a GPU is, as its driver tells."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuLoad:
    """One GPU, or a part of one (MIG), that a backend may use."""

    index: int  # as nvidia-smi counts
    used_bytes: int  # of its memory, by all processes
    total_bytes: int
    busy_ratio: float | None  # of the last moment, in which it computed anything; None: not told
    # Of its memory, that launched backends take by their settings; None: these do not say how much.
    planned_ratio: float | None
    part: int | None = None  # of a GPU in parts (MIG), as nvidia-smi counts; None: it is whole

    @property
    def name(self) -> str:
        """The index, and that of the part behind a colon."""
        return f"{self.index}" if self.part is None else f"{self.index}:{self.part}"

    @property
    def used_ratio(self) -> float:
        """The part of its memory that is in use."""
        return self.used_bytes / self.total_bytes

    @property
    def rest_used_ratio(self) -> float | None:
        """The part in use of what the settings leave free; 0 if not even those have all of theirs; None: not known."""
        if self.planned_ratio is None:
            return None
        rest = 1.0 - self.planned_ratio
        return max((self.used_ratio - self.planned_ratio) / rest, 0.0) if rest > 0 else 0.0
