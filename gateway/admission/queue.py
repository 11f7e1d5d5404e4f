"""The bounded, fair queue of one pool: who goes next, and who may not even wait.

Pure and synchronous. Time comes in as monotonic seconds, backends only as ids that `place` tells.
`take` walks through the tickets in fair order and asks `place` for each, until one is placed:

    walk  band 9   a1  could use {x}, no room     stays first; later ones may pass it
           |       b1  could use {x, y}, no room  its passes are used up: it claims x and y
           |       c1  claimed = {x, y}           placed on z, and taken; no pass is counted, as
           |                                      neither a1 nor b1 could have used z
           v       a2 ...
          band 0   d1 ...

* Between bands: the higher priority is walked first. While a lower band waits it is owed 5 % of the
  tokens given to higher ones; when that pays for its first ticket, it is walked before them. So a
  first ticket of c tokens is tried first after the bands above it were given at most 20 c tokens: no
  band starves, however busy those above. (Tokens, not picks or age: under a long overload every
  waiting request is old, and a few long ones would take the place of many short ones.)
* In a band: deficit round robin between tenants, see `turns`. Tenants that are never blocked and
  stay backlogged from the same time differ by less than a quantum and one ticket in tokens given.
* In a tenant: what was refused before and came again goes first, else in order of the offers; a blocked
  ticket may be passed.
* A placement on a backend that an earlier, blocked ticket of the walk could use too is a pass of that
  ticket. After `max_passes` it claims what it could use: no later ticket may go there, room adds up,
  and no crowd of small requests starves a large one. Other backends go on taking work.
* Tickets that the same backends can take are of one kind. When `place` finds no room for any of a kind,
  the walk leaves the rest of it out. That is no pass, and claims nothing: none of them could go where
  the walk finds room. So however many wait for a full backend, an idle one goes on taking work.
* One walk tries `max_looks` tickets of a kind at most, and twice as many of all. A kind that has room,
  but not for what was tried of it, has half of the looks that are left for kinds not tried yet. So
  `take` gives None only if of each kind all, or as many as it had looks, could not be placed. By
  default six such kinds, or 60 that have no room at all, leave looks for another.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Final, Generic, NamedTuple, TypeVar

from gateway.admission.turns import Band, Held, Ticket

__all__ = ["Ahead", "Blocked", "FairQueue", "Full", "Held", "Limits", "Place", "Placed", "Ticket"]

T = TypeVar("T")
R = TypeVar("R")

# About one short request: a tenant with nothing queued has its turn after one such of each other. As
# turns are numbers, a small quantum costs no more steps than a large one.
QUANTUM_TOKENS: Final = 256

_STALE_DEADLINES: Final = 64  # those of tickets that have left, kept at least until they are swept


class Full(Enum):
    """Which bound refused an offer; closed, because it is a metric label."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    BYTES = "bytes"
    TENANT_REQUESTS = "tenant_requests"
    TENANT_TOKENS = "tenant_tokens"
    TENANT_BYTES = "tenant_bytes"


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that may wait. One tenant may hold `tenant_ratio` of each, also when it is alone.

    With `requests` 0 nothing ever waits; with more, each tenant may hold one request at least.
    """

    requests: int
    tokens: int
    bytes: int
    tenant_ratio: float = 0.5


@dataclass(frozen=True, slots=True)
class Placed(Generic[R]):
    """A backend took the request; `take` hands `value` back."""

    backend_id: str
    value: R


@dataclass(frozen=True, slots=True)
class Blocked:
    """No backend can take the request now; these could once they have room, claimed ones included.

    `best` is the one to claim when its passes are used up, most likely the first to have room; None
    claims all of them. Name none that will never have room: what is claimed takes no later request.
    """

    backend_ids: frozenset[str]
    best: str | None = None
    kind: bool = False  # no ticket of its kind can be placed while this walk lasts


Claims = Mapping[str, Sequence[T]]  # by backend: who claims it
Place = Callable[[T, Claims[T]], Placed[R] | Blocked]


class Ahead(NamedTuple):
    """What is likely served before a ticket; its position is `requests + 1`."""

    requests: int
    tokens: int


class FairQueue(Generic[T]):
    """All that waits for one pool. `held` and `tenants` count it; they are for reading.

    A ticket leaves exactly once: by `take`, `remove`, `expired` or `drain`. What these cost does not
    grow with the number of tickets, but with the looks of a `take` and slowly with tenants and kinds.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        quantum_tokens: int = QUANTUM_TOKENS,
        max_passes: int = 16,
        max_looks: int = 32,
    ) -> None:
        self.limits = limits
        self.held = Held()
        self.tenants: dict[str, Held] = {}
        self._quantum_tokens = quantum_tokens
        self._max_passes = max_passes
        self._max_looks = max_looks
        self._next_number = 0
        self._tickets: dict[int, Ticket[T]] = {}
        self._bands: dict[int, Band[T]] = {}  # highest priority first
        self._kinds: dict[Hashable, int] = {}  # how many of each wait
        self._deadlines: list[tuple[float, int]] = []  # a heap; may name tickets that have left

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket[T]]:
        """Go through what is queued, in the order of the offers; do not change the queue meanwhile."""
        return iter(self._tickets.values())

    def __contains__(self, ticket: Ticket[T]) -> bool:
        return self._tickets.get(ticket.number) is ticket

    def offer(self, ticket: Ticket[T], *, bounded: bool = True) -> Full | None:
        """Queue a ticket, or return the bound that forbids it and change nothing.

        Unbounded is for one that is taken, or removed again, before anything else happens.

        Raises:
            ValueError: it is queued already. One that has left may be offered anew, at the back.
        """
        if ticket in self:
            raise ValueError("the ticket is queued already")
        full = self.full(ticket) if bounded else None
        if full is not None:
            return full
        ticket.number = self._next_number
        ticket.passes = ticket.turn = 0
        self._next_number += 1
        self._tickets[ticket.number] = ticket
        heappush(self._deadlines, (ticket.deadline, ticket.number))
        self.held.add(ticket)
        self._kinds[ticket.kind] = self._kinds.get(ticket.kind, 0) + 1
        self.tenants.setdefault(ticket.tenant, Held()).add(ticket)
        band = self._bands.get(ticket.priority)
        if band is None:
            self._bands[ticket.priority] = band = Band(self._quantum_tokens)
            self._bands = dict(sorted(self._bands.items(), reverse=True))
        band.add(ticket)
        return None

    def full(self, ticket: Ticket[T]) -> Full | None:
        """Return the bound for which `offer` would refuse a ticket now, None when it would not."""
        limits, ratio = self.limits, self.limits.tenant_ratio
        held, own = self.held, self.tenants.get(ticket.tenant, Held())
        checks = (
            (Full.REQUESTS, held.requests + 1 > limits.requests),
            (Full.TOKENS, held.tokens + ticket.cost_tokens > limits.tokens),
            (Full.BYTES, held.bytes + ticket.body_bytes > limits.bytes),
            (Full.TENANT_REQUESTS, own.requests >= limits.requests * ratio),
            (Full.TENANT_TOKENS, own.tokens + ticket.cost_tokens > limits.tokens * ratio),
            (Full.TENANT_BYTES, own.bytes + ticket.body_bytes > limits.bytes * ratio),
        )
        return next((full for full, over in checks if over), None)

    def take(self, place: Place[T, R]) -> tuple[Ticket[T], R] | None:
        """Take out the first ticket that `place` finds a backend for, with the value it gave.

        `place(item, claimed)` must not choose a claimed backend, but where it knows of room that those
        who claim it cannot have; nor touch the queue. When it raises, everything stays queued. Tickets
        past their deadline count as any other: call `expired` first.
        """
        claimed: dict[str, tuple[T, ...]] = {}
        blocked: list[tuple[Ticket[T], frozenset[str]]] = []
        shut: set[Hashable] = set()  # kinds that are left out of the rest of the walk
        looks: dict[Hashable, int] = {}  # that are left of each
        spare = 2 * self._max_looks  # for those not tried yet
        for ticket in self._walk(shut):
            kind = ticket.kind
            left = looks.get(kind)
            if left is None:
                left = (spare + 1) // 2
                spare -= left
            if left:
                verdict = place(ticket.item, claimed)
                if isinstance(verdict, Placed):
                    self._serve(ticket, blocked, verdict.backend_id)
                    return ticket, verdict.value
                left -= 1
                if verdict.kind:
                    spare, left = spare + left, 0
                else:
                    blocked.append((ticket, verdict.backend_ids))
                    if ticket.passes >= self._max_passes:
                        _claim(claimed, ticket.item, verdict)
            looks[kind] = left
            if not left:
                shut.add(kind)
                if len(shut) == len(self._kinds):
                    break
        return None

    def remove(self, ticket: Ticket[T]) -> bool:
        """Take out a ticket whose client left; False, and nothing done, when it is not queued."""
        if ticket not in self:
            return False
        self._drop(ticket)
        return True

    def expired(self, now: float) -> list[Ticket[T]]:
        """Take out every ticket whose deadline is not after `now`, the earliest deadline first."""
        found = []
        while self._deadlines and self._deadlines[0][0] <= now:
            ticket = self._tickets.get(heappop(self._deadlines)[1])
            if ticket is not None:
                self._drop(ticket)
                found.append(ticket)
        return found

    @property
    def highest(self) -> int:
        """The highest priority that waits; 0 when nothing does."""
        return next(iter(self._bands), 0)

    @property
    def oldest_at(self) -> float | None:
        """When what has waited longest was offered; None when nothing waits."""
        oldest = next(iter(self._tickets.values()), None)
        return None if oldest is None else oldest.offered_at

    def next_deadline(self) -> float | None:
        """Return the earliest deadline of what is queued, None when nothing is."""
        while self._deadlines and self._deadlines[0][1] not in self._tickets:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def ahead(self, ticket: Ticket[T]) -> Ahead:
        """Estimate what is served before a ticket, be it queued or only about to be offered.

        Counts all of the higher bands, and of its own what goes by the fair order. Low by what lower
        bands are owed, by what is yet to come, and by what left its tenant's line behind it; blind to
        what is blocked. Takes time by the number of tenants.
        """
        requests = tokens = 0.0
        for priority, band in self._bands.items():
            if priority > ticket.priority:
                requests += band.held.requests
                tokens += band.held.tokens
            elif priority == ticket.priority:
                own_requests, own_tokens = band.ahead(ticket, queued=ticket in self)
                requests += own_requests
                tokens += own_tokens
        return Ahead(round(requests), round(tokens))

    def resize(self, limits: Limits) -> None:
        """Bound further offers by `limits`; what is queued stays, even if it is over them."""
        self.limits = limits

    def drain(self) -> list[Ticket[T]]:
        """Take out everything, in the order of the offers."""
        tickets = [*self._tickets.values()]
        for ticket in tickets:
            self._drop(ticket)
        return tickets

    def _walk(self, shut: AbstractSet[Hashable]) -> Iterator[Ticket[T]]:
        """Go through a few tickets of each band that is due, then all in fair order, but for `shut` kinds."""
        walks = [(band, band.walk(shut)) for band in self._bands.values()]
        few = max(1, self._max_looks // (2 * len(walks) or 1))
        for band, walk in walks:
            if band.due:
                yield from islice(walk, few)
        for _, walk in walks:
            yield from walk

    def _serve(
        self, ticket: Ticket[T], blocked: list[tuple[Ticket[T], frozenset[str]]], backend_id: str
    ) -> None:
        """Let a ticket go to a backend, past those that were found blocked."""
        passing = self._pass(blocked, ticket.priority, backend_id)
        for priority, band in self._bands.items():
            if priority < ticket.priority:
                band.owe(ticket.cost_tokens)
        self._bands[ticket.priority].serve(ticket, passing=passing)
        self._forget(ticket)

    def _pass(
        self, blocked: list[tuple[Ticket[T], frozenset[str]]], priority: int, backend_id: str
    ) -> bool:
        """Count a pass of every ticket that could use the backend; return whether the band has one."""
        found = False
        for ticket, backend_ids in blocked:
            if backend_id in backend_ids and ticket.passes < self._max_passes:
                ticket.passes += 1
                found |= ticket.priority == priority
        return found

    def _drop(self, ticket: Ticket[T]) -> None:
        self._bands[ticket.priority].drop(ticket)
        self._forget(ticket)

    def _forget(self, ticket: Ticket[T]) -> None:
        """Count out a ticket that has left its band."""
        del self._tickets[ticket.number]
        self.held.drop(ticket)
        count = self._kinds.pop(ticket.kind)
        if count > 1:
            self._kinds[ticket.kind] = count - 1
        own = self.tenants[ticket.tenant]
        own.drop(ticket)
        if not own.requests:
            del self.tenants[ticket.tenant]
        if not self._bands[ticket.priority].held.requests:
            del self._bands[ticket.priority]
        if len(self._deadlines) > 2 * len(self._tickets) + _STALE_DEADLINES:
            self._deadlines = [each for each in self._deadlines if each[1] in self._tickets]
            heapify(self._deadlines)


def _claim(claimed: dict[str, tuple[T, ...]], item: T, verdict: Blocked) -> None:
    for each in verdict.backend_ids if verdict.best is None else (verdict.best,):
        claimed[each] = (*claimed.get(each, ()), item)
