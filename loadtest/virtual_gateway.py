"""The gateway's decisions over simulated engines in one process and in simulated time: no socket, no wait.

Real are the pool table, the gate and the chooser, the engines and their metrics page, and what reads it.
Left out is what carries bytes: here a request enters, waits, reads and ends as the handler has it do,
and costs no time but the engine's.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Callable
from typing import Any, Final

from gateway.admission.gate import Gate
from gateway.admission.refusals import heard_within_s
from gateway.config.models import Config
from gateway.core.aio import periodic
from gateway.core.errors import GatewayError
from gateway.core.prefix import Prefix
from gateway.core.types import (
    Ask,
    Call,
    Caller,
    Dialect,
    Endpoint,
    ModelsSeen,
    Outcome,
    ProbePassed,
    RequestRecord,
    Route,
    Scraped,
    ServedModel,
    Slot,
    Usage,
    UsageSource,
)
from gateway.counting.context import bound, settle
from gateway.pools.health import Order
from gateway.pools.pulse import Waits
from gateway.pools.table import PoolTable
from gateway.routing.choice import Chooser
from gateway.sim.metrics import render_metrics
from gateway.upstream.silence import ENDLESS, Silence, waits_of
from gateway.wire.metricspage import parse_metrics
from gateway.wire.replies import error_headers
from loadtest import outcomes
from loadtest.arms import PRIORITIES
from loadtest.arrivals import Shot
from loadtest.openloop import parse_refusal
from loadtest.virtual import Clock, Engines, Reply, VirtualLoop

_TICK_S: Final = 0.5
_BATCH: Final = 32  # of ended requests that are told at once, as the ledger does
_BYTES_PER_TOKEN: Final = 4
_AROUND_BYTES: Final = 150  # of a body that are not its prompt


class Gateway:
    """The gateway's decisions with the given settings of its one pool; `run` is its background work."""

    def __init__(self, engines: Engines, settings: dict[str, Any], seed: int) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self._engines, self._loop = engines, loop
        self._rng = random.Random(seed)
        urls = [f"http://10.0.0.{place}:8000" for place, _ in enumerate(engines.states, start=1)]
        pools = {"m": {"backends": urls, **settings}}
        self.config = Config.model_validate({"pools": pools})
        self.table = PoolTable(loop)
        self.gate = Gate(
            self.table, Chooser(self.table, random.Random(seed)), loop, random.Random(seed)
        )
        self.table.apply(self.config.pools, self.config.health)
        self.gate.configure(self.config.pools, {0, *PRIORITIES.values()})
        self._places = {each.id: place for place, each in enumerate(self.table.backends("m"))}
        window = engines.config.max_model_len
        self._route = Route("m", "m", "m", window_tokens=window, engine_tokens=window)
        self._live: list[dict[str, tuple[Silence, Reply]]] = [{} for _ in urls]
        self._heard_at = [-math.inf for _ in urls]
        self._settled: list[RequestRecord] = []
        self._ids = itertools.count()

    async def run(self) -> None:
        """Watch the engines and look after those who wait, as often as the process does. Cancel: it ends."""
        health = self.config.health
        async with asyncio.TaskGroup() as group:
            for backend_id, place in self._places.items():
                served = (ServedModel("m", None, self._engines.config.max_model_len),)
                self.table.observe(backend_id, ModelsSeen(self._loop.time(), served))
                for every_s, look in (
                    (health.interval, self._probe),
                    (health.scrape_interval, self._scrape),
                ):
                    turn = _turn(look, backend_id, place)
                    rng = random.Random(self._rng.random())
                    name = f"{look.__name__} {backend_id}"
                    group.create_task(periodic(turn, every_s=every_s, name=name, rng=rng))
            ticks = periodic(self._tick, every_s=_TICK_S, name="ticks", jitter_ratio=0.0)
            group.create_task(ticks)

    def lose(self, place: int) -> None:
        """Send no more to an engine, as when it is to restart; what it works on ends."""
        self.table.order(self.table.backends("m")[place].id, Order.DRAIN)

    async def _probe(self, backend_id: str, place: int) -> None:
        self.table.observe(backend_id, ProbePassed(self._loop.time()))

    async def _scrape(self, backend_id: str, place: int) -> None:
        sample = parse_metrics(render_metrics(self._engines.states[place]), self._loop.time())
        assert sample is not None
        self.table.observe(backend_id, Scraped(sample))

    async def _tick(self) -> None:
        now = self._loop.time()
        backends = self.table.backends("m")
        self.table.listen(
            [(each, self._waits(self._places[each.id], now)) for each in backends], now
        )
        self._post()
        self.gate.tick(now)

    def _waits(self, place: int, now: float) -> Waits:
        for silence, reply in self._live[place].values():
            if (quiet_s := reply.quiet_s) is not None:
                silence.broken(now - quiet_s)
        silences = (silence for silence, _ in self._live[place].values())
        return waits_of(silences, self._heard_at[place])

    # --- one request, as `ingress.handler` serves it ---

    def prepare(self, shot: Shot, *, retry: bool = False) -> tuple[Shot, bool]:
        """Nothing is to be made ahead."""
        return shot, retry

    async def send(
        self, prepared: tuple[Shot, bool], outcome: outcomes.Outcome, clock: Clock
    ) -> None:
        """Send one request, see `openloop.Target`."""
        shot, retry = prepared
        request_id = str(next(self._ids))
        now = outcome.sent_s = clock()
        record = RequestRecord(request_id, Endpoint.CHAT, self._loop.time(), stream=True)
        try:
            await self._serve(shot, record, outcome, clock, retry=retry)
            outcome.end, record.outcome = outcomes.End.COMPLETE, Outcome.OK
        except GatewayError as error:
            record.outcome = error.outcome
            self._told(error, outcome, retry=retry)
            decision = self.gate.decisions.get(request_id)
            outcome.wait_s = decision.may_wait_s if decision is not None else None
            outcome.answered_s = clock()
        except asyncio.CancelledError:
            record.outcome = Outcome.CLIENT_GONE
            raise
        finally:
            outcome.ended_s = clock() if outcome.end is not outcomes.End.UNFINISHED else None
            record.ended_at = record.received_at + clock() - now
            self._settle(record)

    async def _serve(
        self, shot: Shot, record: RequestRecord, outcome: outcomes.Outcome, clock: Clock, *, retry: bool
    ) -> None:  # fmt: skip
        call, caller, route = self.call(shot), _caller(shot.tenant), self.route(shot)
        pool = self.config.pools["m"]
        record.model, record.pool, record.caller = "m", "m", caller
        demand = bound(call, route=route, caller=caller, policy=pool.on_overflow)
        if demand is None:
            tokens = shot.prompt_tokens
            demand = settle(call, tokens, route=route, caller=caller, policy=pool.on_overflow)
        record.demand = demand
        need = self.gate.needs.of(call, demand, caller, route.window_tokens)
        ask = Ask(route, call, demand, caller, need, self.gate.top_priority, returned=retry)
        ask.prefix, ask.asked_at = self.prefix(shot, ask), self._loop.time()
        slot = self.gate.enter(ask) or await self._wait(ask, record)
        place = self._places[slot.backend_id]
        outcome.place = place
        record.backend_id, record.sent = slot.backend_id, slot.sent
        record.sent_at = self._loop.time()
        reply = Reply(shot, outcome, clock, lambda: self._first_token(slot, record))
        self._live[place][record.id] = Silence(ENDLESS, record.sent_at, need=need), reply
        try:
            await self._engines.run(place, reply)
            told = self._engines.config.prompt_tokens_details
            record.usage = _usage(shot, outcome.cached_tokens if told else None)
        finally:
            del self._live[place][record.id]
            self._heard_at[place] = self._loop.time()
            slot.release()

    def call(self, shot: Shot) -> Call:
        """Return what is known of a request's body."""
        text_bytes = _BYTES_PER_TOKEN * shot.prompt_tokens
        body = bytes(text_bytes + _AROUND_BYTES)
        return make_call(shot, body, text_bytes)

    def route(self, shot: Shot) -> Route:
        """Return where a request's model leads."""
        return self._route

    def prefix(self, shot: Shot, ask: Ask) -> Prefix | None:
        """Return what a request's beginning is to a prefix cache; here no two are alike."""
        return None

    async def _wait(self, ask: Ask, record: RequestRecord) -> Slot:
        now = self._loop.time()
        own_end = now + self.config.pools["m"].queue.max_wait
        heard = now + heard_within_s(math.inf)
        return await self.gate.wait(
            ask,
            deadline=min(own_end, heard),
            body_bytes=len(ask.call.body),
            request_id=record.id,
        )

    def _first_token(self, slot: Slot, record: RequestRecord) -> None:
        now = record.first_byte_at = self._loop.time()
        self.table.first_token(slot, now)

    def _told(self, error: GatewayError, outcome: outcomes.Outcome, *, retry: bool) -> None:
        lines = error_headers(error, retried=retry)
        headers = {name.decode(): value.decode() for name, value in lines}
        outcome.status = error.status
        refused = error.status in outcomes.REFUSING
        outcome.end = outcomes.End.REFUSED if refused else outcomes.End.FAILED
        outcome.reason, outcome.retry_after_s = parse_refusal(headers, b"")
        outcome.reason = outcome.reason or str(error.code)

    def _settle(self, record: RequestRecord) -> None:
        self._settled.append(record)
        if len(self._settled) >= _BATCH:
            self._post()

    def _post(self) -> None:
        settled, self._settled = self._settled, []
        if settled:
            self.gate.learn(settled)
            self.table.ended(settled)


def _turn(look: Callable[[str, int], Any], backend_id: str, place: int) -> Callable[[], Any]:
    return lambda: look(backend_id, place)


def make_call(shot: Shot, body: bytes, text_bytes: int) -> Call:
    """Return a streaming chat call of a request, with a body that has so much text."""
    return Call(
        Endpoint.CHAT,
        Dialect.CHAT,
        "m",
        stream=True,
        body=body,
        max_new_tokens=shot.output_tokens,
        text_bytes=text_bytes,
    )


def _usage(shot: Shot, cached_tokens: int | None) -> Usage:
    source = UsageSource.UPSTREAM
    return Usage(shot.prompt_tokens, shot.output_tokens, source, cached_tokens)


def _caller(tenant: str) -> Caller:
    return Caller(f"key-{tenant}", tenant, tenant, PRIORITIES.get(tenant, 0))
