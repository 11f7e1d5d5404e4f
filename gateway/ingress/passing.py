"""How a backend's reply reaches the client: whole, or relayed as it comes; both are judged on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from msgspec import structs

from gateway.config.parameters import Resume
from gateway.core.aio import Clock
from gateway.core.endings import Ending
from gateway.core.types import (
    Ask,
    Call,
    Dialect,
    Outcome,
    RequestRecord,
    Slot,
    TrafficFailed,
    TrafficOk,
)
from gateway.ingress.answers import answer, answered_late, own_headers, unfit, used, watch_over
from gateway.ingress.departing import Departing, Departure
from gateway.ingress.downstream import Downstream
from gateway.ingress.gathering import Gathering
from gateway.ingress.keeping import Keeping
from gateway.ingress.settings import GoingOn, Settings
from gateway.observe.ledger import Ledger
from gateway.pools.table import Backend, PoolTable
from gateway.resume.recited import RecitedStream
from gateway.resume.rules import may_go_on, may_recite, may_trail
from gateway.resume.stream import TrailedStream
from gateway.resume.whole import as_stream
from gateway.upstream.relay import Relay
from gateway.upstream.reply import JSON_LINE, Reply
from gateway.upstream.watch import Watch
from gateway.wire.large import fields_at_hand

# Looked up once: 0.15 us before Python 3.12.
_EXACT, _TEXT, _OFF, _OK = Resume.EXACT, Resume.TEXT, Resume.OFF, Outcome.OK


@dataclass(frozen=True, slots=True)
class Passing:
    """Passes replies on, and notes what they tell about their request and its backend."""

    table: PoolTable
    ledger: Ledger
    departing: Departing
    clock: Clock
    keeping: Keeping = field(default_factory=Keeping)

    def keep_trail(self, going_on: Mapping[str, GoingOn], ask: Ask) -> None:
        """Have the backend tell what another one needs to go on with the stream, if one could.

        The pool of the route decides. Another pool, which could not take the request, may have decided
        otherwise.
        """
        pool, call = going_on[ask.route.pool], ask.call
        least = pool.least_tokens
        if least is not None and not call.stream and ask.need.output_tokens >= least:
            ask.call = call = as_stream(call) or call
        tells_ids = call.stream and self._trails(pool.how, ask) is _EXACT
        if tells_ids is not call.tells_ids:
            ask.call = structs.replace(call, tells_ids=tells_ids)

    def _trails(self, how: Resume, ask: Ask) -> Resume:
        """Return whether another backend could go on with the stream that is asked for: by ids, by text, or not."""
        call = ask.call
        if how is _OFF or not self._several(ask) or not may_trail(call):
            return _OFF
        return _OFF if how is _TEXT and call.places is not None else how

    def _several(self, ask: Ask) -> bool:
        """Whether there is another backend that could go on."""
        return len(self.table.backends(ask.route.pool)) > 1

    def _trailed(
        self, down: Downstream, ask: Ask, backend: Backend, how: Resume, *, veil: bool
    ) -> TrailedStream | None:
        """Return the watch of a stream that another backend could go on with, or does go on with; else None."""
        if down.trailed is not None and down.trailed.went_on:
            return down.trailed
        down.trailed = None  # that of a backend which refused the request in its first frame
        by_text = how is _TEXT and not ask.call.tells_ids and self._trails(_TEXT, ask) is _TEXT
        recites = how is _EXACT and not backend.plain and may_recite(ask.call)
        if recites and self._several(ask):
            call = self._kept(down, ask.call)
            down.trailed = RecitedStream(call, ask.demand, request_id=down.id, veil=veil)
        elif ask.call.tells_ids or by_text:
            down.trailed = TrailedStream(
                ask.call, ask.demand, request_id=down.id, veil=veil, by_text=by_text
            )
        return down.trailed

    def _kept(self, down: Downstream, call: Call) -> Call:
        """Return a call that has all of its body as long as its stream runs; none of it where there is no room."""
        if call.places is None:
            return call
        if not may_go_on(call):  # its small fields are enough to say why
            return structs.replace(call, body=b"{}", fields=fields_at_hand(call), places=None)
        down.kept = down.kept or self.keeping.keep(call)
        if down.kept is None:
            return structs.replace(call, body=b"", fields={}, places=None)
        return down.kept.call

    async def relay(  # noqa: PLR0913 - a reply, and all that it is judged by
        self,
        down: Downstream,
        record: RequestRecord,
        ask: Ask,
        backend: Backend,
        reply: Reply,
        slot: Slot,
        settings: Settings,
    ) -> None:
        """Relay a streamed reply; its usage is the backend's, or counted when it was cut.

        Raises:
            GatewayError: it broke, or is none to be passed on.
        Cancel: the backend's connection is closed.
        """
        veil = ask.route.tenants_apart
        pool = settings.going_on[ask.route.pool]
        trailed = (
            self._trailed(down, ask, backend, pool.how, veil=veil)
            if reply.is_event_stream
            else None
        )
        watch: Watch = trailed or watch_over(
            reply, ask.call, down.id, settings.max_reply, veil=veil
        )

        def first_token() -> None:
            now = self.clock.now()
            self.table.first_token(slot, now)
            down.drop_body()
            if down.gathering is None:
                # A response begins before its engine has done anything.
                begun = ask.call.dialect is Dialect.RESPONSES and not goes_on
                down.started_at = now if begun else down.started_at or now

        goes_on = trailed is not None and trailed.went_on
        if ask.call.stream and not record.stream and not goes_on:  # drop what was gathered before
            down.gathering = Gathering(ask.call.dialect, settings.max_reply)
        relay = Relay(
            *(reply, watch, down.gathering or down, self.clock.now()),
            on_first_token=first_token,
            refuses=partial(unfit, reply, record.engine_id, settings.max_reply),
        )
        departure = None
        if trailed is not None:
            departure = self._departure(settings, down, ask, trailed, backend, relay)
        down.relay = relay
        try:
            error = await relay.run()
        except asyncio.CancelledError:
            self._left(down, watch, reply, backend, slot)
            raise
        finally:
            if departure is not None:
                departure.close()
            down.relay = None
            record.first_byte_at = down.started_at
            record.usage = used(watch, reply, record, ask)
        if error is not None:
            raise error
        whole = None if down.gathering is None else down.gathering.reply()
        record.status, record.outcome = reply.status, _OK
        if whole is not None:
            down.extra_headers = own_headers(record, self.clock.now())
            down.respond(200, JSON_LINE, whole)
            record.first_byte_at = down.started_at

    def ends(self, down: Downstream, record: RequestRecord) -> bool:
        """End a stream that broke off where only its end was left to tell; False where more was."""
        stream = down.trailed
        if not isinstance(stream, RecitedStream) or not stream.lacks_its_end:
            return False
        down.end(stream.told_end())
        record.usage, record.status, record.outcome = stream.usage, 200, _OK
        return True

    def _departure(
        self,
        settings: Settings,
        down: Downstream,
        ask: Ask,
        trailed: TrailedStream,
        backend: Backend,
        relay: Relay,
    ) -> Departure | None:
        """Have a stream leave a backend that is drained or has lost it; return what its end has to close, if any."""
        if isinstance(trailed, RecitedStream):
            departure = Departure(self.departing, settings, down, ask, trailed, backend, relay)
            relay.leaves = departure.begin
            return departure
        after_s = settings.going_on[ask.route.pool].move_after_s
        leaves = self.departing.leaving.leaves
        relay.leaves = partial(leaves, ask, trailed, backend, after_s, relay.silence)
        return None

    def _left(
        self, down: Downstream, watch: Watch, reply: Reply, backend: Backend, slot: Slot
    ) -> None:  # fmt: skip
        """Note a stream whose client left at its end: SDKs close at the last frame, and wait for no end of the body."""
        if down.record is not None and down.gone and watch.ended and watch.complete:
            down.record.status, down.record.outcome = reply.status, Outcome.OK
            if backend.health.traffic_failures:
                self.answered(backend, slot, reply.status)

    def answered(self, backend: Backend, slot: Slot, status: int) -> None:
        """Note what a reply that came to its end tells of its backend; a 4xx tells nothing."""
        now, trial = self.clock.now(), backend.tries(slot)
        seen: TrafficFailed | TrafficOk | None = None
        known = self.table.get(backend.id) is backend  # else its name is another server's
        if status >= 500:
            seen = TrafficFailed(now, Ending.HTTP_5XX, trial)
            self.ledger.upstream_failed(backend.id, Ending.HTTP_5XX, hard=known)
        elif status < 400:
            seen = TrafficOk(now, trial)
        if seen is not None and known:
            self.table.observe(backend.id, seen)

    def answer(
        self, down: Downstream, record: RequestRecord, ask: Ask, reply: Reply, most_bytes: int
    ) -> None:
        """Answer with a whole reply.

        Raises:
            GatewayError: it is no answer to the request.
        """
        goes_on = down.trailed is not None and down.trailed.went_on
        if down.started or goes_on:  # it has begun as a stream
            raise answered_late(reply, ask.call, goes_on=goes_on)
        veil = ask.route.tenants_apart
        final = answer(reply, ask.call, down.id, record.engine_id, most_bytes, veil=veil)
        record.status, record.outcome, record.usage = final.status, final.outcome, final.usage
        record.error_code = final.code
        down.respond(final.status, final.lines, final.body)
        record.first_byte_at = down.started_at
