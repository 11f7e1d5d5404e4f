"""Copies of requests for another pool, whose replies nobody gets.

Copies are few: of a share of the conversations, of small bodies only, and at most `max_in_flight` at a time.
Clients come first. A copy takes a place only on a backend of which more than half is free, while nobody waits
in either pool. It never waits and is sent once. It is cancelled as soon as somebody waits for its pool, its
backend is drained, or other gateways have requests there and no place is left: theirs may wait.
A copy is in no access line, no token count and no limit of a key. Its failures do not count against a backend.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from msgspec import structs

from gateway.admission.gate import Gate
from gateway.admission.waiting import Finder
from gateway.config.parameters import PrefixCache
from gateway.core import aio
from gateway.core.aio import Clock
from gateway.core.endpoints import GENERATES, READS
from gateway.core.errors import GatewayError, RequestError, UpstreamError
from gateway.core.traffic import Shadow
from gateway.core.types import Ask, Caller, Demand, Phase, Route, Slot
from gateway.ingress.downstream import Downstream
from gateway.ingress.settings import Settings
from gateway.pools.table import Backend, PoolTable
from gateway.routing.fallback import is_of_one_model
from gateway.routing.trial import place_of
from gateway.upstream.client import Client, Outgoing
from gateway.upstream.engineids import engine_id, plain_id
from gateway.upstream.reply import Reply
from gateway.upstream.silence import Patience, Silence
from gateway.wire.calls import upstream_body

log = logging.getLogger("gateway.shadow")

NOBODY: Final = Caller(key_id="shadow", name="shadow", tenant="shadow")
_COPIED: Final = GENERATES | READS
_NOTHING_KNOWN: Final = Demand(0, exact=False)

# pool, where to, `_Ended`'s value, seconds to the first byte
Count = Callable[[str, str, str, float | None], None]


class _Ended(Enum):
    """How a copy ended; closed, because it is a metric label."""

    OK = "ok"
    REJECTED = "rejected"  # 4xx
    FAILED = "failed"
    DROPPED = "dropped"  # it was not sent, or cancelled


@dataclass(slots=True)
class _Copy:
    """One copy under way, and how it ended so far."""

    pool: str  # that was asked
    to: str
    backend: Backend
    slot: Slot
    ended: _Ended = _Ended.DROPPED
    first_s: float | None = None


class Shadows:
    """All copies under way; their one owner."""

    def __init__(
        self, table: PoolTable, finder: Finder, gate: Gate, client: Client, clock: Clock, count: Count
    ) -> None:  # fmt: skip
        self._table = table
        self._finder = finder
        self._gate = gate
        self._client = client
        self._clock = clock
        self._count = count
        self._under_way: dict[asyncio.Task[None], _Copy] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def copy(self, settings: Settings, down: Downstream, ask: Ask, patience: Patience) -> None:
        """Send a copy of a request that is being sent, if it is among those that are copied."""
        shadow, call = ask.route.shadow, ask.call
        if shadow is None or shadow.pool not in settings.pools or call.endpoint not in _COPIED:
            return
        try:
            if place_of(ask, f"shadow in {shadow.pool}") >= shadow.share or is_of_one_model(call):
                return
            if not self._may_start(down, ask, shadow) or not self._start(
                settings, down, ask, patience
            ):
                self._count(ask.route.pool, shadow.pool, _Ended.DROPPED.value, None)
        except Exception:  # a copy never harms its request
            log.exception("a copy of a request failed", extra={"event": "shadow_failed"})

    def tick(self) -> None:
        """Cancel copies to pools for which somebody waits or may wait, and on backends that are drained."""
        now = self._clock.now()
        for task, copy in self._under_way.items():
            backend = copy.backend
            drained = backend.phase is Phase.DRAINING
            if drained or self._gate.queued(copy.to) or _others_may_wait(backend, now):
                task.cancel()

    def close(self) -> None:
        """Cancel all."""
        for task in self._under_way:
            task.cancel()

    def _may_start(self, down: Downstream, ask: Ask, shadow: Shadow) -> bool:
        if down.hold is not None or down.upload is not None:
            return False
        under_way = sum(copy.pool == ask.route.pool for copy in self._under_way.values())
        waits = any(self._gate.queued(pool) for pool in (ask.route.pool, shadow.pool))
        return under_way < shadow.most and not waits

    def _start(self, settings: Settings, down: Downstream, ask: Ask, patience: Patience) -> bool:
        """Start a copy where it has room; False where it has none, or the other pool takes no such call."""
        assert ask.route.shadow is not None
        to, call, now = ask.route.shadow.pool, ask.call, self._clock.now()
        try:
            settings.policies.judge(call, to, ask.caller.parameters)
        except RequestError:
            return False
        # Nobody looks for its first token, so the next scrape is taken to show that its prompt was read.
        need = structs.replace(ask.need, streams=False)
        # Nothing is learnt of its end either: where one request at a time is a trial, it is a client's.
        tried = {each.id for each in self._table.backends(to) if each.probation is not None}
        copy_of = Ask(Route(to, to, to), call, _NOTHING_KNOWN, NOBODY, need)
        backend = self._finder.find(copy_of, now, tried)
        allowed = None if backend is None else backend.allowed(now)
        if backend is None or (allowed is not None and 2 * _held(backend) >= allowed):
            return False
        apart = settings.pools[to].prefix_cache is PrefixCache.PER_TENANT
        out = _outgoing(down, ask, backend, settings.salt(ask) if apart else None)
        silence = Silence(patience, now, backend.works)
        slot = self._table.take(backend.id, now, need, NOBODY.tenant)
        copy = _Copy(ask.route.pool, to, backend, slot)
        sending = self._send(copy, out, silence, settings.config.timeouts.total)
        task = aio.start(sending, name=f"shadow {backend.id}")
        self._under_way[task] = copy
        task.add_done_callback(self._ended)
        return True

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Give back what a copy had; one that is cancelled before its first step has run nothing itself."""
        copy = self._under_way.pop(task)
        copy.slot.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            copy.ended = _Ended.FAILED
            log.error("a copy failed by a bug", exc_info=error, extra={"event": "shadow_failed"})
        self._count(copy.pool, copy.to, copy.ended.value, copy.first_s)

    async def _send(self, copy: _Copy, out: Outgoing, silence: Silence, within_s: float) -> None:
        """Send a copy and read its reply to the end; cancelled, it closes its connection."""
        try:
            async with asyncio.timeout(within_s):
                reply = await self._client.connections(copy.backend).send(out, silence, fresh=False)
                copy.first_s = self._clock.now() - copy.slot.taken_at
                if reply.body is None:
                    await _Discarded(reply, silence).read()
            copy.ended = _BY_STATUS.get(reply.status // 100, _Ended.FAILED)
        except (GatewayError, TimeoutError):
            copy.ended = _Ended.FAILED


def _held(backend: Backend) -> int:
    """Return how many requests a backend has, of this gateway and of others."""
    return backend.in_flight + backend.elsewhere.requests


def _others_may_wait(backend: Backend, now: float) -> bool:
    """Whether other gateways have requests at a backend that has no place left. Who waits there is not told."""
    allowed = backend.allowed(now) if backend.elsewhere.requests else None
    return allowed is not None and _held(backend) >= allowed


_BY_STATUS: Final = {2: _Ended.OK, 4: _Ended.REJECTED}


def _outgoing(
    down: Downstream, ask: Ask, backend: Backend, salt: Callable[[str | None], str] | None
) -> Outgoing:
    """Return a copy as its backend gets it: under its model's name, with an id of its own.

    It may have as much output as the request itself, which its key or pool may have lowered.
    """
    call, most = ask.call, ask.demand.max_new_tokens
    if most is not None and call.max_new_tokens is None and backend.window_tokens is not None:
        most = min(most, backend.window_tokens)  # more than that an engine refuses
    body = upstream_body(
        call,
        served_model=backend.base_model or backend.pool,
        inject_usage=False,
        max_new_tokens=most,
        salt=salt,
        plain=backend.plain,
    )
    name = plain_id() if backend.plain else engine_id()
    return Outgoing(down.spec.path, call.content_type, name, body)


class _Discarded:
    """Reads a body that the connection hands on in parts, and keeps nothing (`upstream.reply.Sink`)."""

    def __init__(self, reply: Reply, silence: Silence) -> None:
        self._connection = reply.connection
        self._silence = silence
        self._heard = True
        self._whole: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def read(self) -> None:
        """Return at its end. Cancel: the connection is closed."""
        assert self._connection is not None
        self._connection.attach(self)
        try:
            await self._whole
        finally:
            if self._connection is not None:
                self._connection.abort()

    def on_data(self, data: bytes) -> None:
        """Drop it."""
        self._heard = True

    def on_chunk(self, chunk: bytes) -> bool:
        """Leave the framing to the parser."""
        return False

    def on_end(self, data: bytes) -> None:
        """Note the end; the connection may carry another request by now."""
        self._connection = None
        if not self._whole.done():
            self._whole.set_result(None)

    def on_lost(self, error: UpstreamError) -> None:
        """Note that the backend broke off."""
        if not self._whole.done():
            self._whole.set_exception(error)

    def on_tick(self, now: float) -> None:
        """End it when the backend is silent for too long."""
        if self._heard:
            self._silence.broken(now)
            self._heard = False
        elif self._silence.too_long(now) and not self._whole.done():
            self._whole.set_exception(self._silence.error(now))
