"""Requests that are refused before their story begins: no valid head, or no route for them."""

from __future__ import annotations

from typing import Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from gateway.core.errors import GatewayError, TooManyConnections
from gateway.ingress.connections import Connections, Shed
from gateway.wire.replies import error_body, error_headers

_RETRY_S: Final = 1.0


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


def too_many_connections(why: Shed, connections: Connections) -> TooManyConnections:
    """Return what a client is told whose connection is one too many."""
    if why is Shed.ADDRESS:
        return TooManyConnections(
            f"Your address has {connections.most_per_address} connections open, as many as this"
            " gateway allows (`limits.connections_per_address`). Reuse connections, or close some.",
            retry_after_s=_RETRY_S,
        )
    return TooManyConnections(
        f"All {connections.most} connections that this gateway allows (`limits.connections`)"
        " have a request in progress. Retry later.",
        retry_after_s=_RETRY_S,
    )
