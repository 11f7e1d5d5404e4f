"""How a backend's reply reaches the client: whole, or relayed as it comes; both are judged on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from msgspec import structs

from gateway.config.models import PoolConfig, Resume
from gateway.core.aio import Clock
from gateway.core.types import Ask, Outcome, RequestRecord, Slot, TrafficFailed
from gateway.ingress.answers import answer, answered_late, unfit, used, watch_over
from gateway.ingress.downstream import Downstream
from gateway.observe.ledger import Ledger
from gateway.pools.table import Backend, PoolTable
from gateway.resume.rules import may_trail
from gateway.resume.stream import TrailedStream
from gateway.upstream.relay import Relay
from gateway.upstream.reply import Reply
from gateway.upstream.watch import Watch


@dataclass(frozen=True, slots=True)
class Passing:
    """Passes replies on, and notes what they tell of their request and its backend."""

    table: PoolTable
    ledger: Ledger
    clock: Clock

    def keep_trail(self, pools: Mapping[str, PoolConfig], ask: Ask) -> None:
        """Have the backend tell what another one needs to go on with the stream, if one could."""
        if (
            ask.call.stream
            and pools[ask.route.pool].resume is Resume.EXACT
            and len(self.table.backends(ask.route.pool)) > 1
            and not ask.route.tenants_apart
            and may_trail(ask.call)
        ):
            ask.call = structs.replace(ask.call, tells_ids=True)

    async def relay(
        self, down: Downstream, record: RequestRecord, ask: Ask, reply: Reply, slot: Slot, most_bytes: int
    ) -> None:  # fmt: skip
        """Relay a streamed reply; its usage is the backend's, or counted when it was cut.

        Raises:
            GatewayError: it broke, or is none to be passed on.
        Cancel: the backend's connection is closed.
        """
        watch: Watch
        if ask.call.tells_ids and reply.is_event_stream:
            stream = down.trailed or TrailedStream(ask.call, ask.demand, request_id=down.id)
            watch = down.trailed = stream
        else:
            watch = watch_over(reply, ask.call, down.id, most_bytes, veil=ask.route.tenants_apart)

        def first_token() -> None:
            now = self.clock.now()
            self.table.first_token(slot, now)
            down.drop_body()
            down.started_at = down.started_at or now

        relay = Relay(
            *(reply, watch, down, self.clock.now()),
            on_first_token=first_token,
            refuses=partial(unfit, reply, record.engine_id, most_bytes),
        )
        down.relay = relay
        try:
            error = await relay.run()
        except asyncio.CancelledError:
            # SDKs close at the stream's last frame, and do not wait for the end of the body.
            if down.gone and watch.ended and watch.complete:
                record.status, record.outcome = reply.status, Outcome.OK
            raise
        finally:
            down.relay = None
            record.first_byte_at = down.started_at
            record.usage = used(watch, reply, record)
        if error is not None:
            raise error
        record.status, record.outcome = reply.status, Outcome.OK

    def answer(
        self, down: Downstream, record: RequestRecord, ask: Ask, backend: Backend, reply: Reply, most_bytes: int
    ) -> None:  # fmt: skip
        """Answer with a whole reply.

        Raises:
            GatewayError: it is no answer to the request.
        """
        if down.started:  # it waited in public; what came is no stream
            raise answered_late(reply, ask.call)
        veil = ask.route.tenants_apart
        said = answer(reply, ask.call, down.id, record.engine_id, most_bytes, veil=veil)
        record.status, record.outcome, record.usage = said.status, said.outcome, said.usage
        if said.status >= 500:
            self.table.observe(backend.id, TrafficFailed(self.clock.now(), "http_5xx"))
            self.ledger.upstream_failed(backend.id, "http_5xx")
        down.respond(said.status, said.lines, said.body)
        record.first_byte_at = down.started_at
