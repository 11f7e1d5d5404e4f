"""When one backend may be restarted again: what became of it before, backoff, crash loop, schedule.

A `Past` is what is remembered of one backend. `learned` takes in a look at it, `ordered` notes that
its restart was ordered. Times are monotonic seconds.

    first failure after ten well minutes   at once
    the n-th one in a row                  `backoff_s` x 2^(n-2) after it was seen, at most `max_backoff_s`
    `max_restarts` within `within_s`       no further one: the backend is to be suspended

A new incarnation that nobody here ordered counts like a restart of ours: another replica or a service
manager made it, so a replica that takes over knows of the crash loop it finds. Scheduled restarts do
not count, and after a failure they wait for ten well minutes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from gateway.config.supervision import SupervisionConfig
from gateway.core.types import Phase
from gateway.heal.healing import Cause, Facts, Restart
from gateway.launch.launcher import Incarnation

RESET_S: Final = 600.0  # well for so long: the next failure is a first one (as kubelet has it)
TAKE_UP_S: Final = 30.0  # an order that nobody took up by then came to nothing

_CALM_S: Final = 60.0  # well for so long: what failed before is over, not just between two looks
_ATTEMPTS_KEPT: Final = 16  # incarnations of one backend whose orders are remembered
_SPREAD: Final = 0.25  # the last backend of a pool is due this part of `restart_every` early
_DAY_MIN: Final = 24 * 60


@dataclass(frozen=True, slots=True)
class Policy:
    """When the backends of one pool may be restarted; the defaults are those of the settings."""

    automatic: bool = True
    max_unavailable_ratio: float = 0.25
    backoff_s: float = 10.0
    max_backoff_s: float = 300.0
    max_restarts: int = 5
    within_s: float = 1800.0
    restart_every_s: float | None = None
    window: tuple[int, int] | None = None  # minutes of the local day: first, and first after it

    def opens_in(self, minute: int) -> int:
        """Return in how many minutes scheduled restarts may begin; 0: now."""
        if self.window is None:
            return 0
        first, end = self.window
        length = (end - first) % _DAY_MIN or _DAY_MIN
        return 0 if (minute - first) % _DAY_MIN < length else (first - minute) % _DAY_MIN


def policy_of(config: SupervisionConfig) -> Policy:
    """Return the policy that a pool's settings ask for."""
    return Policy(
        automatic=config.automatic,
        max_unavailable_ratio=config.max_unavailable,
        backoff_s=config.backoff,
        max_backoff_s=config.max_backoff,
        max_restarts=config.max_restarts,
        within_s=config.within,
        restart_every_s=config.restart_every,
        window=_window(config.restart_window),
    )


def _window(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, end = text.split("-")
    return _minute(first), _minute(end)


def _minute(text: str) -> int:
    hour, minute = text.split(":")
    return int(hour) * 60 + int(minute)


@dataclass(frozen=True, slots=True)
class Past:
    """What is remembered of one backend; bounded."""

    seen_at: float = -math.inf
    incarnation: Incarnation | None = None  # the last one seen
    since: float | None = None  # when it was first seen
    attempts: tuple[tuple[Incarnation | None, int], ...] = ()  # orders by incarnation, newest last
    ordered_at: float | None = None  # an order is out whose end has not been seen
    taken_up: bool = False  # it has been seen under way
    expecting: bool = False  # the incarnation that an order is to bring has not been seen
    healing: bool = False  # it was ordered to restart and has not served since
    restarts: tuple[float, ...] = ()  # when, newest last: those that count
    in_a_row: int = 0  # restarts since it was well for `RESET_S`
    failed_at: float | None = None  # when what ails it was first seen
    well_since: float | None = None
    idle_since: float | None = None
    good: bool = False  # it served at the last look, and was not replaced since
    bad_at: float | None = None  # when it last ceased to, by itself
    suspended: bool = False

    def orders_for(self, incarnation: Incarnation | None) -> int:
        """Return how often a restart was ordered for an incarnation."""
        return dict(self.attempts).get(incarnation, 0)

    def due_at(self, policy: Policy, now: float) -> float:
        """Return when backoff allows the next restart."""
        failed_at = now if self.failed_at is None else self.failed_at
        if self.in_a_row == 0:
            return failed_at
        doublings = min(self.in_a_row - 1, 64)  # a float holds that, and no pause needs more
        return failed_at + min(policy.backoff_s * 2.0**doublings, policy.max_backoff_s)

    def restarts_since(self, at: float) -> int:
        """Return how many restarts that count came after `at`."""
        return sum(each > at for each in self.restarts)


def learned(past: Past, facts: Facts, now: float, *, ails: bool) -> Past:
    """Return what is remembered after a look; `ails`: something calls for a restart."""
    past = _order_seen(_incarnation_seen(past, facts, now), facts, now)
    well_since = _since(past.well_since, facts.serving and facts.phase is Phase.READY, now)
    well_s = 0.0 if well_since is None else now - well_since
    failed_at = past.failed_at
    if ails and not facts.restarting and past.ordered_at is None:
        failed_at = now if failed_at is None else failed_at
    elif well_s >= _CALM_S:
        failed_at = None
    bad = facts.gone_bad and not facts.restarting and past.ordered_at is None
    return replace(
        past,
        seen_at=now,
        in_a_row=0 if well_s >= RESET_S else past.in_a_row,
        healing=past.healing and not facts.serving,
        failed_at=failed_at,
        well_since=well_since,
        idle_since=_since(past.idle_since, facts.idle, now),
        good=facts.serving and not bad,
        bad_at=now if bad and past.good else past.bad_at,
    )


def _since(before: float | None, holds: bool, now: float) -> float | None:
    if not holds:
        return None
    return now if before is None else before


def _incarnation_seen(past: Past, facts: Facts, now: float) -> Past:
    incarnation = facts.seen.incarnation if facts.seen is not None else None
    if incarnation is None or incarnation == past.incarnation:
        return past
    if past.incarnation is not None and not past.expecting:
        past = _counted(past, now)  # somebody else's
    return replace(
        past,
        incarnation=incarnation,
        since=now,
        ordered_at=None,
        taken_up=False,
        expecting=False,
        failed_at=None,
        well_since=None,
    )


def _order_seen(past: Past, facts: Facts, now: float) -> Past:
    """An order is over when it is no longer under way, or was never taken up."""
    if past.ordered_at is None:
        return past
    if facts.restarting:
        return replace(past, taken_up=True)
    if past.taken_up or now - past.ordered_at >= TAKE_UP_S:
        return _over(past)
    return past


def ordered(past: Past, incarnation: Incarnation | None, now: float, *, counts: bool) -> Past:
    """Return what is remembered once a restart of `incarnation` was ordered."""
    others = tuple(each for each in past.attempts if each[0] != incarnation)
    past = _counted(past, now) if counts else past
    return replace(
        past,
        attempts=(*others, (incarnation, past.orders_for(incarnation) + 1))[-_ATTEMPTS_KEPT:],
        ordered_at=now,
        taken_up=False,
        expecting=True,
        healing=True,
        failed_at=None,
    )


def _counted(past: Past, now: float) -> Past:
    return replace(past, restarts=(*past.restarts, now)[-64:], in_a_row=past.in_a_row + 1)


def schedule_due(past: Past, facts: Facts, policy: Policy, rank_ratio: float, now: float) -> bool:
    """Whether it has run for `restart_every_s`.

    `rank_ratio` (0..1) is its place in its pool: backends that started together come due one after
    the other over the last quarter of that time.
    """
    if policy.restart_every_s is None:
        return False
    age_s = facts.age_s
    if age_s is None:
        age_s = now - past.since if past.since is not None else 0.0
    return age_s >= policy.restart_every_s * (1 - _SPREAD * rank_ratio)


# --- of all backends ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class History:
    """What is remembered of all backends between two calls of `remedy.decide`."""

    pasts: Mapping[str, Past] = field(default_factory=dict)
    at: float = -math.inf  # of the last call
    suspect_until: float = -math.inf

    def after(self, backend_id: str, past: Past) -> History:
        """Return a history in which this is the past of a backend."""
        return replace(self, pasts={**self.pasts, backend_id: past})


def clear(history: History, backend_id: str) -> History:
    """An operator says that the cause is gone: no failures, not suspended."""
    past = history.pasts.get(backend_id, Past())
    return history.after(backend_id, _cleared(past))


def replaced(history: History, backend_id: str) -> History:
    """The configuration has another server in its place: clear, and the end of the old one is no sign."""
    past = history.pasts.get(backend_id, Past())
    return history.after(backend_id, replace(_cleared(past), good=False))


def suspended(history: History, backend_id: str) -> History:
    """Another replica suspended it: what this one has seen of it does not matter."""
    past = history.pasts.get(backend_id, Past())
    return history.after(backend_id, replace(past, suspended=True))


def operated(
    history: History, backend_id: str, incarnation: Incarnation | None, now: float, who: str
) -> tuple[History, Restart]:
    """An operator orders a restart, which clears the backend too: return it, and what is remembered.

    Whatever calls for a restart of the same incarnation meanwhile is answered by this one.
    """
    past = _cleared(history.pasts.get(backend_id, Past()))
    past = ordered(past, incarnation, now, counts=False)
    attempt = past.orders_for(incarnation)
    order = Restart(backend_id, Cause.OPERATOR, f"ordered by {who}", incarnation, True, attempt)
    return history.after(backend_id, past), order


def settled(history: History, backend_id: str) -> History:
    """The order for a backend has come to its end, well or not, or was refused."""
    past = history.pasts.get(backend_id, Past())
    return history.after(backend_id, _over(past))


def withdrawn(history: History, order: Restart) -> History:
    """An order was given up before anything was done or claimed: as if it had not been given."""
    past = history.pasts.get(order.backend_id, Past())
    if past.ordered_at is None or past.orders_for(order.incarnation) != order.attempt:
        return history
    attempts = tuple(
        (incarnation, count - 1) if incarnation == order.incarnation else (incarnation, count)
        for incarnation, count in past.attempts
    )
    counted = past.restarts[-1:] == (past.ordered_at,)
    past = replace(
        _over(past),
        attempts=attempts,
        expecting=False,
        healing=False,
        restarts=past.restarts[:-1] if counted else past.restarts,
        in_a_row=max(0, past.in_a_row - counted),
    )
    return history.after(order.backend_id, past)


def _cleared(past: Past) -> Past:
    return replace(past, restarts=(), in_a_row=0, failed_at=None, suspended=False)


def _over(past: Past) -> Past:
    return replace(past, ordered_at=None, taken_up=False, failed_at=None)
