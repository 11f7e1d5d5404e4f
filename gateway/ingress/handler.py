"""The story of a request, from its head to its settled record.

    authenticate   401, before the body is read
    read body      413, 408, 415
    parse          400
    resolve model  404, the same words for unknown and forbidden
    fall back      from here on, another pool may take what this one cannot, as long as nothing was done
    fit context    400, before anything is forwarded
    charge         429, what the limits of its key and tenant do not allow
    admit          at once, or after a wait for room; 503 or 429 with Retry-After when there is none
    send           502, 504; elsewhere only if nothing was done
    relay          chunk by chunk; after the first byte failures are told in the stream
    settle         always, once, synchronously

In the common case nothing waits but the backend: the key is known, the body came with its head, its
bytes prove that the prompt fits, a slot and an idle connection are at hand.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from gateway.access.failures import FailedKeys
from gateway.access.keys import check_address
from gateway.admission.gate import Gate
from gateway.admission.refusals import heard_within_s
from gateway.core.aio import Clock
from gateway.core.errors import (
    AccessError,
    ClientGone,
    ContextLengthExceeded,
    EngineFull,
    GatewayError,
    Rejected,
    UpstreamError,
)
from gateway.core.ratelimited import LimitsUnknown, RateLimited
from gateway.core.traffic import Cause, Fallback, Waited
from gateway.core.types import Ask, Outcome, RequestRecord, Slot
from gateway.ingress.answers import as_told, check_passed_on, check_taken, own_headers
from gateway.ingress.bodies import Bodies, call_at_hand
from gateway.ingress.charging import charge, give_back, settle
from gateway.ingress.departing import Departing
from gateway.ingress.downstream import Downstream
from gateway.ingress.drain import shutting_down
from gateway.ingress.early import Early
from gateway.ingress.heads import header_lines
from gateway.ingress.leaving import bar_another, let_go, placed_at, taken_ahead, what_runs
from gateway.ingress.measuring import UNMEASURED, Measuring, rest_sent
from gateway.ingress.outgoing import outgoing
from gateway.ingress.passing import Passing
from gateway.ingress.retrying import Retrying
from gateway.ingress.settings import Settings
from gateway.ingress.shadow import Shadows
from gateway.ingress.tracing import Tracing
from gateway.limiting.limiter import Limiter
from gateway.observe.ledger import Ledger
from gateway.pools.table import PoolTable
from gateway.routing.catalog import Catalog, Catalogs
from gateway.routing.fallback import NOTHING_DONE, as_of_own_pool, cause_of, stand_ins
from gateway.routing.trial import assign
from gateway.upstream.client import Client
from gateway.upstream.engineids import engine_id, plain_id
from gateway.upstream.silence import silence_of
from gateway.wire.calls import named
from gateway.wire.replies import error_body, error_headers, fault_of

log = logging.getLogger("gateway.handler")


@dataclass(slots=True)
class Handler:
    """Serves requests. `draining` refuses new ones; the others end in their own time."""

    settings: Settings
    table: PoolTable
    client: Client
    ledger: Ledger
    clock: Clock
    gate: Gate
    catalogs: Catalogs
    live: set[Downstream]
    early: Early
    failed_keys: FailedKeys
    shadows: Shadows
    limiter: Limiter
    bodies: Bodies = field(default_factory=Bodies)
    tracing: Tracing | None = None  # None: there are no traces
    draining: bool = False
    measuring: Measuring = field(init=False)
    passing: Passing = field(init=False)
    retrying: Retrying = field(init=False)

    def __post_init__(self) -> None:
        self.measuring = measuring = Measuring(self.table, self.gate)
        self.retrying = Retrying(
            self.table, self.gate, self.client, self.ledger, self.clock, measuring
        )
        departing = Departing(self.gate, measuring, self.retrying, self.clock)
        self.passing = Passing(self.table, self.ledger, departing, self.clock)

    async def handle(self, down: Downstream) -> None:  # noqa: C901, PLR0915 - the story, in one piece
        """Serve one request; every way out is settled exactly once.

        Cancel: what was taken is given back before this returns; a client that is still there is told.
        """
        settings = self.settings
        down.record = record = RequestRecord(
            down.id, down.spec.endpoint, down.received_at, client_retry=down.retry_count,
            client=down.client_of(settings.proxies),
        )  # fmt: skip
        if self.tracing is not None:
            record.trace = self.tracing.begin(down.headers)
        ask: Ask | None = None
        try:
            if down.gone:
                raise asyncio.CancelledError
            if self.draining:
                raise shutting_down()
            credentials = down.fields
            record.caller = caller = settings.keys.authenticate(
                credentials.get(b"authorization"),
                credentials.get(b"x-api-key"),
                credentials.get(b"api-key"),
                self.clock.wall(),
            )
            if caller.addresses is not None:
                check_address(caller, record.client)
            call = call_at_hand(down, settings.max_body) or await self.bodies.read_call(
                down, caller, settings.config, self.catalog
            )
            record.body_at = self.clock.now()
            settings = self.settings  # the catalog below is of the same configuration
            route = self.catalogs.current(settings.pools).resolve(call, caller)
            down.asked = call = call if call.model else named(call, route)
            record.model, record.pool, record.adapter = route.requested, route.pool, route.adapter
            record.stream, record.unknown_fields = call.stream, call.asked.unknown
            record.choices, record.stated_tokens = call.choices, call.max_new_tokens
            ask = Ask(route, call, UNMEASURED, caller)
            ask.session = down.fields.get(settings.session_header, b"")
            if route.trial is not None:
                record.conversation = assign(ask, down.revision)
            if self.retrying.quarantine.watched:
                await self.retrying.admit(call, caller.tenant)
            try:
                await self._fit_and_charge(settings, record, ask)
                await self._forward(settings, down, record, ask)
            except (Rejected, ContextLengthExceeded, *NOTHING_DONE) as error:
                await self._fall_back(settings, down, record, ask, error)
        except GatewayError as error:
            self._refuse(down, record, error, ask)
        except asyncio.CancelledError:
            if not down.gone:
                self._refuse(down, record, down.stopped_by or shutting_down(), ask)
                record.outcome = record.outcome if down.stopped_by else Outcome.SHUTDOWN
            elif record.outcome is not Outcome.OK:  # else its client left with all of the reply
                record.outcome, record.status = Outcome.CLIENT_GONE, ClientGone.status
            raise
        except Exception:
            log.exception("request failed by a bug", extra={"event": "bug", "id": down.id})
            bug = GatewayError("Internal error in the gateway. It has been logged.")
            self._refuse(down, record, bug)
        finally:
            if ask is not None and ask.place is not None:
                let_go(ask)
            if down.hold is not None:
                down.drop_body()
            if down.kept is not None:
                down.forget_stream()
            if down.upload is not None:
                record.stream = down.upload.form.stream  # the field may come after the file
                down.upload.close()
            if record.failed:
                self.retrying.give_back(down)
            if record.taken is not None:
                settle(self.limiter, record)
            record.ended_at = self.clock.now()
            record.bytes_out = down.bytes_out
            self.live.discard(down)
            down.asked = down.gathering = down.trailed = None  # its connection may rest for minutes
            down.task = None  # a cancelled one holds this frame, and all that the request read
            self.ledger.settle(record)

    async def _fit_and_charge(self, settings: Settings, record: RequestRecord, ask: Ask) -> None:
        """Find out what a request needs of its pool, whether that fits, and charge its limits for it."""
        if not self.measuring.at_once(settings, record, ask):
            await self.measuring.counted(settings, record, ask)
        record.price = settings.prices.of(ask.route.requested, ask.route.pool)
        plan = settings.plans.of(ask.caller, ask.route.requested, ask.route.pool)
        if plan is not None:
            await charge(self.limiter, plan, settings.prices, record, ask)

    async def _fall_back(
        self, settings: Settings, down: Downstream, record: RequestRecord, ask: Ask, error: GatewayError
    ) -> None:  # fmt: skip
        """Have another pool answer, by the limits for its model, what its own cannot take; else raise `error`."""
        asked, cause = ask.route, cause_of(error)
        if cause is None or down.begun or not down.body_at_hand:
            raise error
        pool, catalog = settings.pools[asked.pool], self.catalogs.of(settings.pools)
        put_back = as_of_own_pool(record)
        taken = give_back(self.limiter, record)
        for route in stand_ins(cause, ask, pool, catalog):
            self.retrying.give_back(down)  # no attempt of the pool before is under way
            record.pool, record.adapter = route.pool, route.adapter
            record.fallback = Fallback(asked.pool, cause)
            other = Ask(route, down.asked or ask.call, UNMEASURED, ask.caller, session=ask.session)
            sent = other.attempts_before = self.retrying.passed_on(record)
            down.gathering = down.trailed = None  # of its own pool's call (`keep_trail`)
            record.conversation = assign(other, down.revision)
            try:
                await self._fit_and_charge(settings, record, other)
                await self._forward(settings, down, record, other)
            except GatewayError as failed:
                if down.begun or (record.attempts > sent and cause_of(failed) is None):
                    raise  # it may have been executed
                given = give_back(self.limiter, record)
                taken = given if given and record.attempts > sent else taken
                error = failed if isinstance(failed, RateLimited | LimitsUnknown) else error
            else:
                if cause is Cause.OVERLOAD:
                    self.gate.gone_elsewhere(ask)
                return
            finally:
                let_go(other)
        self.retrying.passed_on(record)
        put_back()
        record.fallback = None
        record.taken = taken if cause is Cause.CONTEXT else None  # an engine may have had it
        raise error

    async def _forward(  # noqa: C901, PLR0915 - all attempts, in one piece
        self, settings: Settings, down: Downstream, record: RequestRecord, ask: Ask
    ) -> None:
        """Send the request to a backend with room, and to another where that repeats nothing."""
        self.passing.keep_trail(settings.going_on, ask)
        while True:
            slot = self.gate.enter(ask) if ask.place is None else taken_ahead(ask)
            slot = slot or await self._wait(settings, down, record, ask)
            if ask.fallback is not None:
                self.gate.note(ask, down.id, slot.backend_id)
            try:
                if not ask.demand.judged:
                    await self.measuring.judge(settings, record, ask)
                backend = placed_at(self.table, slot, ask)
                fresh = False
                while backend is not None:  # else a reload took it away while this request waited
                    if down.trailed is not None and bar_another(ask, down.trailed, backend):
                        break
                    record.attempts += 1
                    if ask.moves_rest is not None:
                        rest_sent(record, ask)
                    record.backend_id = backend.id
                    record.engine_id = plain_id() if backend.plain else engine_id()
                    record.sent = slot.sent
                    record.revision = backend.revision
                    ask.leaves = what_runs(backend, ask)  # as of now: a reload may change it
                    record.sent_at = now = self.clock.now()
                    silence = silence_of(settings.patience, now, backend, ask)
                    salt = settings.salt(ask) if ask.route.tenants_apart else None
                    rank = None if slot.sent is None else slot.sent.rank
                    out = outgoing(down, record, ask, backend, salt, rank)
                    if ask.route.shadow is not None and record.attempts == 1:
                        self.shadows.copy(settings, down, ask, silence.patience)
                    try:
                        reply = await self.client.connections(backend).send(
                            out, silence, fresh=fresh
                        )
                        if reply.status != 200 and reply.body is not None:
                            falls_back = bool(settings.pools[ask.route.pool].fallback.context)
                            if not down.begun:
                                check_passed_on(reply, ask, falls_back=falls_back)
                            check_taken(reply, ask, plain=backend.plain)
                            if reply.status >= 500:
                                await self.retrying.check_lives(down, ask, backend, slot, reply)
                        if record.attempts > 1:
                            self.retrying.give_back(down)
                        down.extra_headers = own_headers(record, self.clock.now())
                        if reply.body is None:
                            await self.passing.relay(
                                down, record, ask, backend, reply, slot, settings
                            )
                        else:
                            self.passing.answer(down, record, ask, reply, settings.max_reply)
                        if backend.health.traffic_failures or record.status >= 500:
                            self.passing.answered(backend, slot, record.status)
                        return
                    except (UpstreamError, EngineFull) as error:
                        fresh = await self.retrying.after(settings, down, ask, backend, slot, error)
                        if self.passing.ends(down, record):
                            return
                        if not fresh:
                            break
            finally:
                slot.release()

    async def _wait(
        self, settings: Settings, down: Downstream, record: RequestRecord, ask: Ask
    ) -> Slot:
        """Wait for room, in all no longer than the pool's `max_wait`, and so short that the client hears the answer."""
        began = self.clock.now()
        queue = settings.pools[ask.route.pool].queue
        # A client's time-out runs from then, until it has the first byte.
        sent_at = began if down.answering else record.body_at or down.received_at
        announces = queue.announce and record.stream and down.upload is None
        try:
            return await self.gate.wait(
                ask,
                deadline=began + queue.max_wait - record.queue_s,  # it may have waited before
                gives_up_at=sent_at + heard_within_s(down.patience_s),
                body_bytes=len(ask.call.body),
                request_id=down.id,
                announce=down.announce if announces else None,
            )
        finally:
            record.queue_s += (ended := self.clock.now()) - began
            record.waits += (Waited(ask.route.pool, began, ended),)

    def _refuse(
        self, down: Downstream, record: RequestRecord, error: GatewayError, ask: Ask | None = None
    ) -> None:
        """Answer with an error; one that came after the first byte was told in the stream already."""
        if isinstance(error, AccessError):
            error = self.failed_keys.judge(error, record.client)
        error = as_told(error, down, record)
        record.outcome, record.error_code, record.status = error.outcome, error.code, error.status
        record.message = error.message
        measured = None if ask is None or ask.demand is UNMEASURED else ask
        if isinstance(error, Rejected):
            record.shed_reason = error.shed_reason
            if measured is not None:
                self.gate.shed(measured, error, down.id, record.backend_id)
        if isinstance(error, RateLimited):
            down.extra_headers = error.lines
        if measured is None or isinstance(error, RateLimited | LimitsUnknown):
            line = ("POST", down.spec.path.decode())
            self.early.keep(error, down.id, line, record.caller)
        if down.started and not down.response_complete and not down.gone:
            down.tell(fault_of(error))
        elif not down.started and not down.gone:
            if record.attempts:
                down.extra_headers = own_headers(record, self.clock.now())
            lines = header_lines(error_headers(error, retried=down.retry_count > 0))
            down.respond(error.status, lines, error_body(error, down.id, down.spec.dialect))

    def catalog(self) -> Catalog:
        """Return the names in force."""
        return self.catalogs.current(self.settings.pools)
