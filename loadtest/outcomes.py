"""What became of each request, and the figures of a cell. Pure; times are seconds of the cell's clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from loadtest.arrivals import Shot

REFUSING: Final = (429, 503)
AT_ONCE_S: Final = 0.050  # a refusal that comes by then came at once


class End(Enum):
    """How a request ended. UNFINISHED: the cell was over first, and we hung up."""

    COMPLETE = "complete"
    REFUSED = "refused"
    FAILED = "failed"
    UNFINISHED = "unfinished"


@dataclass(frozen=True, slots=True)
class Slo:
    """What a good reply keeps: time to first token from the planned arrival, mean token gap."""

    ttft_s: float
    itl_s: float


@dataclass(slots=True)
class Outcome:
    """One request as its client saw it."""

    shot: Shot
    planned_s: float  # of a retry: when it was due
    retry: bool = False
    sent_s: float | None = None
    answered_s: float | None = None  # the head of the reply
    first_s: float | None = None  # the first data event
    last_s: float | None = None
    ended_s: float | None = None
    place: int | None = None  # of the server that was asked, where that is known
    cached_tokens: int | None = None  # that the engine had of its prompt, where that is known
    gap_s: float = 0.0  # the longest silence between two data events
    status: int = 0
    end: End = End.UNFINISHED
    reason: str = ""
    retry_after_s: float | None = None
    # How long it might wait at the gate, where that is known of this request alone.
    wait_s: float | None = None

    @property
    def ttft_s(self) -> float | None:
        """Planned arrival to first token."""
        return None if self.first_s is None else self.first_s - self.planned_s

    @property
    def itl_s(self) -> float | None:
        """Mean gap between tokens. The reply has as many tokens as were asked for."""
        if self.first_s is None or self.last_s is None or self.shot.output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.shot.output_tokens - 1)

    def is_good(self, slo: Slo) -> bool:
        """Whether the reply was whole and kept the objective."""
        ttft_s, itl_s = self.ttft_s, self.itl_s
        return (
            self.end is End.COMPLETE
            and ttft_s is not None
            and ttft_s <= slo.ttft_s
            and (itl_s is None or itl_s <= slo.itl_s)
        )

    def may_become_good(self, slo: Slo, now_s: float) -> bool:
        """Whether it still runs and has not missed the objective for the first token."""
        ttft_s = now_s - self.planned_s if self.ttft_s is None else self.ttft_s
        return self.end is End.UNFINISHED and ttft_s <= slo.ttft_s


def percentiles(values: Iterable[tuple[float, bool]]) -> dict[str, Any] | None:
    """Return p50, p90 and p99 of (value, is exact) pairs; None without any.

    A value that is not exact is a lower bound (the cell ended first). `at_least` names the
    percentiles that are such bounds themselves.
    """
    ordered = sorted(values)
    if not ordered:
        return None
    result: dict[str, Any] = {"count": len(ordered)}
    at_least = []
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        place = min(len(ordered) - 1, int(share * len(ordered)))
        result[name] = round(ordered[place][0], 4)
        if not all(exact for _, exact in ordered[: place + 1]):
            at_least.append(name)
    return result | {"at_least": at_least}


def figures(
    outcomes: Sequence[Outcome],
    slo: Slo,
    window: tuple[float, float],
    cut_s: float,
    wait_s: float | None = 0.0,
) -> dict[str, Any]:
    """Sum up the requests that were planned within the window.

    `cut_s`: when we hung up. `wait_s`: how long a request may wait before it is refused; None: nobody knows.
    """
    within = [each for each in outcomes if window[0] <= each.shot.at_s < window[1]]
    first = [each for each in within if not each.retry]
    seconds = window[1] - window[0]
    return {
        "offered": len(first),
        "offered_per_s": round(len(first) / seconds, 3),
        "goodput_per_s": round(sum(each.is_good(slo) for each in within) / seconds, 3),
        "good_tokens_per_s": round(
            sum(each.shot.output_tokens for each in within if each.is_good(slo)) / seconds, 1
        ),
        "ends": dict(Counter(each.end.value for each in first)),
        "failures": dict(
            Counter(f"{each.status} {each.reason}" for each in within if each.end is End.FAILED)
        ),
        "ttft_s": ttft(within, cut_s),
        "itl_s": percentiles(
            (each.itl_s, True)
            for each in within
            if each.end is End.COMPLETE and each.itl_s is not None
        ),
        "gap_s": percentiles((each.gap_s, True) for each in within if each.end is End.COMPLETE),
        "late_s": percentiles(
            (each.sent_s - each.planned_s, True) for each in within if each.sent_s is not None
        ),
        "refusals": refusals(within, wait_s),
        "retries": retries(within, slo),
        "kinds": _parts(first, slo, cut_s, seconds, lambda each: each.shot.kind),
        "groups": _parts(first, slo, cut_s, seconds, lambda each: each.shot.group),
    }


def ttft(outcomes: Iterable[Outcome], cut_s: float) -> dict[str, Any] | None:
    """Sum up the times to first token of the admitted: neither refused nor failed before it."""
    values = []
    for each in outcomes:
        if each.ttft_s is not None:
            values.append((each.ttft_s, True))
        elif each.end is End.UNFINISHED:
            values.append((max(0.0, cut_s - each.planned_s), False))
    return percentiles(values)


def refusals(outcomes: Iterable[Outcome], wait_s: float | None) -> dict[str, Any]:
    """Sum up refusals: reasons, how soon they came, and what they advise.

    In time is at once, or when its own wait was over; that is `wait_s` where a request tells no other.
    Where neither is known nobody can say.
    """
    refused = [each for each in outcomes if each.end is End.REFUSED and each.answered_s is not None]
    took = [each.answered_s - each.planned_s for each in refused if each.answered_s is not None]
    waits = [wait_s if each.wait_s is None else each.wait_s for each in refused]
    advice = [each.retry_after_s for each in refused if each.retry_after_s is not None]
    return {
        "count": len(refused),
        "reasons": dict(Counter(f"{each.status} {each.reason}" for each in refused)),
        "took_s": percentiles((value, True) for value in took),
        "longest_s": round(max(took, default=0.0), 4),
        "at_once_ratio": ratio(sum(value <= AT_ONCE_S for value in took), len(took)),
        "in_time_ratio": None
        if None in waits
        else ratio(
            sum(
                value <= AT_ONCE_S or abs(value - (wait or 0.0)) <= 2 * AT_ONCE_S
                for value, wait in zip(took, waits, strict=True)
            ),
            len(took),
        ),
        "retry_after_ratio": ratio(len(advice), len(refused)),
        "retry_after_s": percentiles((value, True) for value in advice),
    }


def retries(outcomes: Iterable[Outcome], slo: Slo) -> dict[str, Any]:
    """Sum up the second attempts of clients that obeyed Retry-After."""
    again = [each for each in outcomes if each.retry]
    return {
        "count": len(again),
        "ends": dict(Counter(each.end.value for each in again)),
        "success_ratio": ratio(sum(each.end is End.COMPLETE for each in again), len(again)),
        "good_ratio": ratio(sum(each.is_good(slo) for each in again), len(again)),
    }


def ratio(part: int, whole: int) -> float | None:
    """Return part / whole; None of nothing."""
    return round(part / whole, 4) if whole else None


def _parts(
    outcomes: Sequence[Outcome],
    slo: Slo,
    cut_s: float,
    seconds: float,
    name: Callable[[Outcome], str],
) -> dict[str, Any]:
    parts: dict[str, list[Outcome]] = {}
    for each in outcomes:
        parts.setdefault(name(each), []).append(each)
    return {
        key: {
            "offered": len(part),
            "goodput_per_s": round(sum(each.is_good(slo) for each in part) / seconds, 3),
            "success_ratio": ratio(sum(each.end is End.COMPLETE for each in part), len(part)),
            "good_ratio": ratio(sum(each.is_good(slo) for each in part), len(part)),
            "ttft_s": ttft(part, cut_s),
        }
        for key, part in sorted(parts.items())
    }
