"""What replicas share: who leads, which incarnation was restarted, whether restarts are on hold.

`SharedStore` is the protocol, `MemoryStore` its form for a gateway that runs alone. What every form
guarantees, and `tests/unit/test_store.py` holds it to:

* Each call is atomic: of two at once, one is first.
* At most one live lease has a name. A holder's own time for it ends no later than the store's:
  `Lease.until` is counted from before the call was sent.
* Fencing tokens of a name only grow, over releases, expiry and holders, as long as the store lives.
* Of all calls of `claim_restart` with the same arguments exactly one returns True, for a day at
  least (ten minutes where no incarnation is known, for then nothing runs). Forms that bound what
  they keep forget the oldest claims first.
* A hold stays for its time, or until it is lifted, whoever set it leads or not.
* When it cannot be reached a call raises `StoreUnavailable` within its own deadline. A claim or a
  lease that was not confirmed is none: without the store nothing is restarted.

Times are monotonic seconds of the local clock; what goes between replicas is durations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

from gateway.core.aio import Clock

LEASE_S: Final = 15.0  # as client-go's LeaseDuration
RENEW_S: Final = 5.0  # a renewal may fail once, and the lease still has time left to act
LEFT_S: Final = 8.0  # less than that left: begin nothing; what is begun must end within the lease

_CLAIM_S: Final = 86_400.0
_START_CLAIM_S: Final = 600.0  # over the longest default backoff: replicas in step meet in it
_CLAIMS_KEPT: Final = 4096


class StoreUnavailable(Exception):
    """The shared store did not answer; whether the call took effect is unknown."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A name that is held. `token` is larger than that of every earlier lease of the name."""

    name: str
    holder: str
    token: int
    until: float

    def may_act(self, now: float) -> bool:
        """Whether enough time is left to begin something that only the holder may do."""
        return self.until - now >= LEFT_S


class SharedStore(Protocol):
    """What replicas share. See the module for what every form guarantees.

    Cancel: a call that was under way may or may not have taken effect.
    """

    async def acquire(self, name: str, holder: str) -> Lease | None:
        """Take a free or expired lease for `LEASE_S`; None while it is held. `holder` names one process's life.

        Its own live lease a holder gets anew, with a larger token: it may have lost the reply.
        """

    async def renew(self, lease: Lease) -> Lease | None:
        """Prolong a live lease, its token stays; None when it expired or is another's by now."""

    async def release(self, lease: Lease) -> None:
        """Give a lease back; nothing happens when it expired or is another's by now."""

    async def claim_restart(
        self, backend_id: str, incarnation: str | None, attempt: int = 1
    ) -> bool:
        """Whether the caller, and nobody else ever, is to restart this incarnation (this time)."""

    async def hold(self, scope: str | None, for_s: float | None = None) -> None:
        """Stop automatic restarts for a time, or (None) for good.

        Args:
            scope: a pool's name, a backend's id (what is suspended is held so), None for all; or
                what `heal.intent` makes of an id for a backend that an operator drains.
            for_s: how long. A new hold of the same scope replaces the old one, shorter or longer.
        """

    async def lift(self, scope: str | None) -> None:
        """End the hold of this very scope, if there is one."""

    async def holds(self) -> Mapping[str | None, float]:
        """Return the holds that last, with their ends by the local clock; `inf`: for good."""


class MemoryStore:
    """The shared store of a gateway that runs alone; it is lost with its process."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._leases: dict[str, Lease] = {}  # the last one of each name, for its token
        self._claims: dict[tuple[str, str | None, int], float] = {}  # until when, oldest first
        self._holds: dict[str | None, float] = {}

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
        self._claims[claim] = now + (_START_CLAIM_S if incarnation is None else _CLAIM_S)
        if len(self._claims) > _CLAIMS_KEPT:
            del self._claims[next(iter(self._claims))]
        return True

    async def hold(self, scope: str | None, for_s: float | None = None) -> None:
        """See `SharedStore`."""
        self._holds[scope] = math.inf if for_s is None else self._clock.now() + for_s

    async def lift(self, scope: str | None) -> None:
        """See `SharedStore`."""
        self._holds.pop(scope, None)

    async def holds(self) -> Mapping[str | None, float]:
        """See `SharedStore`."""
        now = self._clock.now()
        self._holds = {scope: until for scope, until in self._holds.items() if until > now}
        return dict(self._holds)
