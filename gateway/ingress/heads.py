"""Request heads as clients may write them, in the one form that is served. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

_ABSOLUTE: Final = re.compile(rb"https?://[^/?#]+([^#]*)", re.IGNORECASE)


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
    lines = [b"%b %b HTTP/%b\r\n" % (method, target, version.encode())]
    lines += [b"%b: %b\r\n" % header for header in headers if header[0] != b"upgrade"]
    return b"".join(lines) + b"\r\n"
