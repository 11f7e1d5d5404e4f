"""What shows that a backend is ill."""

from __future__ import annotations

from typing import Final

from gateway.control.healing import GRAVITY, Cause, Facts, Sign
from gateway.control.launchers.launcher import Seen
from gateway.core.types import Phase

# How long a backend whose process lives has to be DOWN. An engine that says itself that it is dead
# (503 on /health: EngineDeadError) usually exits within seconds, which is then the better cause.
# Others may be busy: a blocked event loop answers late.
DEAD_S: Final = 5.0
SILENT_S: Final = 30.0

# Failed probes that no restart cures: the address, the key or the certificate is wrong.
_MISCONFIGURED: Final = frozenset(
    {"dns", "tls", "unreachable", "garbage", "too_large", "http_401", "http_403", "http_404"}
)


def trouble(facts: Facts, now: float) -> Sign | None:
    """Return the gravest sign that calls for a restart, None when there is none.

    One that starts is only judged by its exit and by the start-up watch, and one that sleeps only by
    its exit: neither shows what a serving one would.
    """
    if facts.phase is Phase.STOPPED or facts.seen is None:
        return _unseen(facts, now)
    if not facts.seen.running:
        return _exited(facts, facts.seen)
    if facts.asleep:
        return None
    starting = facts.starting or facts.phase is Phase.STARTING
    signs = [each for each in facts.signs if not starting or each.cause is Cause.START_HUNG]
    down = None if starting else _down(facts, now)
    if down is not None:
        signs.append(down)
    return min(signs, key=lambda sign: GRAVITY[sign.cause], default=None)


def _unseen(facts: Facts, now: float) -> Sign | None:
    down = facts.phase is Phase.DOWN and not (facts.asleep or facts.starting)
    return _down(facts, now) if down else None


def _exited(facts: Facts, seen: Seen) -> Sign:
    cause = Cause.EXITED
    how = "no process of it runs"
    if seen.incarnation is not None:
        how = "its process ended"
        if seen.exit_code is not None and seen.exit_code < 0:
            how = f"its process was killed by signal {-seen.exit_code}"
        elif seen.exit_code is not None:
            how = f"its process exited with code {seen.exit_code}"
        if facts.starting or facts.phase is Phase.STARTING:
            cause, how = Cause.START_FAILED, f"{how} while it started"
    return Sign(cause, f"{how} ({seen.detail})" if seen.detail else how)


def _down(facts: Facts, now: float) -> Sign | None:
    if facts.phase is not Phase.DOWN or facts.reason.removeprefix("models_") in _MISCONFIGURED:
        return None
    down_s = now - facts.since
    if facts.reason == "no_progress":
        return Sign(Cause.FROZEN, f"work runs, nothing moves; down for {down_s:.0f} s")
    if down_s < (DEAD_S if facts.reason == "http_503" else SILENT_S):
        return None
    why = f"its process runs, but does not serve: {facts.reason or 'down'} for {down_s:.0f} s"
    return Sign(Cause.ENGINE_DEAD, why)
