"""Canaries of several gateways: each tells what it saw, one judges the sum, and all adopt its verdict.

The judge holds a lease in the shared store; of workers without Redis it is worker 1. A gateway tells its sums since
the trial began, so the next message makes up for a lost one. Without the store there is no verdict.

What a gateway saw counts after its death, until the trial ends: a gateway without the trial in its settings notes its
end, once only dead gateways tell of it. So a trial that is set up again begins anew, also in new processes.
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
_DEAD_S: Final = 5.0  # a gateway that was silent for so long is dead
_FORMAT: Final = msgspec.json.Decoder(dict[str, TrialTold])

_Trial = tuple[str, str]  # pool, and digest of the settings
_Others = Sequence[tuple[Mapping[str, TrialTold], float]]  # the message of each, and its age


@dataclass(slots=True)
class Together:
    """One task of a gateway; `id` names its process. `elects`: whether a lease decides if it judges."""

    rollouts: Rollouts
    store: SharedStore
    clock: Clock
    id: str
    elects: bool
    _seat: Seat = field(init=False)
    _tells: bool = False  # its last message told of a canary, whose end must be told, too
    _listens: bool = True  # other gateways told of canaries lately
    # Trials that only dead gateways told of and that are not in the settings here, and when that was noted.
    _ended: dict[_Trial, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._seat = Seat("canaries", self.id, self.store, self.clock)

    async def run(self) -> None:
        """Tell and hear until cancelled."""
        await periodic(self.turn, every_s=_BEAT_S, name="canaries of all gateways")

    async def turn(self) -> None:
        """Send what was seen here, and take in what the others saw."""
        trials = self.rollouts.tell()
        if not (trials or self._tells or self._listens):
            return
        message = trials | self._ends()
        try:
            if self.elects and trials:
                await self._seat.keep()
            text = msgspec.json.encode(message).decode() if message else ""
            found = await self.store.beat(self.id, text, _KEPT_S, Board.CANARIES)
            self._tells = bool(message)
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
        """Note which trials have ended: only dead gateways told of them, and the settings here do not have them."""
        now = self.clock.now()
        self._ended = {each: at for each, at in self._ended.items() if now - at < _KEPT_S}
        if self.rollouts.handed_over:
            return
        living = {trial for every, age_s in others if age_s < _DEAD_S for trial in _trials(every)}
        known = {trial for every, _ in others for trial in _trials(every)}
        self._ended |= dict.fromkeys(known - living - _trials(trials), now)

    def _ends(self) -> dict[str, TrialTold]:
        """Return the messages about trials that have ended."""
        now = self.clock.now()
        return {
            f"{pool} {settings}": TrialTold(settings, Finding.OPEN, 1, Sides(), now - at)
            for (pool, settings), at in self._ended.items()
        }


def _trials(every: Mapping[str, TrialTold]) -> set[_Trial]:
    return {(pool, each.settings) for pool, each in every.items() if each.ended_s is None}


def _lasting(others: _Others, own: Mapping[str, TrialTold]) -> _Others:
    """Return what others told of trials that have not ended since; `own` are the ends that were noted here."""
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
