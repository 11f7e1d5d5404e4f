"""The typed look at a JSON body: which fields are read, how wrong ones are told, which are refused.

Prompts, messages and tools stay raw bytes. `null` counts as absent everywhere. A refusal names the
field and never repeats a value that could be prompt text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NoReturn

import msgspec
from msgspec import Raw

from gateway.core.errors import RequestError
from gateway.wire.frames import is_given

# Fields that reach into the engine or its host, refused from clients whatever the backend's flags
# say: KV transfer names a host to fetch from and ids that bypass the chat template, embeddings are
# torch tensors, templates and processor arguments are code or nearly so.
DENIED_FIELDS: Final = (
    "kv_transfer_params",
    "ec_transfer_params",
    "prompt_embeds",
    "chat_template",
    "mm_processor_kwargs",
    "media_io_kwargs",
)

# Parts whose tokens their own bytes bound: OpenAI chat, Responses and Anthropic names together.
_TEXT_PARTS: Final = frozenset(
    {
        "text",
        "refusal",
        "thinking",
        "redacted_thinking",
        "tool_use",
        "tool_result",
        "tool_reference",
        "tool_addition",
        "tool_removal",
        "input_text",
        "output_text",
        "summary_text",
        "reasoning_text",
    }
)
_MAX_NESTING: Final = 4  # parts inside parts: a tool's result holds blocks


class StreamOptions(msgspec.Struct):
    """The one stream option that the gateway acts on."""

    include_usage: bool | None = None


class Message(msgspec.Struct):
    """A message or input item: only where its content begins is looked at."""

    content: Raw = Raw()
    output: Raw = Raw()


class Peek(msgspec.Struct):
    """Every field that is read from any JSON body."""

    model: str | None = None
    messages: list[Message | list[Message]] | None = None  # some endpoints take conversations
    prompt: Raw = Raw()
    input: Raw = Raw()
    tools: Raw = Raw()
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation: Raw = Raw()
    truncate: Raw = Raw()
    background: bool | None = None
    previous_response_id: Raw = Raw()
    chat_template_kwargs: Raw = Raw()
    # DENIED_FIELDS: anything but null is an error of its type, which is told as a refusal.
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    prompt_embeds: None = None
    chat_template: None = None
    mm_processor_kwargs: None = None
    media_io_kwargs: None = None


class _Part(msgspec.Struct):
    type: str | None = None
    content: Raw = Raw()
    prompt_embeds: Raw = Raw()
    image_embeds: Raw = Raw()
    audio_embeds: Raw = Raw()
    video_embeds: Raw = Raw()


_EMBEDS: Final = ("prompt_embeds", "image_embeds", "audio_embeds", "video_embeds")
_PEEK: Final = msgspec.json.Decoder(Peek)
_OBJECT: Final = msgspec.json.Decoder(dict[str, Raw])
_ITEMS: Final = msgspec.json.Decoder(list[Message])
_PARTS: Final = msgspec.json.Decoder(list[_Part])
_IDS: Final = msgspec.json.Decoder(list[int])
_ID_LISTS: Final = msgspec.json.Decoder(list[list[int]])
_TEXTS: Final = msgspec.json.Decoder(list[str])
_RAWS: Final = msgspec.json.Decoder(list[Raw])


def peek(body: bytes) -> Peek:
    """Read the known fields of a JSON body.

    Raises:
        RequestError: 400; no JSON object, not UTF-8, a wrong type, too deep, a refused field.
    """
    try:
        if not body.isascii():
            body.decode()  # the decoder skips what it does not read, wrong encoding included
        seen = _PEEK.decode(body)
    except msgspec.ValidationError as error:
        field = str(error).partition(" - at `$.")[2].rstrip("`")
        if field in DENIED_FIELDS:
            _deny(field)
        raise _wrong_type(str(error)) from None
    except UnicodeDecodeError:
        raise RequestError("The body must be JSON in UTF-8.", code="invalid_json") from None
    except RecursionError:
        raise _too_deep() from None
    except msgspec.DecodeError as error:
        raise RequestError(_malformed(body, str(error)), code="invalid_json") from None
    if len(seen.chat_template_kwargs):
        _check_template_kwargs(seen.chat_template_kwargs)
    return seen


def fields_of(raw: bytes | Raw) -> dict[str, Raw]:
    """Take an object apart; every value keeps its bytes. Of names that come twice the last counts.

    Raises:
        RequestError: 400; nested too deeply (the limit counts the caller's own depth too).
    """
    try:
        return _OBJECT.decode(raw)
    except RecursionError:
        raise _too_deep() from None


def is_plain_text(messages: Sequence[Message | list[Message]]) -> bool:
    """Whether messages, or several conversations of them, surely hold text only.

    Raises:
        RequestError: 400; a tensor sent as a part.
    """
    plain = True
    for message in messages:
        if isinstance(message, list):
            plain = is_plain_text(message) and plain
            continue
        content = message.content
        if len(content) and memoryview(content)[0] not in b'"n':
            plain = _is_plain_content(content, _MAX_NESTING) and plain
        if is_given(message.output):
            plain = _is_plain_content(message.output, _MAX_NESTING) and plain
    return plain


def is_plain_input(raw: Raw) -> bool:
    """Whether a Responses `input`, a string or a list of items, surely holds text only.

    Raises:
        RequestError: 400; a tensor sent as a part.
    """
    if bytes(raw)[:1] in b'"n':
        return True
    try:
        return is_plain_text(_ITEMS.decode(raw))
    except (msgspec.DecodeError, RecursionError):
        return False  # no shape that an engine takes; the backend says so


class Prompts(msgspec.Struct, frozen=True):
    """The prompts of one request, measured."""

    count: int
    text_bytes: int | None  # of the longest; None: its bytes do not bound its tokens
    ids: int | None = None  # of the longest, if they are token ids
    longest_ratio: float = 1.0  # its share of all of them


def measure_prompts(raw: Raw, field: str, *, at_most: int) -> Prompts:
    """Measure a prompt or a list of them: text, or token ids.

    Raises:
        RequestError: 400; too many, or neither text nor token ids.
    """
    data = bytes(raw)
    if data.startswith(b'"'):
        return Prompts(1, len(data))
    inside = data[1:].lstrip()[:1] if data.startswith(b"[") else b""
    if not inside:
        raise RequestError(
            f"`{field}` has the wrong type: expected text or token ids, one or a list of them.",
            param=field,
            code="invalid_type",
        )
    if inside in b"-0123456789":
        return Prompts(1, len(data), len(_decode(_IDS, raw, field)))
    if inside == b"[":
        lists = _decode(_ID_LISTS, raw, field)
        _check_count(len(lists), field, at_most)
        sizes = [len(each) for each in lists]
        return Prompts(len(lists), len(data), max(sizes), _longest_ratio(sizes))
    texts = _decode(_RAWS, raw, field)
    _check_count(len(texts), field, at_most)
    if any(bytes(text)[:1] != b'"' for text in texts):
        _decode(_TEXTS, raw, field)
    sizes = [len(each) for each in texts]
    return Prompts(max(len(texts), 1), max(sizes, default=0), None, _longest_ratio(sizes))


def _longest_ratio(sizes: list[int]) -> float:
    return max(sizes) / sum(sizes) if any(sizes) else 1.0


def _is_plain_content(content: Raw, nesting: int) -> bool:
    if bytes(content)[:1] == b'"':
        return True
    try:
        parts = _PARTS.decode(content)
    except (msgspec.DecodeError, RecursionError):
        return False  # no shape that an engine takes; the backend says so
    plain = True
    for part in parts:
        for name in _EMBEDS:
            if part.type == name or is_given(getattr(part, name)):
                _deny(name)
        inner = not is_given(part.content) or (
            nesting > 1 and _is_plain_content(part.content, nesting - 1)
        )
        plain = plain and inner and part.type in _TEXT_PARTS
    return plain


def _check_template_kwargs(raw: Raw) -> None:
    if is_given(raw) and "chat_template" in _decode(_OBJECT, raw, "chat_template_kwargs"):
        _deny("chat_template_kwargs.chat_template")


def _deny(field: str) -> NoReturn:
    raise RequestError(
        f"`{field}` is not accepted here. Leave it out.", param=field, code="unsupported_parameter"
    )


def _check_count(count: int, field: str, at_most: int) -> None:
    if count > at_most:
        raise RequestError(
            f"`{field}` may hold at most {at_most} entries, got {count}.",
            param=field,
            code="array_above_max_length",
        )


def _decode(decoder: msgspec.json.Decoder[Any], raw: Raw, field: str) -> Any:
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error), field) from None
    except RecursionError:
        raise _too_deep() from None


def _wrong_type(why: str, root: str = "") -> RequestError:
    """Name the field of the decoder's "Expected `int | null`, got `str` - at `$.n`"."""
    expected, _, place = why.partition(" - at `$")
    field = (root + place.rstrip("`")).lstrip(".")
    expected = expected.replace(" | null", "").replace("Expected", "expected")
    if not field:
        return RequestError(f"The body must be a JSON object: {expected}.", code="invalid_type")
    return RequestError(
        f"`{field}` has the wrong type: {expected}.", param=field, code="invalid_type"
    )


def _too_deep() -> RequestError:
    return RequestError("The body is nested too deeply.", code="invalid_json")


def _malformed(body: bytes, why: str) -> str:
    if not body.strip():
        return "The body is empty; a JSON object is expected."
    if body.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")) or b"\0" in body[:4]:
        return "The body must be JSON in plain UTF-8, without a byte order mark."
    return f"The body is not valid JSON: {why.removeprefix('JSON is malformed: ')}."
