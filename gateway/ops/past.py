"""What operators were told during the last hour: verdict and problems, as they were found at the time.

An entry is kept whenever problems or the states of pools change, and each half minute while there are problems,
for their numbers.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from typing_extensions import TypedDict

from gateway.ops.overview import Overview
from gateway.ops.problems import ProblemTold, VerdictTold
from gateway.ops.states import PoolState

_KEPT_S: Final = 3600.0
_AGAIN_S: Final = 30.0
_MOST: Final = 720  # entries: one each 5 s on average, if problems come and go all the time
_MOST_PROBLEMS: Final = 20  # of one entry, the worst


class VerdictThen(TypedDict):
    """How things were; null: it is more than an hour ago, or the gateway did not look yet."""

    at: float | None  # when it was found, seconds since the epoch
    verdict: VerdictTold | None
    problems: list[ProblemTold]  # the worst first, at most 20
    pools: dict[str, PoolState]


class Past:
    """The verdicts of the last hour. One owner, which hands in each overview that it makes for itself."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, VerdictThen]] = deque(maxlen=_MOST)  # since when, and what

    def note(self, found: Overview, wall: float) -> None:
        """Keep what an overview says, if that is new; `wall`: now, in seconds since the epoch."""
        while len(self._kept) > 1 and self._kept[1][0] < wall - _KEPT_S:
            self._kept.popleft()  # what held when the hour began stays
        made = VerdictThen(
            at=wall,
            verdict=found["verdict"],
            problems=found["problems"][:_MOST_PROBLEMS],
            pools={pool["name"]: pool["state"] for pool in found["pools"]},
        )
        since, last = self._kept[-1] if self._kept else (wall, None)
        again = bool(made["problems"]) and wall - since >= _AGAIN_S
        if last is None or again or _gist(last) != _gist(made):
            self._kept.append((wall, made))

    def at(self, wall: float) -> VerdictThen:
        """Return what was told last at a moment."""
        found = (told for since, told in reversed(self._kept) if since <= wall)
        return next(found, VerdictThen(at=None, verdict=None, problems=[], pools={}))


def _gist(told: VerdictThen) -> object:
    problems = [(each["kind"], each["severity"], each["subject"]) for each in told["problems"]]
    return problems, told["pools"]
