"""Calls from web pages of other origins (CORS, https://fetch.spec.whatwg.org/#http-cors-protocol).

Keys are sent by the page itself, in a header, never by the browser: so no reply allows credentials,
and `*` may stand for every header a reply has.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from gateway.config.limits import CorsConfig

Headers = Iterable[tuple[bytes, bytes]]

_READABLE: Final = b"access-control-allow-origin: %b\r\naccess-control-expose-headers: *\r\n"
_VARY: Final = b"vary: origin\r\n"


class Cors:
    """What replies say to browsers."""

    def __init__(self, origins: frozenset[bytes], max_age_s: float) -> None:
        self._origins = origins
        self._max_age_s = max_age_s

    @classmethod
    def of(cls, config: CorsConfig) -> Cors | None:
        """Return what the settings allow; None if they allow no origin."""
        origins = frozenset(origin.encode() for origin in config.origins)
        return cls(origins, config.max_age) if origins else None

    def lines(self, headers: Headers) -> bytes:
        """Return the header lines of any reply to a request with these headers."""
        if b"*" in self._origins:
            return _READABLE % b"*"
        origin = _only(headers, b"origin")
        return (_READABLE % origin + _VARY) if origin in self._origins else _VARY

    def preflight(self, headers: Headers) -> dict[str, str] | None:
        """Return the further headers of the reply to a preflight; None for an origin that may not call."""
        if b"*" not in self._origins and _only(headers, b"origin") not in self._origins:
            return None
        return {
            "access-control-allow-methods": "GET, POST",
            "access-control-allow-headers": "authorization, *",  # which the star does not stand for
            "access-control-max-age": f"{self._max_age_s:.0f}",
        }


def is_preflight(method: str, headers: Headers) -> bool:
    """Whether a browser asks if a page of another origin may call."""
    names = {name for name, _ in headers}
    return method == "OPTIONS" and {b"origin", b"access-control-request-method"} <= names


def _only(headers: Headers, name: bytes) -> bytes:
    """Return the value of a header that comes once; else nothing."""
    values = [value for each, value in headers if each == name]
    return values[0] if len(values) == 1 else b""
