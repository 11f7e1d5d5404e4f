"""What requests of a pool or a model came to in the last five minutes, and whether most of them fail."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeAlias, TypeVar

from typing_extensions import TypedDict

from gateway.core.types import Outcome
from gateway.observe.recent import ERRORS, Tally, Window, by_pool
from gateway.observe.series import RECENT_S, Series
from gateway.ops.moment import rounded

_WINDOWS_S: Final = (10.0, 30.0, 60.0, RECENT_S)
_LEAST_JUDGED: Final = 8  # in a window; with fewer a longer one is looked at
_LEAST_WELL: Final = 3  # and none that failed: it is over
_LEAST_ERRORS: Final = 5  # fewer may be one bad moment
# Where few ask: failures in so many steps of 10 s, and in the last, are an outage.
_LEAST_MOMENTS: Final = 3
_MODELS_TOLD: Final = 50

Name = TypeVar("Name", bound=Hashable)
Steps: TypeAlias = Sequence[Mapping[Name, Tally]]  # what was counted in each 10 s, the oldest first


class RecentOverview(TypedDict):
    """What ended in the last five minutes, or since the start."""

    seconds: float  # how long that is
    requests: int
    requests_per_s: float
    errors: int  # that failed by no fault of the caller
    errors_by: dict[str, int]  # these, by outcome and status
    shed: int  # refused for capacity
    left: int  # whose client left, or did not read
    tokens_per_s: float  # written
    ttft_p50_s: float | None  # to first token, of streams; null: there was none
    ttft_p95_s: float | None
    gap_p50_s: float | None  # between two tokens of a stream
    gap_p95_s: float | None


class ModelOverview(TypedDict):
    """One model of a pool: its own, or an adapter."""

    name: str
    last_5_min: RecentOverview


@dataclass(frozen=True, slots=True)
class Failing:
    """Most requests of something fail: so many of those that were taken, within so many seconds."""

    errors: int
    judged: int
    seconds: float
    endings: Mapping[tuple[str, str], int]
    quiet_s: float = 0.0  # for so long none came that tells whether it goes on

    @property
    def told(self) -> str:
        """What happened, with the numbers."""
        every = "all" if self.errors == self.judged else f"{self.errors} of"
        refused = any(outcome == Outcome.SHED.value for outcome, _ in self.endings)
        fate = "failed or were refused" if refused else "failed"
        none_since = f", and none came in the last {self.quiet_s:.0f} s" if self.quiet_s else ""
        return f"{every} {self.judged} requests of the last {self.seconds:.0f} s {fate}{none_since}"


class Lately:
    """What was counted in the last seconds and minutes, as of one moment."""

    def __init__(self, series: Series) -> None:
        windows = series.windows(_WINDOWS_S)
        self.recent: Window = windows[RECENT_S]
        self.failures = self.recent.failures()
        self._models = {
            seconds: window.models(times=seconds == RECENT_S) for seconds, window in windows.items()
        }
        self._pools = {
            seconds: by_pool(models, times=seconds == RECENT_S)
            for seconds, models in self._models.items()
        }
        self._steps = series.steps(self.recent.after)
        self._seconds = {seconds: window.seconds for seconds, window in windows.items()}
        self._of_pool: defaultdict[str, list[tuple[str, Tally]]] = defaultdict(list)
        for (pool, model), tally in self._models[RECENT_S].items():
            self._of_pool[pool].append((model, tally))

    def pool(self, name: str, seconds: float = RECENT_S) -> Tally:
        """Return what was counted of a pool; times are told of five minutes only."""
        return self._pools[seconds].get(name) or Tally()

    def models(self, pool: str) -> list[tuple[str, Tally]]:
        """Return what was counted of each model of a pool, the busiest first."""
        return sorted(self._of_pool.get(pool, ()), key=lambda pair: -pair[1].requests)

    def pool_failing(self, name: str) -> Failing | None:
        """Return that most requests of a pool fail now; None if not."""

        def steps() -> Steps[str]:
            return [by_pool(models, times=False) for models in self._models_by_step]

        return _failing(self._pools, self._seconds, name, steps)

    def model_failing(self, pool: str, model: str, *, refused: bool) -> Failing | None:
        """Return that most requests for a model fail now; None if not. `refused`: those for capacity, too."""
        name = (pool, model)
        return _failing(
            self._models, self._seconds, name, lambda: self._models_by_step, refused=refused
        )

    @cached_property
    def _models_by_step(self) -> Steps[tuple[str, str]]:
        return [step.models(times=False) for step in self._steps]

    def told(self, tally: Tally) -> RecentOverview:
        """Return what was counted in five minutes as the overview tells it."""
        seconds = max(self.recent.seconds, 1.0)
        return RecentOverview(
            seconds=round(self.recent.seconds, 1),
            requests=tally.requests,
            requests_per_s=round(tally.requests / seconds, 3),
            errors=tally.errors,
            errors_by=_named(tally.endings),
            shed=tally.shed,
            left=tally.left,
            tokens_per_s=round(tally.tokens / seconds, 2),
            ttft_p50_s=rounded(tally.ttft_s(0.5), 4),
            ttft_p95_s=rounded(tally.ttft_s(0.95), 4),
            gap_p50_s=rounded(tally.gap_s(0.5), 4),
            gap_p95_s=rounded(tally.gap_s(0.95), 4),
        )

    def models_told(self, pool: str) -> list[ModelOverview]:
        """Return the busiest models of a pool."""
        return [
            ModelOverview(name=model, last_5_min=self.told(tally))
            for model, tally in self.models(pool)[:_MODELS_TOLD]
        ]


def _failing(
    tallies: Mapping[float, Mapping[Name, Tally]],
    lasted: Mapping[float, float],
    name: Name,
    steps: Callable[[], Steps[Name]],
    *,
    refused: bool = False,
) -> Failing | None:
    """Judge by the shortest window that holds enough: an outage shows within seconds, and so does its end."""
    counted = ERRORS | {Outcome.SHED.value} if refused else ERRORS
    quiet_s = 0.0
    for seconds, by_name in tallies.items():
        tally = by_name.get(name) or Tally()
        errors, judged = _counts(tally, refused=refused)
        if judged < _LEAST_JUDGED and seconds != RECENT_S:
            if judged >= _LEAST_WELL and not errors:
                return None
            quiet_s = quiet_s if judged else lasted[seconds]
            continue
        if 2 * errors <= judged:
            return None
        if errors < _LEAST_ERRORS and not _again_and_again(name, steps, refused=refused):
            return None
        endings = {kind: count for kind, count in tally.endings.items() if kind[0] in counted}
        return Failing(errors, judged, lasted[seconds], endings, quiet_s)
    return None


def _again_and_again(name: Name, steps: Callable[[], Steps[Name]], *, refused: bool) -> bool:
    """Whether requests failed at several moments, and at the last one at which any were judged."""
    told = (each.get(name) or Tally() for each in steps())
    counts = [each for each in (_counts(tally, refused=refused) for tally in told) if each[1]]
    failed = [2 * errors > judged for errors, judged in counts]
    return sum(failed) >= _LEAST_MOMENTS and failed[-1]


def _counts(tally: Tally, *, refused: bool) -> tuple[int, int]:
    """Return how many failed, of how many; `refused`: those for capacity, too."""
    shed = tally.shed if refused else 0
    return tally.errors + shed, tally.judged + shed


def _named(endings: Mapping[tuple[str, str], int]) -> dict[str, int]:
    return {
        f"{outcome} {code}": count
        for (outcome, code), count in endings.items()
        if outcome in ERRORS
    }
