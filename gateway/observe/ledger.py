"""Settle each request exactly once: its metrics and its access line. Count and log transitions and events, too."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from gateway.core.aio import Clock, periodic
from gateway.core.endings import Ending
from gateway.core.events import Event, EventKind
from gateway.core.types import Outcome, Phase, RequestRecord, Transition
from gateway.observe.log import AccessLog
from gateway.observe.metrics import Metrics

log = logging.getLogger("gateway.ledger")

_GOOD_NEWS: Final = frozenset({Phase.STARTING, Phase.READY})
_BY_ORDER: Final = frozenset({Phase.DRAINING, Phase.CORDONED, Phase.STOPPED})
_BAD_NEWS: Final = frozenset(
    {
        EventKind.EXITED,
        EventKind.START_FAILED,
        EventKind.LAUNCH_FAILED,
        EventKind.SUSPENDED,
        EventKind.LEFT_BEHIND,
        EventKind.ADAPTER_FAILED,
        EventKind.UPGRADE_FAILED,
    }
)

# Settled requests are counted and written in batches: code that runs again and again is in the
# processor's caches, which halves its cost. A batch takes about 0.1 ms.
_BATCH: Final = 32
_POST_EVERY_S: Final = 0.5


class Ledger:
    """Where what happened becomes numbers and lines. Synchronous, so a `finally` may call it.

    Settled requests are posted within half a second, and before anybody reads the metrics: then `on_posted` is
    called. `on_failed` is called at once, for each attempt that fails by its backend's fault. Listeners must not
    raise.
    """

    def __init__(self, metrics: Metrics, access_log: AccessLog, clock: Clock) -> None:
        self.on_posted: list[Callable[[Sequence[RequestRecord]], None]] = []
        self.on_failed: list[Callable[[str], None]] = []
        self._settled: list[RequestRecord] = []
        self._metrics = metrics
        metrics.before_reading = self.post
        self._access_log = access_log
        self._clock = clock

    def settle(self, record: RequestRecord) -> None:
        """Take a request that ended: it will be counted once, and its line written.

        A second call for the same record is a bug: it is logged and counts nothing. A record
        without an outcome is one too, and is counted as such.
        """
        if record.settled:
            log.error("a request was settled twice", extra={"event": "bug", "id": record.id})
            return
        record.settled = True
        if record.ended_at is None:
            record.ended_at = self._clock.now()
        if record.outcome is None:
            record.outcome = Outcome.BUG
            log.error("a request ended without outcome", extra={"event": "bug", "id": record.id})
        self._settled.append(record)
        if len(self._settled) >= _BATCH:
            self.post()

    def post(self) -> None:
        """Count what was settled since the last time, and queue its lines."""
        settled, self._settled = self._settled, []
        self._access_log.write(settled)
        self._metrics.settle(*settled)
        for listener in self.on_posted if settled else ():
            listener(settled)

    async def run(self) -> None:
        """Post, and have the lines written, about twice a second, for ever.

        Cancel: what is settled stays so; `post` counts it.
        """

        async def turn() -> None:
            self.post()
            self._access_log.wake()

        await periodic(turn, every_s=_POST_EVERY_S, name="ledger")

    def transition(self, seen: Transition) -> None:
        """Count a backend's change of phase and log it as event `backend_<phase>`."""
        self._metrics.transition(seen)
        after = seen.after
        level = logging.INFO if after in _GOOD_NEWS or after in _BY_ORDER else logging.WARNING
        log.log(
            level,
            "%s: %s -> %s, %s",
            seen.backend_id,
            seen.before.value,
            after.value,
            seen.detail,
            extra={
                "event": f"backend_{after.value}",
                "backend": seen.backend_id,
                "before": seen.before.value,
                "after": after.value,
                "reason": seen.reason,
            },
        )

    def event(self, seen: Event) -> None:
        """Count what supervision did or saw, and log it as event `supervision_<kind>`."""
        self._metrics.event(seen)
        bad = seen.kind in _BAD_NEWS
        log.log(
            logging.WARNING if bad else logging.INFO,
            "%s: %s: %s",
            seen.backend_id or "gateway",
            seen.kind.value,
            seen.detail,
            extra={
                "event": f"supervision_{seen.kind.value}",
                "backend": seen.backend_id,
                "label": seen.label,
            },
        )

    def retried(self, pool: str, what: str) -> None:
        """Count what followed a failed attempt that may be repeated; `what` is a closed word."""
        self._metrics.retried(pool, what)

    def quarantined(self, pool: str) -> None:
        """Count a request that was refused because backends died as it was worked on."""
        self._metrics.quarantined(pool)

    def upstream_failed(self, backend_id: str, ending: Ending, *, hard: bool) -> None:
        """Count an attempt that failed at a backend; a `hard` failure is held against it."""
        self._metrics.upstream_failed(backend_id, ending)
        for listener in self.on_failed if hard else ():
            listener(backend_id)
