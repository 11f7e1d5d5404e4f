"""Where and when a request waited for a place at a backend: metrics and traces tell it alike. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gateway.core.traffic import Waited
from gateway.core.types import RequestRecord, ShedReason

_LEAST_S: Final = 0.001  # less is what a refusal at once takes, not a wait
_AT_ONCE: Final = {ShedReason.NO_ROOM, ShedReason.QUEUE_FULL, ShedReason.TENANT_QUEUE_FULL}


def waits_of(record: RequestRecord) -> Iterator[Waited]:
    """Yield each time that it was in a queue, in their order."""
    at_once = record.shed_reason in _AT_ONCE
    in_own = [each for each in record.waits if each.pool == record.pool] if at_once else ()
    for each in record.waits:
        if each.ended_at - each.began_at >= _LEAST_S and each not in in_own[-1:]:
            yield each
