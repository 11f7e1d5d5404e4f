"""What replicas share: who leads, which incarnation was restarted, what operators ordered.

`SharedStore` is the protocol. `store.memory` is its form for a gateway that runs alone, `store.onredis`
that of several. What every form guarantees, and `tests/storecases.py` holds it to:

* Each call is atomic: of two at once, one is first.
* At most one live lease has a name. A holder's own time for it ends no later than the store's:
  `Lease.until` is counted from before the call was sent.
* Fencing tokens of a name only grow, over releases, expiry and holders, as long as the store lives.
* Of all calls of `claim_restart` with the same arguments exactly one returns True, for a day at
  least (ten minutes where no incarnation is known, for then nothing runs). Forms that bound what
  they keep forget the oldest claims first.
* A hold stays for its time, or until it is lifted, whoever set it leads or not. That it was lifted
  is told for 30 days, so a hold that is simply missing was lost with the store.
* A log has one word at a time. What is told to it is heard by each replica once, in order, unless it is
  away until more than `LOG_KEPT` others were told, or all are silent for `LOG_TOLD_S`. A log that is lost
  begins anew, with the next word.
* When it cannot be reached a call raises `StoreUnavailable` within its own deadline. A claim or a
  lease that was not confirmed is none: without the store nothing is restarted.

Times are monotonic seconds of the local clock; what goes between replicas is durations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Final, Protocol, TypeVar

import msgspec

# Another replica leads within 10 s of a leader's death: a lease, and the follower's next turn.
LEASE_S: Final = 8.0
RENEW_S: Final = 2.0  # a renewal may fail three times, and the lease still has time left to act
# Who has less left begins nothing; what is begun must be claimed within the lease.
LEFT_S: Final = 3.0

CLAIM_S: Final = 86_400.0
START_CLAIM_S: Final = 600.0  # over the longest default backoff: replicas in step meet in it
LIFTED_S: Final = 30 * 86_400.0  # a gateway that was away that long tells anew what it knows

LOG_KEPT: Final = 256  # tells of a log, of 64 KiB at most each
LOG_READ: Final = 64  # of them at a time
LOG_TOLD_S: Final = 60.0  # after the last one Redis forgets all, and the word after a day

LIFTED: Final = -math.inf  # the end of a hold that was lifted

T = TypeVar("T")


class Board(Enum):
    """What replicas tell each other of; each is told by itself, as often as it changes."""

    REPLICAS = "replicas"  # that they are there, and what they see
    UNDER_WAY = "under way"  # what they have at each backend
    CANARIES = "canaries"  # what they saw of revisions on trial
    ADAPTERS = "adapters"  # which of them requests use and wait for, and what the one that places them does


class StoreUnavailable(Exception):
    """The shared store did not answer; whether the call took effect is unknown. The message is for people."""


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """A name that is held. `token` is larger than that of every earlier lease of the name."""

    name: str
    holder: str
    token: int
    until: float

    def may_act(self, now: float) -> bool:
        """Whether enough time is left to begin something that only the holder may do."""
        return self.until - now >= LEFT_S


class Heard(msgspec.Struct, frozen=True, array_like=True):
    """What was read of a log. `word` is the log's; if it is not the reader's own, `told` is empty."""

    word: str
    place: int  # up to which it is read
    told: Sequence[str] = ()


def read_told(decoder: msgspec.json.Decoder[T], text: str, default: T) -> T:
    """Return what a replica told on a board; the default, if it is of a version that writes it otherwise."""
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, ValueError):
        return default


class SharedStore(Protocol):
    """What replicas share. See the module for what every form guarantees.

    Cancel: a call that was under way may or may not have taken effect.
    """

    @property
    def trouble(self) -> str:
        """Why it does not answer now, for people; empty: it does, as far as is known."""

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
        """Whether the caller, and nobody else ever, is to restart this incarnation (this time).

        A claim whose confirmation was lost is confirmed when the same store object asks again.
        """

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
        """Return the ends of holds by the local clock; `inf`: for good, `LIFTED`: no longer."""

    async def beat(
        self, replica_id: str, told: str, keep_s: float, board: Board = Board.REPLICAS
    ) -> Mapping[str, tuple[str, float]]:
        """Note what a replica tells (empty: it goes); return what all told there, and its age in seconds.

        What is older than `keep_s` is forgotten.
        """

    async def tell(self, log: str, word: str, by: str, told: str, after: int) -> Heard:
        """Add what a replica tells (empty: nothing) to a log, and return what others told after a place.

        A log without a word gets this one. If it has another, nothing is added.
        """

    async def close(self) -> None:
        """Let go of connections. Calls fail from now on."""
