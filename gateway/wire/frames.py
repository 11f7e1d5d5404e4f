"""What frames and replies say: the typed fields that the gateway reads, and nothing else.

Unknown fields are skipped unparsed. What does not fit its type is None, never an error: a backend's
bytes are passed on first, and judged second (by `wire.sse`).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Final, Literal

import msgspec
from msgspec import Raw

from gateway.core.types import Dialect, Usage, UsageSource
from gateway.wire.objects import decode_or_none, is_given
from gateway.wire.replies import Fault, anthropic_error, openai_error

# Dialects whose frames are nameless and end with [DONE].
OPENAI: Final = frozenset({Dialect.CHAT, Dialect.COMPLETIONS, Dialect.PLAIN})


class Details(msgspec.Struct, gc=False):
    """Usage details; OpenAI and Responses spell the field alike."""

    cached_tokens: int | None = None


class UsageObject(msgspec.Struct, gc=False):
    """Token counts as Chat and Completions, Responses, Anthropic or Cohere write them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: Details | None = None
    input_tokens_details: Details | None = None
    cache_read_input_tokens: int | None = None  # Anthropic's, and the next: beside its input tokens
    cache_creation_input_tokens: int | None = None
    image_tokens: int | None = None  # Cohere's, beside its input tokens


class Choice(msgspec.Struct, gc=False):
    """One choice of a Chat or Completions chunk."""

    index: int = 0
    finish_reason: str | None = None


class Chunk(msgspec.Struct, gc=False):
    """A Chat or Completions frame."""

    choices: list[Choice] | None = None
    usage: Raw = Raw()
    error: Raw = Raw()
    object: str | None = None
    system_fingerprint: Raw = Raw()


class Ended(msgspec.Struct, gc=False):
    """One choice of a whole reply that came to a usual end; an abort is none."""

    finish_reason: (
        Literal["stop", "length", "tool_calls", "function_call", "content_filter"] | None
    ) = None


class Counts(msgspec.Struct, gc=False):
    """Token counts as a whole reply tells them."""

    prompt_tokens: int
    completion_tokens: int | None = None
    prompt_tokens_details: Details | None = None


class Completed(msgspec.Struct, gc=False):
    """A whole Chat or Completions reply, as nearly all are."""

    choices: list[Ended] | None = None
    usage: Counts | None = None


class Response(msgspec.Struct, gc=False):
    """The answer inside a Responses API event."""

    status: str | None = None
    usage: Raw = Raw()


class Whole(msgspec.Struct, gc=False):
    """A whole Responses API or Anthropic reply."""

    type: str | None = None
    status: str | None = None
    stop_reason: str | None = None
    usage: Raw = Raw()


class Delta(msgspec.Struct, gc=False):
    """The end of an Anthropic message; `stop_reason` null means that it was aborted."""

    stop_reason: str | None = None


class Event(msgspec.Struct, gc=False):
    """A Responses API or Anthropic frame."""

    type: str = ""
    sequence_number: int | None = None
    response: Response | None = None  # Responses
    message: Raw = Raw()  # Anthropic's message_start; the text of a Responses error
    delta: Raw = Raw()
    usage: Raw = Raw()
    error: Raw = Raw()

    @property
    def is_error(self) -> bool:
        """Whether it tells that its backend failed."""
        return self.type == "error" or (not self.type and is_given(self.error))


class Started(msgspec.Struct, gc=False):
    """The message inside Anthropic's `message_start`."""

    usage: Raw = Raw()


CHUNK: Final = msgspec.json.Decoder(Chunk)
COMPLETED: Final = msgspec.json.Decoder(Completed)
EVENT: Final = msgspec.json.Decoder(Event)
USAGE: Final = msgspec.json.Decoder(UsageObject)
STARTED: Final = msgspec.json.Decoder(Started)
DELTA: Final = msgspec.json.Decoder(Delta)
WHOLE: Final = msgspec.json.Decoder(Whole)
ANY: Final = msgspec.json.Decoder(dict[str, Raw])

_MOST_TOKENS: Final = 1 << 32  # of one request: a thousand times what the largest take
_UPSTREAM: Final = UsageSource.UPSTREAM  # looked up once: 0.15 us before Python 3.12
_USAGE_OBJECT: Final = re.compile(rb'"(?:usage|billed_units)":\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')
_ABORTED: Final = re.compile(rb'"finish_reason":\s*"(?:abort|error)"')


def json_usage(body: bytes) -> Usage | None:
    """Find the usage in a reply that is no stream, or in the end of one.

    Quotes inside JSON strings are escaped, so only a real key can match.
    """
    last = _USAGE_OBJECT.match(body, max(0, body.rfind(b'"usage"')))  # nearly always it is there
    if last is not None and (usage := usage_told(last[1])) is not None:
        return usage
    return next(filter(None, map(usage_told, reversed(_USAGE_OBJECT.findall(body)))), None)


def whole_answer(body: bytes) -> tuple[bool, Usage | None]:
    """Return whether the engine aborted a chat or completions reply with status 200, and its usage."""
    answer = decode_or_none(COMPLETED, body)
    if answer is None:  # an abort, or not as expected; what matters may still be found
        return json_aborted(body), json_usage(body)
    if (counts := answer.usage) is None:
        return False, None
    details = counts.prompt_tokens_details
    cached = None if details is None else details.cached_tokens
    return False, _believed(counts.prompt_tokens, counts.completion_tokens or 0, cached)


def whole_event_answer(body: bytes, dialect: Dialect) -> tuple[bool, Usage | None]:
    """Return the same of a Responses or Anthropic reply, in each of which vLLM marks an abort in another way."""
    answer = decode_or_none(WHOLE, body)
    if answer is None:
        return False, json_usage(body)
    if dialect is Dialect.RESPONSES:
        aborted = answer.status in ("cancelled", "failed")
    else:
        aborted = answer.type == "message" and answer.stop_reason is None
    return aborted, usage_told(answer.usage)


def json_aborted(body: bytes) -> bool:
    """Whether a chat or completions reply with status 200 was in fact aborted by the engine."""
    if body.rfind(b'"abort"') < 0 and body.rfind(b'"error"') < 0:  # three times as fast as `in`
        return False
    return _ABORTED.search(body) is not None


def usage_told(raw: bytes | Raw, before: Usage | None = None) -> Usage | None:
    """Return what a usage object counts; `before` lends a prompt count that was told earlier.

    None if it has no prompt count, or a count that cannot be true.
    """
    usage: UsageObject | None = decode_or_none(USAGE, raw)
    if usage is None:
        return None
    prompt, read = usage.prompt_tokens, usage.cache_read_input_tokens
    if prompt is None and usage.input_tokens is not None:
        prompt = usage.input_tokens + (read or 0) + (usage.cache_creation_input_tokens or 0)
    if prompt is None and before is not None:
        prompt = before.prompt_tokens
    if prompt is None:
        return None
    prompt += usage.image_tokens or 0
    made = usage.completion_tokens if usage.completion_tokens is not None else usage.output_tokens
    details = usage.prompt_tokens_details or usage.input_tokens_details
    return _believed(prompt, made or 0, read if details is None else details.cached_tokens)


def _believed(prompt: int, made: int, cached: int | None) -> Usage | None:
    """Return the counts that a backend told; None if they cannot be true: limits and bills go by them."""
    if cached is not None:
        if cached < 0:
            return None
        cached = min(cached, prompt)
    if 0 <= prompt <= _MOST_TOKENS and 0 <= made <= _MOST_TOKENS:
        return Usage(prompt, made, _UPSTREAM, cached)
    return None


def error_frame(fault: Fault, dialect: Dialect, request_id: str, sequence: int = 0) -> bytes:
    """Write an error inside a stream, where no header carries the request's id.

    `sequence` is the number of a Responses event. Its fields are those of OpenAI's reference, and once more in
    `error`, as OpenAI's servers send them: without that OpenAI's SDKs raise nothing, so loops over the text of
    a stream, LangChain.js's too, take half an answer for all of it.
    """
    told = replace(fault, message=f"{fault.message} (request id: {request_id})")
    if dialect in OPENAI:
        return b"data: " + openai_error(told) + b"\n\n"
    error: dict[str, Any]
    if dialect is Dialect.MESSAGES:
        error = anthropic_error(told)
    else:
        told_twice = {"code": told.code, "message": told.message, "param": told.param}
        error = {"type": "error", **told_twice, "sequence_number": sequence}
        error["error"] = {"type": told.type, **told_twice}
    return b"event: error\ndata: " + msgspec.json.encode(error) + b"\n\n"


def stamped(frame: bytes, fingerprint: Raw) -> bytes:
    """Add a fingerprint to a chunk as vLLM writes it: one line that is one object."""
    if not (is_given(fingerprint) and frame.endswith(b"}\n\n")):
        return frame
    return b'%b,"system_fingerprint":%b}\n\n' % (frame[:-3], fingerprint)


def is_whole(frame: bytes) -> bool:
    """Whether a last frame, its blank line missing, is complete all the same."""
    json = frame[frame.find(b"data:") + 5 :].strip()
    return json == b"[DONE]" or (json != b"" and decode_or_none(ANY, json) is not None)
