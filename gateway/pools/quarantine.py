"""Which requests were present when backends died: one that was at two deaths is not sent to a third.

    lost --the backend refuses its next probe--> present at one death --and at a second--> quarantined
     `---it passes: it lives, and the loss says nothing                                  for ten minutes

A request is known by a keyed hash of its body, with a key that this process made for itself. Neither the
body nor anything of it is kept. A loss is an attempt whose connection broke, or that an engine which lives no
more answered with an error; a death is a loss after which the health check is refused, broken off, or says
that the engine is dead, within five seconds. What is drained or restarted by order dies of nothing. All that was in
flight at a death was present, so an innocent request that was there twice is kept out too: its sender is told.

Of a large body nothing is left once its reply has begun, and uploads are never kept: they are not known here.
"""

from __future__ import annotations

import hmac
import math
import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from gateway.core.aio import Clock
from gateway.core.endings import Ending
from gateway.core.types import Phase
from gateway.pools.table import Backend, PoolTable

DEATHS: Final = 2  # that make a quarantine
QUARANTINE_S: Final = 600.0
_DIES_WITHIN_S: Final = 5.0
_MOST: Final = 10_000  # requests known; of one death the oldest goes first
_MOST_LOSSES: Final = 10_000  # not yet decided
_LOSSES: Final = frozenset({Ending.BROKE, Ending.STREAM, Ending.HTTP_5XX, Ending.STALE})
_DEAD: Final = frozenset({"refused", "reset", "http_503"})  # what a probe of a dead server finds
_BY_ORDER: Final = frozenset({"restart", "pending"})  # reasons of STARTING


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A keyed hash of a body, and the body's length."""

    digest: bytes
    body_bytes: int

    @property
    def id(self) -> str:
        """What it is called in messages."""
        return self.digest[:6].hex()


@dataclass(frozen=True, slots=True)
class Loss:
    """One attempt that was lost."""

    at: float
    of: Fingerprint
    backend_id: str
    pool: str


@dataclass(slots=True)
class Suspect:
    """A request that was present at a death; `until` is set once it is quarantined."""

    of: Fingerprint
    pool: str
    deaths: list[tuple[float, str]] = field(default_factory=list)  # when, and of which backend
    until: float = -math.inf
    refused: Counter[str] = field(default_factory=Counter)  # by tenant

    @property
    def seen_at(self) -> float:
        """When the last of the backends died."""
        return self.deaths[-1][0]


class Quarantine:
    """All requests that were present at deaths. Their one owner; every method is synchronous.

    `watched` has the lengths of their bodies: a request of another length is none of them. `on_lost` is
    told of a backend where something was lost, `on_quarantined` of a request that was at two deaths.
    """

    def __init__(self, table: PoolTable, clock: Clock) -> None:
        self.watched: Counter[int] = Counter()
        self.on_lost: list[Callable[[str], None]] = []
        self.on_quarantined: list[Callable[[Suspect], None]] = []
        self._table = table
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._losses: deque[Loss] = deque()
        self._suspects: OrderedDict[bytes, Suspect] = OrderedDict()

    def fingerprint(self, body: bytes) -> Fingerprint:
        """Return what a body is known by: 1 us and 1 ms for each MiB."""
        return Fingerprint(hmac.digest(self._key, body, "sha256"), len(body))

    # --- fed --------------------------------------------------------------------------------------

    def lost(self, backend: Backend, of: Fingerprint) -> None:
        """Note that an attempt was lost; what became of its backend will show."""
        if len(self._losses) == _MOST_LOSSES:
            self._unwatch(self._losses.popleft().of)
        self._losses.append(Loss(self._clock.now(), of, backend.id, backend.pool))
        self.watched[of.body_bytes] += 1
        for listener in self.on_lost:
            listener(backend.id)

    def tick(self) -> None:
        """Decide about losses as far as it is known what became of their backends, and forget what is long ago."""
        now = self._clock.now()
        losses, self._losses = self._losses, deque()
        for loss in losses:
            dead = self._is_dead(loss)
            if dead is None and now - loss.at < _DIES_WITHIN_S:
                self._losses.append(loss)
                continue
            if dead:
                self._present(loss)
            self._unwatch(loss.of)
        past = [each for each in self._suspects.values() if now >= each.seen_at + QUARANTINE_S]
        for suspect in past:
            self._forget(suspect)

    def _is_dead(self, loss: Loss) -> bool | None:
        """Whether the backend died of it, or with it; None while that is not known."""
        backend = self._table.get(loss.backend_id)
        if backend is None:
            return False
        health = backend.health
        if health.probed_at < loss.at:
            return None
        if health.probe_failure in _DEAD:
            return health.probed_at - loss.at < _DIES_WITHIN_S
        return None if health.probe_failure else False

    def _present(self, loss: Loss) -> None:
        """Count a death for a request; once for all of its attempts that were lost there at that time."""
        suspect = self._suspects.get(loss.of.digest)
        if suspect is None:
            suspect = self._suspects[loss.of.digest] = Suspect(loss.of, loss.pool)
            self.watched[loss.of.body_bytes] += 1
        for at, backend_id in suspect.deaths:
            if backend_id == loss.backend_id and loss.at - at < _DIES_WITHIN_S:
                return
        suspect.deaths.append((loss.at, loss.backend_id))
        self._suspects.move_to_end(loss.of.digest)
        if len(self._suspects) > _MOST:
            self._forget(next(iter(self._suspects.values())))
        if len(suspect.deaths) >= DEATHS:
            suspect.until = loss.at + QUARANTINE_S
            for listener in self.on_quarantined:
                listener(suspect)

    def _forget(self, suspect: Suspect) -> None:
        del self._suspects[suspect.of.digest]
        self._unwatch(suspect.of)

    def _unwatch(self, of: Fingerprint) -> None:
        self.watched[of.body_bytes] -= 1
        if not self.watched[of.body_bytes]:
            del self.watched[of.body_bytes]

    # --- asked ------------------------------------------------------------------------------------

    def undecided(self, of: Fingerprint) -> bool:
        """Whether a request may turn out to have been at two deaths, within seconds."""
        self.tick()
        pending = {each.backend_id for each in self._losses if each.of == of}
        known = self._suspects.get(of.digest)
        return bool(pending) and len(pending) + (len(known.deaths) if known else 0) >= DEATHS

    def found(self, of: Fingerprint) -> Suspect | None:
        """Return a request that is quarantined; None: it may be sent."""
        known = self._suspects.get(of.digest)
        return known if known is not None and self._clock.now() < known.until else None

    def __iter__(self) -> Iterator[Suspect]:
        """Go through those that are quarantined, the newest last."""
        self.tick()
        now = self._clock.now()
        return iter([each for each in self._suspects.values() if now < each.until])

    def lift(self, name: str) -> bool:
        """Forget a request by its id, whatever it was present at; False: it is not known."""
        suspect = next((each for each in self._suspects.values() if each.of.id == name), None)
        if suspect is None:
            return False
        self._forget(suspect)
        return True


def may_be_a_death(backend: Backend, ending: Ending) -> bool:
    """Whether an attempt that ended so may have ended by its backend's death, which nobody ordered."""
    ordered = backend.phase in (Phase.DRAINING, Phase.STOPPED) or (
        backend.phase is Phase.STARTING and backend.reason in _BY_ORDER
    )
    return ending in _LOSSES and not ordered
