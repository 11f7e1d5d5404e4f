"""Request heads as clients may write them, in the one form that is served. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Final

CLIENT_ID: Final = re.compile(rb"[A-Za-z0-9_.-]{1,128}")  # a client's own request id

_ABSOLUTE: Final = re.compile(rb"https?://[^/?#]+([^#]*)", re.IGNORECASE)


_as_line: Final = b"%b: %b\r\n".__mod__


def header_lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return headers as the lines of a head."""
    return b"".join(map(_as_line, headers))


def joined(headers: Collection[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return headers by name. Different values of one name are joined by commas (RFC 9110 section 5.3)."""
    fields = dict(headers)
    if len(fields) == len(headers):
        return fields
    values: dict[bytes, dict[bytes, None]] = {name: {} for name in fields}
    for name, value in headers:
        values[name][value] = None
    return {name: b",".join(each) for name, each in values.items()}


def origin_form(target: bytes) -> bytes:
    """Return path and query of a request target that is a whole URL (RFC 9112 section 3.2.2).

    A target of another form is returned as it is; only one that begins with a slash is a path.
    """
    found = _ABSOLUTE.fullmatch(target)
    if found is None:
        return target
    path = found[1]
    return path if path.startswith(b"/") else b"/" + path


def without_upgrade(
    method: bytes, target: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]
) -> bytes:
    """Return a parsed request head as bytes again, without its offer to change the protocol.

    A server may ignore the offer (RFC 9110 section 7.8). All other headers stay as they were, so a
    parser frames the body as it would have without the offer.
    """
    first = b"%b %b HTTP/%b\r\n" % (method, target, version.encode())
    return first + header_lines(each for each in headers if each[0] != b"upgrade") + b"\r\n"


# --- W3C Trace Context (https://www.w3.org/TR/trace-context/) ---------------------------------------

_PARENT: Final = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)
_MEMBER: Final = re.compile(rb"[a-z0-9][a-z0-9_*/@-]{0,255}=[ -+\--<>-~]{0,255}[!-+\--<>-~]")
_MAX_STATE_BYTES: Final = 512  # as much as every participant has to pass on
_MAX_STATE_MEMBERS: Final = 32


def trace_lines(headers: Collection[tuple[bytes, bytes]]) -> bytes:
    """Return the header lines that carry a client's trace on to a backend; none for an invalid one."""
    parents = [value for name, value in headers if name == b"traceparent"]
    if len(parents) != 1 or _PARENT.fullmatch(parents[0]) is None:
        return b""
    state = b",".join([value for name, value in headers if name == b"tracestate"])
    return b"traceparent: %b\r\n%b" % (parents[0], _state_line(state))


def _state_line(state: bytes) -> bytes:
    members = [member.strip(b" \t") for member in state.split(b",")]
    valid = (
        len(state) <= _MAX_STATE_BYTES
        and len(members) <= _MAX_STATE_MEMBERS
        and all(_MEMBER.fullmatch(member) for member in members)
    )
    return b"tracestate: %b\r\n" % state if valid else b""
