"""When a backend gets no new requests because those before it failed, though the server lives. Pure.

    trusted --five hard failures in a row, or fewer than 0.8 of at least 10 attempts in half a minute
       ^      end well--> EJECTED --its time is over, and a health check passes--> PROBATION
       |                     ^--the trial fails: out for twice as long---------------|
       `--the trial ends well: it starts slowly--------------------------------------'

On probation it gets one request at a time, and one more each half minute while that lasts. Neither a trial whose
client leaves nor one that is refused for capacity decides anything: the next request is one.

This is soft evidence, for what is asked may be what fails. So nobody is ejected while about as much fails at
its peers, nor where fewer than half of the pool would be left: never the only backend, and never more than half.
When others go down later, so that fewer than half are left, who is ejected may be chosen again, after all others.

Sources: Envoy outlier detection (consecutive_5xx 5, base_ejection_time 30 s, max_ejection_time 300 s, panic
threshold 50 %), Finagle (success rate 0.8 over 30 s), Linkerd (one probe, a failure lengthens).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from msgspec.structs import replace

from gateway.core.types import SERVING, Slot
from gateway.pools.facts import Accused, Ejection, HealthState, Policy

_TRIAL_S: Final = 30.0  # a long stream shows nothing for minutes, and may be the only request
_MARK_S: Final = 5.0
_MARKS: Final = 7  # the oldest is half a minute ago, or a little more


@dataclass(slots=True)
class Tally:
    """The attempts sent to one backend, and those that failed hard: ever, and in the last half minute.

    What was sent counts, not what ended: failures come at once, and long replies end much later.
    """

    sent: int = 0
    failed: int = 0
    _marks: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=_MARKS))

    def tick(self, now: float) -> None:
        """Let time pass; called about twice a second."""
        if not self._marks or now - self._marks[-1][0] >= _MARK_S:
            self._marks.append((now, self.sent, self.failed))

    def lately(self) -> tuple[int, int]:
        """Return how many attempts were sent in the last half minute, and how many failed."""
        _, sent, failed = self._marks[0] if self._marks else (0.0, 0, 0)
        return self.sent - sent, self.failed - failed

    def forget(self, now: float) -> None:
        """Begin anew."""
        self._marks.clear()
        self.tick(now)


@dataclass(slots=True)
class Probation:
    """Lets one request at a time through, and one more for each half minute that it lasts."""

    slots: dict[int, Slot] = field(default_factory=dict)  # of those under way, by identity

    def is_taken(self, now: float) -> bool:
        """Whether the request that was let through last is under way, and not for long yet."""
        last = next(reversed(self.slots.values()), None)
        return last is not None and now - last.taken_at < _TRIAL_S


def accusation(
    state: HealthState, tally: Tally, peers: Iterable[Tally], policy: Policy
) -> tuple[Accused, str] | None:
    """Return what a backend that serves is to be ejected for, and the evidence; None: nothing."""
    if state.ejection is not None or state.phase not in SERVING:
        return None
    sent, failed = tally.lately()
    accused, evidence = None, ""
    if state.traffic_failures >= policy.burst:
        accused = Accused.IN_A_ROW
        evidence = f"{state.traffic_failures} requests in a row failed, most recently: it {state.traffic_reason}"
    elif sent >= policy.least_sent and sent - failed < policy.least_ratio * sent:
        accused = Accused.RATIO
        # What failed may have been sent long before.
        told = f"{sent} requests were sent and {failed} failed in the last 30 s"
        evidence = f"{told}, most recently: it {state.traffic_reason}"
    if accused is None or _fails_everywhere(failed, sent, peers, policy):
        return None
    return accused, evidence


def _fails_everywhere(failed: int, sent: int, peers: Iterable[Tally], policy: Policy) -> bool:
    """Whether about as much fails at its peers: then it is what is asked, or the way to all of them."""
    counts = (peer.lately() for peer in peers)
    shares = [theirs / all_ for all_, theirs in counts if 2 * all_ >= policy.least_sent]
    return bool(shares) and 2 * median(shares) >= failed / max(sent, 1)


def enough_left(states: Iterable[HealthState], *, without: HealthState | None = None) -> bool:
    """Whether at least half of a pool serve and are not ejected, `without` counted out."""
    pool = [*states]
    left = sum(
        each is not without and each.phase in SERVING and each.ejection is None for each in pool
    )
    return 2 * left >= len(pool)


def ejected(
    state: HealthState, accused: Accused, evidence: str, at: float, policy: Policy
) -> HealthState:
    """Return the facts of one that is out for a while, longer each time in a row."""
    again = state.ejection is not None or at - state.cleared_at < policy.forgiven_s
    times = state.ejections + 1 if again else 1
    ejection = Ejection(accused, evidence, times, at + out_s(times, policy))
    return replace(state, ejection=ejection, ejections=times)


def out_s(times: int, policy: Policy) -> float:
    """Return how long an ejection lasts that is the n-th in a row."""
    return min(policy.ejection_s * 2.0 ** min(times - 1, 16), policy.longest_ejection_s)


def told(ejection: Ejection, policy: Policy) -> tuple[str, str]:
    """Return the reason and the sentence for people."""
    why, times = ejection.evidence, ejection.times
    if ejection.probation:
        return "probation", f"{why}; one request at a time is sent to see whether it works again"
    again = "" if times == 1 else f" (time {times} in a row)"
    out = f"{out_s(times, policy):.0f} s{again}"
    return ejection.accused.value, f"{why}; it gets no new requests for {out}, then one at a time"
