"""What the policy remembers of one backend that no state tells: its restarts, and when one is due again.

A new incarnation that nobody here launched counts like a restart of ours: another replica or a
service manager made it, so a replica that takes over knows of the crash loop it finds. Scheduled
restarts do not count. After a failure they wait for ten well minutes, and so they do when one could
not be carried out.

    first failure after ten well minutes   at once
    the n-th one in a row                  `backoff` x 2^(n-2) after it was seen, at most `max_backoff`
    `max_restarts` within `within`       no further one: the backend is to be suspended

Times are monotonic seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from gateway.config.supervision import SupervisionConfig
from gateway.heal.decisions import Cause, Restart, Setback
from gateway.heal.members import Member
from gateway.launch.launcher import Incarnation

RESET_S: Final = 600.0  # well for so long: the next failure is a first one (as kubelet has it)

_CALM_S: Final = 60.0  # well for so long: what failed before is over, not just between two looks
# For the replica that claimed a restart to carry it out: longer than any takes to stop a server. If the
# same one runs on, that replica has ended, or could not.
_ANOTHERS_S: Final = 1200.0
MOST_RESTARTS: Final = 10_000  # of one backend are remembered; `max_restarts` may be no more
_ATTEMPTS_KEPT: Final = 16  # incarnations of one backend whose orders are remembered


@dataclass(frozen=True, slots=True)
class Tried:
    """The orders for one incarnation."""

    incarnation: Incarnation | None
    times: int = 0
    again_at: float = -math.inf  # when another may follow: at once, if the last one changed nothing
    counted: bool = False  # the last one counts as a restart


@dataclass(frozen=True, slots=True)
class Record:
    """What is remembered of one backend; bounded."""

    seen_at: float = -math.inf
    incarnation: Incarnation | None = None  # the last one seen
    since: float | None = None  # when it was first seen
    tried: tuple[Tried, ...] = ()  # newest last
    restarts: tuple[float, ...] = ()  # when, newest last: those that count
    in_a_row: int = 0  # restarts since it was well for `RESET_S`
    once_more: bool = False  # the last restart was for a start that a restart cannot help
    failed_at: float | None = None  # when what ails it was first seen
    idle_since: float | None = None

    def orders_for(self, incarnation: Incarnation | None) -> Tried:
        """Return the orders for an incarnation."""
        found = (each for each in self.tried if each.incarnation == incarnation)
        return next(found, Tried(incarnation))

    def due_at(self, policy: SupervisionConfig, now: float) -> float:
        """Return when backoff allows the next restart."""
        failed_at = now if self.failed_at is None else self.failed_at
        if self.in_a_row == 0:
            return failed_at
        doublings = min(self.in_a_row - 1, 64)  # a float holds that, and no pause needs more
        return failed_at + min(policy.backoff * 2.0**doublings, policy.max_backoff)

    def restarts_since(self, at: float) -> int:
        """Return how many restarts that count came after `at`."""
        return sum(each > at for each in self.restarts)

    def looked(self, member: Member, now: float, *, ails: bool) -> Record:
        """Return what is remembered after a look; `ails`: something calls for its restart."""
        record, incarnation, well_s = self, member.incarnation, member.well_s(now)
        if incarnation is not None and incarnation != self.incarnation:
            if self.incarnation is not None and not member.ours:
                record = record.counted(now)
            record = replace(record, incarnation=incarnation, since=now, failed_at=None)
        failed_at = record.failed_at
        if ails:
            failed_at = now if failed_at is None else failed_at
        elif well_s >= _CALM_S:
            failed_at = None
        idle_since = None
        if member.idle:
            idle_since = now if self.idle_since is None else self.idle_since
        in_a_row = 0 if well_s >= RESET_S else record.in_a_row
        return replace(
            record, seen_at=now, in_a_row=in_a_row, failed_at=failed_at, idle_since=idle_since
        )

    def ordered(self, incarnation: Incarnation | None, now: float, *, counts: bool) -> Record:
        """Return what is remembered once a restart of `incarnation` was ordered."""
        times = self.orders_for(incarnation).times + 1
        tried = Tried(incarnation, times, again_at=math.inf, counted=counts)
        record = self.counted(now) if counts else self
        return replace(record, tried=record._tried(tried), failed_at=None)

    def after_orders(self, incarnation: Incarnation | None, times: int, now: float) -> Record:
        """Return what is remembered if the gateway before this one gave so many orders for an incarnation."""
        tried = self._tried(Tried(incarnation, times, again_at=now))
        return replace(self, seen_at=now, tried=tried)

    def came_to(self, setback: Setback, order: Restart, now: float) -> Record:
        """Return what is remembered of an order that did not come to a start."""
        tried = self.orders_for(order.incarnation)
        if tried.times != order.attempt:
            return self  # another one was given since
        match setback:
            case Setback.GIVEN_UP:
                before = replace(tried, times=tried.times - 1, again_at=now, counted=False)
                record = replace(self, tried=self._tried(before), once_more=False)
                return record.uncounted() if tried.counted else record
            case Setback.FAILED | Setback.NOT_NOW:
                passes = setback is Setback.NOT_NOW
                again = replace(tried, again_at=now, counted=tried.counted and not passes)
                record = replace(self, tried=self._tried(again))
                if order.cause is Cause.SCHEDULED:  # it did not count, and has to wait all the same
                    return replace(record, in_a_row=record.in_a_row + 1)
                uncounted = tried.counted and passes
                return replace(record, restarts=record.restarts[:-1]) if uncounted else record
            case Setback.ANOTHERS:
                again = replace(tried, again_at=now + _ANOTHERS_S)
                return replace(self, tried=self._tried(again))

    def cleared(self) -> Record:
        """Return what is left when an operator says that the cause is gone."""
        return replace(self, restarts=(), in_a_row=0, once_more=False, failed_at=None)

    def counted(self, now: float) -> Record:
        """Return the same with one restart more."""
        return replace(
            self, restarts=(*self.restarts, now)[-MOST_RESTARTS:], in_a_row=self.in_a_row + 1
        )

    def uncounted(self) -> Record:
        """Return the same with one restart less."""
        return replace(self, restarts=self.restarts[:-1], in_a_row=max(0, self.in_a_row - 1))

    def _tried(self, tried: Tried) -> tuple[Tried, ...]:
        others = tuple(each for each in self.tried if each.incarnation != tried.incarnation)
        return (*others, tried)[-_ATTEMPTS_KEPT:]


@dataclass(frozen=True, slots=True)
class History:
    """What is remembered of all backends between two calls of `policy.decide`."""

    records: Mapping[str, Record] = field(default_factory=dict)
    at: float = -math.inf  # of the last call
    blind_until: float = -math.inf  # we suspect ourselves

    def of(self, backend_id: str) -> Record:
        """Return what is remembered of a backend."""
        return self.records.get(backend_id, Record())

    def after(self, backend_id: str, record: Record) -> History:
        """Return a history in which this is the record of a backend."""
        return replace(self, records={**self.records, backend_id: record})

    def clear(self, backend_id: str) -> History:
        """An operator says that the cause is gone: no failures."""
        return self.after(backend_id, self.of(backend_id).cleared())

    def anew(self, backend_id: str) -> History:
        """A reload made another unit for a backend: what it sees first took the place of nothing."""
        return self.after(backend_id, replace(self.of(backend_id), incarnation=None))

    def came_to(self, setback: Setback, order: Restart) -> History:
        """Take note of what became of an order."""
        record = self.of(order.backend_id).came_to(setback, order, self.at)
        return self.after(order.backend_id, record)
