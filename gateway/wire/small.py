"""Which JSON bodies are handled in one piece, and how deep any of them may be."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Raw

from gateway.core.errors import RequestError
from gateway.wire.objects import MAX_DEPTH, begins, items_of, too_deep

# Below both of these a body is decoded at once, which takes 10 ms at most whatever it holds.
SMALL_BODY_BYTES: Final = 64 * 1024
SMALL_BODY_CONTAINERS: Final = 1000

_STRING: Final = re.compile(rb'"[^"]*+"')
_NO_STRUCTURE: Final = bytes(set(range(256)) - set(b'[]{}"'))
_ALL_ALIKE: Final = bytes.maketrans(b"[]{}", b"()()")
_NOT_OPENING: Final = bytes(set(range(256)) - set(b"[{"))
_DIVIDER: Final = b"\0"  # in no JSON
_NOT_OPENING_NOR_DIVIDER: Final = _NOT_OPENING.replace(_DIVIDER, b"")
_FEW: Final = 8  # brackets that are searched for; where there are more, counting takes less time
_CONTAINER_BYTES: Final = 3  # the least that one more object or list takes, with its comma
_LEVEL_BYTES: Final = 2  # the least that one more level takes
_LIST: Final = b"["[0]


def is_small(body: bytes) -> bool:
    """Whether a body is decoded at once: it has few bytes, and few objects and lists.

    Brackets in its strings count too: a text of nothing else is handled as a large body.
    """
    size = len(body)
    if size <= _CONTAINER_BYTES * SMALL_BODY_CONTAINERS:
        return True
    return size <= SMALL_BODY_BYTES and containers(body) <= SMALL_BODY_CONTAINERS


def most_containers(values: Iterable[Raw]) -> int:
    """Return the most objects and lists that any one of these values has: it has no more levels than that."""
    brackets = _DIVIDER.join(values).translate(None, _NOT_OPENING_NOR_DIVIDER)
    return max(map(len, brackets.split(_DIVIDER)))


def check_depth(body: bytes, fields: Mapping[str, Raw]) -> None:
    """Refuse a small body that is nested too deeply, by its fields; the scan does so for others.

    Raises:
        RequestError: 400; deeper than `MAX_DEPTH`.
    """
    if len(body) > SMALL_BODY_BYTES:
        return
    for name, raw in fields.items():
        if len(raw) > _LEVEL_BYTES * (MAX_DEPTH - 1) and _is_deeper(raw, MAX_DEPTH - 1):
            raise too_deep(name)


def containers(value: bytes) -> int:
    """Return how many objects and lists a value has at most: brackets in its strings count too."""
    left = _FEW
    for bracket in (b"{", b"["):
        at = value.find(bracket)
        while at >= 0:
            left -= 1
            if left < 0:
                return len(value.translate(None, _NOT_OPENING))
            at = value.find(bracket, at + 1)
    return _FEW - left


def _is_deeper(raw: Raw, most: int) -> bool:
    """Whether a value is nested more deeply than so many levels."""
    value = bytes(raw)
    if containers(value) <= most:
        return False
    try:
        if begins(raw) == _LIST and most_containers(items_of(raw)) < most:
            return False
    except RequestError:
        return True  # it is too deep even for the decoder
    if b"\\" in value:  # each quote that is left begins or ends a string
        value = value.replace(b"\\\\", b"").replace(b'\\"', b"")
    nested = value.translate(_ALL_ALIKE, _NO_STRUCTURE)
    outside = nested.replace(b'""', b"")  # a string without brackets is two quotes by now
    nested = _STRING.sub(b"", nested) if b'"' in outside else outside
    for _ in range(most):
        if not nested:
            break
        nested = nested.replace(b"()", b"")
    return bool(nested)
