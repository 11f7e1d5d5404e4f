"""Which JSON bodies are handled in one piece, and how deep any of them may be."""

from __future__ import annotations

import re
from typing import Final

from gateway.core.errors import RequestError

# Below all of these a body is decoded at once, which takes 5 ms at most whatever it holds.
SMALL_BODY_BYTES: Final = 64 * 1024
SMALL_BODY_CONTAINERS: Final = 1000
SMALL_BODY_COMMAS: Final = 4000
# JSON Schemas are the deepest that clients send. Source: OpenAI, structured outputs: at most 10
# levels of properties, which are two or three levels of JSON each.
MAX_DEPTH: Final = 64

_STRING: Final = re.compile(rb'"[^"]*+"')
_NO_STRUCTURE: Final = bytes(set(range(256)) - set(b'[]{}"'))
_ALL_ALIKE: Final = bytes.maketrans(b"[]{}", b"()()")


def is_small(body: bytes) -> bool:
    """Whether a body is decoded at once: it has few bytes, and few objects and lists."""
    size = len(body)
    if size <= SMALL_BODY_CONTAINERS:
        return True
    return (
        size <= SMALL_BODY_BYTES
        and _containers(body) <= SMALL_BODY_CONTAINERS
        and body.count(b",") <= SMALL_BODY_COMMAS
    )


def check_depth(body: bytes) -> None:
    """Refuse a small body that is valid JSON, but nested too deeply; the scan does so for others.

    Raises:
        RequestError: 400; deeper than `MAX_DEPTH`.
    """
    if len(body) > SMALL_BODY_BYTES or _containers(body) <= MAX_DEPTH:
        return
    if b"\\" in body:  # no quote that is left is within a string
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    nested = body.translate(_ALL_ALIKE, _NO_STRUCTURE)
    outside = nested.replace(b'""', b"")  # a string without brackets is two quotes by now
    nested = _STRING.sub(b"", nested) if b'"' in outside else outside
    for _ in range(MAX_DEPTH):
        if not nested:
            return
        nested = nested.replace(b"()", b"")
    if nested:
        raise too_deep()


def _containers(body: bytes) -> int:
    """Return the objects and lists of a body, those that its strings speak of included."""
    return body.count(b"{") + body.count(b"[")


def too_deep(field: str | None = None) -> RequestError:
    """Return the refusal of a body that is nested too deeply, at a field of its top level."""
    where = "The body" if field is None else f"`{field}`"
    return RequestError(
        f"{where} is nested too deeply: at most {MAX_DEPTH} levels are accepted.",
        param=field,
        code="invalid_json",
    )
