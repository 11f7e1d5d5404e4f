"""What the gateway does once an attempt has failed: it notes whose fault that was, and obeys `upstream.attempts`."""

from __future__ import annotations

import asyncio
import math
import random
from functools import partial
from typing import Final

from gateway.admission.gate import Gate
from gateway.admission.refusals import engine_refused, heard_within_s
from gateway.core.aio import Clock, beside
from gateway.core.endings import Attempt, Barrier, Ending
from gateway.core.errors import (
    AdapterLost,
    BackendBroke,
    BackendStopping,
    ConnectFailed,
    EngineFull,
    MisdirectedReply,
    NothingFree,
    RequestForgotten,
    RequestQuarantined,
    StaleConnection,
    StreamMoved,
    UpstreamError,
)
from gateway.core.exclusion import Chance
from gateway.core.types import Ask, Call, ModelsSeen, RequestRecord, Slot, TrafficFailed
from gateway.ingress.deaths import LOOK_S, Deaths
from gateway.ingress.downstream import Downstream
from gateway.ingress.leaving import pass_over
from gateway.ingress.measuring import Measuring
from gateway.ingress.settings import Settings
from gateway.observe.ledger import Ledger
from gateway.pools.attribution import is_hard
from gateway.pools.losses import Fingerprint
from gateway.pools.quarantine import Quarantine, may_be_a_death
from gateway.pools.table import Backend, PoolTable
from gateway.resume.recited import RecitedStream
from gateway.resume.stream import TrailedStream
from gateway.routing.choice import failed_at
from gateway.upstream import attempts
from gateway.upstream.client import Client
from gateway.upstream.reply import Reply
from gateway.wire.replies import upstream_fault

# What vLLM says of a request whose engine has ended, and all work on it. As it is stopped, it may say so for seconds
# while its health is good. Source: `EngineDeadError` of vLLM 0.32 (the first) and 0.33; seen there.
_ENDED: Final = (
    "EngineCore encountered an issue. See stack trace (above) for the root cause.",
    "The server had an error while processing your request.",
)
_AT_ONCE_BYTES: Final = 1024 * 1024  # a millisecond


class Retrying:
    """Decides about attempts that failed, of all requests."""

    def __init__(
        self, table: PoolTable, gate: Gate, client: Client, ledger: Ledger, clock: Clock, measuring: Measuring
    ) -> None:  # fmt: skip
        self._table = table
        self._gate = gate
        self._client = client
        self._ledger = ledger
        self._clock = clock
        self._measuring = measuring
        self._rng = random.Random()
        self.quarantine = Quarantine(table, clock)
        self._budget = attempts.Budget()
        self._deaths = Deaths(table, gate, self.quarantine, clock)

    async def after(
        self, settings: Settings, down: Downstream, ask: Ask, backend: Backend, slot: Slot,
        error: UpstreamError | EngineFull,
    ) -> bool:  # fmt: skip
        """Note a failed attempt; return True to try a fresh connection, False to look for another place.

        Where only the end of a stream is left to tell, it returns False, and `Passing.ends` tells that end.

        Raises:
            GatewayError: nothing more is tried; the client gets it (502, 503, 504).
        Cancel: nothing is held.
        """
        record = down.record
        assert record is not None
        self._note(record, ask, backend, slot, error)
        over = await self._judge(down, record, ask, backend, error)
        unsent = isinstance(error, ConnectFailed) and not isinstance(error, NothingFree)
        if over or unsent or (down.trailed is not None and down.trailed.cut is not None):
            await self._deaths.can_go_on(ask, backend, slot, sent=not unsent)
        stream = await self._findable(settings, down, record, ask)
        if stream is not None and stream.awaits and isinstance(error, StaleConnection):
            self._ledger.retried(ask.route.pool, attempts.Next.FRESH_CONNECTION.value)
            return True  # nobody had its rest
        if isinstance(stream, RecitedStream) and stream.lacks_its_end:
            return False  # nobody is asked: `Passing.ends`
        if stream is not None and await self._goes_on(down, ask, backend, slot, error, stream):
            return False
        chance = self._chance(ask)
        step = self._next(down, record, ask, error, chance, over=over)
        if step is attempts.Next.TELL:
            raise engine_refused(ask, error) if isinstance(error, EngineFull) else error
        self._ledger.retried(ask.route.pool, step.value)
        if step is attempts.Next.AGAIN:
            ask.tried.pop(backend.id, None)
        if stream is not None and stream.went_on:
            self._measuring.anew(down, ask, stream)
        made = record.attempts - ask.attempts_before
        await _pause(slot, attempts.pause_s(step, error, made, self._rng.random()))
        return step is attempts.Next.FRESH_CONNECTION

    async def _goes_on(
        self, down: Downstream, ask: Ask, backend: Backend, slot: Slot, error: UpstreamError | EngineFull,
        stream: TrailedStream,
    ) -> bool:  # fmt: skip
        """Have an ask be for what is left of its stream; False, with the ask unchanged, where nobody can go on."""
        record, tried, too_old = down.record, ask.tried, False
        assert record is not None
        if stream.awaits:
            ask.tried = {**tried}
            too_old = pass_over(ask, stream, self._table.backends(ask.route.pool))
        chance, pause_s = self._chance(ask), 0.0
        if isinstance(error, EngineFull) and stream.awaits and chance is Chance.NEVER:
            del ask.tried[backend.id]  # it is the only one, and well
            chance, pause_s = self._gate.chance(ask), attempts.rest_pause_s(error)
        if self._measuring.rest(record, ask, stream, chance, moved=isinstance(error, StreamMoved)):
            await _pause(slot, pause_s)
            return True
        if down.answering:
            nobody = Barrier.OLD_ENGINE if too_old else Barrier.NO_BACKEND
            record.not_resumed = stream.barrier or nobody
        ask.tried = tried  # a backend that cannot go on with the stream may begin it anew
        return False

    def _chance(self, ask: Ask) -> Chance:
        return self._gate.chance(ask) if ask.place is None else Chance.NOW

    def _next(
        self, down: Downstream, record: RequestRecord, ask: Ask, error: UpstreamError | EngineFull,
        chance: Chance, *, over: bool,
    ) -> attempts.Next:  # fmt: skip
        """Return what follows a failed attempt of which there is no stream to go on with."""
        step = attempts.after(
            error,
            attempts=record.attempts - ask.attempts_before,
            repeatable=_repeatable(down),
            over=over,
            chance=chance,
            left_s=self._left_s(down, record),
        )
        if step is not attempts.Next.TELL and attempts.adds_load(error, over=over):
            active = sum(each.in_flight for each in self._table.backends(ask.route.pool))
            if not self._budget.begin(down, ask.route.pool, active):
                self._ledger.retried(ask.route.pool, "over_budget")
                return attempts.Next.TELL
        return step

    async def _findable(
        self, settings: Settings, down: Downstream, record: RequestRecord, ask: Ask
    ) -> TrailedStream | None:
        """Return the request's stream, after finding out at which token it broke off.

        Raises:
            RequestQuarantined: asking for the ids also killed a backend (400).
        """
        stream = down.trailed
        while stream is not None and stream.cut is not None:
            asked_at = self._clock.now()
            failed = await self._measuring.find_way(settings, ask, stream)
            if failed is None:
                break
            failed_at(ask, failed)
            fingerprint = await self.lost(down, record, failed, Ending.BROKE, asked_at)
            if fingerprint is not None:
                await self._admit(fingerprint, ask.caller.tenant)
        return stream

    async def _judge(
        self, down: Downstream, record: RequestRecord, ask: Ask, backend: Backend, error: UpstreamError | EngineFull
    ) -> bool:  # fmt: skip
        """Note what a failure tells of its backend's death, and look whether it was the second one.

        Returns whether nobody works on the request any more, where it can be sent again.

        Raises:
            RequestQuarantined: it was (400).
        Cancel: nothing is held.
        """
        if isinstance(error, UpstreamError) and error.in_order:
            self.quarantine.ended_in_order(backend.id)
            return True
        if isinstance(error, RequestForgotten | BackendStopping | AdapterLost):
            return True
        ended = not backend.plain and error.message in _ENDED
        fingerprint = await self.lost(down, record, backend, error.ending)
        if fingerprint is None:
            return ended
        await self._admit(fingerprint, ask.caller.tenant)
        return ended or (_repeatable(down) and await self._deaths.died(fingerprint, record))

    async def check_lives(
        self, down: Downstream, ask: Ask, backend: Backend, slot: Slot, reply: Reply
    ) -> None:
        """Note that a backend answered 5xx; if it did so as it died, another one may take the request.

        Raises:
            BackendBroke: another one can; `after` has it go there (502).
        Cancel: nothing is held.
        """
        record = down.record
        assert record is not None
        fingerprint = await self.lost(down, record, backend, Ending.HTTP_5XX)
        if not _repeatable(down):
            return
        fault = upstream_fault(reply.status, reply.body or b"", ask.call.dialect)
        says_so = not backend.plain and fault.message in _ENDED
        if says_so or (fingerprint is not None and await self._deaths.died(fingerprint, record)):
            failed_at(ask, backend)
            if await self._deaths.can_go_on(ask, backend, slot, sent=True):
                crashed = "The backend crashed while it worked on the request."
                raise BackendBroke(fault.message if says_so else crashed)

    async def lost(
        self,
        down: Downstream,
        record: RequestRecord,
        backend: Backend,
        ending: Ending,
        sent_at: float | None = None,
    ) -> Fingerprint | None:
        """Note that a backend may have died of a request, or with it; return what the request is known by.

        `sent_at` is when it was sent there, where that was no attempt of the record. Cancel: nothing is held.
        """
        caller, sent_at, body = record.caller, sent_at or record.sent_at, _known_by(down, record)
        if body is None or caller is None or sent_at is None:
            return None
        if not may_be_a_death(backend, ending):
            return None
        fingerprint = down.fingerprint or await self._fingerprint(body, caller.tenant)
        down.fingerprint = fingerprint
        said_tokens = 0 if record.usage is None else record.usage.completion_tokens
        self.quarantine.lost(backend, fingerprint, sent_at, said_tokens)
        return fingerprint

    async def admit(self, call: Call, tenant: str) -> None:
        """Look whether a request that has just come was present at two deaths.

        Raises:
            RequestQuarantined: it was (400).
        Cancel: nothing is held.
        """
        if len(call.body) in self.quarantine.watched:
            await self._admit(await self._fingerprint(call.body, tenant), tenant)

    async def _admit(self, fingerprint: Fingerprint, tenant: str) -> None:
        # Until its backend was probed: milliseconds as a rule, five seconds at most.
        while self.quarantine.undecided(fingerprint):  # noqa: ASYNC110 - time decides, too
            await asyncio.sleep(LOOK_S)
        found = self.quarantine.found(fingerprint)
        if found is None:
            return
        found.refused[tenant] += 1
        self._ledger.quarantined(found.pool)
        minutes = math.ceil((found.until - self._clock.now()) / 60)
        raise RequestQuarantined(
            "This request was being worked on each time when two servers crashed one after the other, so it is not"
            f" sent to another one for {minutes} min. Please change it: its prompt, its media or its"
            f" parameters. If it is not to blame, an operator can lift this (quarantine {fingerprint.id})."
        )

    async def _fingerprint(self, body: bytes, tenant: str) -> Fingerprint:
        if len(body) <= _AT_ONCE_BYTES:
            return self.quarantine.fingerprint(body, tenant)
        return await beside(partial(self.quarantine.fingerprint, body, tenant))

    def give_back(self, down: Downstream) -> None:
        """Give back a request's place in the budget: another attempt was answered, or it is over."""
        self._budget.end(down)

    def passed_on(self, record: RequestRecord) -> int:
        """Keep an attempt that was refused before another pool is asked; return how many attempts there were."""
        if record.fallback is not None and record.attempts > len(record.failed):
            self._keep(record, record.backend_id or "", Ending.REFUSED, self._clock.now())
        return record.attempts

    def _keep(self, record: RequestRecord, backend_id: str, ending: Ending, now: float) -> None:
        """Keep an attempt that is over, of a request that is not."""
        span_id = "" if record.trace is None else record.trace.attempt_id
        sent_at = record.sent_at or now
        over = Attempt(backend_id, record.engine_id, sent_at, now, ending, span_id)
        record.failed = (*record.failed, over)

    def _note(
        self, record: RequestRecord, ask: Ask, backend: Backend, slot: Slot, error: UpstreamError | EngineFull
    ) -> None:  # fmt: skip
        failed_at(ask, backend)
        now, known = self._clock.now(), self._table.get(backend.id) is backend
        self._keep(record, backend.id, error.ending, now)
        if known:  # else a reload gave its name to another server
            self._table.observe(backend.id, TrafficFailed(now, error.ending, backend.tries(slot)))
        if isinstance(error, EngineFull):  # it did nothing, as its refusal says
            record.usage = record.usage if record.resumed else None
        elif not isinstance(error, StreamMoved):
            hard = known and is_hard(error.ending)
            self._ledger.upstream_failed(backend.id, error.ending, hard=hard)
        if isinstance(error, AdapterLost) and known and backend.health.models_known:
            left = tuple(each for each in backend.models.values() if each.name != ask.route.adapter)
            seen = ModelsSeen(now, left, backend.endpoints, backend.version)
            self._table.observe(backend.id, seen)
            del ask.tried[backend.id]  # it is up, and may load it again
            self._gate.want(ask.route)
        if isinstance(error, BackendStopping):
            self._gate.want(ask.route, leaving=backend.id)
        if isinstance(error, MisdirectedReply):
            self._client.connections(backend).distrust()

    def _left_s(self, down: Downstream, record: RequestRecord) -> float:
        """Return how long the client still waits for the beginning of an answer."""
        sent_at = record.body_at or down.received_at
        return sent_at + heard_within_s(down.patience_s) - self._clock.now()


async def _pause(slot: Slot, seconds: float) -> None:
    """Wait before another attempt, without the place of the last one."""
    if seconds:
        slot.release()
        await asyncio.sleep(seconds)


def _known_by(down: Downstream, record: RequestRecord) -> bytes | None:
    """Return what a request is known by: its body; if that is gone and others go on with its stream, an id.

    That is the engine's, as clients give several requests one `x-request-id`. It does not tell that one comes again.
    """
    if down.kept is not None:
        return down.kept.call.body
    if down.asked is None or down.upload is not None:
        return None
    if down.body_at_hand:
        return down.asked.body
    return None if down.trailed is None else record.engine_id.encode()


def _repeatable(down: Downstream) -> bool:
    """Whether a request can be sent once more: its client has no byte of a reply, and its body is at hand."""
    return down.body_at_hand and not down.answering
