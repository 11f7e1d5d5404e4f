"""Requests that are refused before their story begins: no valid head, or no route for them."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from gateway.core.errors import GatewayError
from gateway.wire.replies import error_body, error_headers


def last_reply(error: GatewayError, request_id: str, date_line: bytes) -> bytes:
    """Return the whole reply to what has no valid head; the connection closes after it."""
    body = error_body(error, request_id)
    headers = [
        *error_headers(error),
        (b"x-request-id", request_id.encode()),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
    ]
    lines = b"".join([b"%b: %b\r\n" % header for header in headers])
    return b"%b%b%b\r\n%b" % (STATUS_LINE[error.status], date_line, lines, body)
