"""Which trace a request belongs to: its client's, or a new one."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.config.traces import TracesConfig
from gateway.core.aio import Clock
from gateway.core.tracing import Trace, new_span_id, new_trace_id
from gateway.ingress.heads import trace_parent, trace_state_line
from gateway.observe.ledger import Ledger

if TYPE_CHECKING:
    from gateway.observe.otlp import Traces


@dataclass(frozen=True, slots=True)
class Tracing:
    """Begins the traces of requests.

    A client that is trusted names the trace and decides whether it is recorded. Of any other a
    request begins a trace of its own, with a link to the client's span.
    """

    sample: float  # share of the traces that begin here and are recorded
    trusts_clients: bool
    traces: Traces  # on their way to the collector

    @classmethod
    def of(cls, config: TracesConfig, ledger: Ledger, clock: Clock) -> Tracing | None:
        """Return what the settings say; None: there are no traces, and nothing of them is imported."""
        if config.endpoint is None:
            return None
        # Its library is an extra, and takes 0.2 s to import.
        from gateway.observe.otlp import Traces

        headers = {name: value.get_secret_value() for name, value in config.headers.items()}
        traces = Traces(config.endpoint.get_secret_value(), headers, clock)
        ledger.on_posted.append(traces.posted)
        return cls(config.sample, config.trust_clients, traces)

    def begin(self, headers: Collection[tuple[bytes, bytes]]) -> Trace:
        """Return the trace of a request that comes with these header fields."""
        parent = trace_parent(headers)
        if parent is not None and self.trusts_clients:
            state = trace_state_line(headers)
            return Trace(
                parent.trace_id, new_span_id(), parent.sampled, parent.span_id, state=state
            )
        sampled = random.random() < self.sample
        return Trace(new_trace_id(), new_span_id(), sampled, linked=parent)
