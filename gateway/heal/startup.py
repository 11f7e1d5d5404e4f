"""Watch one start of a server: which stage it is in, and whether it hangs there.

Pure. A start is judged by stages, not by one timeout: twenty minutes of loading weights may be in
order where three minutes of silence in NCCL's set-up are not. In a stage every line is a sign of
life, so patience counts from the last line; the whole start has its own limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from gateway.config.supervision import PatienceConfig
from gateway.vllmlog.milestones import Stage, stage_of

# The setting with the patience for a stage, and `graphs` for those that come later.
_PATIENCE: Final = {
    Stage.LAUNCHED: "config",
    Stage.CONFIG: "config",
    Stage.DISTRIBUTED_INIT: "distributed",
    Stage.LOADING_WEIGHTS: "weights",
    Stage.PROFILING: "profiling",
    Stage.KV_CACHE: "profiling",
}


@dataclass(slots=True)
class StartWatch:
    """One start. Times are monotonic seconds; `usual_s` is how long the stages took last time.

    `speaks` is False for a server whose log nobody reads: then only the whole start is limited.
    """

    patience: PatienceConfig
    began_at: float
    speaks: bool = True
    usual_s: Mapping[Stage, float] = field(default_factory=dict)
    stage: Stage = Stage.LAUNCHED
    stage_at: float = 0.0
    spoke_at: float = 0.0
    took_s: dict[Stage, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stage_at = self.spoke_at = self.began_at

    def heard(self, line: str, now: float) -> None:
        """Take in one line of its log."""
        self.spoke_at = now
        stage = stage_of(line)
        # Workers speak across each other: a stage that was left is not entered again.
        if stage is not None and stage > self.stage:
            self.took_s[self.stage] = now - self.stage_at
            self.stage, self.stage_at = stage, now

    def put_off(self, now: float) -> None:
        """Begin to count now: its service manager has not started it yet."""
        self.began_at = self.stage_at = self.spoke_at = now

    def hung(self, now: float) -> str | None:
        """Return in a sentence why the start counts as hung; None while it does not."""
        silent_s, whole_s = now - self.spoke_at, now - self.began_at
        if whole_s >= self.patience.total:
            return (
                f"not ready {whole_s:.0f} s after its launch, still {self.stage.words}"
                " (supervision.patience.total)"
            )
        name = _PATIENCE.get(self.stage, "graphs")
        if self.speaks and silent_s >= getattr(self.patience, name):
            return (
                f"silent for {silent_s:.0f} s while {self.stage.words}"
                f" (supervision.patience.{name})"
            )
        return None

    def told(self, now: float) -> str:
        """Return where it is, for people: the stage, how long, and how long that took last time."""
        usual_s = self.usual_s.get(self.stage)
        usually = f", usually {usual_s:.0f} s" if usual_s is not None else ""
        total_s = sum(self.usual_s.values())
        whole = f"{now - self.began_at:.0f} s of about {total_s:.0f} s in all" if total_s else ""
        words = f"{self.stage.words} for {now - self.stage_at:.0f} s{usually}"
        return f"{words}; {whole}" if whole else words

    def ready_at(self, now: float) -> float | None:
        """Return when it serves, if it goes as the last one; None: unknown."""
        if not self.usual_s:
            return None
        here_s = self.usual_s.get(self.stage, 0.0) - (now - self.stage_at)
        later = (each for stage, each in self.usual_s.items() if stage.value > self.stage.value)
        return now + max(here_s, 0.0) + sum(later)

    def ended(self, now: float) -> dict[Stage, float]:
        """Return how long each stage took, for the next start to be compared with."""
        return self.took_s | {self.stage: now - self.stage_at}
