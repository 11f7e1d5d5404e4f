"""Failed authentications by client address: what is slowed, and what is remembered for that.

A key has 256 random bits, so this is not what keeps it from being guessed: it keeps one address from
filling logs, and from learning at full speed why each of its keys was refused. Only failures count,
and only failures are slowed: a right key is never looked up here. Clients behind one proxy share its
address unless it is one of `trusted_proxies`; so a flood of one of them costs the others nothing but
the reason of their own failures.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from gateway.core.addresses import client_network
from gateway.core.errors import AccessError, TooManyFailedKeys

ADDRESSES: Final = 4096  # remembered, about 200 bytes each; whoever failed longest ago goes first
_MINUTE_S: Final = 60.0


class FailedKeys:
    """A bucket of failures for each client address."""

    def __init__(
        self,
        per_minute: int,
        now: Callable[[], float],
        on_failure: Callable[[str], None] = lambda result: None,
    ) -> None:
        """Failures above `per_minute` are limited; `on_failure` hears of each: told or limited."""
        self._most = per_minute
        self._now = now
        self._on_failure = on_failure
        self._buckets: OrderedDict[str | None, tuple[float, float]] = OrderedDict()  # level, when

    def judge(self, error: AccessError, host: str | None) -> AccessError | TooManyFailedKeys:
        """Count a failure of an address (None: a UNIX socket); return what its client is told.

        Above the limit that is the same for every kind of failure.
        """
        wait_s = self.count(host)
        if not wait_s:
            return error
        return TooManyFailedKeys(
            f"Your address sent more than {self._most} requests without a valid API key within a"
            " minute. Requests with a valid key are still served.",
            retry_after_s=wait_s,
        )

    def count(self, host: str | None) -> float:
        """Count a failure; return 0, or after how many seconds the next one is within the limit."""
        now, each_s, address = self._now(), _MINUTE_S / self._most, client_network(host)
        level, at = self._buckets.pop(address, (0.0, now))
        level = max(0.0, level - (now - at) / each_s)
        limited = level > self._most - 1
        self._buckets[address] = (level if limited else level + 1, now)
        if len(self._buckets) > ADDRESSES:
            self._buckets.popitem(last=False)
        self._on_failure("limited" if limited else "told")
        return math.ceil((level - self._most + 1) * each_s) if limited else 0.0
