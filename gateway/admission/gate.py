"""When a request may enter an engine: at once, after a wait, or not at all.

    enter --nobody waits, a backend has room--> slot              no await: the common case
    wait  --no backend suits, or none is large enough--> refused at once
      |---- the queue is full, it may not wait, or its turn would come too late--> refused at once
      `---- waits --capacity frees, its turn--> slot              the backend is chosen only then
                |--its deadline passes--> refused
                `--its client leaves--> forgotten

A slot is given back through itself, which lets the next in. Whoever takes and gives back is on the
one event loop, and nothing awaits in between, so no place is given twice or lost.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from gateway.admission.bounds import Limits
from gateway.admission.decisions import Decision, Decisions, State, decide
from gateway.admission.line import Line
from gateway.admission.needs import Needs
from gateway.admission.refusals import (
    kept_for_others,
    no_backend,
    no_room,
    queue_full,
    starting,
    too_late,
)
from gateway.admission.waiting import Announce, Finder, Waiting, awaits
from gateway.config.models import PoolConfig
from gateway.core.aio import Clock
from gateway.core.endpoints import NO_ENGINE
from gateway.core.errors import GatewayError, Rejected
from gateway.core.exclusion import Chance
from gateway.core.traffic import Queued
from gateway.core.types import Ask, Exclusion, Outcome, RequestRecord, Route, Slot
from gateway.pools.table import Backend, PoolTable

_TENANTS_COUNTED: Final = 32  # among more, a position is an estimate that costs too much
_OK: Final = Outcome.OK  # looked up once: 0.15 us before Python 3.12
_STOOD_STILL_S: Final = 10.0  # between two ticks
_LEARNT_FROM: Final = 4  # of each batch of ended requests: means need no more


class Gate:
    """Admission to all pools. One event loop; only `wait` suspends."""

    def __init__(
        self, table: PoolTable, finder: Finder, clock: Clock, rng: random.Random | None = None
    ) -> None:
        self.top_priority: int | None = None
        self.decisions = Decisions()
        self.on_wanted: list[Callable[[Route, str], None]] = []  # what finds no place at once
        self._table = table
        self._finder = finder
        self._clock = clock
        self._rng = rng or random.Random()
        self.needs = Needs()
        self._lines: dict[str, Line] = {}
        self._pools: Mapping[str, PoolConfig] = {}
        self._ticked_at = clock.now()
        table.on_capacity.append(self._let_in)
        table.on_read.append(self._read)

    def configure(self, pools: Mapping[str, PoolConfig], priorities: AbstractSet[int]) -> None:
        """Take over settings; what waits for a pool that is gone is refused.

        `priorities` are those of keys that can send requests: a reserve is kept for the highest of several. Without
        any there are no keys: all are one tenant, whose share is the whole queue.
        """
        self._pools = pools
        self.top_priority = max(priorities) if len(priorities) > 1 else None
        for name, pool in pools.items():
            limits = Limits.of(pool.queue, shared=bool(priorities))
            if name in self._lines:
                self._lines[name].queue.limits = limits
            else:
                self._lines[name] = Line(
                    name, limits, self._table, self._finder, self._clock, self._rng
                )
            self._lines[name].follow(pool, self.top_priority)
        for name in self._lines.keys() - pools.keys():
            self._lines.pop(name).close()

    def learn(self, settled: Sequence[RequestRecord]) -> None:
        """Learn from requests that ended what others will need, and how long whole replies take."""
        for record in settled[-_LEARNT_FROM:]:
            self.needs.learn(record)
            line = self._lines.get(record.pool or "")
            sent_at, ended_at = record.sent_at, record.ended_at
            if line is None or record.outcome is not _OK or record.endpoint in NO_ENGINE:
                continue
            if not (sent_at and ended_at):
                continue
            line.patience.replied(ended_at - sent_at)
            if not record.stream and not line.queue:  # how long it takes while nobody waits
                line.patience.whole.learn(ended_at - sent_at, 0)

    # --- in and out -------------------------------------------------------------------------------

    def enter(self, ask: Ask) -> Slot | None:
        """Take a place at once when nobody waits and a backend has room; else None: `wait`.

        One that was let in before, and failed through no fault of its own, need not wait again. What
        no engine works on waits for nobody and takes no place: any backend that suits has room for it.
        """
        line = self._lines.get(ask.route.pool)
        if line is None or (line.queue.held.requests and _waits_its_turn(line, ask)):
            return None
        now = self._clock.now()
        backend = self._finder.find(ask, now)
        if backend is None:
            return None
        if ask.call.endpoint in NO_ENGINE:
            return self._table.visit(backend.id, now)
        line.came(ask)
        ask.let_in = True
        caller, route = ask.caller, ask.route
        return self._table.take(backend.id, now, ask.need, caller.tenant, ask.prefix, route.adapter)

    def chance(self, ask: Ask) -> Chance:
        """Return when another backend could take a request of which an attempt failed."""
        choice = self._finder.explain(ask, self._clock.now())
        if choice.expected_s:
            return Chance.NOW
        later = any(reason.passes for reason in choice.excluded.values())
        return Chance.LATER if later else Chance.NEVER

    def want(self, route: Route, leaving: str = "") -> None:
        """Tell that a request found no place at once: its adapter may have to be loaded.

        `leaving` is a backend that said that it shuts down, and takes nothing any more.
        """
        for listener in self.on_wanted if route.adapter is not None else ():
            listener(route, leaving)

    async def wait(
        self, ask: Ask, *, deadline: float, body_bytes: int, request_id: str, announce: Announce | None = None,
        gives_up_at: float = math.inf,
    ) -> Slot:  # fmt: skip
        """Wait for a place, until `deadline` (monotonic seconds) or as long as the pool lets it wait.

        `gives_up_at` is when its client gives up: it does not wait longer.
        `announce` is called every two seconds meanwhile, first after the first of them; less often in a crowd.

        Raises:
            Unavailable: no backend serves it now (503).
            Overloaded: the queue is full, or no place came in time (503).
            TooManyWaiting: too much of the caller's own waits already (429).
            RequestError: it is larger than any backend's KV cache (400).
        Cancel: the request leaves the queue at once; a place that was just given goes to the next.
        """
        line = self._lines.get(ask.route.pool)
        if line is None:  # a reload took the pool away while the prompt was counted
            raise no_backend(ask, {}, self._rng)
        line.came(ask)
        self.want(ask.route)
        waiting = line.waiting(ask, min(deadline, gives_up_at), body_bytes, announce)
        waiting.impatient = gives_up_at < deadline
        turn = waiting.turn
        decision, refusal = self._judge(line, waiting, request_id)
        self.decisions.keep(decision)
        try:
            if refusal is None or decision.has_room:
                # One that may not wait is let in now or never, wherever there is room.
                ask.free_at = ask.free_at if refusal is None else -math.inf
                line.queue.offer(waiting)
                line.let_in()
                decision.awaits = ask.awaits
            if refusal is not None and not turn.done():
                raise refusal  # if there is room, it is kept for those before it
            slot = await turn
        except GatewayError as error:
            if error is refusal:
                line.forecast.refused(ask, error)
            else:
                decision.may_wait_s = waiting.deadline - waiting.came_at  # it may be less by now
                decision.hurried = waiting.hurried
                decision.refused(error, self._clock.now())
            raise
        except asyncio.CancelledError:
            decision.left(self._clock.now())
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                turn.result().release()
            raise
        finally:
            if line.queue.remove(waiting):
                line.let_in()  # others may have stood back for it
        ask.let_in = True
        decision.admitted(slot.backend_id, self._clock.now())
        return slot

    def foresee(self, ask: Ask, *, body_bytes: int) -> Decision:
        """Return what `enter` and `wait` would do with a request now. Nothing is taken, queued or kept.

        It may go earlier than that, past those before it, where it fits and none of them does.

        Raises:
            Unavailable: a reload took its pool away (503).
        """
        line, now = self._lines.get(ask.route.pool), self._clock.now()
        if line is None:
            raise no_backend(ask, {}, self._rng)
        deadline = now + self._pools[ask.route.pool].queue.max_wait
        decision, _ = self._judge(line, line.waiting(ask, deadline, body_bytes), "")
        backend = None if _waits_its_turn(line, ask) else self._finder.find(ask, now)
        if backend is not None:
            decision.admitted(backend.id, now)
        return decision

    def shed(self, ask: Ask, error: Rejected, request_id: str, backend_id: str | None) -> None:
        """Keep why a request was shed, where `wait` did not refuse it: by an engine, or as the gateway ends.

        `backend_id` is where it was sent last. A request for a pool that is gone is not kept.
        """
        kept = self._kept(ask, request_id, now := self._clock.now())
        if kept is not None and kept.state is not State.REFUSED:
            kept.refused(error, now)
            kept.backend_id = backend_id

    def gone_elsewhere(self, ask: Ask) -> None:
        """Do not expect a request back that was refused and told to come again: another pool has it."""
        line = self._lines.get(ask.route.pool)
        if line is not None:
            line.forecast.returned(ask)

    def note(self, ask: Ask, request_id: str, backend_id: str) -> None:
        """Keep that a request which another pool could not take was let in, if it did not wait."""
        kept = self._kept(ask, request_id, now := self._clock.now())
        if kept is not None and kept.state is not State.ADMITTED:
            kept.admitted(backend_id, now)

    def tick(self, now: float) -> None:
        """Measure how fast each pool drains, and look after those who wait; about twice a second."""
        seconds, self._ticked_at = now - self._ticked_at, now
        if seconds > _STOOD_STILL_S:  # this process did: that tells nothing of the pools
            seconds = 0.0
        for line in self._lines.values():
            line.tick(now, seconds)

    def anybody_waits(self) -> bool:
        """Whether a request waits for room in any pool."""
        return any(line.queue.held.requests for line in self._lines.values())

    def queued(self, pool: str) -> int:
        """Return how many requests wait for a pool."""
        line = self._lines.get(pool)
        return 0 if line is None else line.queue.held.requests

    def queues(self) -> dict[str, Queued]:
        """Return what waits for each pool."""
        now, found = self._clock.now(), {}
        for pool, line in self._lines.items():
            held, at = line.queue.held, line.queue.oldest_at
            found[pool] = Queued(held.requests, held.tokens, None if at is None else now - at)
        return found

    def awaited(self, pool: str) -> set[str]:
        """Return the adapters that requests wait for, or with which they wait for room."""
        line = self._lines.get(pool)
        names = (each.ask.route.adapter for each in (line.queue if line is not None else ()))
        return {name for name in names if name is not None}

    # --- inside -----------------------------------------------------------------------------------

    def _kept(self, ask: Ask, request_id: str, now: float) -> Decision | None:
        """Return the decision of a request, made now where `wait` made none; None: its pool is gone."""
        decision = self.decisions.get(request_id)
        if decision is None or decision.need is not ask.need:  # of another request by the same id
            if ask.route.pool not in self._pools:
                return None
            decision, _ = self._decide(ask, request_id, now, wait_s=0.0)
            self.decisions.keep(decision)
        return decision

    def _judge(
        self, line: Line, waiting: Waiting, request_id: str
    ) -> tuple[Decision, GatewayError | None]:
        """Decide whether a request may wait; with the refusal when it may not. Changes nothing."""
        ask, now, queue, forecast = waiting.ask, waiting.came_at, line.queue, line.forecast
        wait_s = max(waiting.deadline - now, 0.0)  # its time may be over by now
        decision, why = self._decide(ask, request_id, now, wait_s)
        decision.impatient, decision.hurried = waiting.impatient, waiting.hurried
        full, refusal = None, None
        eta_s = forecast.ahead_s(waiting)
        room_s = 0.0 if decision.has_room else forecast.room_s(ask, now)
        lost = len(why) >= len(decision.said) and not any(reason.passes for reason in why.values())
        if (starting_up := awaits(self._backends(ask), ask)) and eta_s is None:
            eta_s = 0.0  # nothing is known of the drain; its start is what it waits for
        decision.eta_s = None if eta_s is None or room_s is None else eta_s + room_s
        if lost and not starting_up:
            refusal = no_backend(ask, why, self._rng)
        elif starting_up and room_s is not None and room_s > wait_s:
            decision.starts_too_late = True
            refusal = starting(ask, room_s, wait_s, self._rng)
        elif wait_s <= 0:
            refusal = no_room(ask, self._kept_from(ask, why), forecast.retry_after_s(ask))
        elif not starting_up and eta_s is not None and eta_s > line.doubt(waiting) * wait_s:
            again_s = forecast.retry_after_s(ask)
            refusal = too_late(ask, self._kept_from(ask, why), eta_s, wait_s, again_s)
        elif (full := queue.full(waiting)) is not None:
            again_s = forecast.retry_after_s(ask)
            kept = self._kept_from(ask, why)
            refusal = queue_full(ask, full, queue, kept, waiting.body_bytes, again_s)
        elif len(queue.tenants) <= _TENANTS_COUNTED:
            decision.position = queue.ahead(waiting).requests + 1
        if refusal is not None:
            decision.refused(refusal, now, full)
        return decision, refusal

    def _decide(
        self, ask: Ask, request_id: str, now: float, wait_s: float
    ) -> tuple[Decision, Mapping[str, Exclusion]]:
        """Return the decision of a request that comes, and why backends cannot take it."""
        backends, pool = self._backends(ask), self._pools[ask.route.pool]
        choice, at = self._finder.explain(ask, now), (now, self._clock.wall())
        decision = decide(request_id, ask, backends, choice, pool=pool, at=at, wait_s=wait_s)
        return decision, choice.excluded

    def _kept_from(self, ask: Ask, why: Mapping[str, Exclusion]) -> Mapping[str, Exclusion]:
        return kept_for_others((each.id for each in self._backends(ask)), why)

    def _backends(self, ask: Ask) -> Sequence[Backend]:
        return self._table.backends(ask.route.pool)

    def _read(self, pool: str, seconds: float, prompt_tokens: int) -> None:
        line = self._lines.get(pool)
        if line is None:
            return
        if line.queue.held.requests:
            line.let_in()
        else:
            line.patience.first.learn(seconds, prompt_tokens)

    def _let_in(self, pool: str) -> None:
        line = self._lines.get(pool)
        if line is not None and line.queue.held.requests:
            line.let_in()


def _waits_its_turn(line: Line, ask: Ask) -> bool:
    return bool(line.queue) and not ask.let_in and ask.call.endpoint not in NO_ENGINE
