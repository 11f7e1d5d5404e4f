"""Which JSON bodies are handled in one piece, and how deep any of them may be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from msgspec import Raw

from gateway.core.errors import RequestError

# Below both of these a body is decoded at once, which takes 10 ms at most whatever it holds.
SMALL_BODY_BYTES: Final = 64 * 1024
SMALL_BODY_CONTAINERS: Final = 1000
# JSON Schemas are the deepest that clients send. Source: OpenAI, structured outputs: at most 10
# levels of properties, which are two or three levels of JSON each.
MAX_DEPTH: Final = 64

_STRING: Final = re.compile(rb'"[^"]*+"')
_NO_STRUCTURE: Final = bytes(set(range(256)) - set(b'[]{}"'))
_ALL_ALIKE: Final = bytes.maketrans(b"[]{}", b"()()")
_SHORT_BYTES: Final = 1024  # counting takes less time than searching
_CONTAINER_BYTES: Final = 3  # the least that one more object or list takes, with its comma


def is_small(body: bytes) -> bool:
    """Whether a body is decoded at once: it has few bytes, and few objects and lists.

    Brackets in its strings count too: a text of nothing else is handled as a large body.
    """
    size = len(body)
    if size <= _CONTAINER_BYTES * SMALL_BODY_CONTAINERS:
        return True
    return size <= SMALL_BODY_BYTES and (
        _has_few_containers(body, MAX_DEPTH)
        or body.count(b"{") + body.count(b"[") <= SMALL_BODY_CONTAINERS
    )


def check_depth(body: bytes, fields: Mapping[str, Raw]) -> None:
    """Refuse a small body that is nested too deeply, by its fields; the scan does so for others.

    Raises:
        RequestError: 400; deeper than `MAX_DEPTH`.
    """
    if len(body) > SMALL_BODY_BYTES or _has_few_containers(body, MAX_DEPTH):
        return
    for name, raw in fields.items():
        value = bytes(raw)
        if not _has_few_containers(value, MAX_DEPTH - 1) and _is_deeper(value, MAX_DEPTH - 1):
            raise too_deep(name)


def _has_few_containers(value: bytes, most: int) -> bool:
    """Whether a value has at most so many objects and lists; a search ends at the first too many."""
    if len(value) <= _SHORT_BYTES:
        return value.count(b"{") + value.count(b"[") <= most
    left = most
    for bracket in (b"{", b"["):
        at = value.find(bracket)
        while at >= 0:
            left -= 1
            if left < 0:
                return False
            at = value.find(bracket, at + 1)
    return True


def _is_deeper(value: bytes, most: int) -> bool:
    """Whether valid JSON is nested more deeply than so many levels."""
    if b"\\" in value:  # no quote that is left is within a string
        value = value.replace(b"\\\\", b"").replace(b'\\"', b"")
    nested = value.translate(_ALL_ALIKE, _NO_STRUCTURE)
    outside = nested.replace(b'""', b"")  # a string without brackets is two quotes by now
    nested = _STRING.sub(b"", nested) if b'"' in outside else outside
    for _ in range(most):
        if not nested:
            break
        nested = nested.replace(b"()", b"")
    return bool(nested)


def too_deep(field: str | None = None) -> RequestError:
    """Return the refusal of a body that is nested too deeply, at a field of its top level."""
    where = "The body" if field is None else f"`{field}`"
    return RequestError(
        f"{where} is nested too deeply: at most {MAX_DEPTH} levels are accepted.",
        param=field,
        code="invalid_json",
    )
