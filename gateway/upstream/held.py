"""When requests that a backend still holds are ended because it is out of service: a pure rule.

    DOWN, its engine stands still                      at once: nothing came for longer than it may take
    DOWN for another reason (its probes fail, say)     those that heard nothing for half a minute; before their
                                                       first byte, for half a minute of it
    DOWN, asleep                                       never: it goes on when it wakes
    STARTING, its service manager is at work on it     those that heard nothing for half a minute: it may
                                                       stop the old server gracefully
    STARTING                                           at once: it is being restarted, and that is ordered

A server of vLLM that stops waits for our connections, so one that is ended by its order restarts sooner.
They are not tried again: the engine may have worked on them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from gateway.core.errors import BackendDown
from gateway.core.types import SERVING, Phase
from gateway.pools.table import Backend
from gateway.upstream.connection import Connection
from gateway.upstream.silence import Silence

_STANDS_STILL: Final = frozenset({"no_progress", "frozen"})
_PENDING: Final = "pending"
_UNSURE_S: Final = 30.0  # a server that is too busy to answer its probes may answer requests yet


def ended(backend: Backend, silence: Silence, now: float) -> BackendDown | None:
    """Return the error with which a request ends now; None when it may go on."""
    phase, reason = backend.phase, backend.reason
    if phase is Phase.STARTING and reason != _PENDING:
        why = "is being restarted"
    elif phase not in (Phase.DOWN, Phase.STARTING) or reason == "asleep":
        return None
    elif reason in _STANDS_STILL or now - _quiet_since(backend, silence) >= _UNSURE_S:
        why = "was taken out of service because it no longer responds"
    else:
        return None
    return BackendDown(
        f"The server that worked on this request {why}. The request was ended, perhaps half done. "
        "Please send it again."
    )


def _quiet_since(backend: Backend, silence: Silence) -> float:
    """Return since when a request hears nothing that it should hear.

    Before its first byte that is normal while its backend serves: a whole reply has it at its end.
    """
    since = silence.since
    return since if silence.was_broken else max(since, backend.health.since)


def end_held(backend: Backend, busy: Iterable[Connection], now: float) -> None:
    """End the requests that are to end now, of those on these connections of a backend."""
    if backend.phase in SERVING:
        return
    for connection in tuple(busy):
        error = ended(backend, connection.silence, now)
        if error is not None:
            connection.end(error)
