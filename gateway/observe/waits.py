"""Whether a request waited for a place at a backend: metrics and traces tell it alike. Pure."""

from __future__ import annotations

from typing import Final

from gateway.core.types import RequestRecord, ShedReason

_LEAST_S: Final = 0.001  # less is what a refusal at once takes, not a wait
_AT_ONCE: Final = {ShedReason.NO_ROOM, ShedReason.QUEUE_FULL, ShedReason.TENANT_QUEUE_FULL}


def waited(record: RequestRecord) -> bool:
    """Whether it was in a queue."""
    return record.queue_s >= _LEAST_S and record.shed_reason not in _AT_ONCE
