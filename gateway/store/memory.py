"""The shared store of a gateway that runs alone."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from msgspec.structs import replace

from gateway.core.aio import Clock
from gateway.store.shared import (
    CLAIM_S,
    LEASE_S,
    LIFTED,
    LOG_KEPT,
    LOG_READ,
    START_CLAIM_S,
    Board,
    Heard,
    Lease,
)

_CLAIMS_KEPT: Final = 4096
_MOST_LOGS: Final = 16


@dataclass(slots=True)
class _Log:
    word: str
    place: int = 0  # how many were told
    told: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=LOG_KEPT))


class MemoryStore:
    """See `SharedStore`. It is lost with its process."""

    trouble: Final = ""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._leases: dict[str, Lease] = {}  # the last one of each name, for its token
        self._claims: dict[tuple[str, str | None, int], float] = {}  # until when, oldest first
        self._holds: dict[str | None, float] = {}
        # By board and replica: what it told, and when.
        self._told: dict[Board, dict[str, tuple[str, float]]] = {each: {} for each in Board}
        self._logs: dict[str, _Log] = {}

    async def acquire(self, name: str, holder: str) -> Lease | None:
        """See `SharedStore`."""
        now, last = self._clock.now(), self._leases.get(name)
        if last is not None and last.until > now and last.holder != holder:
            return None
        token = 1 if last is None else last.token + 1
        self._leases[name] = lease = Lease(name, holder, token, now + LEASE_S)
        return lease

    async def renew(self, lease: Lease) -> Lease | None:
        """See `SharedStore`."""
        now = self._clock.now()
        if not self._live(lease, now):
            return None
        self._leases[lease.name] = renewed = replace(lease, until=now + LEASE_S)
        return renewed

    async def release(self, lease: Lease) -> None:
        """See `SharedStore`."""
        if self._live(lease, self._clock.now()):
            self._leases[lease.name] = replace(lease, until=-math.inf)

    def _live(self, lease: Lease, now: float) -> bool:
        last = self._leases.get(lease.name)
        return last is not None and last.token == lease.token and last.until > now

    async def claim_restart(
        self, backend_id: str, incarnation: str | None, attempt: int = 1
    ) -> bool:
        """See `SharedStore`; the newest 4,096 claims are kept."""
        now, claim = self._clock.now(), (backend_id, incarnation, attempt)
        if self._claims.get(claim, -math.inf) > now:
            return False
        self._claims.pop(claim, None)  # so that the dictionary's order is that of time
        self._claims[claim] = now + (START_CLAIM_S if incarnation is None else CLAIM_S)
        if len(self._claims) > _CLAIMS_KEPT:
            del self._claims[next(iter(self._claims))]
        return True

    async def hold(self, scope: str | None, for_s: float | None = None) -> None:
        """See `SharedStore`."""
        self._holds[scope] = math.inf if for_s is None else self._clock.now() + for_s

    async def lift(self, scope: str | None) -> None:
        """See `SharedStore`."""
        self._holds[scope] = LIFTED

    async def holds(self) -> Mapping[str | None, float]:
        """See `SharedStore`."""
        now = self._clock.now()
        kept = self._holds.items()
        self._holds = {scope: end for scope, end in kept if end > now or end == LIFTED}
        return dict(self._holds)

    async def beat(
        self, replica_id: str, told: str, keep_s: float, board: Board = Board.REPLICAS
    ) -> Mapping[str, tuple[str, float]]:
        """See `SharedStore`."""
        now, every = self._clock.now(), self._told[board]
        every[replica_id] = told, now
        for each, (text, at) in [*every.items()]:
            if not text or now - at >= keep_s:
                del every[each]
        return {each: (text, now - at) for each, (text, at) in every.items()}

    async def tell(self, log: str, word: str, by: str, told: str, after: int) -> Heard:
        """See `SharedStore`."""
        found = self._logs.setdefault(log, _Log(word))
        if len(self._logs) > _MOST_LOGS:
            del self._logs[next(iter(self._logs))]
        if found.word != word:
            return Heard(found.word, 0)
        if told:
            found.told.append((by, told))
            found.place += 1
        forgotten = found.place - len(found.told)
        first = max(0, after - forgotten) if after <= found.place else 0
        read = [*islice(found.told, first, first + LOG_READ)]
        place = forgotten + first + len(read)
        return Heard(word, place, [text for who, text in read if who != by])

    async def close(self) -> None:
        """Nothing is open."""
