"""When a failed attempt may be made again: a pure rule.

Only what surely was not executed is repeated, and never after the client's first byte:

    ConnectFailed     nothing was sent                         -> another backend
    StaleConnection   an idle connection died unanswered       -> the same backend, fresh connection, once
    anything else     the engine may have worked, or still do  -> never

Source: RFC 9110 section 9.2.2 (no automatic retry of a non-idempotent method unless it surely was not applied).
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from gateway.core.errors import ConnectFailed, StaleConnection, UpstreamError

MAX_ATTEMPTS: Final = 3


class Retry(Enum):
    """What to do after a failed attempt."""

    NO = "no"
    ELSEWHERE = "elsewhere"
    FRESH_CONNECTION = "fresh_connection"


def after(error: UpstreamError, *, attempts: int, response_started: bool) -> Retry:
    """Decide on the next step after `attempts` attempts, the last of which failed with `error`."""
    if response_started or attempts >= MAX_ATTEMPTS:
        return Retry.NO
    if isinstance(error, StaleConnection):
        return Retry.FRESH_CONNECTION
    if isinstance(error, ConnectFailed):
        return Retry.ELSEWHERE
    return Retry.NO
