"""The line of one pool: who waits, who is let in when there is room, who is refused meanwhile."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Hashable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Final

from gateway.admission.announce import announce
from gateway.admission.bounds import Limits
from gateway.admission.forecast import Forecast
from gateway.admission.patience import Patience
from gateway.admission.queue import Blocked, Claims, FairQueue
from gateway.admission.refusals import (
    kept_for_others,
    no_backend,
    starting,
    starts_late,
    waited_too_long,
)
from gateway.admission.waiting import (
    Announce,
    Finder,
    Waiting,
    all_start,
    awaits,
    awaits_load,
    coming,
    covers,
    left_alone,
    needs_as_much,
    place_at,
    starts_in_s,
)
from gateway.config.models import Admission, PoolConfig
from gateway.core.aio import Clock, after_reading
from gateway.core.endpoints import NO_ENGINE
from gateway.core.errors import GatewayError
from gateway.core.exclusion import AWAITS_ADAPTER
from gateway.core.types import SERVING, Ask, Need, Slot
from gateway.pools.room import LEAST
from gateway.pools.table import Backend, PoolTable

Kinds = dict[tuple[object, ...], Blocked]

_NOTHING: Final[frozenset[str]] = frozenset()
_DOUBT: Final = 4.0  # for a tenant's only request, see `Line.doubt`
_SOON_S: Final = 1.0  # whoever waits no longer than this knows soon enough
_LATE_S: Final = 0.01  # a timer that is later: the loop was held up
_HOPELESS: Final = 1.5  # times the time that is left: how long a start takes is an estimate


class Line:
    """What waits for one pool. Synchronous; everything it decides reaches `Waiting.turn`."""

    def __init__(
        self, pool: str, limits: Limits, table: PoolTable, finder: Finder, clock: Clock, rng: random.Random
    ) -> None:  # fmt: skip
        self.queue = FairQueue(limits)
        self.forecast = Forecast(self.queue, partial(table.backends, pool), rng)
        self.patience = Patience()
        self.top_priority: int | None = None  # as of `Gate`
        self._guarded = True  # admission is on
        self._slo_s: float | None = None  # `slo.ttft`, if it is set
        self._pool = pool
        self._table = table
        self._finder = finder
        self._clock = clock
        self._rng = rng
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._seen: tuple[object, ...] = ()  # revision and sizes: when last looked who is lost
        self._loading: set[Hashable] = set()  # kinds that wait for their adapter everywhere
        self._revision = -1  # of the table, when that was found
        self._fitting = (0.0, 0.0)  # of the backends then, the smallest KV cache and window

    def follow(self, pool: PoolConfig, top_priority: int | None) -> None:
        """Take over settings."""
        self.top_priority = top_priority
        self._guarded = pool.admission is Admission.ON
        self._slo_s = pool.slo.ttft if "ttft" in pool.slo.model_fields_set else None

    # --- told -------------------------------------------------------------------------------------

    def let_in(self) -> None:
        """Let in who may go now; called whenever there may be more room."""
        if not self.queue:
            return
        now, backends = self._clock.now(), self._backends
        serving = [each for each in backends if each.phase in SERVING]
        if serving:
            self._look_for_lost(now)
            self._place(serving, now)
        if serving or any(map(coming, backends)):
            self._arm()
        else:
            self.close()

    def _place(self, serving: Sequence[Backend], now: float) -> None:
        """Let in those for whom there is room.

        Once a request finds none, those like it that need as much or more are skipped.
        """
        # What keeps out such a request keeps out all, but for one whose prompt is cached where others are
        # still read: that stands back for those who wait.
        best = self.queue.highest, self.top_priority
        full = {each.id for each in serving if each.obstacle(LEAST, now, *best) is not None}
        if self._revision != self._table.revision:
            self._revision, self._loading = self._table.revision, set()
        kinds: Kinds = {}
        blocked: dict[tuple[object, ...], Need] = {}  # the smallest that found no room, by `alike`
        before: dict[str, float] = {}  # seconds that those will take who wait for one backend

        def place(waiting: Waiting, claimed: Claims) -> Slot | Blocked:
            ask = waiting.ask
            if waiting.turn.done():  # its client has left; its own task takes it out
                return Blocked(frozenset())
            least, fits = blocked.get(waiting.alike), self._fits_all(ask)
            if fits and least is not None and needs_as_much(self._backends, ask, least):
                return self._blocked(waiting, kinds, now, full)
            held = left_alone(self._table, ask, claimed) if claimed else _NOTHING
            backend = self._finder.find(ask, now, full | held, before)
            if ask.awaits is not None:
                return Blocked(frozenset((ask.awaits,)), ask.awaits, awaits=True)
            if backend is None:
                if fits and (least is None or covers(least, ask.need)):
                    blocked[waiting.alike] = ask.need
                return self._blocked(waiting, kinds, now, full)
            slot = place_at(self._table, backend.id, ask, now)
            before.clear()  # the next walk begins with the first again
            blocked.clear()
            if backend.obstacle(LEAST, now, *best) is not None:
                full.add(backend.id)
                kinds.clear()
            return slot

        while len(full) < len(serving) and (taken := self.queue.take(place, self._loading)):
            waiting, slot = taken
            waiting.turn.set_result(slot)

    def tick(self, now: float, seconds: float) -> None:
        """Measure how fast the pool drains, and look after those who wait; about twice a second."""
        drain = self.forecast.tick(seconds, now)
        self.patience.tick(seconds, drain.most_per_s, drain.probable_per_s, drain.memory_s)
        for each in self._backends:
            each.room.peak.calm = not self.patience.overloaded
        if self.queue:
            if self._may_hurry(now):
                self._hurry(now)
            self.let_in()
            self._refuse_lost(now)
            self._refuse_unserved(now)
            announce(self.queue, self.forecast, now)

    def came(self, ask: Ask) -> None:
        """Note that a request came, maybe again."""
        again = ask.returned and not ask.let_in and self.forecast.returned(ask)
        loads = ask.route.adapter is not None and awaits_load(self._backends, ask)
        if not (ask.let_in or again or loads):
            self.patience.came(ask.caller.tenant, ask.need.tokens)
        if ask.caller.priority == ask.top_priority:
            self._table.highest_came(self._pool, self._clock.now())

    def close(self) -> None:
        """Refuse everybody: no backend serves the pool, or it is gone."""
        for waiting in self.queue.drain():
            self._refuse_for_good(waiting)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- asked ------------------------------------------------------------------------------------

    def waiting(
        self, ask: Ask, deadline: float, body_bytes: int, announce: Announce | None = None
    ) -> Waiting:
        """Return a request that wants to wait until `deadline`, or as long as the pool allows."""
        now, turn = self._clock.now(), asyncio.get_running_loop().create_future()
        waiting, need = Waiting(ask, turn, now, deadline, body_bytes, announce), ask.need
        if awaits_load(self._backends, ask):
            return waiting  # it waits for a load, and that ends
        waiting.allowed = self.patience.allowed(
            need.prompt_tokens, streams=need.streams, returned=waiting.returned, slo_s=self._slo_s
        )
        if self._may_hurry(now):
            load = self.patience.load(waiting.tenant)
            waiting.hurry(now + self.patience.wait_s(load, waiting.allowed))
        return waiting

    def doubt(self, waiting: Waiting) -> float:
        """Return the factor by which an estimated wait must exceed a request's time, to refuse it at once.

        An estimate knows the drain, but not the room that is kept for tenants that use little. A mistake
        costs little where the tenant has other requests waiting. A tenant's only request has the benefit
        of the doubt, and so has one that came again as it was told: they may wait until their deadline.
        """
        only = waiting.returned or waiting.tenant not in self.queue.tenants
        return _DOUBT if only else 1.0

    # --- inside -----------------------------------------------------------------------------------

    @property
    def _backends(self) -> Sequence[Backend]:
        return self._table.backends(self._pool)

    def _blocked(
        self, waiting: Waiting, kinds: Kinds, now: float, full: AbstractSet[str] = _NOTHING
    ) -> Blocked:
        """Return which backends could take a request once they have room.

        One look answers for all of a kind that fit every backend: they differ in size alone.
        """
        ask, fits = waiting.ask, self._fits_all(waiting.ask)
        known = kinds.get(waiting.kind) if fits else None
        if known is None:
            why = self._finder.explain(ask, now).excluded
            usable = [
                each
                for each in self._backends
                if (reason := why.get(each.id)) is None or reason.passes
            ]
            # Room is of no use to it where its adapter is not: it claims none there, and nobody passes it.
            able = [each for each in usable if why.get(each.id) not in AWAITS_ADAPTER]
            best = min(able, key=lambda each: each.in_flight, default=None)
            ids = frozenset(each.id for each in able)
            shut = fits and ids <= full
            known = Blocked(ids, best.id if best else None, shut=shut, lost=not usable)
            if shut and usable and not able:
                self._loading.add(waiting.kind)
            if fits:
                kinds[waiting.kind] = known
        return known

    def _fits_all(self, ask: Ask) -> bool:
        """Whether a request is small enough for each backend that serves."""
        capacity, window = self._fitting
        total = ask.demand.total_tokens if ask.demand.exact else 0
        return ask.need.tokens <= capacity and total <= window

    def _look_for_lost(self, now: float) -> None:
        """Refuse those whom no backend can serve any more, if what backends serve, or their sizes, have changed."""
        backends = self._backends
        seen = self._table.revision, *(each.room.capacity_tokens for each in backends)
        if seen != self._seen:
            self._seen = seen
            capacities = (each.room.capacity_tokens or math.inf for each in backends)
            windows = (each.window_tokens or math.inf for each in backends)
            self._fitting = min(capacities), min(windows)
            self._let_pass(now)
            self._refuse_lost(now)

    def _let_pass(self, now: float) -> None:
        """Let those go that need no engine, and so no room: when they came, no backend could serve them."""
        for waiting in [each for each in self.queue if each.ask.call.endpoint in NO_ENGINE]:
            backend = self._finder.find(waiting.ask, now)
            if backend is not None and not waiting.turn.done() and self.queue.remove(waiting):
                waiting.turn.set_result(place_at(self._table, backend.id, waiting.ask, now))

    def _refuse_lost(self, now: float) -> None:
        """Refuse those whom no backend can serve any more, however long they wait."""
        if not any(each.phase in SERVING for each in self._backends):
            return  # one is about to; what it can take is not known yet
        kinds: Kinds = {}
        for waiting in [*self.queue]:
            if self._blocked(waiting, kinds, now).lost:
                self.queue.remove(waiting)
                self._refuse_for_good(waiting)

    def _refuse(self, waiting: Waiting, error: GatewayError) -> None:
        """End a wait, which has left the queue, with an error."""
        if not waiting.turn.done():
            waiting.turn.set_exception(error)
        self.forecast.refused(waiting.ask, error)

    def _refuse_for_good(self, waiting: Waiting) -> None:
        why = self._finder.explain(waiting.ask, self._clock.now()).excluded
        self._refuse(waiting, no_backend(waiting.ask, why, self._rng))

    def _may_hurry(self, now: float) -> bool:
        """Whether the pool may end waits before their settings do, see `Patience`."""
        return self._guarded and self.patience.bounds_waits and not all_start(self._backends, now)

    def _hurry(self, now: float) -> None:
        """Hold those who wait to what is allowed now: else those from before an overload would hold up all others.

        Without it the simulated study engine serves 18 good replies/s at 4 x its load, not 52 (seed 1).
        """
        loads = {tenant: self.patience.load(tenant) for tenant in self.queue.tenants}
        for waiting in self.queue:
            wait_s = self.patience.wait_s(loads[waiting.tenant], waiting.allowed)
            deadline = waiting.came_at + wait_s
            if deadline < waiting.deadline:
                self.queue.hurry(waiting, max(now, deadline))

    def _refuse_unserved(self, now: float) -> None:
        """Refuse those whose time will surely be over before a backend has started."""
        if any(each.phase in SERVING for each in self._backends):
            return
        for waiting in [*self.queue]:
            starts_s = starts_in_s(self._backends, waiting.ask, now)
            left_s = waiting.deadline - now
            if starts_s is None or not starts_s > _HOPELESS * left_s > _HOPELESS * _SOON_S:
                continue
            if self.queue.remove(waiting):
                waiting.deadline = now
                self._refuse(waiting, starting(waiting.ask, starts_s, left_s, self._rng))

    def _arm(self) -> None:
        """Be called at the next deadline, if anything waits."""
        deadline = self.queue.next_deadline()
        if deadline is None or (self._timer is not None and self._due <= deadline):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = deadline
        late_s = max(0.001, deadline - self._clock.now())  # the loop's clock is as coarse as that
        self._timer = asyncio.get_running_loop().call_later(late_s, self._expire)

    def _expire(self) -> None:
        """Refuse those whose time is over; after a pause of the loop, once it has read what came: there may be room."""
        if self._clock.now() - self._due > _LATE_S:
            after_reading(self._refuse_late)
        else:
            self._refuse_late()

    def _refuse_late(self) -> None:
        self._timer = None
        now = self._clock.now()
        for waiting in self.queue.expired(now):
            self._refuse(waiting, self._over(waiting, now))
        self.let_in()  # others may have stood back for them
        self._arm()

    def _over(self, waiting: Waiting, now: float) -> GatewayError:
        """Return what a request is told whose time is over."""
        ask, waited_s = waiting.ask, now - waiting.came_at
        why = self._finder.explain(ask, now).excluded
        if not awaits(self._backends, ask):
            why = kept_for_others((each.id for each in self._backends), why)
            return waited_too_long(ask, why, waited_s, self.forecast.retry_after_s(ask))
        if (starts_s := starts_in_s(self._backends, ask, now)) is None:
            return no_backend(ask, why, self._rng)
        return starts_late(ask, starts_s, waited_s, self._rng)
