"""The fair order of the tickets of one priority: deficit round robin between tenants.

A tenant earns one quantum per turn, and its next ticket goes in the turn in which its quanta add up
to what the ticket costs. Turns are numbers here, in place of a ring that goes round: a ticket of a
hundred quanta takes no more steps than a small one, and a candidate keeps its place.

    waiting (first in, first out)         candidates (sorted: turn, line, rank)
    a: a3 a4 a5          --advance-->     (4 a a1) (5 a a2) (5 b b1)
    b: b2                                     ^ blocked: a2 became a candidate as well

What was refused and came again as it was told has waited longer than its tenant's other tickets, and
becomes a candidate before them. Between tenants it changes nothing.

A tenant's tickets of several kinds, which other backends can take, become candidates one of each kind
in turn: however many of a kind find no room, they keep none of another kind from its turn. All kinds
are paid from the one account of the tenant.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

T = TypeVar("T")

_BAND_SHARE: Final = 20  # a waiting band is given 1 token for every 20 (5 %) that higher bands are
_LAST: Final = 1 << 62  # behind the number of every line


@dataclass(slots=True)
class Held:
    """How much waits."""

    requests: int = 0
    tokens: int = 0
    bytes: int = 0

    def add(self, ticket: Ticket[T]) -> None:
        """Count a ticket in."""
        self.requests += 1
        self.tokens += ticket.cost_tokens
        self.bytes += ticket.body_bytes

    def drop(self, ticket: Ticket[T]) -> None:
        """Count a ticket out."""
        self.requests -= 1
        self.tokens -= ticket.cost_tokens
        self.bytes -= ticket.body_bytes


@dataclass(slots=True, eq=False)
class Ticket(Generic[T]):
    """One request that wants to wait. The queue's own fields come last; others only read them."""

    item: T
    tenant: str
    priority: int  # its band; higher goes first
    cost_tokens: int  # what it will take of a backend; counts as 1 at least
    body_bytes: int
    offered_at: float
    deadline: float
    returned: bool = False  # it was refused before, and came again as it was told
    kind: Hashable = None  # but for its size, the same backends can take all of one kind
    passes: int = field(default=0, init=False)  # later ones that went where it could have gone
    number: int = field(default=-1, init=False)  # order of offers
    turn: int = field(default=0, init=False)  # when it may go; 0: not a candidate yet
    rank: int = field(default=0, init=False)  # order of candidates
    earlier: tuple[int, int] = field(default=(0, 0), init=False)  # its lane's offers before it

    def __post_init__(self) -> None:
        self.cost_tokens = max(1, self.cost_tokens)


@dataclass(slots=True, eq=False)
class Lane(Generic[T]):
    """Tickets that go in the order of their offers."""

    held: Held = field(default_factory=Held)  # candidates too
    offered: tuple[int, int] = (0, 0)  # requests and tokens, ever
    waiting: OrderedDict[int, Ticket[T]] = field(default_factory=OrderedDict)

    def add(self, ticket: Ticket[T]) -> None:
        """Queue a ticket."""
        ticket.earlier = requests, tokens = self.offered
        self.offered = requests + 1, tokens + ticket.cost_tokens
        self.held.add(ticket)
        self.waiting[ticket.number] = ticket

    def before(self, earlier: tuple[int, int]) -> tuple[int, int]:
        """Return the requests and tokens of what is held of the offers before."""
        requests = self.held.requests - (self.offered[0] - earlier[0])
        tokens = self.held.tokens - (self.offered[1] - earlier[1])
        return max(0, requests), max(0, tokens)


@dataclass(slots=True, eq=False)
class Kind(Generic[T]):
    """One tenant's tickets of one priority and one kind."""

    returned: Lane[T] = field(default_factory=Lane)
    fresh: Lane[T] = field(default_factory=Lane)
    front: Ticket[T] | None = None  # the candidate that was not found blocked by itself
    shut: bool = False  # all of the kind were found blocked when this was last walked by

    def lane(self, ticket: Ticket[T]) -> Lane[T]:
        """Return where a ticket belongs."""
        return self.returned if ticket.returned else self.fresh

    @property
    def requests(self) -> int:
        """How many it holds."""
        return self.returned.held.requests + self.fresh.held.requests

    @property
    def tokens(self) -> int:
        """What they cost."""
        return self.returned.held.tokens + self.fresh.held.tokens

    def next(self) -> Ticket[T] | None:
        """Take out the ticket that is to become a candidate, if any waits."""
        lane = self.returned if self.returned.waiting else self.fresh
        return lane.waiting.popitem(last=False)[1] if lane.waiting else None

    def before(self, ticket: Ticket[T], *, queued: bool) -> tuple[int, int]:
        """Return the requests and tokens of its own that go before a ticket."""
        lane = self.lane(ticket)
        requests, tokens = lane.before(ticket.earlier if queued else lane.offered)
        if queued and ticket.turn:
            return requests, tokens
        if not ticket.returned:
            held = self.returned.held
            return requests + held.requests, tokens + held.tokens
        if self.front is not None and not self.front.returned:
            return requests + 1, tokens + self.front.cost_tokens
        return requests, tokens


@dataclass(slots=True, eq=False)
class Line(Generic[T]):
    """One tenant's tickets of one priority."""

    number: int
    spent_tokens: int  # what it was served, and what it earned in turns when it had nothing to try
    charged_tokens: int = 0  # what its candidates cost
    turn: int = 0  # of the latest candidate; a later one never gets an earlier turn
    held: Held = field(default_factory=Held)
    kinds: dict[Hashable, Kind[T]] = field(default_factory=dict)  # that hold any

    @property
    def idle(self) -> bool:
        """Whether it has nothing to try: what it holds was found blocked, if it holds any."""
        return all(kind.front is None or kind.shut for kind in self.kinds.values())

    def before(self, ticket: Ticket[T], *, queued: bool) -> tuple[float, float]:
        """Return the requests and tokens of its own that go before a ticket; kinds take turns."""
        kind = self.kinds.get(ticket.kind) or Kind()
        own, cost = kind.before(ticket, queued=queued)
        first = ticket if queued and ticket.turn else kind.front
        requests: float = own
        tokens: float = cost
        for other in self.kinds.values():
            if other is not kind:
                later = first and other.front and other.front.rank > first.rank
                turns = min(other.requests, own + (not later))
                requests += turns
                tokens += other.tokens * turns / other.requests
        return requests, tokens


@dataclass(slots=True, eq=False)
class Band(Generic[T]):
    """All tickets of one priority. One that holds any ticket has a candidate."""

    quantum_tokens: int
    turn: int = 0  # the latest of a ticket that was served without passing another of the band
    owed: int = 0  # tokens given to higher bands; one in `_BAND_SHARE` of them is owed to this one
    ranks: int = 0  # given so far
    held: Held = field(default_factory=Held)
    lines: dict[str, Line[T]] = field(default_factory=dict)
    candidates: list[tuple[int, int, int, Ticket[T]]] = field(default_factory=list)

    def add(self, ticket: Ticket[T]) -> None:
        """Queue a ticket behind those of its tenant; one that has returned behind those that have."""
        line = self.lines.get(ticket.tenant)
        if line is None:
            line = self.lines[ticket.tenant] = Line(ticket.number, 0)
        kind = line.kinds.get(ticket.kind)
        if kind is None:
            kind = line.kinds[ticket.kind] = Kind()
        self.held.add(ticket)
        line.held.add(ticket)
        kind.lane(ticket).add(ticket)
        if kind.front is None:
            self._forfeit(line)
            self._advance(line, kind)

    def serve(self, ticket: Ticket[T], *, passing: bool) -> None:
        """Let a ticket go at its tenant's cost; `passing` when it counted as a pass of one in the band.

        Then the turn stays: a tenant that comes now goes right after those whose turn it is, not
        after all that were tried in vain. As passes are bounded, the turn soon moves on.
        """
        if not passing:
            self.turn = max(self.turn, ticket.turn)
        self.owed = max(0, self.owed - _BAND_SHARE * ticket.cost_tokens)
        self.lines[ticket.tenant].spent_tokens += ticket.cost_tokens
        self.drop(ticket)

    def drop(self, ticket: Ticket[T]) -> None:
        """Let a ticket go, at no cost to its tenant."""
        line = self.lines[ticket.tenant]
        kind = line.kinds[ticket.kind]
        lane = kind.lane(ticket)
        self.held.drop(ticket)
        line.held.drop(ticket)
        lane.held.drop(ticket)
        if not ticket.turn:
            del lane.waiting[ticket.number]
            return
        place = (ticket.turn, line.number, ticket.rank)
        del self.candidates[bisect_left(self.candidates, place)]
        line.charged_tokens -= ticket.cost_tokens
        if kind.front is ticket:
            self._advance(line, kind)
        if not kind.requests:
            del line.kinds[ticket.kind]
        if not line.kinds:
            del self.lines[ticket.tenant]

    def walk(self, shut: AbstractSet[Hashable]) -> Iterator[Ticket[T]]:
        """Go through the tickets in fair order. Asking for the next one says that this is blocked.

        Those of a kind that is, or meanwhile comes to be, in `shut` are left out; their turns stay.
        """
        at = 0
        while at < len(self.candidates):
            ticket = self.candidates[at][-1]
            line = self.lines[ticket.tenant]
            kind = line.kinds[ticket.kind]
            if ticket.kind not in shut:
                if kind.shut and ticket.turn < self.turn:
                    self._forfeit(line)
                kind.shut = False
                yield ticket
            if ticket.kind in shut:
                kind.shut = True
            elif kind.front is ticket:  # it stays where it is, and the next of the kind may try
                self._advance(line, kind)
            at += 1

    @property
    def due(self) -> bool:
        """Whether what the band is owed pays for its first ticket."""
        return self.owed >= _BAND_SHARE * self.candidates[0][-1].cost_tokens

    def owe(self, tokens: int) -> None:
        """Note what a higher band was given; no more is saved up than the first ticket costs."""
        self.owed = min(self.owed + tokens, _BAND_SHARE * self.candidates[0][-1].cost_tokens)

    def ahead(self, ticket: Ticket[T], *, queued: bool) -> tuple[float, float]:
        """Estimate the requests and tokens of this band that are served before a ticket.

        These are its tenant's earlier ones, and what the others earn until the turn in which it goes.
        """
        line = self.lines.get(ticket.tenant)
        if line is None:
            line = Line(_LAST, self.turn * self.quantum_tokens)
        requests, tokens = line.before(ticket, queued=queued)
        turn: float = ticket.turn
        if not (queued and turn):
            turn = -(-(line.spent_tokens + tokens + ticket.cost_tokens) // self.quantum_tokens)
        for other in self.lines.values():
            if other is not line:
                turns = turn if other.number < line.number else turn - 1
                earned = max(0.0, turns * self.quantum_tokens - other.spent_tokens)
                share = min(1.0, earned / other.held.tokens)
                requests += share * other.held.requests
                tokens += share * other.held.tokens
        return requests, tokens

    def _forfeit(self, line: Line[T]) -> None:
        """Take from an idle line what it earned: turns in which nothing could be tried are not saved up."""
        if line.idle:
            earned = self.turn * self.quantum_tokens - line.charged_tokens
            line.spent_tokens = max(line.spent_tokens, earned)

    def _advance(self, line: Line[T], kind: Kind[T]) -> None:
        """Make the kind's next ticket a candidate, in the first turn whose quanta pay for it."""
        kind.front = ticket = kind.next()
        if ticket is None:
            return
        line.charged_tokens += ticket.cost_tokens
        paid_in = -(-(line.spent_tokens + line.charged_tokens) // self.quantum_tokens)
        ticket.turn = line.turn = max(paid_in, line.turn)
        ticket.rank = self.ranks = self.ranks + 1
        insort(self.candidates, (ticket.turn, line.number, ticket.rank, ticket))
