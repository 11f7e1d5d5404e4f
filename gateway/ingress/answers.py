"""What is answered: a backend's whole reply, judged and in the client's form; our own headers."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from gateway.core.codes import CODES
from gateway.core.endings import Barrier
from gateway.core.errors import (
    AdapterLost,
    BackendBroke,
    BackendStopping,
    ContextLengthExceeded,
    EndedByShutdown,
    EngineFull,
    GatewayError,
    MisdirectedReply,
    ModelNotFound,
    Rejected,
    ReplyTooLarge,
    RequestError,
    RestRefused,
    ShuttingDown,
    StreamBroke,
    Unavailable,
    UpstreamError,
)
from gateway.core.types import (
    Ask,
    Call,
    Demand,
    Dialect,
    Outcome,
    RequestRecord,
    Usage,
    UsageSource,
)
from gateway.ingress.downstream import Downstream
from gateway.ingress.heads import header_lines
from gateway.limiting.rules import header_lines as header_lines_of
from gateway.resume.stream import TrailedStream
from gateway.upstream.engineids import is_of_another
from gateway.upstream.reading import is_encoded
from gateway.upstream.reply import EVENT_STREAM, JSON_LINE, Reply
from gateway.upstream.watch import PlainWatch, Watch
from gateway.wire.frames import ANY, json_usage, whole_answer, whole_event_answer
from gateway.wire.objects import decode_or_none
from gateway.wire.replies import CONTEXT_CODE, normalise_upstream_error, upstream_fault
from gateway.wire.sse import StreamWatch
from gateway.wire.veil import Veil, VeiledStream, veiled

_OK: Final = Outcome.OK  # looked up once: 0.15 us before Python 3.12
_FULL: Final = 503  # vLLM's own admission control: back-pressure, not sickness
_TOO_MANY: Final = 429  # the same, as TGI says it
_MISSING, _NO_MODEL = 404, ModelNotFound.default_code
# What a vLLM answers to new requests while it drains (`--shutdown-timeout`), though its health is good: the threads
# that read prompts have ended. Source: Python's ThreadPoolExecutor; seen with vLLM 0.32.
_FAILED, _STOPPING = 500, "cannot schedule new futures after shutdown"
_TAKES_NOTHING: Final = (RequestError, ShuttingDown, EndedByShutdown)
_WITH_CHOICES: Final = (Dialect.CHAT, Dialect.COMPLETIONS)
_NO_REPLY: Final = "The backend answered with something else than a model's reply."


class Answer(msgspec.Struct, frozen=True, gc=False):
    """One whole reply to a client."""

    status: int
    lines: bytes  # of its head
    body: bytes
    outcome: Outcome
    usage: Usage | None = None
    code: str | None = None  # of its error


_OTHER_CODE: Final = "invalid_request"  # stands in the log for one that the backend made up
# Headers as vLLM sends them nearly always.
_USUAL: Final = frozenset({b"", b"application/json", EVENT_STREAM})
# What a body may be: vLLM's replies, transcripts, and bytes of embeddings or sound.
_MEDIA: Final = re.compile(
    rb"application/(?:[\w.-]+\+)?json|application/(?:octet-stream|x-subrip)"
    rb"|text/(?:event-stream|plain|vtt|srt)|audio/[\w.+-]+|multipart/[\w.+-]+"
)


def unfit(reply: Reply, engine_id: str, most_bytes: int, beginning: bytes) -> GatewayError | None:
    """Return why a reply with status 200 is not passed on; None: it is. `beginning` is how its body begins.

    What cannot be read is refused: compressed bodies and pages of HTML come from something in between.
    """
    if not reply.is_usual and (error := _unreadable(reply, most_bytes)) is not None:
        return error
    if is_of_another(beginning, engine_id):
        return MisdirectedReply("The backend answered with the reply to another request.")
    return None


def _unreadable(reply: Reply, most_bytes: int) -> GatewayError | None:
    headers = reply.headers
    if b"content-encoding" in headers and is_encoded(headers):
        return BackendBroke("The backend compressed its reply, which it was not asked for.")
    usual = headers.get(b"content-type", b"") in _USUAL
    if not usual and not _MEDIA.fullmatch(reply.content_type):
        return BackendBroke(_NO_REPLY)
    declared = None if reply.body is not None else headers.get(b"content-length")
    if declared is not None and (length := int(declared)) > most_bytes:
        return ReplyTooLarge(
            f"The backend's reply has {length} bytes; at most {most_bytes} are accepted "
            "(`limits.max_reply`). Please ask for less at a time."
        )
    return None


def answer(
    reply: Reply,
    call: Call,
    request_id: str,
    engine_id: str,
    most_bytes: int,
    *,
    veil: bool = False,
) -> Answer:
    """Return what a client gets for a backend's whole reply: the reply, or the error in our form.

    `veil` hides how much of the prompt was cached.

    Raises:
        BackendBroke: it says 200 and yet is no answer (502).
        ReplyTooLarge: it is (502).
        MisdirectedReply: it is the answer to another request (502).
    """
    body = reply.body or b""
    if reply.status != 200:
        status, body, headers = normalise_upstream_error(
            reply.status, body, call.dialect, request_id
        )
        outcome = Outcome.UPSTREAM_REJECTED if status < 500 else Outcome.BACKEND_ERROR
        told = upstream_fault(reply.status, reply.body or b"", call.dialect).code
        code = told if told in CODES else _OTHER_CODE
        return Answer(status, header_lines(headers), body, outcome, code=code)
    if (error := unfit(reply, engine_id, most_bytes, body)) is not None:
        raise error
    if call.dialect in _WITH_CHOICES:
        aborted, usage = whole_answer(body)
    elif call.dialect is Dialect.PLAIN:
        aborted, usage = False, _plain_usage(reply, body)
    else:
        aborted, usage = whole_event_answer(body, call.dialect)
    if aborted:
        error = BackendBroke("the backend did not finish the request")
        error.in_order = True
        raise error
    if usage is None and call.dialect is not Dialect.PLAIN and decode_or_none(ANY, body) is None:
        raise BackendBroke(_NO_REPLY)  # nothing, part of a reply, or the page of something else
    lines = reply.passed_lines()
    if b"content-type" not in reply.headers:
        lines += JSON_LINE
    return Answer(200, lines, veiled(body) if veil else body, _OK, usage)


def _plain_usage(reply: Reply, body: bytes) -> Usage | None:
    """Return the usage that a reply of vectors or the like tells; with raw vectors it is in a header."""
    metadata = reply.headers.get(b"metadata")
    return json_usage(body if metadata is None else metadata)


def engine_full(reply: Reply, call: Call) -> EngineFull:
    """Return the error for an engine's own refusal for capacity, with its words and its time to retry."""
    pause = reply.headers.get(b"retry-after", b"")
    pause_s = float(pause) if pause.isdigit() and len(pause) < 5 else None  # a date is left alone
    fault = upstream_fault(reply.status, reply.body or b"", call.dialect)
    return EngineFull(fault.message, pause_s)


def too_long(reply: Reply, call: Call) -> ContextLengthExceeded | None:
    """Return the error for a request that the engine found too long for its window; None for another."""
    fault = upstream_fault(reply.status, reply.body or b"", call.dialect)
    if fault.code != CONTEXT_CODE:
        return None
    error = ContextLengthExceeded(fault.message, param=fault.param)
    error.outcome = Outcome.UPSTREAM_REJECTED
    return error


def check_taken(reply: Reply, ask: Ask, *, plain: bool) -> None:
    """Look whether an engine took a request that it answers with an error.

    Raises:
        EngineFull: it refused it for capacity.
        BackendStopping: its server takes no more of them.
        AdapterLost: it knows no such adapter, though it listed it.
    """
    if reply.status == _FULL or (plain and reply.status == _TOO_MANY):
        raise engine_full(reply, ask.call)
    if reply.status == _FAILED:
        fault = upstream_fault(reply.status, reply.body or b"", ask.call.dialect)
        if fault.message == _STOPPING:
            raise BackendStopping(
                "The server that this request was sent to is shutting down. Please retry."
            )
    if reply.status == _MISSING and ask.route.adapter is not None:
        fault = upstream_fault(reply.status, reply.body or b"", ask.call.dialect)
        if fault.code == _NO_MODEL and f"`{ask.route.adapter}`" in fault.message:
            raise AdapterLost("The server that had the adapter has lost it. Please retry.")


def check_passed_on(reply: Reply, ask: Ask, *, falls_back: bool) -> None:
    """Look whether the client gets an engine's error, or another pool may take the request yet.

    Raises:
        ContextLengthExceeded: it is too long for this one.
        Unavailable: it went to another pool than its own, and that model does not take such a request.
    """
    if falls_back and (error := too_long(reply, ask.call)):
        raise error
    if ask.fallback is not None and reply.status < _TOO_MANY:
        raise Unavailable("The model that stands in refused the request.")


def answered_late(reply: Reply, call: Call, *, goes_on: bool) -> GatewayError:
    """Return the error of a stream whose backend answered with something else.

    With `goes_on` it refused the rest of another's stream, for which no client had asked.
    """
    fault = upstream_fault(reply.status, reply.body or b"", call.dialect)
    if reply.status == 200 or fault.status >= 500:
        return BackendBroke("the backend did not return a stream")
    if goes_on:
        return RestRefused("the backend refused the rest of the stream")
    error = RequestError(fault.message, code=fault.code, param=fault.param)
    error.outcome = Outcome.UPSTREAM_REJECTED
    return error


def watch_over(
    reply: Reply, call: Call, request_id: str, most_bytes: int, *, veil: bool = False
) -> Watch:
    """Return the watch of a reply that is passed on as it comes; `veil` as for `answer`."""
    if reply.is_event_stream:
        return (VeiledStream if veil else StreamWatch)(
            call.dialect, choices=call.choices, hide_usage=call.hides_usage, request_id=request_id
        )
    return (_VeiledPlain if veil else PlainWatch)(call.dialect, most_bytes=most_bytes)


class _VeiledPlain(PlainWatch):
    """A large reply whose client is not to see how much of its prompt was cached."""

    def __init__(self, dialect: Dialect, *, most_bytes: int) -> None:
        super().__init__(dialect, most_bytes=most_bytes)
        self._veil = Veil()

    def feed(self, data: bytes) -> bytes:
        """Pass on everything but the counts."""
        return self._veil.feed(super().feed(data))

    def close(self) -> bytes:
        """Judge the body, which is whole now; return its last bytes."""
        return super().close() + self._veil.end()


def used(watch: Watch, reply: Reply, record: RequestRecord, ask: Ask) -> Usage | None:
    """Return the usage of what was passed on: as the backend told it, else counted.

    By its token ids, if they are kept: an event may have several tokens, or none. Else by the events that came.
    """
    if (usage := watch.usage) is not None or reply.status >= 400:
        return usage
    if b"metadata" in reply.headers:
        return _plain_usage(reply, b"")
    if not reply.is_event_stream:
        return None  # what came of it has no tokens that could be counted
    began, demand, need = watch.began, record.demand, record.need
    if isinstance(watch, TrailedStream) and (counts := watch.trail.counts) is not None:
        return Usage(*counts, UsageSource.COUNTED)
    if began is not None:
        return Usage(began.prompt_tokens, watch.events, UsageSource.COUNTED, began.cached_tokens)
    exact = demand is not None and demand.exact
    source = UsageSource.COUNTED if exact else UsageSource.ESTIMATED
    written = _written(ask, watch.events, demand)
    return Usage(need.prompt_tokens if need is not None else 0, written, source)


def _written(ask: Ask, events: int, demand: Demand | None) -> int:
    """Return how many tokens so many events have at most; of each choice the first one comes by itself.

    In a chat it comes behind an event with the role. No choice has more than it may, or than the window holds.
    """
    call = ask.call
    first = call.choices * (2 if call.dialect is Dialect.CHAT else 1)
    most = (None if demand is None else demand.max_new_tokens) or ask.route.widest_tokens
    if call.event_tokens == 1 or events <= first or most is None:
        return events
    tokens = first + (events - first) * call.event_tokens
    return min(tokens, max(events, most * call.choices))


def as_told(error: GatewayError, down: Downstream, record: RequestRecord) -> GatewayError:
    """Return the error that a client gets for a failure. If it gets nothing else, no tokens were used."""
    if isinstance(error, UpstreamError | Rejected) and down.trailed and down.trailed.awaits:
        error = StreamBroke("The stream broke off, and no other backend could go on with it.")
        if down.answering and record.not_resumed is None:  # none had room in time
            record.not_resumed = Barrier.NO_BACKEND
    if isinstance(error, UpstreamError) and not down.answering:
        if isinstance(error, StreamBroke):
            error.outcome = Outcome.BACKEND_ERROR
        if error.outcome is Outcome.BACKEND_ERROR:  # not a time-out: an engine may have used many
            record.usage = None
    elif isinstance(error, _TAKES_NOTHING) and not down.answering:
        record.usage = None
    return error


def own_headers(record: RequestRecord, now: float) -> bytes:
    """Return our header lines: who answered, after how many attempts, how long a place and the answer took (ms).

    The model is named where another one answers than was asked for, a revision where backends have one.
    """
    sent_at = record.sent_at or now
    # In tenths of a millisecond: to write a float costs as much as all else here.
    queue, backend = int(record.queue_s * 1e4), int((now - sent_at) * 1e4)
    lines = (
        b"x-gateway-backend: %b\r\nx-gateway-attempts: %d\r\nserver-timing: queue;dur=%d.%d, backend;dur=%d.%d\r\n"
        % (
            (record.backend_id or "").encode(),
            record.attempts,
            queue // 10,
            queue % 10,
            backend // 10,
            backend % 10,
        )
    )
    if record.resumed:
        lines += b"x-gateway-resumed: %d\r\n" % record.resumed
    if record.fallback is not None:
        lines += b"x-gateway-model: %b\r\n" % (record.pool or "").encode()
    if record.taken is not None:
        taken = record.taken
        lines += header_lines_of(taken.plan, taken.used, taken.wall, taken.share_of)
    if record.revision:
        lines += b"x-gateway-revision: %b\r\n" % record.revision.encode()
    return lines
