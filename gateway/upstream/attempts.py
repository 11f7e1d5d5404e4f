"""What follows a failed attempt: one pure rule, and the handler only obeys.

Only what surely was not executed is tried again:

    StaleConnection   an idle connection died unanswered    the same backend, on a fresh connection
    ConnectFailed     nothing was sent                      another backend, or a wait for one
    EngineFull        the engine took nothing of it         another backend that has room now
    anything else     the engine may have worked, or may still work      told

Nothing is tried again once the client has a byte of a reply, when the body is held nowhere any more,
or after the third attempt. The rest of a stream that was cut where it can go on (`resume.stream`) is a
request of its own, which goes elsewhere whatever has failed, at most three times. The client is told
the last error: as a reply where none has begun, else in its stream. A full engine does not send the
client back to the queue, where all wait for the same engines: the client is told when to come again.

A backend that was tried is left out of the choice until it has come back (`Ask.tried`).

Source: RFC 9110 section 9.2.2 (no automatic retry of a non-idempotent method unless it surely was not applied).
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from gateway.core.errors import ConnectFailed, EngineFull, StaleConnection, UpstreamError
from gateway.core.types import Chance

MAX_ATTEMPTS: Final = 3


class Next(Enum):
    """What follows a failed attempt."""

    TELL = "tell"  # no attempt: the client is told the error
    ELSEWHERE = "elsewhere"
    FRESH_CONNECTION = "fresh_connection"


def after(
    error: UpstreamError | EngineFull,
    *,
    attempts: int,
    answering: bool,
    body_at_hand: bool,
    chance: Chance,
) -> Next:
    """Decide what follows the last of `attempts`, which failed with `error`.

    `answering`: the client has a byte of a reply. `chance`: when a backend that was not tried has room.
    """
    if answering or not body_at_hand or attempts >= MAX_ATTEMPTS:
        return Next.TELL
    if isinstance(error, StaleConnection):
        return Next.FRESH_CONNECTION
    if isinstance(error, ConnectFailed) and chance is not Chance.NEVER:
        return Next.ELSEWHERE
    if isinstance(error, EngineFull) and chance is Chance.NOW:
        return Next.ELSEWHERE
    return Next.TELL
