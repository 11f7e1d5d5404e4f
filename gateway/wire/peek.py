"""The typed look at a JSON body: which fields are read, and how wrong ones are refused.

Fields of their plain types are decoded at once. Only where that fails they are read one by one, as
laxly as vLLM reads them.

Prompts, messages and tools stay raw bytes. `null` counts as absent everywhere. A refusal names the
field and never repeats a value that could be prompt text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec
from msgspec import Raw

from gateway.core.errors import RequestError
from gateway.wire.lax import MAX_ITEMS, MOST, NotReadable, lax_bool, lax_ids, lax_int
from gateway.wire.objects import (
    decode_or_none,
    fields_once,
    is_given,
    not_utf8,
    too_deep,
    wrong_type,
)

# Larger ones mean nothing, and some fit no float. The lax readers take the same.
Integer = Annotated[int, msgspec.Meta(ge=-MOST, le=MOST)]


class StreamOptions(msgspec.Struct):
    """The one stream option that the gateway acts on."""

    include_usage: bool | None = None


class Peek(msgspec.Struct):
    """Every field that is read from any JSON body."""

    model: str | None = None
    prompt: Raw = Raw()
    input: Raw = Raw()
    tools: Raw = Raw()
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: Integer | None = None
    n: Integer | None = None
    max_tokens: Integer | None = None
    max_completion_tokens: Integer | None = None
    max_output_tokens: Integer | None = None
    truncate_prompt_tokens: Integer | None = None
    truncation: Raw = Raw()
    truncate: Raw = Raw()


_PEEK: Final = msgspec.json.Decoder(Peek)
_IDS: Final = msgspec.json.Decoder(list[int])
_ID_LISTS: Final = msgspec.json.Decoder(list[list[int]])
_TEXTS: Final = msgspec.json.Decoder(list[str])
_RAWS: Final = msgspec.json.Decoder(list[Raw])
_VALUES: Final = msgspec.json.Decoder(list[Any])
_VALUE_LISTS: Final = msgspec.json.Decoder(list[list[Any]])

# The first escape of a surrogate pair without the second: `\ud83d`, behind whole escapes of backslashes.
_HALF: Final = re.compile(rb"(?<!\\)(?:\\\\)*\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")


def take_apart(body: bytes) -> dict[str, Raw]:
    """Return the fields of a JSON body.

    Raises:
        RequestError: 400; no JSON object, not UTF-8, too deep, or a name comes twice.
    """
    try:
        if not body.isascii():
            body.decode()  # the decoder skips what it does not read, wrong encoding included
        return fields_once(body)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None
    except UnicodeDecodeError:
        raise not_utf8() from None
    except msgspec.DecodeError as error:
        raise RequestError(_malformed(body, str(error)), code="invalid_json") from None


def peek(body: bytes, fields: dict[str, Raw]) -> Peek:
    """Read the known fields of a JSON body; `fields` are all that it has.

    Raises:
        RequestError: 400; a wrong type.
    """
    try:
        if len(body) <= _SHORT_BYTES:
            return _PEEK.decode(body)
        # Once more through a long body would take longer than writing what is read of it.
        seen: Peek = _PEEK.decode(
            msgspec.json.encode({name: fields[name] for name in _LAX_FIELDS if name in fields})
        )
    except msgspec.ValidationError:
        return _peek_laxly(fields)
    for name in _RAW_FIELDS:
        if name in fields:
            setattr(seen, name, fields[name])
    return seen


def _peek_laxly(fields: dict[str, Raw]) -> Peek:
    """Read the fields one by one."""
    raws: dict[str, Any] = {name: fields[name] for name in _RAW_FIELDS if name in fields}
    seen = Peek(**raws)
    for name, read in _LAX_FIELDS.items():
        raw = fields.get(name, _ABSENT)
        if is_given(raw):
            setattr(seen, name, _read_laxly(read, raw, name))
    return seen


def _read_laxly(read: Callable[[Any], Any], raw: Raw, name: str) -> Any:
    try:
        return read(msgspec.json.decode(raw))
    except (NotReadable, msgspec.DecodeError):
        # The strict decoder has the last word: it says what is wrong.
        one = b'{"%b":%b}' % (name.encode(), raw)
        try:
            return getattr(_PEEK.decode(one), name)
        except msgspec.ValidationError as error:
            raise _refusal(str(error)) from None
    except RecursionError:
        raise too_deep() from None


def _lax_text(value: object) -> str:
    if not isinstance(value, str):
        raise NotReadable
    return value


def _lax_options(value: object) -> StreamOptions:
    if not isinstance(value, dict):
        raise NotReadable
    include = value.get("include_usage")
    return StreamOptions(None if include is None else lax_bool(include))


_ABSENT: Final = Raw()
_SHORT_BYTES: Final = 2048
_RAW_FIELDS: Final = ("prompt", "input", "tools", "truncation", "truncate")
_LAX_FIELDS: Final[dict[str, Callable[[Any], Any]]] = {
    "model": _lax_text,
    "stream": lax_bool,
    "stream_options": _lax_options,
    **dict.fromkeys(
        [
            *("stream_interval", "n", "max_tokens", "max_completion_tokens", "max_output_tokens"),
            "truncate_prompt_tokens",
        ],
        lax_int,
    ),
}


class Prompts(msgspec.Struct, frozen=True):
    """The prompts of one request, measured."""

    count: int
    text_bytes: int | None  # of the longest; None: its bytes do not bound its tokens
    ids: int | None = None  # of the longest, if they are token ids
    longest_ratio: float = 1.0  # its share of all of them
    field: str = "prompt"  # where they are
    likely_bytes: int | None = None  # see `Call`


def measure_prompts(raw: Raw, field: str) -> Prompts:
    """Measure a prompt or a list of them: text, or token ids.

    Raises:
        RequestError: 400; neither text nor token ids.
    """
    data = bytes(raw)
    if data.startswith(b'"'):
        return Prompts(1, len(data), field=field)
    inside = data[1:].lstrip()[:1] if data.startswith(b"[") else b""
    if not inside:
        raise wrong_type(field, "expected text or token ids, one or a list of them")
    if inside in b"-0123456789tf":
        return Prompts(1, len(data), len(_ids(raw, field)), field=field)
    if inside == b"[":
        lists = _id_lists(raw, field)
        sizes = [len(each) for each in lists]
        return Prompts(len(lists), len(data), max(sizes), _longest_ratio(sizes), field)
    texts = _decode(_RAWS, raw, field)
    if any(bytes(text)[:1] != b'"' for text in texts):
        return Prompts(1, len(data), len(_ids(raw, field)), field=field)
    sizes = [len(each) for each in texts]
    return Prompts(max(len(texts), 1), max(sizes, default=0), None, _longest_ratio(sizes), field)


def _ids(raw: Raw, field: str) -> list[int]:
    """Read a list of token ids; where it is none, the strict decoder tells why."""
    ids = decode_or_none(_IDS, raw)
    if ids is None:
        values = decode_or_none(_VALUES, raw)
        try:
            return lax_ids([] if values is None else values)
        except NotReadable:
            texts = values is not None and isinstance(values[0], str)
            _decode(_TEXTS if texts else _IDS, raw, field)
    return ids or []


def _id_lists(raw: Raw, field: str) -> list[list[int]]:
    lists = decode_or_none(_ID_LISTS, raw)
    if lists is None:
        values = decode_or_none(_VALUE_LISTS, raw)
        try:
            if values is not None and sum(map(len, values)) <= MAX_ITEMS:
                return [lax_ids(each) for each in values]
        except NotReadable:
            pass
        _decode(_ID_LISTS, raw, field)
    return lists or []


def _longest_ratio(sizes: list[int]) -> float:
    return max(sizes) / sum(sizes) if any(sizes) else 1.0


def _decode(decoder: msgspec.json.Decoder[Any], raw: Raw, field: str) -> Any:
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), field) from None
    except RecursionError:
        raise too_deep() from None


def _refusal(why: str, root: str = "") -> RequestError:
    """Name the field of the decoder's "Expected `int | null`, got `str` - at `$.n`"."""
    expected, _, place = why.partition(" - at `$")
    field = (root + place.rstrip("`")).lstrip(".")
    expected = expected.replace(" | null", "").replace("Expected", "expected")
    if not field:
        return RequestError(f"The body must be a JSON object: {expected}.", code="invalid_type")
    return wrong_type(field, expected)


def _malformed(body: bytes, why: str) -> str:
    if not body.strip():
        return "The body is empty; a JSON object is expected."
    if body.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")) or b"\0" in body[:4]:
        return "The body must be JSON in plain UTF-8, without a byte order mark."
    at_escape = any(word in why for word in ("truncated", "escape", "surrogate"))
    if at_escape and (half := _HALF.search(body)):
        why = f"half of a character at byte {half.end() - 6}: text was cut inside an emoji"
    elif why == "Input data was truncated":
        why = "it ends too early"
    return f"The body is not valid JSON: {why.removeprefix('JSON is malformed: ')}."
