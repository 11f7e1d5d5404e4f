"""Adapters whose load ended servers: after two deaths, an adapter is not loaded any more.

    a load fails --the server ends, or refuses its next probe--> one death --and again--> not loaded for a day
       `---the server passes its next probe: the failure proves nothing

Until a server is known to live, it loads no other adapter: that load would fail too, and be blamed for the death.
After one death, a restarted server serves before it loads the adapter again, and only one server at a time tries.
A load that succeeds clears the adapter. So do a new path and an operator's order to load it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from gateway.adapters.memory import Death, Memory
from gateway.core.aio import Clock
from gateway.core.types import Phase
from gateway.pools.quarantine import DEAD
from gateway.pools.table import Backend

log = logging.getLogger("gateway.adapters")

DEATHS: Final = 2
_KEPT_S: Final = 86400.0
_DIES_WITHIN_S: Final = 5.0
# A server that is stopped, or restarted after a drain, does not answer either, so here only its end counts.
_NO_PROOF: Final = frozenset({Phase.DRAINING, Phase.STOPPED, Phase.STARTING})


@dataclass(frozen=True, slots=True)
class _Failed:
    """A load that failed, of which it is not known whether its server lives."""

    name: str
    path: str
    at: float


@dataclass(slots=True)
class Deadly:
    """The failed loads of one pool's adapters. `memory` keeps the deaths."""

    pool: str
    memory: Memory
    clock: Clock
    _failed: dict[str, _Failed] = field(default_factory=dict)  # by backend
    # By backend, while no load is known to be the cause.
    _ended_at: dict[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether anything is held against any adapter."""
        return bool(self._failed or self.memory.deaths(self.pool))

    def failed(self, backend_id: str, name: str, path: str) -> None:
        """Note that a load failed: soon it is known whether its server lives."""
        now = self.clock.now()
        self._failed[backend_id] = _Failed(name, path, now)
        if now - self._ended_at.get(backend_id, -math.inf) <= _DIES_WITHIN_S:
            self.ended(backend_id)

    def ended(self, backend_id: str) -> None:
        """Note that a server ended by itself. If it was loading an adapter, that counts as the cause."""
        failed, now = self._failed.pop(backend_id, None), self.clock.now()
        if failed is None or now - failed.at > _DIES_WITHIN_S:
            self._ended_at[backend_id] = now  # the failure of a load may be reported later
            return
        self._ended_at.pop(backend_id, None)
        death = Death(backend_id, failed.path, self.clock.wall())
        self.memory.died(self.pool, failed.name, death)
        if why := barred(self.deaths(failed.name, failed.path)):
            extra = {"event": "adapter_deadly", "backend": backend_id, "adapter": failed.name}
            log.error("the adapter %s: %s", failed.name, why, extra=extra)

    def look(self, backends: Collection[Backend]) -> None:
        """Decide, by their probes, whether servers where loads failed have died."""
        for each in backends if self._failed or self._ended_at else ():
            well = not each.health.probe_failure
            if well and each.health.probed_at >= self._ended_at.get(each.id, math.inf):
                del self._ended_at[each.id]  # it is back
            if (failed := self._failed.get(each.id)) is None:
                continue
            probed, why = each.health.probed_at >= failed.at, each.health.probe_failure
            if probed and why in DEAD and each.phase not in _NO_PROOF:
                self.ended(each.id)
            elif probed and not why:
                del self._failed[each.id]
        # By its age alone: no probe tells of a server that a reload removed.
        since = self.clock.now() - _DIES_WITHIN_S
        self._failed = {key: each for key, each in self._failed.items() if each.at >= since}

    def deaths(self, name: str, path: str) -> list[Death]:
        """Return the deaths by loads of an adapter from a path, as far as they still count."""
        if not (known := self.memory.deaths(self.pool).get(name)):
            return []
        now = self.clock.wall()
        return [each for each in known if each.path == path and 0 <= now - each.at < _KEPT_S]

    def suspects(self, paths: Mapping[str, str]) -> list[str]:
        """Return the adapters that a restarted server loads only once it serves."""
        known = self.memory.deaths(self.pool)
        failed = [each.name for each in self._failed.values()]
        return [*failed, *(name for name in known if self.deaths(name, paths.get(name, "")))]

    def undecided(self, name: str) -> bool:
        """Whether a server may have died a moment ago as it loaded this adapter."""
        return any(each.name == name for each in self._failed.values())

    def doubts(self, backend: Backend) -> bool:
        """Whether a server may have died a moment ago, of a load or of anything else."""
        return backend.id in self._failed or bool(backend.health.probe_failure)

    def clear(self, name: str, until: float = math.inf) -> None:
        """Forget the deaths of an adapter, those up to a moment by the wall clock."""
        self.memory.forgive(self.pool, name, until)


def barred(deaths: Collection[Death]) -> str:
    """Return, for people, why an adapter is not loaded any more; empty: it may be loaded."""
    if len(deaths) < DEATHS:
        return ""
    places = ", ".join(dict.fromkeys(each.backend_id for each in deaths))
    return (
        f"servers died as they loaded it ({len(deaths)} times, on {places}), so it is not loaded for a day;"
        " `vllm-gateway adapters load` tries it again"
    )
