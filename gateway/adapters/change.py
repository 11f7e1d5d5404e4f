"""A change of one backend's adapters that is under way, and what it keeps from requests meanwhile."""

from __future__ import annotations

import math
import re
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from gateway.adapters.placement import NOBODY, Move
from gateway.core.exclusion import Exclusion
from gateway.pools.table import Backend

_VERSION: Final = re.compile(r"v?(\d+)\.(\d+)")
# The first version whose source keeps adapters apart when one is loaded while requests for others run.
# 0.24 was shown to mix them up without any error (vllm#47724).
_KEEPS_APART: Final = (0, 32)


@dataclass(slots=True, eq=False)
class Change:
    """A change that is under way. Its keeper alone writes it."""

    move: Move
    began_at: float
    awaited: bool = False  # it was begun as requests wait for its load
    late_at: float = (
        math.inf
    )  # from then on requests no longer wait for its load; inf: it is not asked for yet

    @property
    def names(self) -> frozenset[str]:
        """The adapters that it concerns."""
        return frozenset(name for name in (self.move.unload, self.move.load) if name is not None)

    def held_up(self, backend: Backend, in_use: AbstractSet[str]) -> frozenset[str]:
        """Return what it will load once requests in flight there have ended."""
        move = self.move
        if self.late_at < math.inf or move.load is None or move.load == move.unload:
            return NOBODY
        waits = bool(in_use) if mixes(backend) else move.unload in in_use
        return frozenset((move.load,)) if waits else NOBODY

    def lacking(self, backend: Backend, now: float) -> dict[str, Exclusion]:
        """Return the adapters that are not available meanwhile, beyond the plan."""
        move, found = self.move, dict[str, Exclusion]()
        if mixes(backend) and move.load is not None:
            found = dict.fromkeys(backend.adapters, Exclusion.ADAPTER_LOADING)
        if move.unload is not None and move.load is None:
            found[move.unload] = Exclusion.MODEL_MISSING
        if move.load is not None and now > self.late_at:
            found[move.load] = Exclusion.ADAPTER_FAILED
        return found


def mixes(backend: Backend) -> bool:
    """Whether a load may make running requests use another adapter's weights.

    A backend that reports no version counts as one that does: a mix-up would go unnoticed.
    """
    found = _VERSION.match(backend.version or "")
    return found is None or (int(found[1]), int(found[2])) < _KEEPS_APART
