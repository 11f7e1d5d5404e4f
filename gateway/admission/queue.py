"""The bounded, fair queue of one pool: who goes next.

Pure and synchronous. Time comes in as monotonic seconds, backends only as the ids that `place` tells.
`take` asks `place` for one request after the other until one finds room:

    walk  band 9   a1  could use {x}, no room     stays first; later ones may pass it
           |       b1  could use {x, y}, no room  was passed 16 times: it claims x and y
           |       c1  claimed = {x, y}           goes to z; no pass, as neither a1 nor b1 can use z
           v       a2 ...
          band 0   d1 ...

* The higher priority (band) goes first. While a lower band waits it is owed 5 % of the tokens given to
  higher ones; when that pays for its first request, it is looked at before them. So no band starves.
* In a band the order is fair between tenants, see `band`.
* A request that goes where a blocked one before it could go too has passed it. What was passed 16 times
  claims a backend: no later request may go there, room adds up, and no crowd of small ones starves it.
* To a backend, requests of one `kind` differ in size alone. When `place` finds a kind shut, the rest of
  the kind costs no look, however many wait. One walk has 64 looks. A kind that had as many of them as
  are left is left out from then on, so a crowd of requests that fit nowhere leaves looks for the others.
  So are those that wait for one backend, where they could go to another, once as many had a look.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Final

from gateway.admission.band import Band
from gateway.admission.bounds import Full, Held, Limits
from gateway.admission.waiting import Waiting
from gateway.core.types import Slot

_STALE_DEADLINES: Final = 64  # of requests that have left: with fewer, the heap is not swept
_STEPS_PER_LOOK: Final = 4  # of a walk: to pass somebody over without a look costs a microsecond


@dataclass(frozen=True, slots=True)
class Blocked:
    """No backend can take the request now. `backend_ids` could once they have room, claimed ones included.

    `best` is the backend that a request claims when it was passed too often: probably the first with room.
    None: it claims all of them. Name no backend that will never have room: a claimed one takes no later request.
    """

    backend_ids: frozenset[str]
    best: str | None = None
    awaits: bool = False  # it waits for `best`, though another backend may have room
    shut: bool = False  # no request of its kind can be placed while this walk lasts
    lost: bool = False  # no backend will ever be able to take it


Claims = Mapping[str, Sequence[Waiting]]  # by backend: who claims it
Place = Callable[[Waiting, Claims], Slot | Blocked]


class _Looks:
    """How many looks one walk has left, and whom it passes over."""

    def __init__(self, left: int, out: set[Hashable]) -> None:
        self.left = left
        self.out = out  # kinds
        self.crowded: set[str | None] = set()  # backends, for which those were seen to wait
        self._by: dict[Hashable, int] = {}  # kind, or awaited backend

    def note(self, waiting: Waiting, found: Blocked) -> None:
        """Note a look that found no room."""
        waiting.awaits = found.best if found.awaits else None
        whom = waiting.awaits or waiting.kind
        self._by[whom] = self._by.get(whom, 0) + 1
        self.left -= 1
        are_many = self._by[whom] >= self.left
        if found.awaits:
            if are_many:
                self.crowded.add(found.best)
        elif found.shut or are_many:
            self.out.add(waiting.kind)


class FairQueue:
    """All that waits for one pool. `held` and `tenants` count it; they are for reading.

    A request leaves exactly once: by `take`, `remove`, `expired` or `drain`. What these cost does not
    grow with the number that wait, but with the looks of a `take` and slowly with tenants and kinds.
    """

    def __init__(self, limits: Limits, *, max_passes: int = 16, max_looks: int = 64) -> None:
        self.limits = limits
        self.held = Held()
        self.tenants: dict[str, Held] = {}
        self._max_passes = max_passes
        self._max_looks = max_looks
        self._next_number = 0
        self._waiting: dict[int, Waiting] = {}
        self._bands: dict[int, Band] = {}  # highest priority first
        self._kinds: Counter[Hashable] = Counter()  # how many of each wait
        self._deadlines: list[tuple[float, int]] = []  # a heap; may name what has left

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Waiting]:
        """Go through what waits, in order of arrival; do not change the queue meanwhile."""
        return iter(self._waiting.values())

    def offer(self, waiting: Waiting) -> None:
        """Queue a new request. Ask `full` before, but for one that is to be taken or removed at once."""
        waiting.number = self._next_number
        waiting.order = not waiting.returned, waiting.number
        self._next_number += 1
        self._waiting[waiting.number] = waiting
        self._kinds[waiting.kind] += 1
        heappush(self._deadlines, (waiting.deadline, waiting.number))
        for held in (self.held, self.tenants.setdefault(waiting.tenant, Held())):
            held.add(waiting.cost_tokens, waiting.body_bytes)
        if waiting.priority not in self._bands:
            bands = {**self._bands, waiting.priority: Band()}
            self._bands = dict(sorted(bands.items(), reverse=True))
        self._bands[waiting.priority].add(waiting)

    def full(self, waiting: Waiting) -> Full | None:
        """Return the bound that a request would break if it was queued now; None: it may wait."""
        held, own = self.counted(waiting.tenant, waiting.priority)
        return self.limits.full(held, own, waiting.cost_tokens, waiting.body_bytes)

    def counted(self, tenant: str, priority: int) -> tuple[Held, Held]:
        """Return what waits with a priority or a higher one, of all and of a tenant: its bounds count that."""
        held, own = Held(), Held()
        for each, band in self._bands.items():
            if each < priority:
                break
            held.include(band.held)
            if tenant in band.tenants:
                own.include(band.tenants[tenant].held)
        return held, own

    def take(
        self, place: Place, shut: AbstractSet[Hashable] = frozenset()
    ) -> tuple[Waiting, Slot] | None:
        """Take out the first request that `place` finds a slot for, with the slot; none of kinds that are `shut`.

        `place(waiting, claimed)` must not touch the queue. It must not choose a claimed backend, unless there
        is room that those who claim it cannot have. When it raises, everything stays queued.
        Requests past their deadline count as any other: call `expired` first.
        """
        claimed: dict[str, tuple[Waiting, ...]] = {}
        blocked: list[tuple[Waiting, frozenset[str]]] = []
        looks = _Looks(self._max_looks, {*(shut & self._kinds.keys())})
        if len(looks.out) == len(self._kinds):
            return None
        for waiting in islice(self._walk(looks.out), _STEPS_PER_LOOK * looks.left):
            if waiting.awaits in looks.crowded:
                continue
            found = place(waiting, claimed)
            if isinstance(found, Slot):
                self._serve(waiting, blocked, found.backend_id)
                return waiting, found
            looks.note(waiting, found)
            if not found.shut:
                blocked.append((waiting, found.backend_ids))
                if waiting.passes >= self._max_passes:
                    for each in found.backend_ids if found.best is None else (found.best,):
                        claimed[each] = (*claimed.get(each, ()), waiting)
            if not looks.left or len(looks.out) == len(self._kinds):
                break
        return None

    def hurry(self, waiting: Waiting, deadline: float) -> None:
        """Bring the deadline of a queued request forward; one that is earlier already stays."""
        if waiting.hurry(deadline):
            heappush(self._deadlines, (deadline, waiting.number))

    def remove(self, waiting: Waiting) -> bool:
        """Take out a request whose client left; False, and nothing done, when it is not queued."""
        if waiting not in self:
            return False
        self._drop(waiting)
        return True

    def expired(self, now: float) -> list[Waiting]:
        """Take out every request whose deadline is not after `now`, the earliest deadline first."""
        late = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            late.append(self._drop(self._waiting[self._deadlines[0][1]]))
        return late

    def drain(self) -> list[Waiting]:
        """Take out everything, in order of arrival."""
        return [self._drop(waiting) for waiting in [*self]]

    @property
    def highest(self) -> int:
        """The highest priority that waits; 0 when nothing does."""
        return next(iter(self._bands), 0)

    @property
    def oldest_at(self) -> float | None:
        """When what has waited longest came; None when nothing waits."""
        oldest = next(iter(self), None)
        return None if oldest is None else oldest.came_at

    def next_deadline(self) -> float | None:
        """Return the earliest deadline of what waits, None when nothing does."""
        while self._deadlines and self._deadlines[0][1] not in self._waiting:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def ahead(self, waiting: Waiting) -> Held:
        """Estimate what is served before a request, be it queued or only about to be offered.

        Counts all of the higher bands, and what goes before it in its own by the fair order. What lower bands
        are owed, what has yet to come, and what is blocked is left out. The position of the request is
        `requests` plus one. The time grows with the tenants, and with the requests of its own before it.
        """
        band = self._bands.get(waiting.priority) or Band()
        requests, tokens = band.ahead(waiting)
        for priority, higher in self._bands.items():
            if priority > waiting.priority:
                requests += higher.held.requests
                tokens += higher.held.tokens
        return Held(round(requests), round(tokens))

    def _walk(self, shut: AbstractSet[Hashable]) -> Iterator[Waiting]:
        """Go through a few requests of each band that is due, then through all, but for `shut` kinds."""
        walks = [(band, band.walk(shut)) for band in self._bands.values()]
        for band, walk in walks:
            if band.due:
                yield from islice(walk, max(1, self._max_looks // (4 * len(walks))))
        for _, walk in walks:
            yield from walk

    def _serve(
        self, waiting: Waiting, blocked: list[tuple[Waiting, frozenset[str]]], backend_id: str
    ) -> None:
        """Let a request go to a backend, past those that were found blocked."""
        for passed, backend_ids in blocked:
            if backend_id in backend_ids:
                passed.passes = min(passed.passes + 1, self._max_passes)
        for priority, band in self._bands.items():
            if priority < waiting.priority:
                band.owe(waiting.cost_tokens)
        self._bands[waiting.priority].pay(waiting)
        self._drop(waiting)

    def _drop(self, waiting: Waiting) -> Waiting:
        """Let a request go."""
        del self._waiting[waiting.number]
        own, band = self.tenants[waiting.tenant], self._bands[waiting.priority]
        for held in (self.held, own):
            held.drop(waiting.cost_tokens, waiting.body_bytes)
        if not own.requests:
            del self.tenants[waiting.tenant]
        band.drop(waiting)
        if not band.tenants:
            del self._bands[waiting.priority]
        self._kinds[waiting.kind] -= 1
        if not self._kinds[waiting.kind]:
            del self._kinds[waiting.kind]
        if len(self._deadlines) > 2 * len(self._waiting) + _STALE_DEADLINES:
            self._deadlines = [(each.deadline, each.number) for each in self._waiting.values()]
            heapify(self._deadlines)
        return waiting
