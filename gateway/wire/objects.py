"""JSON objects taken apart once: every value keeps its bytes, and no key comes twice.

The decoder keeps the last of two equal keys, as vLLM does; another reader may keep the first. Arithmetic
shows that it dropped none: names and values account for every byte of an object that is written without
spaces, as the SDKs do, or for all but the spaces of Python's json. A body can be made so that this adds
up though a name comes twice; engine and gateway then read the same value. Any other object is gone
through name by name.
"""

from __future__ import annotations

import re
from itertools import chain
from typing import Any, Final

import msgspec
from msgspec import Raw

from gateway.core.errors import RequestError
from gateway.core.printable import shown

_OBJECT: Final = msgspec.json.Decoder(dict[str, Raw])
_OBJECTS: Final = msgspec.json.Decoder(list[dict[str, Raw]])
_ITEMS: Final = msgspec.json.Decoder(list[Raw])
# JSON Schemas are the deepest that clients send. Source: OpenAI, structured outputs: at most 10
# levels of properties, which are two or three levels of JSON each.
MAX_DEPTH: Final = 64

_STRING: Final = msgspec.json.Decoder(str)
_BEFORE_VALUE: Final = re.compile(rb'[ \t\r\n]*("(?>(?:[^"\\]|\\.)*)")[ \t\r\n]*:[ \t\r\n]*')
_AFTER_VALUE: Final = re.compile(rb"[ \t\r\n]*([,}])")


def fields_of(raw: bytes | Raw) -> dict[str, Raw]:
    """Take an object apart; of names that come twice the last counts.

    Raises:
        RequestError: 400; nested too deeply (the limit counts the caller's own depth too).
        msgspec.DecodeError: it is no object.
    """
    return _decoded(_OBJECT, raw)  # type: ignore[no-any-return]


def fields_once(raw: bytes | Raw, path: str = "") -> dict[str, Raw]:
    """Take an object apart whose names come once. `path` is where it is in the body.

    Raises:
        RequestError: 400; a name comes twice, or it is nested too deeply.
        msgspec.DecodeError: it is no object.
    """
    try:
        fields = _OBJECT.decode(raw)
    except RecursionError:
        raise too_deep() from None
    spaces = len(raw) - len(msgspec.json.encode(fields))
    if spaces != 0 and spaces != 2 * len(fields) - 1:
        _check_names(bytes(raw), fields, path)
    return fields


def objects_once(raw: Raw, path: str) -> list[dict[str, Raw]]:
    """Take a list of objects apart in each of which names come once. `path` is where it is in the body.

    Raises:
        RequestError: 400; a name comes twice in one of them, or they are nested too deeply.
        msgspec.DecodeError: it is no list of objects.
    """
    objects: list[dict[str, Raw]] = _decoded(_OBJECTS, raw)
    names = sum(map(len, objects))
    spaces = len(raw) - 1 - 2 * len(objects) - 4 * names - _texts_bytes(objects)
    if spaces not in (0, 2 * names - 1):
        for index, (each, fields) in enumerate(zip(items_of(raw), objects, strict=True)):
            if _compact_bytes(fields) != len(each):
                _check_names(bytes(each), fields, f"{path}[{index}]")
    return objects


def items_of(raw: Raw) -> list[Raw]:
    """Take a list apart.

    Raises:
        RequestError: 400; nested too deeply.
        msgspec.DecodeError: it is no list.
    """
    return _decoded(_ITEMS, raw)  # type: ignore[no-any-return]


def items_if_list(raw: Raw) -> list[Raw]:
    """Take a list apart; nothing comes of what is none, or is nested too deeply."""
    return decode_or_none(_ITEMS, raw) or []


def decode_or_none(decoder: msgspec.json.Decoder[Any], data: bytes | Raw) -> Any:
    """Decode what fits the type; None for anything else."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def is_given(raw: Raw) -> bool:
    """Whether a raw field is there and not null."""
    size = len(raw)
    return size > 0 and (size != len(b"null") or bytes(raw) != b"null")


def begins(raw: Raw) -> int:
    """Return the first byte of a value, which tells its type."""
    return memoryview(raw)[0]


def _decoded(decoder: msgspec.json.Decoder[Any], raw: bytes | Raw) -> Any:
    try:
        return decoder.decode(raw)
    except RecursionError:
        raise too_deep() from None


def too_deep(field: str | None = None) -> RequestError:
    """Return the refusal of a body that is nested too deeply, at a field of its top level."""
    where = "The body" if field is None else f"`{field}`"
    return RequestError(
        f"{where} is nested too deeply: at most {MAX_DEPTH} levels are accepted.",
        param=field,
        code="invalid_json",
    )


def not_utf8() -> RequestError:
    """Return the refusal of a body in another encoding."""
    return RequestError("The body must be JSON in UTF-8.", code="invalid_json")


def wrong_type(path: str, why: str) -> RequestError:
    """Return the refusal of a value of the wrong type, by its place in the body."""
    return RequestError(f"`{path}` has the wrong type: {why}.", param=path, code="invalid_type")


def _compact_bytes(fields: dict[str, Raw]) -> int:
    """Return how long the object is without spaces, escapes in names and names that come twice."""
    return 1 + 4 * len(fields) + sum(map(len, fields)) + sum(map(len, fields.values()))


def _texts_bytes(objects: list[dict[str, Raw]]) -> int:
    """Return how long all names and values are."""
    values = chain.from_iterable(map(dict.values, objects))
    return sum(map(len, chain.from_iterable(objects))) + sum(map(len, values))


def _check_names(data: bytes, fields: dict[str, Raw], path: str) -> None:
    """Refuse an object in whose text a name comes twice; `fields` has the last value of each name."""
    if not fields:
        return  # nothing but space between the braces
    seen: set[str] = set()
    at = data.find(b"{") + 1
    while True:
        before = _BEFORE_VALUE.match(data, at)
        assert before is not None  # the decoder has read it
        name = _STRING.decode(before[1])
        value = fields[name]
        at = before.end() + len(value)
        after = _AFTER_VALUE.match(data, at)
        if name in seen or after is None or not data.startswith(value, before.end()):
            raise _twice(name, path)
        if after[1] == b"}":
            return
        seen.add(name)
        at = after.end()


def _twice(name: str, path: str) -> RequestError:
    where = f"{path}.{shown(name)}" if path else shown(name)
    return RequestError(
        f"`{where}` appears twice. Send it once.", param=where, code="duplicate_key"
    )
