"""Send spans to an OpenTelemetry collector, by its official library. Imported only where traces are on.

Requests that ended wait in a bounded queue. One task has a thread make their spans and send them, a batch at a
time. What a collector does not take in time is dropped and counted: a request never waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from gateway import __version__
from gateway.core.aio import Clock, periodic
from gateway.core.types import RequestRecord
from gateway.observe.spans import Span, spans_of

log = logging.getLogger("gateway.traces")

MOST_WAITING: Final = 4096  # requests
_BATCH: Final = 256  # requests: about a thousand spans, and 15 ms of the thread
_EVERY_S: Final = 1.0
_SEND_S: Final = 5.0  # for one batch, what is tried again included
_LAST_S: Final = 2.0  # for what is left when the gateway ends
_LOG_EVERY_S: Final = 60.0

_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_SCOPE: Final = InstrumentationScope("vllm-gateway", __version__)


class Traces:
    """Sends the spans of requests that ended. `posted` takes them, `run` sends them, `close` ends it."""

    def __init__(self, endpoint: str, headers: Mapping[str, str], clock: Clock) -> None:
        # The library logs the collector's address, and the same failure each second.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self.lost = 0
        self._clock = clock
        self._waiting: deque[RequestRecord] = deque()
        self._exporter = OTLPSpanExporter(
            endpoint=endpoint.rstrip("/") + "/v1/traces", headers=dict(headers), timeout=_SEND_S
        )
        self._resource = Resource.create(
            {
                "service.name": "vllm-gateway",
                "service.version": __version__,
                "service.instance.id": str(uuid.uuid4()),
            }
        )
        self._logged_at = -_LOG_EVERY_S
        self._logged_lost = 0

    def posted(self, settled: Iterable[RequestRecord]) -> None:
        """Take requests that were settled; one too many is dropped and counted."""
        for record in settled:
            if record.trace is not None and record.trace.sampled:
                if len(self._waiting) < MOST_WAITING:
                    self._waiting.append(record)
                else:
                    self.lost += 1

    async def run(self) -> None:
        """Send about once a second, for ever. Cancel: what waits stays; `close` sends it."""
        await periodic(self._turn, every_s=_EVERY_S, name="traces")

    async def close(self) -> None:
        """Send what is left, as far as two seconds suffice. Nothing is sent afterwards."""
        try:
            async with asyncio.timeout(_LAST_S):
                await self._turn()
        except TimeoutError:
            log.warning("some traces were not sent", extra={"event": "traces_lost"})
        finally:
            self._exporter.shutdown()  # type: ignore[no-untyped-call]

    async def _turn(self) -> None:
        # What comes meanwhile is for the next turn: under load some always does.
        left = len(self._waiting)
        while left:
            batch = [self._waiting.popleft() for _ in range(min(_BATCH, left))]
            left -= len(batch)
            ahead_s = self._clock.wall() - self._clock.now()
            if not await asyncio.to_thread(self._send, batch, ahead_s):
                self.lost += len(batch)
                break
        self._log_losses()

    def _send(self, batch: Sequence[RequestRecord], ahead_s: float) -> bool:
        """Send the spans of some requests, in a thread; return whether the collector took them."""
        spans = [self._readable(each) for record in batch for each in spans_of(record, ahead_s)]
        return self._exporter.export(spans) is SpanExportResult.SUCCESS

    def _log_losses(self) -> None:
        """Log how many were lost, at most once a minute."""
        now = self._clock.now()
        if self.lost > self._logged_lost and now - self._logged_at >= _LOG_EVERY_S:
            lost, self._logged_lost, self._logged_at = self.lost - self._logged_lost, self.lost, now
            log.warning(
                "the traces of %d requests were lost: the collector (`traces.endpoint`) does not take them",
                lost, extra={"event": "traces_lost", "requests": lost},
            )  # fmt: skip

    def _readable(self, span: Span) -> ReadableSpan:
        """Return a span in the form of the library."""
        attributes = dict(span.attributes)
        if span.error is not None:
            attributes["error.type"] = span.error
        parent, linked = span.parent_id, span.linked
        links = [] if linked is None else [Link(_context(linked.trace_id, linked.span_id, True))]
        return ReadableSpan(
            name=span.name,
            context=_context(span.trace_id, span.span_id, False),
            parent=None if parent is None else _context(span.trace_id, parent, True),
            resource=self._resource,
            attributes=attributes,
            links=links,
            kind=SpanKind[span.kind.name],
            status=Status() if span.error is None else Status(StatusCode.ERROR),
            start_time=int(span.began_at * 1e9),
            end_time=int(span.ended_at * 1e9),
            instrumentation_scope=_SCOPE,
        )


def _context(trace_id: str, span_id: str, is_remote: bool) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote, _SAMPLED)
