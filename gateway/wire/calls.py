"""Requests on the wire: the endpoint allow-list, what a body asks for, the smallest rewrite.

What goes upstream is the client's own bytes, the same object, unless a field must differ; then the
values of all other fields are still the client's own bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import msgspec
from msgspec import UNSET, Raw, structs

from gateway.core.errors import NO_MODEL, MissingModel, RequestError, UnsupportedMediaType
from gateway.core.types import Call, Dialect, Endpoint, Route
from gateway.wire.forms import FormReader
from gateway.wire.large import fields_at_hand, spliced
from gateway.wire.measures import COMPLETIONS_MAX_TOKENS, OUTPUT_LIMITS, Measure
from gateway.wire.objects import fields_of, is_given
from gateway.wire.ordinary import SHORT_CHAT_BYTES, Ordinary, ordinary, short_chat
from gateway.wire.peek import Peek, peek, take_apart
from gateway.wire.prompts import prompts_of, truncates
from gateway.wire.small import check_depth, is_small


@dataclass(frozen=True, slots=True)
class EndpointSpec:
    """One allowed path. It is also the path upstream: nothing of a client's URL is forwarded.

    `streams`: a client may ask for an event stream by the field `stream`.
    """

    endpoint: Endpoint
    path: bytes
    dialect: Dialect
    streams: bool = False
    multipart: bool = False


_CHAT: Final = Endpoint.CHAT  # looked up once: 0.15 us before Python 3.12
# Source: vLLM 0.32. Of several paths of one endpoint the first is the one that vLLM recommends.
_ALLOWED: Final = (
    EndpointSpec(Endpoint.CHAT, b"/v1/chat/completions", Dialect.CHAT, streams=True),
    EndpointSpec(Endpoint.COMPLETIONS, b"/v1/completions", Dialect.COMPLETIONS, streams=True),
    EndpointSpec(Endpoint.RESPONSES, b"/v1/responses", Dialect.RESPONSES, streams=True),
    EndpointSpec(Endpoint.MESSAGES, b"/v1/messages", Dialect.MESSAGES, streams=True),
    EndpointSpec(Endpoint.COUNT_TOKENS, b"/v1/messages/count_tokens", Dialect.MESSAGES),
    EndpointSpec(Endpoint.CHAT_BATCH, b"/v1/chat/completions/batch", Dialect.CHAT),
    EndpointSpec(Endpoint.EMBEDDINGS, b"/v1/embeddings", Dialect.PLAIN),
    EndpointSpec(Endpoint.EMBED, b"/v2/embed", Dialect.PLAIN),
    EndpointSpec(Endpoint.POOLING, b"/pooling", Dialect.PLAIN),
    EndpointSpec(Endpoint.CLASSIFY, b"/classify", Dialect.PLAIN),
    EndpointSpec(Endpoint.RERANK, b"/rerank", Dialect.PLAIN),
    EndpointSpec(Endpoint.RERANK, b"/v1/rerank", Dialect.PLAIN),
    EndpointSpec(Endpoint.RERANK, b"/v2/rerank", Dialect.PLAIN),
    EndpointSpec(Endpoint.SCORE, b"/score", Dialect.PLAIN),
    EndpointSpec(Endpoint.SCORE, b"/v1/score", Dialect.PLAIN),
    EndpointSpec(Endpoint.GENERATIVE_SCORING, b"/generative_scoring", Dialect.PLAIN),
    EndpointSpec(Endpoint.DECISIONS, b"/v1/systemone", Dialect.PLAIN),
    EndpointSpec(
        Endpoint.TRANSCRIPTIONS, b"/v1/audio/transcriptions", Dialect.PLAIN, multipart=True
    ),
    EndpointSpec(Endpoint.TRANSLATIONS, b"/v1/audio/translations", Dialect.PLAIN, multipart=True),
    EndpointSpec(Endpoint.TOKENIZE, b"/tokenize", Dialect.PLAIN),
    EndpointSpec(Endpoint.DETOKENIZE, b"/detokenize", Dialect.PLAIN),
)
ENDPOINTS: Final[Mapping[bytes, EndpointSpec]] = MappingProxyType(
    {spec.path: spec for spec in _ALLOWED}
)


def parse_call(spec: EndpointSpec, body: bytes, content_type: bytes = b"application/json") -> Call:
    """Read from a JSON body what the gateway acts on; `form_call` does so for a form.

    `text_bytes` and `prompt_token_ids` are those of the longest prompt: the window is per prompt.

    `model` is empty where the client leaves it out and vLLM then takes its base model.

    Raises:
        RequestError: 400; the message names the field and never repeats prompt text.
        UnsupportedMediaType: 415.
    """
    if content_type != b"application/json":
        _check_json_type(content_type)
    fields = take_apart(body)
    found = ordinary(spec.endpoint, body, fields)
    if found is None:
        return measured_call(spec, body, content_type, fields)
    return _ordinary_call(spec, body, content_type, fields, found)


def parse_at_once(spec: EndpointSpec, body: bytes, content_type: bytes) -> Call | None:
    """Do as `parse_call` with a body of at most `SMALL_BODY_BYTES`; None if it is not small.

    An ordinary body is small, however many objects and lists it has: it takes 10 ms at most too.
    """
    if content_type != b"application/json":
        _check_json_type(content_type)
    if spec.endpoint is _CHAT and len(body) <= SHORT_CHAT_BYTES:
        found = short_chat(body)
        if found is not None:
            return _ordinary_call(spec, body, content_type, None, found)
    try:
        fields = take_apart(body)
    except RequestError:
        if is_small(body):
            raise
        return None
    found = ordinary(spec.endpoint, body, fields)
    if found is not None:
        return _ordinary_call(spec, body, content_type, fields, found)
    return measured_call(spec, body, content_type, fields) if is_small(body) else None


def _ordinary_call(
    spec: EndpointSpec, body: bytes, content_type: bytes, fields: Mapping[str, Raw] | None, found: Ordinary
) -> Call:  # fmt: skip
    """Return the call of an ordinary body."""
    seen = found.seen
    limit, limit_field = _limit(spec.endpoint, seen)
    options = seen.stream_options
    return Call(
        endpoint=spec.endpoint,
        dialect=spec.dialect,
        model=seen.model or "",
        stream=seen.stream is True,
        body=body,
        max_new_tokens=limit,
        max_new_field=limit_field,
        wants_usage=options.include_usage is True if options else False,
        text_bytes=found.text_bytes,
        likely_bytes=found.likely_bytes,
        content_type=content_type,
        asked=found.asked,
        fields=fields,
        messages_only=fields is None and not (seen.user or seen.metadata or seen.reasoning_effort),
    )


def measured_call(
    spec: EndpointSpec, body: bytes, content_type: bytes, fields: dict[str, Raw]
) -> Call:
    """Return the call of any body, whose fields are looked at one by one."""
    seen = peek(body, fields)
    check_depth(body, fields)
    if not seen.model and spec.dialect is Dialect.MESSAGES:
        raise MissingModel(NO_MODEL, param="model")
    endpoint = spec.endpoint
    limit, limit_field = _limit(endpoint, seen)
    measure = Measure(endpoint, fields)
    prompts = prompts_of(measure, seen, body)
    usage_on_request = reports_usage_on_request(spec.dialect)
    choices = _choices(seen.n) if usage_on_request else 1
    options = seen.stream_options
    return Call(
        endpoint=endpoint,
        dialect=spec.dialect,
        model=seen.model or "",
        stream=seen.stream is True and spec.streams,
        body=body,
        max_new_tokens=limit,
        max_new_field=limit_field,
        choices=choices * prompts.count if usage_on_request else 1,
        sequences=choices * max(prompts.count, measure.documents),
        longest_ratio=prompts.longest_ratio,
        wants_usage=not usage_on_request or (options is not None and options.include_usage is True),
        text_bytes=prompts.text_bytes,
        likely_bytes=prompts.likely_bytes,
        prompt_token_ids=prompts.ids,
        truncates_prompt=truncates(endpoint, seen),
        content_type=content_type,
        asked=measure.asked(choices=choices, prompts=prompts.count, prompts_field=prompts.field),
        fields=fields,
        event_tokens=max(1, seen.stream_interval or 1) if usage_on_request else 1,
    )


def form_call(spec: EndpointSpec, form: FormReader, body: bytes, content_type: bytes) -> Call:
    """Return what the gateway acts on of a form read so far; `body` is its beginning, with the model.

    Raises:
        RequestError: 400; there is no model.
    """
    if not form.fields.get("model"):
        raise MissingModel(NO_MODEL, param="model")
    return Call(
        endpoint=spec.endpoint,
        dialect=spec.dialect,
        model=form.fields["model"],
        stream=form.stream,
        body=body,
        wants_usage=True,
        content_type=content_type,
        model_at=form.model_at,
    )


def named(call: Call, route: Route) -> Call:
    """Return a call whose body names no model, with the name of the model that it leads to."""
    return structs.replace(call, model=route.requested, unnamed=True)


def upstream_body(
    call: Call,
    *,
    served_model: str | None,
    inject_usage: bool,
    max_new_tokens: int | None = None,
    salt: Callable[[str | None], str] | None = None,
    plain: bool = False,
) -> bytes:
    """Return the body for the backend: `call.body` itself when nothing must change.

    `served_model` is the name that the backend knows; None leaves it to the client's body.
    `salt` makes the salt of the prefix cache out of the client's own one. `plain`: the backend is no vLLM,
    and knows a limit of the output by its oldest name.
    """
    body = call.body
    renames = served_model is not None and (call.unnamed or served_model != call.model)
    if call.model_at is not None:
        start, end = call.model_at
        return body[:start] + (served_model or "").encode() + body[end:] if renames else body
    adds_usage = (
        inject_usage
        and call.stream
        and not call.wants_usage
        and reports_usage_on_request(call.dialect)
    )
    changes: dict[str, Raw] = {}
    if renames:
        changes["model"] = _encoded(served_model)
    if max_new_tokens is not None and max_new_tokens != call.max_new_tokens:
        limit_field = call.max_new_field or _limit_field(call.endpoint, plain=plain)
        if limit_field:
            changes[limit_field] = _encoded(max_new_tokens)
    asks_ids = call.tells_ids and not plain
    if not (changes or salt):
        if not (adds_usage or asks_ids):
            return body
        longer = _lengthened(call, usage=adds_usage, ids=asks_ids)
        if longer is not None:
            return longer
    return _rewritten(call, changes, salt, usage=adds_usage, ids=asks_ids)


def _lengthened(call: Call, *, usage: bool, ids: bool) -> bytes | None:
    """Return a small body with further fields behind its own; None where it may have one of them already.

    A name that is written with escapes is not found here; of two equal names the engine takes the last.
    """
    body = call.body
    if call.places is not None or not call.model or call.unnamed or not body.endswith(b"}"):
        return None
    if (usage and body.find(b'"stream_options"') >= 0) or (ids and body.find(_IDS) >= 0):
        return None
    return b"".join((body[:-1], _MORE_USAGE if usage else b"", _MORE_IDS if ids else b"", b"}"))


def _rewritten(
    call: Call, changes: dict[str, Raw], salt: Callable[[str | None], str] | None, *, usage: bool, ids: bool
) -> bytes:  # fmt: skip
    """Return a body with these changes, and with those that follow from what it says itself."""
    fields = fields_at_hand(call)
    if usage:
        changes["stream_options"] = _with_usage(fields.get("stream_options", Raw()))
    if salt:
        own = fields.get("cache_salt", Raw())
        changes["cache_salt"] = _encoded(salt(msgspec.json.decode(own) if is_given(own) else None))
    if ids:
        changes["return_token_ids"] = _TRUE
    if call.places is not None:
        return spliced(call.body, call.places, changes)
    return msgspec.json.encode(fields | changes)


def _limit_field(endpoint: Endpoint, *, plain: bool) -> str | None:
    """Return the field by which a backend is told how much to write; None where an endpoint has none."""
    names = OUTPUT_LIMITS.get(endpoint)
    return None if names is None else names[-1 if plain else 0]


_IDS: Final = b'"return_token_ids"'
_MORE_IDS: Final = b",%b:true" % _IDS
_MORE_USAGE: Final = b',"stream_options":{"include_usage":true}'
_TRUE: Final = Raw(b"true")


def reports_usage_on_request(dialect: Dialect) -> bool:
    """Whether a stream tells its tokens only if `stream_options` asks for them."""
    return dialect is Dialect.CHAT or dialect is Dialect.COMPLETIONS


def _check_json_type(content_type: bytes) -> None:
    if content_type.partition(b";")[0].strip().lower() != b"application/json":
        raise UnsupportedMediaType("The body must be sent as `Content-Type: application/json`.")


def _limit(endpoint: Endpoint, seen: Peek) -> tuple[int | None, str | None]:
    """Return the limit that a body states for its output, and the field that states it."""
    for field in OUTPUT_LIMITS.get(endpoint, ()):
        limit = getattr(seen, field)
        if limit is None or limit is UNSET:
            continue
        if limit < 0:
            raise RequestError(
                f"`{field}` must be at least 1, got {limit}.",
                param=field,
                code="integer_below_min_value",
            )
        return limit, field
    return COMPLETIONS_MAX_TOKENS if endpoint is Endpoint.COMPLETIONS else None, None


def _choices(n: int | None) -> int:
    if n is None:
        return 1
    if n < 1:
        raise RequestError(
            f"`n` must be at least 1, got {n}.", param="n", code="integer_below_min_value"
        )
    return n


def _encoded(value: object) -> Raw:
    return Raw(msgspec.json.encode(value))


def _with_usage(options: Raw) -> Raw:
    """Return stream options that ask for the usage chunk at the end, but not for usage on every chunk."""
    fields = fields_of(options) if is_given(options) else {}
    fields.pop("continuous_usage_stats", None)
    fields["include_usage"] = Raw(b"true")
    return _encoded(fields)
