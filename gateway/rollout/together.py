"""Canaries of several gateways: each tells what it saw, one judges the sum, and all take its verdict over.

Who judges holds a lease in the shared store. Of workers without Redis it is the one that leads. What a gateway tells
are sums since the trial began, so what a lost beat had is in the next one. Without the store there is no verdict.

What a gateway saw counts after its death, unless the trial ended since: who does not have it in the settings says so
of what only the dead told. So a trial that is set up again begins anew, also where new settings are new processes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from gateway.core.aio import Clock, periodic
from gateway.rollout.rollouts import Rollouts, Sides, TrialTold
from gateway.rollout.verdict import Finding
from gateway.store.seat import Seat
from gateway.store.shared import Board, SharedStore, StoreUnavailable, read_told

_BEAT_S: Final = 1.0
_KEPT_S: Final = 3600.0  # what a gateway saw stays true when it is gone
_DEAD_S: Final = 5.0  # who has not told anything for so long is gone
_FORMAT: Final = msgspec.json.Decoder(dict[str, TrialTold])

_Trial = tuple[str, str]  # pool, and digest of the settings
_Others = Sequence[tuple[Mapping[str, TrialTold], float]]  # what each told, and its age


@dataclass(slots=True)
class Together:
    """One task of a gateway; `id` names its life. `elects`: whether it may be the one that judges, by a lease."""

    rollouts: Rollouts
    store: SharedStore
    clock: Clock
    id: str
    elects: bool
    _seat: Seat = field(init=False)
    _tells: bool = False  # others may hear of a canary here, so its end is told too
    _listens: bool = True  # others told of canaries lately
    # Trials that only the dead told of and that are not in the settings here, by when that was noted.
    _ended: dict[_Trial, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._seat = Seat("canaries", self.id, self.store, self.clock)

    async def run(self) -> None:
        """Tell and hear until cancelled."""
        await periodic(self.turn, every_s=_BEAT_S, name="canaries of all gateways")

    async def turn(self) -> None:
        """Tell what was seen here, and hear of the others."""
        trials = self.rollouts.tell()
        if not (trials or self._tells or self._listens):
            return
        told = trials | self._ends()
        try:
            if self.elects and trials:
                await self._seat.keep()
            text = msgspec.json.encode(told).decode() if told else ""
            found = await self.store.beat(self.id, text, _KEPT_S, Board.CANARIES)
            self._tells = bool(told)
        except StoreUnavailable:
            found = None
        if self.elects:
            self.rollouts.judges = self._seat.ours
        if found is not None:
            others = [
                (read_told(_FORMAT, text, {}), age_s)
                for each, (text, age_s) in found.items()
                if each != self.id
            ]
            self._listens = bool(others)
            self._note_ends(trials, others)
            self.rollouts.hear(_lasting(others, self._ends()))

    def _note_ends(self, trials: Mapping[str, TrialTold], others: _Others) -> None:
        """Note which trials have ended: only the dead told of them, and they are not in the settings here."""
        now = self.clock.now()
        self._ended = {each: at for each, at in self._ended.items() if now - at < _KEPT_S}
        if self.rollouts.handed_over:
            return
        living = {trial for every, age_s in others if age_s < _DEAD_S for trial in _trials(every)}
        known = {trial for every, _ in others for trial in _trials(every)}
        self._ended |= dict.fromkeys(known - living - _trials(trials), now)

    def _ends(self) -> dict[str, TrialTold]:
        """Return what is told of trials that have ended."""
        now = self.clock.now()
        return {
            f"{pool} {settings}": TrialTold(settings, Finding.OPEN, 1, Sides(), now - at)
            for (pool, settings), at in self._ended.items()
        }


def _trials(every: Mapping[str, TrialTold]) -> set[_Trial]:
    return {(pool, each.settings) for pool, each in every.items() if each.ended_s is None}


def _lasting(others: _Others, own: Mapping[str, TrialTold]) -> _Others:
    """Return what others told of trials that have not ended since; `own` are the ends that are known here."""
    ended_s: dict[str, float] = {}
    for every, age_s in (*others, (own, 0.0)):
        for name, each in every.items():
            if each.ended_s is not None:
                ended_s[name] = min(ended_s.get(name, math.inf), age_s + each.ended_s)

    def lasts(pool: str, each: TrialTold, age_s: float) -> bool:
        return each.ended_s is None and age_s < ended_s.get(f"{pool} {each.settings}", math.inf)

    return [
        ({pool: each for pool, each in every.items() if lasts(pool, each, age_s)}, age_s)
        for every, age_s in others
    ]
