"""Where a request waited and failed, and how often it was resumed: for metrics and traces. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gateway.core.traffic import Waited
from gateway.core.types import RequestRecord, ShedReason

_LEAST_S: Final = 0.001  # less is the time of an immediate refusal, no wait
_AT_ONCE: Final = {ShedReason.NO_ROOM, ShedReason.QUEUE_FULL, ShedReason.TENANT_QUEUE_FULL}


def waits_of(record: RequestRecord) -> Iterator[Waited]:
    """Yield each wait of a request in a queue, in order; an immediate refusal is none."""
    at_once = record.shed_reason in _AT_ONCE
    in_own = [each for each in record.waits if each.pool == record.pool] if at_once else ()
    for each in record.waits:
        if each.ended_at - each.began_at >= _LEAST_S and each not in in_own[-1:]:
            yield each


def failed_elsewhere(record: RequestRecord) -> Iterator[str]:
    """Yield the pool of each attempt that failed in another pool than the one that answered, or was asked last."""
    for each in record.failed:
        pool, _, _ = each.backend_id.rpartition("/")
        if pool != record.pool:
            yield pool


def resumes_of(record: RequestRecord) -> Iterator[tuple[str, int]]:
    """Yield how often another backend went on with its stream, by the cause: a closed word."""
    for cause, times in (("failure", record.resumed - record.moved), ("drain", record.moved)):
        if times:
            yield cause, times
