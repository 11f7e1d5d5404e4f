"""A request that ended, as the spans of its trace. Pure.

    request            server    gen_ai.*, http.*, how it ended
    |-- queue          internal  each time that it waited for a place at a backend
    |-- attempt        client    one for each backend that it was sent to; the backend's own spans are below it
    |   `-- first_token  internal  of a stream: from sending it to the first token
    `-- resume         client    an attempt that went on with a stream that had broken off

Names and attributes follow OpenTelemetry's conventions for generative AI, as far as they have them; the
others begin with `vllm_gateway.`. No span has a prompt, a reply, a key or an address.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from gateway.core.endings import Attempt
from gateway.core.tracing import Parent, Trace, new_span_id
from gateway.core.types import Endpoint, Outcome, RequestRecord
from gateway.observe.waits import waits_of

Attributes = dict[str, str | int | float | bool]

# Source: OpenTelemetry semantic conventions for generative AI, `gen_ai.operation.name`; it has no name
# for what is not here, which goes by the endpoint's own.
_OPERATIONS: Final = {
    Endpoint.CHAT: "chat",
    Endpoint.MESSAGES: "chat",
    Endpoint.RESPONSES: "chat",
    Endpoint.COMPLETIONS: "text_completion",
    Endpoint.EMBEDDINGS: "embeddings",
    Endpoint.EMBED: "embeddings",
}
_NO_ERRORS: Final = frozenset({Outcome.OK, Outcome.CLIENT_GONE})


class Kind(Enum):
    """Which side of a call a span is."""

    SERVER = "server"
    CLIENT = "client"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Span:
    """One span. Times are wall seconds; `error` is a closed word, None for what went well."""

    name: str
    kind: Kind
    trace_id: str
    span_id: str
    parent_id: str | None
    began_at: float
    ended_at: float
    attributes: Attributes = field(default_factory=dict)
    error: str | None = None
    linked: Parent | None = None


def spans_of(record: RequestRecord, ahead_s: float) -> Iterator[Span]:
    """Yield the spans of a request that ended; none where it has no trace that is recorded.

    `ahead_s`: by how much wall time is ahead of the clock of the record.
    """
    trace = record.trace
    if trace is None or not trace.sampled:
        return
    yield _request(record, trace, ahead_s)
    attempts = [*record.failed]
    if record.attempts > len(attempts) and record.sent_at is not None:
        attempts.append(_last(record, trace, record.sent_at))
    for wait in waits_of(record):
        yield _below(trace, "queue", wait.began_at + ahead_s, wait.ended_at + ahead_s)
    resumes_from = len(attempts) - min(record.resumed, len(attempts) - 1)
    for number, each in enumerate(attempts):
        error = _error(record) if each.ending is None else each.ending.value
        yield Span(
            name=f"{'resume' if number >= resumes_from else _operation(record)} {record.model}",
            kind=Kind.CLIENT,
            trace_id=trace.trace_id,
            span_id=each.span_id or new_span_id(),
            parent_id=trace.span_id,
            began_at=each.sent_at + ahead_s,
            ended_at=each.ended_at + ahead_s,
            attributes={
                "gen_ai.operation.name": _operation(record),
                "gen_ai.provider.name": "vllm",
                "gen_ai.request.model": record.sent_model or record.model or "",
                "vllm_gateway.backend": each.backend_id,
                "vllm_gateway.engine_request_id": each.engine_id,
                "vllm_gateway.attempt": number + 1,
            },
            error=error,
        )
    first_at = record.first_byte_at if record.stream else None
    for each in attempts:
        if first_at is not None and each.sent_at <= first_at <= each.ended_at:
            began_at = each.sent_at + ahead_s
            yield _below(trace, "first_token", began_at, first_at + ahead_s, each.span_id)
            break


def _request(record: RequestRecord, trace: Trace, ahead_s: float) -> Span:
    """Return the span of all of a request."""
    attributes: Attributes = {
        "gen_ai.operation.name": _operation(record),
        "http.request.method": "POST",
        "http.response.status_code": record.status,
        "vllm_gateway.request_id": record.id,
        "vllm_gateway.outcome": "" if record.outcome is None else record.outcome.value,
        "vllm_gateway.attempts": record.attempts,
        "vllm_gateway.stream": record.stream,
    }
    usage, caller = record.usage, record.caller
    if usage is not None:
        attributes["gen_ai.usage.input_tokens"] = usage.prompt_tokens
        attributes["gen_ai.usage.output_tokens"] = usage.completion_tokens
        attributes["vllm_gateway.usage_source"] = usage.source.value
        if usage.cached_tokens is not None:
            attributes["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
    known = {
        "gen_ai.request.model": record.model,
        "gen_ai.request.max_tokens": record.stated_tokens,
        "vllm_gateway.pool": record.pool,
        "vllm_gateway.adapter": record.adapter,
        "vllm_gateway.tenant": None if caller is None else caller.tenant,
        "vllm_gateway.shed_reason": None
        if record.shed_reason is None
        else record.shed_reason.value,
        "vllm_gateway.resumed": record.resumed or None,
    }
    attributes |= {name: value for name, value in known.items() if value is not None}
    return Span(
        name=f"{_operation(record)} {record.model}" if record.model else _operation(record),
        kind=Kind.SERVER,
        trace_id=trace.trace_id,
        span_id=trace.span_id,
        parent_id=trace.parent_id,
        began_at=record.received_at + ahead_s,
        ended_at=_ended_at(record) + ahead_s,
        attributes=attributes,
        error=_error(record),
        linked=trace.linked,
    )


def _below(
    trace: Trace, name: str, began_at: float, ended_at: float, parent_id: str | None = None
) -> Span:
    """Return a span of the gateway itself, below that of the request or of an attempt."""
    ids = trace.trace_id, new_span_id(), parent_id or trace.span_id
    return Span(name, Kind.INTERNAL, *ids, began_at, ended_at)


def _last(record: RequestRecord, trace: Trace, sent_at: float) -> Attempt:
    """Return the attempt that did not fail before the request ended."""
    backend_id = record.backend_id or ""
    ended_at = _ended_at(record)
    return Attempt(backend_id, record.engine_id, sent_at, ended_at, None, trace.attempt_id)


def _operation(record: RequestRecord) -> str:
    if record.endpoint is None:
        return "unknown"
    return _OPERATIONS.get(record.endpoint, record.endpoint.value)


def _error(record: RequestRecord) -> str | None:
    """Return what went wrong, as a closed word: the error's code, else how the request ended."""
    if record.outcome is None or record.outcome in _NO_ERRORS:
        return None
    return record.error_code or record.outcome.value


def _ended_at(record: RequestRecord) -> float:
    return record.received_at if record.ended_at is None else record.ended_at
