"""What is seen of a backend, and where that leads: pure functions of its state and of one look.

seen      leads to
Absent    Absent, wherever it was; what we launch is due to be started
Pending   Starting: its service manager is at work on it, and is left to finish
Running   another incarnation than known: Starting, and `fresh`: what probes found is of the one before
Ended     Failed, to be examined
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from gateway.core.types import Phase
from gateway.heal.decisions import Cause, Sign
from gateway.heal.states import (
    Absent,
    Draining,
    Failed,
    Proving,
    Replacing,
    Starting,
    State,
    Suspect,
    Suspended,
)
from gateway.launch.launcher import Runs, Seen
from gateway.pools.table import Backend
from gateway.watch.fetch import DENIED, OF_TLS

# How long a backend whose process lives has to be DOWN before that is proof. An engine that says
# itself that it is dead (503 on /health: EngineDeadError) usually exits within seconds, which is then
# the better cause. Others may be busy: a blocked event loop answers late.
DEAD_S: Final = 5.0
SILENT_S: Final = 30.0

# Failed probes that no restart cures: the address, the key or the certificate is wrong, or this machine has
# nothing free for a connection.
_MISCONFIGURED: Final = (
    frozenset({"ours", "dns", "unreachable", "garbage", "too_large"}) | OF_TLS | DENIED
)


def after_look(state: State, seen: Seen, now: float, *, launches: bool) -> State:
    """Return the state after a look; the same object where it changes nothing.

    `launches`: it is for us to start it.
    """
    if isinstance(state, Draining | Replacing):
        return state
    match seen.state:
        case Runs.ABSENT:
            return _absent(state, seen, now, launches=launches)
        case Runs.ENDED:
            return _ended(state, seen, now)
        case Runs.PENDING:
            return _pending(state, seen, now)
        case Runs.RUNNING:
            return _running(state, seen, now)


def _absent(state: State, seen: Seen, now: float, *, launches: bool) -> State:
    match state:
        case Absent(looked=True, due=due) if due is launches:
            return state
        case Starting(incarnation=None, ours=True, pending=pending):
            return _at_work(state, "", now) if pending else state  # it is not to be seen yet
        case Failed(owed=True):
            return state
        case Failed(lives=False) | Suspended(lives=False) if launches:
            return state
        case Suspended():
            return replace(state, lives=False) if state.lives else state
        case _:
            return Absent(now, seen.incarnation, due=launches)


def _ended(state: State, seen: Seen, now: float) -> State:
    match state:
        case Absent(looked=False):
            return Absent(now, seen.incarnation, due=True)  # before our time
        case Suspended(lives=True):
            return replace(state, incarnation=seen.incarnation, lives=False)
        case Suspended():
            return state
        case Absent() | Failed(lives=False) if state.incarnation == seen.incarnation:
            return state
        case Starting(incarnation=None, before=before) if seen.incarnation in (None, before):
            return state  # what it replaces
    found = isinstance(state, Starting) and not state.owes
    unproved = isinstance(state, Suspect) and not state.proved
    starting = unproved or isinstance(state, Starting | Proving | Failed) and not found
    cause = Cause.START_FAILED if starting else Cause.EXITED
    how = how_it_ended(seen, starting=starting)
    sign = Sign(cause, how)
    return Failed(now, seen.incarnation, sign=sign, examined=False, told="its process has ended")


def _pending(state: State, seen: Seen, now: float) -> State:
    told = seen.detail or "its service manager is at work on it"
    match state:
        case Suspended():
            return state
        case Starting():
            return state if state.pending == told else _at_work(state, told, now)
        case _:
            return Starting(now, None, pending=told, pending_at=now)


def _at_work(state: Starting, told: str, now: float) -> Starting:
    """Return a start with what its service manager does with it now; empty: nothing any more."""
    since = state.pending_at if state.pending else now
    owes = state.owes or bool(told)  # it does not serve meanwhile
    return replace(state, pending=told, pending_at=since if told else 0.0, owes=owes)


def _running(state: State, seen: Seen, now: float) -> State:
    match state:
        case Absent(looked=False, unproven=unproven):
            owes = unproven is not None and unproven == seen.incarnation
            return Starting(now, seen.incarnation, owes=owes)
        case Starting(incarnation=None, before=before):
            another = seen.incarnation is not None and seen.incarnation != before
            after = replace(state, incarnation=seen.incarnation, fresh=True)
            return _at_work(after, "", now) if another else state
        case Suspended(lives=lives) if not lives or state.incarnation != seen.incarnation:
            return replace(state, incarnation=seen.incarnation, lives=True)
        case Suspended():
            return state
        case Failed(lives=False) | Absent():
            return Starting(now, seen.incarnation, fresh=True)
        case _ if state.incarnation != seen.incarnation:
            return Starting(now, seen.incarnation, before=state.incarnation, fresh=True)
        case Starting(pending=pending) if pending:
            return _at_work(state, "", now)
        case _:
            return state


def how_it_ended(seen: Seen, *, starting: bool) -> str:
    """Return for people how a process ended."""
    how = "its process ended"
    if seen.incarnation is None:
        how = "it has no running process"
    elif seen.exit_code is not None and seen.exit_code < 0:
        how = f"its process was killed by signal {-seen.exit_code}"
    elif seen.exit_code is not None:
        how = f"its process exited with code {seen.exit_code}"
    how += " while it started" if starting else ""
    return f"{how} ({seen.detail})" if seen.detail else how


@dataclass(frozen=True, slots=True)
class Doubt:
    """Evidence that a server that runs does not work; after `proof_s` it may be proof."""

    sign: Sign
    reason: str  # short closed word
    proof_s: float


def doubt(backend: Backend) -> Doubt | None:
    """Return what its probes and its progress have against a backend that serves; None: nothing."""
    health, reason = backend.health, backend.reason
    if health.asleep or health.tended is not None:
        return None
    if backend.phase is not Phase.DOWN:
        return None
    if reason.removeprefix("models_") in _MISCONFIGURED:
        return None
    if reason == "no_progress":
        return Doubt(Sign(Cause.FROZEN, health.detail), "frozen", 0.0)
    why = f"its process runs but does not serve: {health.detail}"
    proof_s = DEAD_S if reason == "http_503" else SILENT_S
    return Doubt(Sign(Cause.ENGINE_DEAD, why), reason, proof_s)
