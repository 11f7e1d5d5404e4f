"""Which requests were present when backends died: one that was at two deaths is not sent to a third.

    lost --the backend refuses its next probe--> present at one death --and at a second--> quarantined
     `---it passes: it lives, and the loss says nothing                                  for ten minutes

A request is known by a keyed hash of its body, with a key that this gateway made, and its tenant. Neither the
body nor anything of it is kept. Workers of one gateway tell each other which requests were at a death. It was at
a second death only if it was sent after it was lost at the first: of several equal requests on backends that die
at once, each was at one. If others were at both, too, it is to blame only if it stood at the same place of its
answer: one that kills does so again where it did before.

A loss is an attempt whose connection broke, or that an engine which lives no more answered with an error; a death
is a loss after which the health check is refused, broken off, or says that the engine is dead, within five seconds.
What is drained or restarted by order dies of nothing, nor does what ends a reply in order meanwhile: it is stopped.
(But nobody works any more on what was lost with a server that was stopped: see `died`.)
All that was in flight at a death was present, so an innocent request that was there twice is kept out too, if
nothing speaks for it: its sender is told.

Of a large body nothing is left once its reply has begun, and uploads are never kept: they are not known here.
"""

from __future__ import annotations

import hmac
import math
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from gateway.core.aio import Clock
from gateway.core.endings import Ending
from gateway.core.types import Phase
from gateway.pools.losses import End, Fingerprint, Loss, Losses, Presence
from gateway.pools.table import Backend, PoolTable

QUARANTINE_S: Final = 600.0
_DIES_WITHIN_S: Final = 5.0
_MOST: Final = 10_000  # requests known; of one death the oldest goes first
_MOST_LOSSES: Final = 10_000  # not yet decided
_LOSSES: Final = frozenset({Ending.BROKE, Ending.STREAM, Ending.HTTP_5XX, Ending.STALE})
DEAD: Final = frozenset({"refused", "reset", "http_503"})  # what a probe of a dead server finds
_BY_ORDER: Final = frozenset({"restart", "pending"})  # reasons of STARTING


@dataclass(slots=True)
class Suspect:
    """A request that was present at a death; `until` is set once it is quarantined."""

    of: Fingerprint
    pool: str
    deaths: list[Loss] = field(default_factory=list)  # the first attempt that each of them took
    until: float = -math.inf
    refused: Counter[str] = field(default_factory=Counter)  # by tenant

    @property
    def seen_at(self) -> float:
        """When the last of the backends died."""
        return max(each.at for each in self.deaths)

    @property
    def died(self) -> list[str]:
        """Which backends died."""
        return [each.end.backend_id for each in self.deaths]


class Quarantine:
    """All requests that were present at deaths. Their one owner; every method is synchronous.

    `watched` has the lengths of their bodies: a request of another length is none of them. `on_lost` is
    told of a backend that may have died, `on_quarantined` of a request that was at two deaths.
    """

    def __init__(self, table: PoolTable, clock: Clock) -> None:
        self.watched: Counter[int] = Counter()
        self.on_lost: list[Callable[[str], None]] = []
        self.on_quarantined: list[Callable[[Suspect], None]] = []
        self._tell: Callable[[list[Presence]], None] | None = None
        self._table = table
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._losses = Losses(_MOST_LOSSES)
        self._ends: dict[str, End] = {}  # the last of each backend
        self._suspects: OrderedDict[bytes, Suspect] = OrderedDict()
        # Lost with a backend that was stopped, by its id and the request: the oldest first, for five seconds.
        self._stopped: dict[tuple[str, bytes], Loss] = {}

    def share(self, key: bytes, tell: Callable[[list[Presence]], None]) -> None:
        """Know requests by the key of all workers, and tell the others what is proven here. Call it first of all."""
        self._key, self._tell = key, tell

    def fingerprint(self, body: bytes, tenant: str) -> Fingerprint:
        """Return what a tenant's body is known by: 1 us and 1 ms for each MiB."""
        return Fingerprint(hmac.digest(self._key + tenant.encode(), body, "sha256"), len(body))

    # --- fed --------------------------------------------------------------------------------------

    def lost(self, backend: Backend, of: Fingerprint, sent_at: float, said_tokens: int = 0) -> None:
        """Note that an attempt was lost which was sent then; what became of its backend will show."""
        now = self._clock.now()
        last = self._ends.get(backend.id)
        if last and sent_at >= last.proven_at and not backend.health.probe_failure:
            del self._ends[backend.id]  # it was started again within seconds
        end = self._end(backend.id, now)
        end.present.add(of.digest)
        loss = Loss(of, backend.pool, end, now, sent_at, said_tokens)
        self.watched[of.body_bytes] += 1
        if (gone := self._losses.add(loss)) is not None:
            self._unwatch(gone.of)
        if self._has_ended(loss) is not None:
            self._losses.look_again(backend.id)
        self.doubt(backend.id)

    def doubt(self, backend_id: str) -> None:
        """Have it be found out at once whether a backend lives."""
        for listener in self.on_lost:
            listener(backend_id)

    def ended_in_order(self, backend_id: str) -> None:
        """Note that a backend ended a reply itself, unfinished: what else is lost there is no sign of a crash."""
        self._end(backend_id, self._clock.now()).in_order = True

    def heard(self, told: Sequence[Any]) -> None:
        """Take what another worker of this gateway has proven: each a `Presence`, as a list.

        Raises:
            msgspec.ValidationError: it is something else.
        """
        losses = []
        for each in msgspec.convert(told, list[Presence]):
            end = self._end(each.backend_id, each.began_at)
            end.present.add(each.digest)
            of = Fingerprint(each.digest, each.body_bytes)
            losses.append(Loss(of, each.pool, end, each.at, each.sent_at, each.said_tokens))
        for loss in losses:
            if not loss.end.in_order:
                self._present(loss)

    def _end(self, backend_id: str, at: float) -> End:
        end = self._ends.get(backend_id)
        if end is None or abs(at - end.began_at) >= _DIES_WITHIN_S:
            end = self._ends[backend_id] = End(backend_id, at)
        return end

    def tick(self) -> None:
        """Decide about losses as far as it is known what became of their backends, and forget what is long ago."""
        now = self._clock.now()
        proven = []
        for backend_id in self._losses.backends():
            proven += self._decide(backend_id, now)
        if proven and self._tell is not None:
            self._tell(proven)
        for end in [*self._ends.values()]:
            if now - end.began_at >= _DIES_WITHIN_S:
                del self._ends[end.backend_id]
        while self._stopped:
            key, loss = next(iter(self._stopped.items()))
            if now - loss.at < _DIES_WITHIN_S:
                break
            del self._stopped[key]
        while self._suspects:
            first = next(iter(self._suspects.values()))
            if now < first.seen_at + QUARANTINE_S:
                break
            self._forget(first)

    def _decide(self, backend_id: str, now: float) -> list[Presence]:
        """Decide about what was lost at a backend, if more is known of it by now; return what is proven."""
        losses, backend = self._losses.at(backend_id), self._table.get(backend_id)
        end, health = losses[-1].end, None if backend is None else backend.health
        told = (health and health.probed_at, health and health.probe_failure, end, end.in_order)
        is_new = self._losses.looks_new(backend_id, told)
        if not is_new and now - losses[0].at < _DIES_WITHIN_S:
            return []
        found = [(loss, self._has_ended(loss)) for loss in losses]
        decided = [
            (loss, ended)
            for loss, ended in found
            if ended is not None or now - loss.at >= _DIES_WITHIN_S
        ]
        self._losses.decided(backend_id, [loss for loss, _ in decided])
        lost = [loss for loss, ended in decided if ended]
        for loss in (each for each in lost if each.end.in_order):
            self._stopped.pop((backend_id, loss.of.digest), None)
            self._stopped[backend_id, loss.of.digest] = loss
        dead_of = [loss for loss in lost if not loss.end.in_order]
        for loss in dead_of:
            loss.end.proven_at = min(loss.end.proven_at, now)
            self._present(loss)
        for loss, _ in decided:
            self._unwatch(loss.of)
        return [loss.told() for loss in dead_of]

    def _has_ended(self, loss: Loss) -> bool | None:
        """Whether the backend died of it, or with it, or was stopped; None while that is not known."""
        backend = self._table.get(loss.end.backend_id)
        if backend is None:
            return False
        health = backend.health
        if health.probed_at < loss.at:
            return None
        if health.probe_failure in DEAD:
            return health.probed_at - loss.at < _DIES_WITHIN_S
        return None if health.probe_failure else False

    def _present(self, loss: Loss) -> None:
        """Count a death for a request; once for all of its attempts that were lost at it."""
        suspect = self._suspects.get(loss.of.digest)
        if suspect is None:
            suspect = self._suspects[loss.of.digest] = Suspect(loss.of, loss.pool)
            self.watched[loss.of.body_bytes] += 1
        known = next((each for each in suspect.deaths if each.end is loss.end), None)
        if known is None:
            suspect.deaths.append(loss)
        else:
            known.sent_at = max(known.sent_at, loss.sent_at)
        self._suspects.move_to_end(loss.of.digest)
        if len(self._suspects) > _MOST:
            self._forget(next(iter(self._suspects.values())))
        if any(each.repeats(first) for each in suspect.deaths for first in suspect.deaths):
            told = suspect.until > loss.at
            suspect.until = suspect.seen_at + QUARANTINE_S
            for listener in [] if told else self.on_quarantined:
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
        pending = [each for each in self._losses.of(of.digest) if not each.end.in_order]
        known = self._suspects.get(of.digest)
        if not pending:
            return False
        losses = [*pending, *(known.deaths if known else ())]
        first = min(losses, key=lambda each: each.at)
        return any(each.follows(first) for each in losses)

    def died(self, of: Fingerprint, backend_id: str, sent_at: float) -> bool | None:
        """Whether a backend ended with an attempt that was sent there then, or later; None while that is not known."""
        self.tick()

        def there(loss: Loss) -> bool:
            return loss.end.backend_id == backend_id and loss.sent_at >= sent_at

        if any(map(there, self._losses.of(of.digest))):
            return None
        stopped = self._stopped.get((backend_id, of.digest))
        if stopped is not None and there(stopped):
            return True
        known = self._suspects.get(of.digest)
        return known is not None and any(map(there, known.deaths))

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
