"""The cells of the overload study: which requests come when, in proportion to the measured capacity."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from loadtest.arrivals import Phase, Profile, Shot, merge, plan

LEAD_S: Final = 3.0  # arrivals before the window: the load settles
TAIL_S: Final = 3.0  # arrivals after it: the last requests of the window are no better off
# The longest Retry-After of a refusal: the last of a surge are to come again within the cell.
LONGEST_S: Final = 30.0
SHARERS: Final = 8  # tenants of the fairness scenario
TIMES: Final = 50.0  # the greedy one sends this many times its share
LOST_S: Final = 10.0  # at least, after a server is lost: what happens at once counts
LASTS: Final = 4.0  # times as long as other cells, where a load lasts
TENANTS: Final = ("t1", "t2", "t3", "t4")
QUIET: Final = tuple(f"quiet{i}" for i in range(1, SHARERS))
NAMES: Final = ("levels", "surge", "fairness", "classes")
ALL_TENANTS: Final = (*TENANTS, *QUIET, "greedy", "interactive", "batch")


@dataclass(frozen=True)
class Cell:
    """One measurement of one arm. Only requests planned within `window` count."""

    scenario: str
    label: str  # the level, or the part of the scenario
    shots: list[Shot]
    window: tuple[float, float]
    until_s: float
    retry: bool = False
    lost_at_s: float | None = None  # from then on one server takes no new request


@dataclass(frozen=True)
class Study:
    """What all cells share. `capacity_per_s` is in requests of the profile's mix."""

    profile: Profile
    capacity_per_s: float
    seconds: float
    seed: int
    retry: bool = False
    lead_s: float = LEAD_S
    tail_s: float = TAIL_S

    def cells(self, scenario: str, levels: list[float]) -> list[Cell]:
        """Return the cells of one scenario."""
        match scenario:
            case "levels":
                return [self.level(level) for level in levels]
            case "surge":
                return [self.surge(3.0)]
            case "fairness":
                return [self.fairness(flood=flood) for flood in (False, True)]
            case _:
                return [self.classes(flood=flood) for flood in (False, True)]

    def level(self, level: float) -> Cell:
        """Return a constant load of `level` x capacity from several tenants."""
        shots = plan(self._steady(level), self.profile, TENANTS, self.seed)
        return self._cell("retry" if self.retry else "levels", f"{level:g}", shots, self.retry)

    def surge(self, level: float) -> Cell:
        """Return half load, 10 s of `level`, and half load again: retries may find room."""
        part_s = max(1.5 * self.seconds, LONGEST_S)
        phases = [
            Phase(s, x * self.capacity_per_s) for s, x in ((5, 0.5), (10, level), (part_s, 0.5))
        ]
        shots = plan(phases, self.profile, TENANTS, self.seed)
        return Cell("surge", f"{level:g}", shots, (0.0, 15.0 + part_s), 15.0 + part_s, retry=True)

    def fairness(self, *, flood: bool) -> Cell:
        """Return eight tenants at half of their share each; in the flood one of them sends 50 shares."""
        share = 1 / SHARERS
        quiet = plan(self._steady(0.5 * share * len(QUIET)), self.profile, QUIET, self.seed)
        greedy_at = TIMES * share if flood else 0.5 * share
        greedy = plan(self._steady(greedy_at), self.profile, ("greedy",), self.seed + 100)
        return self._cell("fairness", "flood" if flood else "quiet", merge(quiet, greedy))

    def classes(self, *, flood: bool) -> Cell:
        """Return short requests of a key with priority, alone and under 4 x capacity of another's."""
        short = self.profile.only("short")
        first = plan(self._steady(0.25), short, ("interactive",), self.seed)
        batch = plan(self._steady(4.0 if flood else 0.0), self.profile, ("batch",), self.seed + 100)
        return self._cell("classes", "flood" if flood else "alone", merge(first, batch))

    def lost(self) -> Cell:
        """Return a constant load of 1 x capacity of two servers, one of which is lost as the window begins.

        The window is short: what comes after it is as `level(2)` with half of the servers.
        """
        short = replace(self, seconds=max(LOST_S, self.lead_s))
        cell = short.level(1.0)
        return replace(cell, scenario="lost", label="1", lost_at_s=cell.window[0])

    def lasting(self, level: float) -> Cell:
        """Return a constant load for four times as long, of which the second half counts: a queue grows slowly."""
        half_s = LASTS / 2 * self.seconds
        longer = replace(self, lead_s=self.lead_s + half_s, seconds=half_s)
        return replace(longer.level(level), scenario="lasting")

    def changed(self) -> Cell:
        """Return 1.4 x capacity, which counts from the first moment on. What came before is `Profile.batch`."""
        return replace(replace(self, lead_s=0.0).level(1.4), scenario="changed")

    def _steady(self, level: float) -> list[Phase]:
        rate_per_s = level * self.capacity_per_s
        return [Phase(s, rate_per_s) for s in (self.lead_s, self.seconds, self.tail_s)]

    def _cell(self, scenario: str, label: str, shots: list[Shot], retry: bool = False) -> Cell:
        window = (self.lead_s, self.lead_s + self.seconds)
        return Cell(scenario, label, shots, window, window[1] + self.tail_s, retry)
