"""Requests that are refused before they reach a model: counted, logged, and kept to be explained.

`Early.settle` counts and logs those that never reach the handler: without a valid head, without a route, or on
routes that are not inference.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import msgspec
from typing_extensions import TypedDict
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from gateway.config.findings import KeyPath
from gateway.core.aio import Clock
from gateway.core.errors import (
    BodyTimeout,
    GatewayError,
    HeadTimeout,
    HeadTooLarge,
    Rejected,
    TooManyConnections,
)
from gateway.core.limits import Scope
from gateway.core.ratelimited import LimitsUnknown, RateLimited
from gateway.core.types import Caller, RequestRecord
from gateway.ingress.connections import Connections, Shed
from gateway.ingress.heads import header_lines
from gateway.observe.redact import redact
from gateway.wire.replies import error_body, error_headers

KEPT: Final = 256  # refusals of strangers, and as many of callers: about 1 KB each
_SHOWN_CHARS: Final = 128  # of a path
_RETRY_S: Final = 1.0

_DECIDED_BY: Final[dict[type[GatewayError], KeyPath]] = {
    HeadTimeout: ("timeouts", "header"),
    HeadTooLarge: ("limits", "max_header_bytes"),
    BodyTimeout: ("timeouts", "body"),
}


class RefusedRequest(TypedDict):
    """What a request was, and what its client was told.

    Method and path are empty where they were not read; never a query. Key and tenant are null where
    it had no valid key.
    """

    id: str
    method: str
    path: str
    key_id: str | None
    tenant: str | None
    status: int
    code: str | None
    message: str


class Refused(msgspec.Struct, frozen=True):
    """One refused request, when it came, and the setting that decided."""

    request: RefusedRequest
    wall_at: float
    setting: KeyPath | None


class Early:
    """Keeps the latest refusals by request id; those of strangers push out none of a caller."""

    def __init__(self, settle: Callable[[RequestRecord], None], clock: Clock) -> None:
        """`settle` is the ledger's."""
        self.callers: OrderedDict[str, Refused] = OrderedDict()
        self.strangers: OrderedDict[str, Refused] = OrderedDict()
        self._settle = settle
        self._clock = clock

    def get(self, request_id: str) -> Refused | None:
        """Return what is kept of a request; a caller's before that of a stranger with the same id."""
        return self.callers.get(request_id) or self.strangers.get(request_id)

    def keep(
        self, error: GatewayError, request_id: str, line: tuple[str, str], caller: Caller | None
    ) -> None:
        """Keep why a request was refused; `line` is its method and path."""
        kept = self.strangers if caller is None else self.callers
        method, path = line
        kept.pop(request_id, None)
        request = RefusedRequest(
            id=request_id,
            method=method,
            path=redact(path[:_SHOWN_CHARS]),
            key_id=None if caller is None else caller.key_id,
            tenant=None if caller is None else caller.tenant,
            status=error.status,
            code=error.code,
            message=error.message,
        )
        kept[request_id] = Refused(request, self._clock.wall(), _decided_by(error))
        if len(kept) > KEPT:
            kept.popitem(last=False)

    def settle(
        self, error: GatewayError, request_id: str, line: tuple[str, str], client: str | None
    ) -> None:
        """Count, log and keep the refusal of a request that no handler saw; `client` is its address."""
        record = RequestRecord(request_id, None, self._clock.now(), client=client)
        record.message = error.message
        record.outcome, record.error_code, record.status = error.outcome, error.code, error.status
        if isinstance(error, Rejected):
            record.shed_reason = error.shed_reason
        self._settle(record)
        self.keep(error, request_id, line, None)


def _decided_by(error: GatewayError) -> KeyPath | None:
    """Return the setting that decided, where it is in the settings file."""
    limit = error.limit if isinstance(error, RateLimited | LimitsUnknown) else None
    if limit is not None and limit.scope in (Scope.TENANT, Scope.TENANT_MODEL):
        return ("tenants", limit.owner, "limits")
    return _DECIDED_BY.get(type(error))


def last_reply(error: GatewayError, request_id: str, first_lines: bytes) -> bytes:
    """Return the whole reply to what has no valid head; the connection closes after it."""
    body = error_body(error, request_id)
    headers = [
        *error_headers(error),
        (b"x-request-id", request_id.encode()),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
    ]
    lines = header_lines(headers)
    return b"%b%b%b\r\n%b" % (STATUS_LINE[error.status], first_lines, lines, body)


def too_many_connections(why: Shed, connections: Connections) -> TooManyConnections:
    """Return the refusal of a connection that is one too many."""
    of_all, of_address = " (`limits.connections`)", " (`limits.connections_per_address`)"
    if not connections.by_setting:
        of_all = of_address = ""
    if why is Shed.ADDRESS:
        return TooManyConnections(
            f"Your address has {connections.most_per_address} connections open, as many as this"
            f" gateway allows{of_address}. Reuse connections, or close some.",
            retry_after_s=_RETRY_S,
        )
    return TooManyConnections(
        f"All {connections.most} connections that this gateway allows{of_all}"
        " have a request in progress. Retry later.",
        retry_after_s=_RETRY_S,
    )
