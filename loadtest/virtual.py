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
import selectors
from collections.abc import Callable
from typing import Any, Final

from gateway.admission.gate import Gate
from gateway.admission.refusals import heard_within_s
from gateway.config.models import Config
from gateway.core.aio import periodic
from gateway.core.errors import GatewayError
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
from gateway.pools.pulse import Waits
from gateway.pools.table import PoolTable
from gateway.routing.choice import Chooser
from gateway.sim.config import SimConfig
from gateway.sim.metrics import render_metrics
from gateway.sim.sequence import Emitted, Sequence
from gateway.sim.state import SimState
from gateway.upstream.silence import ENDLESS, Silence, waits_of
from gateway.wire.metricspage import parse_metrics
from gateway.wire.replies import error_headers
from loadtest import outcomes
from loadtest.arms import PRIORITIES
from loadtest.arrivals import Shot
from loadtest.openloop import parse_refusal

Clock = Callable[[], float]

_TICK_S: Final = 0.5
_BATCH: Final = 32  # of ended requests that are told at once, as the ledger does
_BYTES_PER_TOKEN: Final = 4
_AROUND_BYTES: Final = 150  # of a body that are not its prompt


class _Jumps(selectors.DefaultSelector):
    """Waits for nothing: the time that a loop would sleep has passed at once."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everything waits, and no timer will ever end it")
        self.loop.at += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time stands still while anything can run, then jumps to the next timer. It is a clock too."""

    def __init__(self) -> None:
        self.at = 1000.0
        selector = _Jumps()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.at

    now = wall = time


class Reply:
    """One request in an engine: notes when its tokens come. A sink of the engine's driver."""

    def __init__(
        self, shot: Shot, outcome: outcomes.Outcome, clock: Clock, first: Callable[[], None]
    ) -> None:
        self.shot, self.outcome = shot, outcome
        self.ended = asyncio.get_running_loop().create_future()
        self._clock, self._first = clock, first

    @property
    def quiet_s(self) -> float | None:
        """How long ago its last token came; None before the first."""
        last_s = self.outcome.last_s
        return None if last_s is None else self._clock() - last_s

    def put_nowait(self, item: Emitted | None) -> None:
        """Take a token."""
        outcome, now = self.outcome, self._clock()
        if outcome.first_s is None:
            outcome.first_s = outcome.last_s = now
            outcome.status = 200
            self._first()
        outcome.gap_s = max(outcome.gap_s, now - (outcome.last_s or now))
        outcome.last_s = now
        if item is not None and item.finish and not self.ended.done():
            self.ended.set_result(None)


class Engines:
    """Some equal simulated servers."""

    def __init__(self, config: SimConfig, count: int) -> None:
        self.config = config
        self.states = [SimState(config) for _ in range(count)]
        self._ids = itertools.count()

    async def run(self, place: int, reply: Reply) -> None:
        """Have a server work on a request until its last token. Cancel: it forgets the request at once."""
        number = next(self._ids)
        shot, driver = reply.shot, self.states[place].drivers[0]
        first = number << 20  # no two prompts share a token, so no cache holds a prefix
        prompt = tuple(range(first, first + shot.prompt_tokens))
        driver.submit(Sequence(str(number), prompt, (0,) * shot.output_tokens), reply)
        try:
            await reply.ended
        finally:
            driver.abort(str(number))

    def total(self, name: str) -> float:
        """Return a counter, summed."""
        return sum(getattr(engine.totals, name) for each in self.states for engine in each.engines)


class Direct:
    """No gateway: the client picks the server with the fewest of its requests."""

    def __init__(self, engines: Engines, seed: int) -> None:
        self._engines = engines
        self._open = [0] * len(engines.states)
        self._rng = random.Random(seed)

    def prepare(self, shot: Shot, *, retry: bool = False) -> Shot:
        """Nothing is to be made ahead."""
        return shot

    async def send(self, prepared: Shot, outcome: outcomes.Outcome, clock: Clock) -> None:
        """Send one request, see `openloop.Target`."""
        least = min(self._open)
        place = self._rng.choice([i for i, count in enumerate(self._open) if count == least])
        self._open[place] += 1
        outcome.sent_s = clock()
        try:
            await self._engines.run(place, Reply(prepared, outcome, clock, lambda: None))
            outcome.ended_s, outcome.end = clock(), outcomes.End.COMPLETE
        finally:
            self._open[place] -= 1


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
        call, caller, route = _call(shot), _caller(shot.tenant), self._route
        pool = self.config.pools["m"]
        record.model, record.pool, record.caller = "m", "m", caller
        demand = bound(call, route=route, caller=caller, policy=pool.on_overflow)
        if demand is None:
            tokens = shot.prompt_tokens
            demand = settle(call, tokens, route=route, caller=caller, policy=pool.on_overflow)
        record.demand = demand
        need = self.gate.need(call, demand, caller, route.window_tokens)
        ask = Ask(route, call, demand, caller, need, self.gate.top_priority, returned=retry)
        slot = self.gate.enter(ask) or await self._wait(ask, record)
        place = self._places[slot.backend_id]
        record.backend_id, record.sent_at = slot.backend_id, self._loop.time()
        reply = Reply(shot, outcome, clock, lambda: self._first_token(slot, record))
        self._live[place][record.id] = Silence(ENDLESS, record.sent_at, need=need), reply
        try:
            await self._engines.run(place, reply)
            record.usage = Usage(shot.prompt_tokens, shot.output_tokens, UsageSource.UPSTREAM)
        finally:
            del self._live[place][record.id]
            self._heard_at[place] = self._loop.time()
            slot.release()

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


def _call(shot: Shot) -> Call:
    text_bytes = _BYTES_PER_TOKEN * shot.prompt_tokens
    body = bytes(text_bytes + _AROUND_BYTES)
    return Call(
        Endpoint.CHAT,
        Dialect.CHAT,
        "m",
        stream=True,
        body=body,
        max_new_tokens=shot.output_tokens,
        text_bytes=text_bytes,
    )


def _caller(tenant: str) -> Caller:
    return Caller(f"key-{tenant}", tenant, tenant, PRIORITIES.get(tenant, 0))
