"""How much may wait for one pool: in all, and of one tenant.

A request is judged by what waits with its own priority or a higher one: what goes after it does not keep it
out. So each priority that keys have may fill the bounds anew. `limits.bodies` bounds the bytes of all together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum

from gateway.config.models import QueueConfig


class Full(Enum):
    """Which bound refused a request that wanted to wait; closed, because it is a metric label."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    BYTES = "bytes"
    TENANT_REQUESTS = "tenant_requests"
    TENANT_TOKENS = "tenant_tokens"
    TENANT_BYTES = "tenant_bytes"


@dataclass(slots=True)
class Held:
    """How much waits."""

    requests: int = 0
    tokens: int = 0
    bytes: int = 0

    def add(self, tokens: int, size_bytes: int) -> None:
        """Count a request in."""
        self.requests += 1
        self.tokens += tokens
        self.bytes += size_bytes

    def drop(self, tokens: int, size_bytes: int) -> None:
        """Count a request out."""
        self.requests -= 1
        self.tokens -= tokens
        self.bytes -= size_bytes

    def include(self, more: Held) -> None:
        """Add another count to this one."""
        self.requests += more.requests
        self.tokens += more.tokens
        self.bytes += more.bytes


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that may wait. One tenant may hold `tenant_ratio` of each, also when it is alone.

    With `requests` 0 nothing ever waits; with more, each tenant may hold one, if that is no larger than its part.
    """

    requests: int
    tokens: int
    bytes: int
    tenant_ratio: float = 0.5
    of_tenant: Held = field(init=False, compare=False)  # the most that may wait of one tenant

    def __post_init__(self) -> None:
        ratio = Decimal(str(self.tenant_ratio))  # in floats, 0.55 of 100 is more than 55
        requests = math.ceil(self.requests * ratio)
        share = Held(requests, int(self.tokens * ratio), int(self.bytes * ratio))
        object.__setattr__(self, "of_tenant", share)

    @classmethod
    def of(cls, queue: QueueConfig, *, shared: bool) -> Limits:
        """Return the limits of the settings. A queue that is not `shared` has one tenant, who may fill it."""
        share = queue.tenant_share if shared else 1.0
        return cls(queue.max_requests, queue.max_tokens, queue.max_bytes, share)

    def full(self, held: Held, own: Held, tokens: int, size_bytes: int) -> Full | None:
        """Return the bound that one more request would break; `held` and `own` are as `FairQueue.counted` tells."""
        share = self.of_tenant
        checks = (
            (Full.REQUESTS, held.requests + 1 > self.requests),
            (Full.TOKENS, held.tokens + tokens > self.tokens),
            (Full.BYTES, held.bytes + size_bytes > self.bytes),
            (Full.TENANT_REQUESTS, own.requests + 1 > share.requests),
            (Full.TENANT_TOKENS, own.tokens + tokens > share.tokens),
            (Full.TENANT_BYTES, own.bytes + size_bytes > share.bytes),
        )
        return next((full for full, over in checks if over), None)
