"""How an attempt failed at a backend, and why no other one goes on with a stream: two closed lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Final

import msgspec


class Ending(Enum):
    """How one attempt failed at its backend; closed, because it is a metric label.

    `pools.attribution` says which of them count against a backend. A reply of 4xx that the client gets is no
    failure of the attempt, and a client that leaves is none.
    """

    CONNECT = "connect"  # no connection: refused or unreachable; nothing was sent
    CONNECT_TIMEOUT = "connect_timeout"  # no connection in time: it may be busy; nothing was sent
    OURS = "ours"  # this machine had no port, descriptor or memory for a connection
    BROKE = "broke"  # the connection was lost, or what came was no reply, before the client's first byte
    HTTP_5XX = "http_5xx"  # it answered 500 or above, other than a refusal for capacity
    TIMEOUT = "timeout"  # it was silent past its deadline
    FORGOTTEN = "forgotten"  # its engine works, and has no such request any more
    STREAM = "stream"  # its stream broke, stalled, or told an error after the client's first byte
    MISDIRECTED = "misdirected"  # its reply names another request
    FULL = "full"  # its own admission control took nothing of it
    STALE = "stale"  # a reused idle connection was closed under it, unanswered
    MOVED = "moved"  # it is drained, and another backend goes on with the stream
    REST_REFUSED = "rest_refused"  # it answered 4xx to the rest of a stream that another one began
    DOWN = "down"  # it was out of service, and the request in it was ended
    REFUSED = "refused"  # it answered 4xx, and another pool or backend was asked

    __hash__ = object.__hash__  # members are single objects; Enum's own hash is a call into Python


FAILED: Final[Mapping[Ending, str]] = {  # what an operator is told: "it ..."
    Ending.CONNECT: "could not be reached",
    Ending.CONNECT_TIMEOUT: "took no connection in time",
    Ending.OURS: "was not reached: the gateway's machine had no port, file descriptor or memory left",
    Ending.BROKE: "broke off before the first byte, or answered what is no reply",
    Ending.HTTP_5XX: "answered with a server error",
    Ending.TIMEOUT: "was silent for too long",
    Ending.FORGOTTEN: "worked on others, and had forgotten it",
    Ending.STREAM: "broke off, stalled or told an error in the middle of the stream",
    Ending.MISDIRECTED: "sent the reply to another request",
    Ending.FULL: "refused it for capacity",
    Ending.STALE: "had closed the reused connection",
    Ending.MOVED: "is drained: another one goes on with the stream",
    Ending.REFUSED: "refused it (4xx)",
    Ending.REST_REFUSED: "refused the rest of a stream that another one began",
    Ending.DOWN: "was out of service",
}

_UNREACHED: Final = frozenset({Ending.CONNECT, Ending.CONNECT_TIMEOUT, Ending.OURS})


class Attempt(msgspec.Struct, frozen=True, gc=False):
    """One attempt to have a request answered. Times are monotonic seconds."""

    backend_id: str
    engine_id: str
    sent_at: float
    ended_at: float
    ending: Ending | None  # None: it did not fail
    span_id: str = ""  # of its span, where the request has a trace


def reached(attempts: int, failed: Sequence[Attempt]) -> bool:
    """Whether some of a request's attempts found a server to connect to."""
    return len(failed) < attempts or any(each.ending not in _UNREACHED for each in failed)


class Barrier(Enum):
    """Why no other backend goes on with a stream that broke off."""

    REQUEST = "request"  # it asks for what does not follow from the tokens alone (`resume.rules`)
    REPLY = "reply"  # a tool call, half a frame, its end, or reasoning beside stop strings
    SEAM = "seam"  # what was drawn by chance was shown beyond the last place to go on
    IDS = "ids"  # nobody could tell for sure the token ids of what was shown (Messages, Responses)
    BODY = "body"  # there was no room to keep its large body (Messages, Responses)
    STRAYED = "strayed"  # another backend began anew, or did not say again what was shown
    # A vLLM before 0.27 can only go on with plain text, which this was not.
    OLD_ENGINE = "old_engine"
    FAILURES = "failures"  # three backends failed
    NO_BACKEND = "no_backend"  # there was none to go on
