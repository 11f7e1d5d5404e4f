"""The story of a request, from its head to its settled record.

    authenticate   401, before the body is read
    read body      413, 408, 415
    parse          400
    resolve model  404, the same words for unknown and forbidden
    fit context    400, before anything is forwarded
    choose         503 with Retry-After when nobody can take it
    send           502, 504; elsewhere only if nothing was sent
    relay          chunk by chunk; after the first byte failures are told in the stream
    settle         always, once, synchronously

In the common case nothing waits but the backend: the key is known, the body came with its head, its
bytes prove that the prompt fits, a slot and an idle connection are at hand.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass, field

from gateway.access.context import bound, settle, unsettled
from gateway.access.counters import PromptCounters
from gateway.access.keys import KeyRing, OpenRing
from gateway.config.models import Config
from gateway.core.aio import Clock
from gateway.core.errors import (
    BackendBroke,
    ClientGone,
    GatewayError,
    ShuttingDown,
    UpstreamError,
)
from gateway.core.types import (
    Call,
    Caller,
    Demand,
    Dialect,
    Outcome,
    Phase,
    RequestRecord,
    Route,
    TrafficFailed,
    TrafficOk,
    Usage,
    UsageSource,
)
from gateway.ingress.downstream import Downstream
from gateway.observe.ledger import Ledger
from gateway.pools.table import Backend, PoolTable
from gateway.routing.catalog import Catalog
from gateway.routing.choice import choose
from gateway.routing.filters import eligible
from gateway.upstream import attempts
from gateway.upstream.client import Client, Outgoing
from gateway.upstream.relay import Patience, PlainWatch, Relay, Watch
from gateway.upstream.reply import Reply
from gateway.wire.calls import form_call, parse_call, upstream_body
from gateway.wire.frames import json_usage, whole_answer
from gateway.wire.replies import error_body, error_headers, normalise_upstream_error
from gateway.wire.sse import StreamWatch

log = logging.getLogger("gateway.handler")

_GENERATES = (Dialect.CHAT, Dialect.COMPLETIONS)
_ADMISSION_REFUSED = 503  # vLLM's own admission control: back-pressure, not sickness


@dataclass(slots=True)
class Settings:
    """What a reload swaps, all at once; a request keeps the settings it started with."""

    config: Config
    keys: KeyRing | OpenRing
    counters: PromptCounters
    patience: Patience


@dataclass(slots=True)
class Handler:
    """Serves requests. `draining` refuses new ones; the others end in their own time."""

    settings: Settings
    table: PoolTable
    client: Client
    ledger: Ledger
    clock: Clock
    live: set[Downstream]
    rng: random.Random = field(default_factory=random.Random)
    draining: bool = False
    _catalog: Catalog | None = None
    _catalog_epoch: int = -1

    async def handle(self, down: Downstream) -> None:  # noqa: PLR0915 - the story, in one piece
        """Serve one request; every way out is settled exactly once.

        Cancel: what was taken is given back before this returns; a client that is still there is told.
        """
        settings = self.settings
        record = RequestRecord(
            down.id, down.spec.endpoint, down.received_at, client_retry=down.retry_count
        )
        down.entered = True
        try:
            if down.gone:
                raise asyncio.CancelledError
            if self.draining:
                raise ShuttingDown(
                    "This gateway is shutting down. Retry; another replica will answer.",
                    retry_after_s=1,
                )
            credentials = down.credentials
            record.caller = caller = settings.keys.authenticate(
                credentials.get(b"authorization"),
                credentials.get(b"x-api-key"),
                credentials.get(b"api-key"),
                self.clock.wall(),
            )
            config = settings.config
            if down.spec.multipart:
                call = await self._open_upload(config, down, record)
            else:
                body = await down.read_body(config.limits.max_body, config.timeouts.body)
                record.body_at = self.clock.now()
                call = parse_call(down.spec, body, down.content_type)
            settings = self.settings  # the catalog below is of the same configuration
            route = self.catalog().resolve(call, caller)
            record.model, record.pool, record.adapter = route.requested, route.pool, route.adapter
            record.stream = call.stream
            demand = bound(call, window_tokens=route.window_tokens, caller=caller)
            if demand is None:
                demand = await self._count(settings, call, route, caller)
            record.demand = demand
            await self._forward(settings, down, record, call, route, demand)
        except GatewayError as error:
            self._refuse(down, record, error)
        except asyncio.CancelledError:
            if down.gone:
                record.outcome, record.status = Outcome.CLIENT_GONE, ClientGone.status
            else:
                self._refuse(
                    down,
                    record,
                    ShuttingDown("This gateway is shutting down. Retry.", retry_after_s=1),
                )
                record.outcome = Outcome.SHUTDOWN
            raise
        except Exception:
            log.exception("request failed by a bug", extra={"request_id": down.id})
            self._refuse(
                down,
                record,
                GatewayError("The gateway failed on this request; it has been logged."),
            )
        finally:
            if down.upload is not None:
                record.stream = down.upload.form.stream  # the field may come after the file
                down.upload.close()
            record.ended_at = self.clock.now()
            record.bytes_out = down.bytes_out
            self.live.discard(down)
            self.ledger.settle(record)

    async def _open_upload(self, config: Config, down: Downstream, record: RequestRecord) -> Call:
        """Read a form as far as its model; the rest of it is checked and sent on as it comes."""
        upload = down.open_upload(config.limits.max_audio_body, config.timeouts.body)
        head = await upload.read_head()
        record.body_at = self.clock.now()
        return form_call(down.spec, upload.form, head, down.content_type)

    async def _count(self, settings: Settings, call: Call, route: Route, caller: Caller) -> Demand:
        """Count the prompt exactly where its size alone does not tell whether it fits."""
        backends = [each for each in self.table.backends(route.pool) if each.phase is Phase.READY]
        tokens = await settings.counters.count(call, route, backends)
        if tokens is None:
            return unsettled(call, window_tokens=route.window_tokens, caller=caller)
        policy = settings.config.pools[route.pool].on_overflow
        return settle(call, tokens, window_tokens=route.window_tokens, caller=caller, policy=policy)

    async def _forward(
        self, settings: Settings, down: Downstream, record: RequestRecord, call: Call, route: Route, demand: Demand
    ) -> None:  # fmt: skip
        """Send the request to the best backend, and to the next one where that surely repeats nothing."""
        tried: list[str] = []
        backend: Backend | None = None
        hides_usage = call.stream and call.dialect in _GENERATES and not call.wants_usage
        while True:
            now = self.clock.now()
            if backend is not None and self.table.get(backend.id) is not backend:
                backend = None  # a reload took it away while we waited
            fresh = backend is not None
            if backend is None:
                backend = choose(
                    self.table.backends(route.pool), route, call, demand, tried, now, self.rng
                )
            slot = self.table.take(backend.id, now)
            record.attempts += 1
            record.backend_id = backend.id
            record.sent_at = now
            try:
                body = upstream_body(
                    call,
                    served_model=backend.served_name(route),
                    inject_usage=hides_usage,
                    max_new_tokens=demand.max_new_tokens,
                )
                request_id = f"{down.id}-{record.attempts}"
                reply = await self.client.connections(backend).send(
                    Outgoing(down.spec.path, call.content_type, request_id, body, down.upload),
                    deadline=now + settings.config.timeouts.first_byte,
                    fresh=fresh,
                )
                down.extra_headers = _own_headers(record, self.clock.now())
                if reply.body is None:
                    await self._relay(settings, down, record, call, reply, hides_usage)
                else:
                    self._answer(down, record, call, backend, reply)
                if backend.traffic_failures and reply.status < 500:
                    self.table.observe(backend.id, TrafficOk(self.clock.now()))
                return
            except UpstreamError as error:
                self.table.observe(backend.id, TrafficFailed(self.clock.now(), error.reason))
                self.ledger.upstream_failed(backend.id, error.reason)
                retry = attempts.after(
                    error, attempts=record.attempts, response_started=down.started
                )
                if retry is attempts.Retry.NO:
                    raise
                if retry is attempts.Retry.ELSEWHERE:
                    tried.append(backend.id)
                    backend = None
                    if not eligible(
                        self.table.backends(route.pool), route, call, demand, tried, now
                    ):
                        raise
            finally:
                slot.release()

    async def _relay(
        self, settings: Settings, down: Downstream, record: RequestRecord, call: Call, reply: Reply, hides_usage: bool
    ) -> None:  # fmt: skip
        """Relay a streamed reply; its usage is the backend's, or counted when it was cut."""
        watch: Watch
        if reply.content_type == b"text/event-stream":
            watch = StreamWatch(
                call.dialect, choices=call.choices, hide_usage=hides_usage, request_id=down.id
            )
        else:
            watch = PlainWatch()
        down.relay = relay = Relay(reply, watch, down, settings.patience, self.clock.now())
        try:
            error = await relay.run()
        finally:
            down.relay = None
            record.first_byte_at = down.started_at
            record.usage = watch.usage or _counted(record, watch.events)
        if error is not None:
            raise error
        record.status = reply.status
        record.outcome = Outcome.OK if reply.status < 400 else Outcome.UPSTREAM_REJECTED

    def _answer(
        self, down: Downstream, record: RequestRecord, call: Call, backend: Backend, reply: Reply
    ) -> None:
        """Answer with a whole reply: the backend's own, or its error in OpenAI's form."""
        body = reply.body or b""
        status, headers = (
            reply.status,
            [(b"content-type", reply.headers.get(b"content-type", b"application/json"))],
        )
        if status == 200:
            if call.dialect in _GENERATES:
                aborted, record.usage = whole_answer(body)
            else:
                aborted, record.usage = False, json_usage(body)
            if aborted or reply.content_type == b"text/html":
                raise BackendBroke("the backend did not finish the request")
            record.outcome = Outcome.OK
        else:
            status, body, headers = normalise_upstream_error(status, body, call.dialect, down.id)
            record.outcome = Outcome.UPSTREAM_REJECTED if status < 500 else Outcome.BACKEND_ERROR
            if status == _ADMISSION_REFUSED:
                record.outcome = Outcome.SHED
            elif status >= 500:
                self.table.observe(backend.id, TrafficFailed(self.clock.now(), "http_5xx"))
                self.ledger.upstream_failed(backend.id, "http_5xx")
        record.status = status
        down.respond(status, headers, body)
        record.first_byte_at = down.started_at

    def _refuse(self, down: Downstream, record: RequestRecord, error: GatewayError) -> None:
        """Answer with an error; one that came after the first byte was told in the stream already."""
        record.outcome = error.outcome
        record.error_code = error.code
        record.status = error.status
        if not down.started and not down.gone:
            down.respond(
                error.status, error_headers(error), error_body(error, down.id, down.spec.dialect)
            )

    # --- choosing -------------------------------------------------------------------------------------

    def catalog(self) -> Catalog:
        """Return the current names; rebuilt when the table's membership or models changed."""
        if self._catalog is None or self._catalog_epoch != self.table.epoch:
            self._catalog_epoch = self.table.epoch
            self._catalog = Catalog.build(self.settings.config.pools, self.table)
        return self._catalog

    def configure(self, settings: Settings) -> None:
        """Swap the settings after a reload."""
        self.settings = settings
        self._catalog = None


def _counted(record: RequestRecord, events: int) -> Usage:
    """Return the usage of a stream whose backend did not get to tell it."""
    demand = record.demand
    exact = demand is not None and demand.exact
    prompt = demand.prompt_tokens if demand is not None else 0
    return Usage(prompt, events, UsageSource.COUNTED if exact else UsageSource.ESTIMATED)


def _own_headers(record: RequestRecord, now: float) -> bytes:
    """Return our header lines: who answered, after how many attempts, and where the time went (ms)."""
    sent_at = record.sent_at or now
    return (
        b"x-gateway-backend: %b\r\nx-gateway-attempts: %d\r\nserver-timing: queue;dur=%.1f, backend;dur=%.1f\r\n"
        % (
            (record.backend_id or "").encode(),
            record.attempts,
            (sent_at - record.received_at) * 1e3,
            (now - sent_at) * 1e3,
        )
    )
