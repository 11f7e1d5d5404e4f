"""What every launcher can do: see what runs, stop it, start it anew.

A backend's server is one *incarnation* at a time: a process, a container, a pod. An order names the
incarnation that it is for, and a launcher that finds another one refuses with `Superseded`. So
neither two supervisors nor a late order restart a server twice.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NewType, Protocol

from pydantic import JsonValue

# Opaque and compared for equality only: pid + start time, InvocationID, container id + StartedAt,
# pod UID.
Incarnation = NewType("Incarnation", str)


class Obstacle(Enum):
    """What kept a launcher from carrying out an order. Closed.

    None of these is a failure of the server.
    """

    # The service manager did not answer in time, is away, or refused for now: try again, with pauses.
    TRANSIENT = "transient"
    # A program, folder, unit or permission is missing or wrong: only a person can change that.
    CANNOT_HELP = "cannot_help"
    # A disk takes nothing now: it is full, or read-only, or a quota is used up; the message has the path.
    DISK = "disk"
    # Somebody else listens at the server's address; nothing was started.
    PORT = "port"


class LaunchError(Exception):
    """A launcher could not carry out an order. The message is for people: what, why, what to do."""

    def __init__(self, message: str, obstacle: Obstacle = Obstacle.TRANSIENT) -> None:
        super().__init__(message)
        self.obstacle = obstacle


class Superseded(LaunchError):
    """Another incarnation runs than the order was for; nothing was done."""


_TAKES_NOTHING: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
_SCARCE: Final = frozenset(
    {
        errno.EAGAIN,
        errno.ENOMEM,
        errno.EMFILE,
        errno.ENFILE,
        errno.EINTR,
        errno.EBUSY,
        errno.ETXTBSY,
    }
)


def obstacle_of(error: OSError) -> Obstacle:
    """Return what a system error means for the next try."""
    if error.errno in _TAKES_NOTHING:
        return Obstacle.DISK
    return Obstacle.TRANSIENT if error.errno in _SCARCE else Obstacle.CANNOT_HELP


class Runs(Enum):
    """Whether a backend's server runs, as its launcher or its service manager says. Closed.

    A service manager that works on a server may finish: only ENDED is a failure.
    """

    # Nothing runs, and that is no failure. A launched server was not started yet. One of a service
    # manager does not exist, was never started, or its owner stopped it or scaled it to zero.
    ABSENT = "absent"
    # The service manager works on it: it makes it, stops it, or waits before it restarts it. Such are a
    # pod without a node or an image, or in CrashLoopBackOff; a rollout between two pods; a unit
    # that activates or deactivates; a container that Docker restarts, or that somebody paused.
    PENDING = "pending"
    # Its process lives. Probes show whether it serves.
    RUNNING = "running"
    # Its process ended, or could not be started, and nobody but us will start it again.
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Seen:
    """What a launcher sees of one backend's server now."""

    incarnation: Incarnation | None = None  # the one that runs, or ran last; None: none ever ran
    state: Runs = Runs.ABSENT
    exit_code: int | None = None  # of one that ended, where it can be known; negative: the signal
    detail: str = ""  # one sentence where something is odd
    # Whether the kernel killed it, or a process of it, for lack of host memory: True only with proof
    # (a counter of the kernel's, or the service manager's word); None: that cannot be known.
    oom_killed: bool | None = None
    # How often the service manager restarted it by itself. The count begins at 0 again when the manager
    # makes a new server, so only a rise means a restart.
    own_restarts: int = 0
    others: bool = False  # another gateway is in charge of it, lives, and will stop it at its end
    outdated: bool = False  # it was started with other settings than are configured now
    # When its process began, in seconds since the epoch; None: unknown. Computed anew at each look.
    began_at: float | None = field(default=None, compare=False)

    @property
    def running(self) -> bool:
        """Whether its process lives."""
        return self.state is Runs.RUNNING

    @property
    def gone(self) -> bool:
        """Whether nothing of it runs, and no service manager is at work on it."""
        return self.state is Runs.ABSENT or self.state is Runs.ENDED


def check_order(server: str, seen: Seen, expected: Incarnation | None) -> None:
    """Make sure that an order is for what runs, or ran last. `expected` None: for a server that does not run.

    Raises:
        Superseded: another incarnation does.
    """
    if seen.incarnation != expected and (expected is not None or not seen.gone):
        raise Superseded(
            f"{server}: the order was for {expected or 'a server that does not run'}, but it is now"
            f" {seen.incarnation or 'none'}; nothing was done"
        )


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes of a start to the configured command line: flags without dashes, and environment variables.

    None as a value takes a flag away. Launchers that do not build the command line refuse any.
    """

    args: Mapping[str, JsonValue] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)

    def refuse(self, why: str) -> None:
        """Refuse changes, in a launcher that does not build the command line.

        Raises:
            LaunchError: there are changes.
        """
        if self.args or self.env:
            raise LaunchError(why, Obstacle.CANNOT_HELP)

    def __bool__(self) -> bool:
        return bool(self.args or self.env)


class Launcher(Protocol):
    """One backend's server under somebody's supervision, ours or a service manager's.

    Every call ends within its own deadline (45 s, plus the grace where one is given).
    Errors: `LaunchError`. Cancel: a call that was under way may or may not have taken effect;
    `look` tells.
    """

    launches: bool  # True: the gateway starts it: it builds the command line, and stops its group

    async def look(self) -> Seen:
        """Return what runs."""

    async def restart(
        self, expected: Incarnation | None, *, grace_s: float, changes: Changes
    ) -> Incarnation | None:
        """Stop what runs, if that is still `expected` (None: nothing may run), and start anew.

        Returns the new incarnation, or None where only a later `look` can tell.

        Raises:
            Superseded: another incarnation runs.
            LaunchError: it could not be stopped or started.
        """

    async def stop(self, expected: Incarnation, *, grace_s: float) -> None:
        """Stop `expected` for good; nothing of it is left when this returns.

        Raises:
            Superseded: another incarnation runs.
            LaunchError: it does not end, or nobody but its service manager may stop it.
        """

    async def log(self, max_bytes: int) -> str:
        """Return the end of what the server wrote; empty where that cannot be had."""

    async def close(self) -> None:
        """Let go of connections; what runs goes on."""
