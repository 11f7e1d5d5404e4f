"""The errors of a request that does not fit its limits, or may not while nobody knows what is used."""

from __future__ import annotations

from gateway.core.errors import GatewayError
from gateway.core.limits import Limit
from gateway.core.types import Outcome


class RateLimited(GatewayError):
    """A request does not fit its limits: 429. `lines` are the header lines about all of them.

    Without `retry_after_s` it can never fit.
    """

    status = 429
    type = "rate_limit_error"
    default_code = "rate_limit_exceeded"
    outcome = Outcome.REJECTED
    lines: bytes = b""
    limit: Limit | None = None


class LimitsUnknown(GatewayError):
    """A limit lets nothing through while replicas cannot agree on what is used: 503."""

    status = 503
    type = "service_unavailable_error"
    default_code = "limits_unavailable"
    outcome = Outcome.REJECTED
    limit: Limit | None = None
