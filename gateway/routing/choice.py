"""The choice of a backend for one request: now, or with the reason why not."""

from __future__ import annotations

import random
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from gateway.core.types import Ask, Exclusion
from gateway.pools.table import Backend
from gateway.routing.filters import NOTHING_CLAIMED, eligible, reasons
from gateway.routing.pick import pick, scores


@dataclass(frozen=True, slots=True)
class Choice:
    """Why a request goes where it goes, for people: the scores of who may take it, the rest's reasons."""

    backend_id: str | None
    scores: dict[str, float]
    excluded: dict[str, Exclusion]


class Chooser:
    """Chooses with its own random numbers; the admission gate asks it, for every request."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def find(
        self,
        backends: Sequence[Backend],
        ask: Ask,
        now: float,
        claimed: AbstractSet[str] = NOTHING_CLAIMED,
    ) -> Backend | None:
        """Return the best of the eligible backends that nobody who waits has claimed, if any."""
        found = eligible(backends, ask, now, claimed)
        if len(found) > 1:
            return pick(found, now, self._rng)
        return found[0] if found else None

    def why_not(self, backends: Sequence[Backend], ask: Ask, now: float) -> dict[str, Exclusion]:
        """Return why each backend that cannot take the request cannot."""
        return reasons(backends, ask, now)

    def explain(self, backends: Sequence[Backend], ask: Ask, now: float) -> Choice:
        """Choose as `find` does, and tell why. Nothing is taken."""
        why = reasons(backends, ask, now)
        found = eligible(backends, ask, now) if len(why) < len(backends) else []
        if not found:
            return Choice(None, {}, why)
        totals = zip((each.id for each in found), scores(found, now), strict=True)
        return Choice(pick(found, now, self._rng).id, dict(totals), why)
