"""The requests of one priority, in fair order between tenants.

Self-clocked fair queueing (Golestani 1994), counted in tokens. Each tenant has a `start`, and its next
request the tag `start + cost`. The least tag goes; of equal ones, that of the tenant which came first.
The tag becomes the tenant's start, and the band's clock shows the largest tag served. A tenant with
nothing waiting is forgotten; when it comes, it starts at the clock:

    tenant   start   next costs   tag
    a          300          100   400   goes; now its start and the clock are 400
    b          200          250   450
    c          300         1000  1300   goes when a and b were served up to 1300

Two tenants that came together, always have a request waiting and are never blocked are served alike, but
for one request: who is served has the lower tag, so it got no more than the other did with its next one.

Within a tenant, the request that is next stays next. After it go those that were refused before and came
again as they were told, then the others, both in order of arrival. If the next one leaves unserved, the
one behind it takes its turn over.

After a blocked request the one that follows it is tried with the tag that it would have if the blocked
one had been served. So small requests can pass a large one of their tenant, and tries are shared out as
service is. A tenant that was blocked while others were served saves up no turns: when it is
served next, its start rises to the clock of that time at least.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right, insort
from collections.abc import Hashable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import attrgetter
from typing import Final

from gateway.admission.bounds import Held
from gateway.admission.waiting import Waiting

Tagged = tuple[int, int, Waiting, "Tenant"]  # by tag, then by the tenant's number

_BAND_SHARE: Final = 20  # a waiting band is given 1 token for every 20 (5 %) that higher bands are

_order = attrgetter("order")


@dataclass(slots=True, eq=False)
class Tenant:
    """What one tenant has waiting in one band."""

    start: int
    number: int  # of the request with which it came
    floor: int = 0  # the clock when others were last served while all of it was blocked
    next: Waiting | None = None
    place: tuple[int, int] = (0, 0)  # the tag of the next, and its own number
    kinds: dict[Hashable, list[Waiting]] = field(default_factory=dict)  # the rest, in order
    held: Held = field(default_factory=Held)

    def add(self, waiting: Waiting) -> None:
        """Queue a request."""
        self.held.add(waiting.cost_tokens, waiting.body_bytes)
        if self.next is None:
            self.next = waiting
        else:
            insort(self.kinds.setdefault(waiting.kind, []), waiting, key=_order)

    def drop(self, waiting: Waiting) -> None:
        """Let a request go."""
        self.held.drop(waiting.cost_tokens, waiting.body_bytes)
        if waiting is self.next:
            self.next = following = self.after(waiting)
            if following is None:
                return
            waiting = following
        line = self.kinds[waiting.kind]
        del line[bisect_left(line, waiting.order, key=_order)]
        if not line:
            del self.kinds[waiting.kind]

    def after(self, waiting: Waiting, shut: AbstractSet[Hashable] = frozenset()) -> Waiting | None:
        """Return its request that follows another, leaving out those of kinds that are shut."""
        first = waiting is self.next
        found = [
            line[at]
            for kind, line in self.kinds.items()
            if kind not in shut
            and (at := 0 if first else bisect_right(line, waiting.order, key=_order)) < len(line)
        ]
        return min(found, key=_order, default=None)

    def ahead(self, waiting: Waiting) -> tuple[int, int]:
        """Return how many of its requests and tokens go before one of them, be that queued or not."""
        if waiting is self.next or self.next is None:
            return 0, 0
        if waiting.number < 0 and not waiting.returned:
            return self.held.requests, self.held.tokens
        before = [self.next]
        for line in self.kinds.values():
            before += line[: bisect_left(line, waiting.order, key=_order)]
        return len(before), sum(each.cost_tokens for each in before)


@dataclass(slots=True, eq=False)
class Band:
    """All that waits with one priority."""

    clock: int = 0
    owed: int = 0  # tokens given to higher bands; one in `_BAND_SHARE` of them is owed to this one
    held: Held = field(default_factory=Held)
    tenants: dict[str, Tenant] = field(default_factory=dict)
    order: list[Tagged] = field(default_factory=list)  # of the next of each tenant, sorted
    idle: list[Tenant] = field(default_factory=list)  # of which the walk found nothing that can go

    def add(self, waiting: Waiting) -> None:
        """Queue a request."""
        self.held.add(waiting.cost_tokens, waiting.body_bytes)
        tenant = self.tenants.get(waiting.tenant)
        if tenant is None:
            tenant = self.tenants[waiting.tenant] = Tenant(self.clock, waiting.number)
        tenant.add(waiting)
        if tenant.next is waiting:
            self._put(tenant, waiting)

    def drop(self, waiting: Waiting) -> None:
        """Let a request go, at no cost to its tenant."""
        self.held.drop(waiting.cost_tokens, waiting.body_bytes)
        tenant = self.tenants[waiting.tenant]
        tenant.drop(waiting)
        del self.order[bisect_left(self.order, tenant.place)]
        if tenant.next is None:
            del self.tenants[waiting.tenant]
        else:
            self._put(tenant, tenant.next)

    def pay(self, waiting: Waiting) -> None:
        """Charge a tenant for a request that goes."""
        tenant, cost = self.tenants[waiting.tenant], waiting.cost_tokens
        tenant.start = max(tenant.start + cost, tenant.floor)
        self.clock = max(self.clock, tenant.start)
        self.owed = max(0, self.owed - _BAND_SHARE * cost)
        for each in self.idle:
            each.floor = self.clock

    def walk(self, shut: AbstractSet[Hashable]) -> Iterator[Waiting]:
        """Go through the requests by their tags. Asking for the next one says that this is blocked.

        Those of a kind that is, or meanwhile comes to be, in `shut` are left out.
        """
        self.idle, at = [], 0
        later: list[Tagged] = []  # a heap: of those that follow blocked ones
        while later or at < len(self.order):
            if at == len(self.order) or (later and later[0] < self.order[at]):
                tag, number, waiting, tenant = heappop(later)
            else:
                tag, number, waiting, tenant = self.order[at]
                at += 1
            if waiting.kind not in shut:
                yield waiting
            following = tenant.after(waiting, shut)
            if following is not None:
                heappush(later, (tag + following.cost_tokens, number, following, tenant))
            else:
                self.idle.append(tenant)

    def owe(self, tokens: int) -> None:
        """Note what a higher band was given; no more is saved up than pays for the first request."""
        self.owed = min(self.owed + tokens, _BAND_SHARE * self.order[0][2].cost_tokens)

    @property
    def due(self) -> bool:
        """Whether what the band is owed pays for its first request."""
        return self.owed >= _BAND_SHARE * self.order[0][2].cost_tokens

    def ahead(self, waiting: Waiting) -> tuple[float, float]:
        """Estimate the requests and tokens of this band that are served before a request."""
        own = self.tenants.get(waiting.tenant) or Tenant(self.clock, sys.maxsize)
        own_requests, own_tokens = own.ahead(waiting)
        requests, tokens = float(own_requests), float(own_tokens)
        tag = own.start + own_tokens + waiting.cost_tokens
        for _, _, _, other in self.order[: bisect_left(self.order, (tag, own.number))]:
            if other is not own:
                earns = tag - max(other.start, other.floor)
                share = min(1.0, max(0, earns) / other.held.tokens)
                requests += share * other.held.requests
                tokens += share * other.held.tokens
        return requests, tokens

    def _put(self, tenant: Tenant, waiting: Waiting) -> None:
        tenant.place = tenant.start + waiting.cost_tokens, tenant.number
        insort(self.order, (*tenant.place, waiting, tenant))
