"""The typed look at a JSON body: which fields are read, and how wrong ones are told.

Prompts, messages and tools stay raw bytes. `null` counts as absent everywhere. A refusal names the
field and never repeats a value that could be prompt text.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Raw

from gateway.core.errors import RequestError


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
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation: Raw = Raw()
    truncate: Raw = Raw()


_PEEK: Final = msgspec.json.Decoder(Peek)
_IDS: Final = msgspec.json.Decoder(list[int])
_ID_LISTS: Final = msgspec.json.Decoder(list[list[int]])
_TEXTS: Final = msgspec.json.Decoder(list[str])
_RAWS: Final = msgspec.json.Decoder(list[Raw])


def peek(body: bytes) -> Peek:
    """Read the known fields of a JSON body.

    Raises:
        RequestError: 400; no JSON object, not UTF-8, a wrong type, too deep.
    """
    try:
        if not body.isascii():
            body.decode()  # the decoder skips what it does not read, wrong encoding included
        return _PEEK.decode(body)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None
    except UnicodeDecodeError:
        raise RequestError("The body must be JSON in UTF-8.", code="invalid_json") from None
    except RecursionError:
        raise _too_deep() from None
    except msgspec.DecodeError as error:
        raise RequestError(_malformed(body, str(error)), code="invalid_json") from None


class Prompts(msgspec.Struct, frozen=True):
    """The prompts of one request, measured."""

    count: int
    text_bytes: int | None  # of the longest; None: its bytes do not bound its tokens
    ids: int | None = None  # of the longest, if they are token ids
    longest_ratio: float = 1.0  # its share of all of them
    field: str = "prompt"  # where they are


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
        raise RequestError(
            f"`{field}` has the wrong type: expected text or token ids, one or a list of them.",
            param=field,
            code="invalid_type",
        )
    if inside in b"-0123456789":
        return Prompts(1, len(data), len(_decode(_IDS, raw, field)), field=field)
    if inside == b"[":
        lists = _decode(_ID_LISTS, raw, field)
        sizes = [len(each) for each in lists]
        return Prompts(len(lists), len(data), max(sizes), _longest_ratio(sizes), field)
    texts = _decode(_RAWS, raw, field)
    if any(bytes(text)[:1] != b'"' for text in texts):
        _decode(_TEXTS, raw, field)
    sizes = [len(each) for each in texts]
    return Prompts(max(len(texts), 1), max(sizes, default=0), None, _longest_ratio(sizes), field)


def _longest_ratio(sizes: list[int]) -> float:
    return max(sizes) / sum(sizes) if any(sizes) else 1.0


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
