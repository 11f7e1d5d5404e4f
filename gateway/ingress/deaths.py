"""Waits for what shows whether a backend that failed a request has died.

If it was the only one with an adapter, another one loads it once that one is known to be down: after a few
probes, in a second or so. Until then nobody else is due to have the adapter, so its requests wait here. From
then on they wait for the load in the queue, as all do.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from gateway.admission.gate import Gate
from gateway.core.aio import Clock
from gateway.core.exclusion import Chance
from gateway.core.types import SERVING, Ask, RequestRecord, Slot
from gateway.pools.losses import Fingerprint
from gateway.pools.quarantine import Quarantine
from gateway.pools.table import Backend, PoolTable

LOOK_S: Final = 0.02
# A dead server refuses its probe within milliseconds. A silent one may be busy: its client is held no longer.
_PROOF_S: Final = 1.0
_DOWN_S: Final = 3.0  # for the probes that take a backend out of service


@dataclass(frozen=True, slots=True)
class Deaths:
    """Asks for proof, and waits for it."""

    table: PoolTable
    gate: Gate
    quarantine: Quarantine
    clock: Clock

    async def died(self, fingerprint: Fingerprint, record: RequestRecord) -> bool:
        """Whether the backend of the last attempt has died, as its probe shows within a second."""
        backend_id, sent_at = record.backend_id or "", record.sent_at or 0.0
        until = self.clock.now() + _PROOF_S
        while (died := self.quarantine.died(fingerprint, backend_id, sent_at)) is None:
            if self.clock.now() >= until:
                return False
            await asyncio.sleep(LOOK_S)
        return died

    async def can_go_on(self, ask: Ask, backend: Backend, slot: Slot, *, sent: bool) -> bool:
        """Whether any backend can take a request after this one failed.

        If that had the only copy of an adapter, wait until it is known to be down. If it lives after all, it may be
        asked again for what was not `sent`. Cancel: nothing is held.
        """
        if ask.place is not None or self.gate.chance(ask) is not Chance.NEVER:
            return True
        if ask.route.adapter is None or not self._others(backend):
            return False
        slot.release()  # nobody works on it there
        since = self.clock.now()
        self.quarantine.doubt(backend.id)
        while self.table.get(backend.id) is backend and backend.phase in SERVING:
            lives = backend.health.probed_at >= since and not backend.health.probe_failure
            if lives and not sent:
                ask.tried.pop(backend.id, None)
            if lives or self.clock.now() - since > _DOWN_S:
                break
            await asyncio.sleep(LOOK_S)
        self.gate.want(ask.route)
        return self.gate.chance(ask) is not Chance.NEVER

    def _others(self, backend: Backend) -> bool:
        """Whether there are servers beside it that might load an adapter."""
        members = self.table.backends(backend.pool)
        return any(
            each.phase in SERVING and not each.plain and each is not backend for each in members
        )
