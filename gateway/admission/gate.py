"""When a request may enter an engine: at once, after a wait, or not at all.

    enter --nobody waits, a backend has room--> slot              no await: the common case
    wait  --no backend suits, or none is large enough--> refused at once
      |---- the queue is full, or its turn would come too late--> refused at once
      `---- waits --capacity frees, its turn--> slot              the backend is chosen only then
                |--its deadline passes--> refused
                `--its client leaves--> forgotten

A slot is given back through itself, which lets the next in. Whoever takes and gives back is on the
one event loop, and nothing awaits in between, so no place is given twice or lost.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final, Protocol

from gateway.admission.decisions import Decision, Decisions, Weighed, decide
from gateway.admission.forecast import Drain, Outputs
from gateway.admission.queue import Blocked, FairQueue, Limits, Placed
from gateway.admission.refusals import no_backend, queue_full, too_late, waited_too_long
from gateway.admission.turns import Ticket
from gateway.config.models import PoolConfig, QueueConfig
from gateway.core.aio import Clock
from gateway.core.errors import GatewayError
from gateway.core.types import (
    Ask,
    Call,
    Caller,
    Demand,
    Exclusion,
    Need,
    Outcome,
    RequestRecord,
    Slot,
)
from gateway.pools.table import Backend, PoolTable

_BYTES_PER_TOKEN: Final = 4  # of English text and code; for a prompt that nobody has counted
_LEARNT_FROM: Final = 4  # of each batch of ended requests: means need no more
_TENANTS_COUNTED: Final = 32  # among more, a position is an estimate that costs too much
_UNKNOWN_PROMPT_TOKENS: Final = 1024  # pictures and sound: about one picture's worth


class Finder(Protocol):
    """Who chooses a backend; `routing.choice.Chooser`."""

    def find(
        self, backends: Sequence[Backend], ask: Ask, now: float, claimed: AbstractSet[str] = ...
    ) -> Backend | None:
        """Return the best backend that may take the request now, if any."""

    def why_not(self, backends: Sequence[Backend], ask: Ask, now: float) -> dict[str, Exclusion]:
        """Return why each backend that cannot take the request cannot."""

    def explain(self, backends: Sequence[Backend], ask: Ask, now: float) -> Weighed:
        """Return what each backend is worth to the request, and why others cannot take it."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """One request in a queue."""

    ask: Ask
    turn: asyncio.Future[Slot]


@dataclass(slots=True, eq=False)
class _Line:
    """What waits for one pool, and how fast it drains."""

    queue: FairQueue[_Waiting]
    drain: Drain = field(default_factory=Drain)
    given_back_tokens: int = 0  # by its backends, at the last tick
    timer: asyncio.TimerHandle | None = None


class Gate:
    """Admission to all pools. One event loop; only `wait` suspends."""

    def __init__(
        self, table: PoolTable, finder: Finder, clock: Clock, rng: random.Random | None = None
    ) -> None:
        self.top_priority: int | None = None
        self.decisions = Decisions()
        self._table = table
        self._finder = finder
        self._clock = clock
        self._rng = rng or random.Random()
        self._outputs = Outputs()
        self._lines: dict[str, _Line] = {}
        self._pools: Mapping[str, PoolConfig] = {}
        self._ticked_at = clock.now()
        table.on_capacity.append(self._pump)

    def configure(self, pools: Mapping[str, PoolConfig], priorities: AbstractSet[int]) -> None:
        """Take over settings; what waits for a pool that is gone is refused.

        `priorities` are those that keys have: a reserve is kept for the highest of several.
        """
        self._pools = pools
        self.top_priority = max(priorities) if len(priorities) > 1 else None
        for name, pool in pools.items():
            limits = _limits(pool.queue)
            if name in self._lines:
                self._lines[name].queue.resize(limits)
            else:
                self._lines[name] = _Line(FairQueue(limits))
        for name in self._lines.keys() - pools.keys():
            line = self._lines.pop(name)
            for ticket in line.queue.drain():
                _refuse(ticket.item, no_backend(ticket.item.ask, {}, self._rng))
            _disarm(line)

    # --- what a request needs -------------------------------------------------------------------

    def need(self, call: Call, demand: Demand, caller: Caller) -> Need:
        """Estimate what a request will take of a KV cache; the output as learnt of model and key."""
        if demand.exact:
            prompt = demand.prompt_tokens
        elif call.text_bytes is not None:
            prompt = min(demand.prompt_tokens, call.text_bytes // _BYTES_PER_TOKEN + 1)
        else:
            prompt = min(demand.prompt_tokens, _UNKNOWN_PROMPT_TOKENS)
        output = self._outputs.expect(call.model, caller.key_id, demand.max_new_tokens)
        return Need(prompt, output * call.choices, call.stream)

    def learn(self, settled: Sequence[RequestRecord]) -> None:
        """Learn from a few of the requests that ended how long outputs of their model and key get."""
        for record in settled[-_LEARNT_FROM:]:
            usage, demand = record.usage, record.demand
            if usage is None or demand is None or record.model is None or record.caller is None:
                continue
            tokens = usage.completion_tokens // record.choices
            most = demand.max_new_tokens
            cut = record.outcome is not Outcome.OK or (most is not None and tokens >= most)
            if tokens:
                learn = self._outputs.cut if cut else self._outputs.ended
                learn(record.model, record.caller.key_id, tokens)

    # --- in and out -------------------------------------------------------------------------------

    def enter(self, ask: Ask) -> Slot | None:
        """Take a place at once when nobody waits and a backend has room; else None: `wait`.

        One that was let in before, and failed through no fault of its own, need not wait again.
        """
        line = self._lines.get(ask.route.pool)
        if line is None or (line.queue and not ask.tried):
            return None
        return self._take(line, ask)

    def has_room(self, ask: Ask) -> bool:
        """Whether `enter` would give a place to a request that was let in before."""
        return self._finder.find(self._backends(ask), ask, self._clock.now()) is not None

    async def wait(self, ask: Ask, *, deadline: float, body_bytes: int, request_id: str) -> Slot:
        """Wait for a place, until `deadline` at most (monotonic seconds).

        Raises:
            Unavailable: no backend serves it now (503).
            Overloaded: the queue is full, or no place came in time (503).
            TooManyWaiting: too much of the caller's own waits already (429).
            RequestError: it is larger than any backend's KV cache (400).
        Cancel: the request leaves the queue at once; a place that was just given goes to the next.
        """
        line, now = self._lines[ask.route.pool], self._clock.now()
        waiting = _Waiting(ask, asyncio.get_running_loop().create_future())
        ticket = _ticket(waiting, body_bytes, now, deadline)
        decision, refusal = self._judge(line, ticket, request_id)
        self.decisions.keep(decision)
        if refusal is not None:
            raise refusal
        line.queue.offer(ticket)
        try:
            self._pump(ask.route.pool)
            slot = await waiting.turn
        except GatewayError as error:
            decision.refused(error, self._clock.now())
            raise
        except asyncio.CancelledError:
            decision.left(self._clock.now())
            turn = waiting.turn
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                turn.result().release()
            raise
        finally:
            line.queue.remove(ticket)
        decision.admitted(slot.backend_id, self._clock.now())
        return slot

    def foresee(self, ask: Ask, *, body_bytes: int) -> Decision:
        """Return what `enter` and `wait` would do with a request now. Nothing is taken, queued or kept.

        What waits may be passed by one that fits where nothing before it does: then it goes earlier.
        """
        line, now = self._lines[ask.route.pool], self._clock.now()
        waiting = _Waiting(ask, asyncio.get_running_loop().create_future())
        deadline = now + self._pools[ask.route.pool].queue.max_wait
        decision, _ = self._judge(line, _ticket(waiting, body_bytes, now, deadline), "")
        if not line.queue:
            backend = self._finder.find(self._backends(ask), ask, now)
            if backend is not None:
                decision.admitted(backend.id, now)
        return decision

    def tick(self, now: float) -> None:
        """Measure how fast each pool drains; called about twice a second."""
        seconds, self._ticked_at = now - self._ticked_at, now
        for pool, line in self._lines.items():
            backends = self._table.backends(pool)
            given_back = sum(each.room.given_back_tokens for each in backends)
            tokens, line.given_back_tokens = given_back - line.given_back_tokens, given_back
            if seconds > 0 and (tokens > 0 or any(each.in_flight for each in backends)):
                line.drain.passed(seconds, max(0, tokens))
            self._pump(pool)

    def queues(self) -> dict[str, tuple[int, int]]:
        """Return how many requests wait for each pool, and the tokens they need."""
        return {
            pool: (line.queue.held.requests, line.queue.held.tokens)
            for pool, line in self._lines.items()
        }

    def oldest_s(self, pool: str) -> float | None:
        """Return how long what waits longest for a pool has waited; None when nothing does."""
        line = self._lines.get(pool)
        at = line.queue.oldest_at if line is not None else None
        return None if at is None else self._clock.now() - at

    # --- inside -----------------------------------------------------------------------------------

    def _judge(
        self, line: _Line, ticket: Ticket[_Waiting], request_id: str
    ) -> tuple[Decision, GatewayError | None]:
        """Decide whether a request may wait; with the refusal when it may not. Changes nothing."""
        ask, now, queue = ticket.item.ask, ticket.offered_at, line.queue
        backends, wait_s = self._backends(ask), ticket.deadline - now
        weighed = self._finder.explain(backends, ask, now)
        pool, at = self._pools[ask.route.pool], (now, self._clock.wall())
        decision = decide(request_id, ask, backends, weighed, pool=pool, at=at, wait_s=wait_s)
        why, full, refusal = weighed.excluded, None, None
        retry_after_s = line.drain.retry_after_s(queue.held.tokens, self._rng.random())
        decision.eta_s = eta_s = self._eta_s(line, ticket, now)
        if len(why) >= len(backends) and not any(reason.passes for reason in why.values()):
            refusal = no_backend(ask, why, self._rng)
        elif eta_s is not None and eta_s > wait_s:
            refusal = too_late(ask, why, eta_s, wait_s, retry_after_s)
        elif (full := queue.full(ticket)) is not None:
            refusal = queue_full(ask, full, queue, why, retry_after_s)
        elif len(queue.tenants) <= _TENANTS_COUNTED:
            decision.position = queue.ahead(ticket).requests + 1
        if refusal is not None:
            decision.refused(refusal, now, full)
        return decision, refusal

    def _backends(self, ask: Ask) -> Sequence[Backend]:
        return self._table.backends(ask.route.pool)

    def _take(self, line: _Line, ask: Ask, claimed: AbstractSet[str] = frozenset()) -> Slot | None:
        now = self._clock.now()
        backend = self._finder.find(self._backends(ask), ask, now, claimed)
        if backend is None:
            return None
        return self._table.take(backend.id, now, ask.need)

    def _pump(self, pool: str) -> None:
        """Let in who may go now; called whenever there may be more room."""
        line = self._lines.get(pool)
        if line is None or not line.queue:
            return
        lost: list[_Waiting] = []

        def place(waiting: _Waiting, claimed: AbstractSet[str]) -> Placed[Slot] | Blocked:
            if waiting.turn.done():  # its client has left; its own task takes it out
                return Blocked(frozenset())
            slot = self._take(line, waiting.ask, claimed)
            if slot is not None:
                return Placed(slot.backend_id, slot)
            usable = self._usable(waiting.ask)
            if not usable:
                lost.append(waiting)
            best = min(usable, key=lambda each: each.in_flight, default=None)
            ids = frozenset(each.id for each in usable)
            return Blocked(ids, best.id if best is not None else None)

        while (taken := line.queue.take(place)) is not None:
            taken[0].item.turn.set_result(taken[1])
        for waiting in lost:
            why = self._finder.why_not(self._backends(waiting.ask), waiting.ask, self._clock.now())
            _refuse(waiting, no_backend(waiting.ask, why, self._rng))
        self._arm(line)

    def _usable(self, ask: Ask) -> list[Backend]:
        """Return the backends that could take a request once they have room."""
        why = self._finder.why_not(self._backends(ask), ask, self._clock.now())
        return [each for each in self._backends(ask) if each.id not in why or why[each.id].passes]

    def _eta_s(self, line: _Line, ticket: Ticket[_Waiting], now: float) -> float | None:
        """Estimate how long a ticket waits; None when nobody knows. All that waits is a quick bound."""
        eta_s = line.drain.eta_s(line.queue.held.tokens)
        if eta_s is None or now + eta_s <= ticket.deadline:
            return eta_s
        return line.drain.eta_s(line.queue.ahead(ticket).tokens)

    def _arm(self, line: _Line) -> None:
        """Be called at the next deadline, if anything waits."""
        _disarm(line)
        deadline = line.queue.next_deadline()
        if deadline is not None:
            loop = asyncio.get_running_loop()
            late_s = max(0.0, deadline - self._clock.now())
            line.timer = loop.call_later(late_s, self._expire, line)

    def _expire(self, line: _Line) -> None:
        now = self._clock.now()
        for ticket in line.queue.expired(now):
            ask = ticket.item.ask
            retry_after_s = line.drain.retry_after_s(line.queue.held.tokens, self._rng.random())
            why = self._finder.why_not(self._backends(ask), ask, now)
            _refuse(ticket.item, waited_too_long(ask, why, now - ticket.offered_at, retry_after_s))
        self._arm(line)


def _ticket(waiting: _Waiting, body_bytes: int, now: float, deadline: float) -> Ticket[_Waiting]:
    ask = waiting.ask
    caller = ask.caller
    return Ticket(
        waiting, caller.tenant, caller.priority, ask.need.tokens, body_bytes, now, deadline
    )


def _limits(queue: QueueConfig) -> Limits:
    return Limits(queue.max_requests, queue.max_tokens, queue.max_bytes, queue.tenant_share)


def _refuse(waiting: _Waiting, error: GatewayError) -> None:
    if not waiting.turn.done():
        waiting.turn.set_exception(error)


def _disarm(line: _Line) -> None:
    if line.timer is not None:
        line.timer.cancel()
        line.timer = None
