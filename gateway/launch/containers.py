"""Read the answers of the Docker Engine API about a container. Pure.

https://docs.docker.com/reference/api/engine/
"""

from __future__ import annotations

import re
import signal
import struct
from datetime import datetime
from typing import Any, Final

from gateway.launch.launcher import Incarnation, Obstacle, Runs, Seen

_FRAME: Final = struct.Struct(">BxxxL")  # stream, three zeros, length: API, "attach to a container"
_NEVER: Final = "0001-01-01T00:00:00Z"  # StartedAt of a container that was never started
_SIGNALLED: Final = 128  # exit codes above are signals, as in a shell
_LAST_SIGNAL: Final = 64
# Messages of Docker and its runtimes when a container cannot be started; they have no error codes.
_OBSTACLES: Final = {
    Obstacle.DISK: re.compile(r"no space left on device|disk quota exceeded", re.I),
    Obstacle.PORT: re.compile(r"port is already allocated|address already in use", re.I),
    Obstacle.CANNOT_HELP: re.compile(
        r"no such (?:file or directory|image)|executable file not found|permission denied"
        r"|could not select device driver|unknown or invalid runtime|invalid argument",
        re.I,
    ),
}


def seen_container(found: dict[str, Any]) -> Seen:
    """Return the state of an inspected container. Only events show whether a person stopped it."""
    state = found["State"]
    started = state.get("StartedAt") or _NEVER
    runs = _runs(state)
    ended = runs is Runs.ENDED or state.get("Restarting")
    code = int(state.get("ExitCode") or 0) if ended and has_started(state) else None
    if code is not None and _SIGNALLED < code <= _SIGNALLED + _LAST_SIGNAL:
        code = _SIGNALLED - code
    return Seen(
        incarnation=None if started == _NEVER else Incarnation(f"{found['Id'][:16]}@{started}"),
        state=runs,
        exit_code=code,
        detail=_oddity(state),
        oom_killed=bool(state.get("OOMKilled")) if ended else None,
        own_restarts=int(found.get("RestartCount") or 0),
        began_at=_began_at(started),
    )


def _began_at(started: str) -> float | None:
    """Return when a container began, in seconds since the epoch; None: never, or that cannot be read."""
    if started == _NEVER:
        return None
    try:
        return datetime.fromisoformat(started).timestamp()
    except ValueError:
        return None


def _runs(state: dict[str, Any]) -> Runs:
    if state.get("Restarting") or state.get("Paused"):
        return Runs.PENDING
    if state.get("Running"):
        return Runs.RUNNING
    return Runs.ENDED if has_started(state) or state.get("Error") else Runs.ABSENT


def has_started(state: dict[str, Any]) -> bool:
    """Return whether its process has run, now or before."""
    return (state.get("StartedAt") or _NEVER) != _NEVER


def is_a_stop(event: dict[str, Any]) -> bool:
    """Return whether an event comes from `docker stop`: its SIGTERM, or its end."""
    told = event.get("Actor", {}).get("Attributes", {}).get("signal")
    return event.get("Action") == "stop" or told == str(signal.SIGTERM.value)


def obstacle(said: str) -> Obstacle:
    """Return what Docker's reason for a refusal means for the next try."""
    return next(
        (each for each, words in _OBSTACLES.items() if words.search(said)), Obstacle.TRANSIENT
    )


def _oddity(state: dict[str, Any]) -> str:
    if state.get("OOMKilled"):
        return "the kernel killed it: out of host memory (OOM)"
    if state.get("Paused"):
        return "it is paused; resume it with `docker unpause`"
    if state.get("Restarting"):
        return "it ended, and Docker is restarting it (its restart policy)"
    return str(state.get("Error") or "")[:300]


class Output:
    """The end of a container's output, taken from the frames in which Docker mixes its two streams."""

    def __init__(self, *, framed: bool, max_bytes: int) -> None:
        self.end = bytearray()
        self._framed = framed
        self._max_bytes = max_bytes
        self._rest = b""
        self._left = 0  # of the frame that is being read

    def feed(self, chunk: bytes) -> None:
        """Take in what was read next."""
        if not self._framed:
            self._keep(chunk)
            return
        data = self._rest + chunk
        while self._left or len(data) >= _FRAME.size:
            if not self._left:
                _, self._left = _FRAME.unpack_from(data)
                data = data[_FRAME.size :]
            part, data = data[: self._left], data[self._left :]
            self._left -= len(part)
            self._keep(part)
            if self._left:
                break
        self._rest = data

    def _keep(self, part: bytes) -> None:
        self.end += part
        del self.end[: -self._max_bytes]


def unix_seconds(started: str) -> str:
    """Return Docker's time as Unix seconds; it has nanoseconds, which Python does not read."""
    seconds, _, rest = started.partition(".")
    at = datetime.fromisoformat(seconds.removesuffix("Z") + "+00:00").timestamp()
    digits = re.match(r"\d+", rest)
    return f"{at:.0f}.{digits[0] if digits else 0}"
