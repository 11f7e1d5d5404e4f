"""A server that systemd runs: a unit. Its incarnation is its InvocationID.

The unit decides how it is stopped (signals, TimeoutStopSec); the grace given here is only the time
to wait. The gateway's user needs a polkit rule; deploy/systemd/ has one to copy.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Mapping
from typing import Any, Final

from gateway.launch.launcher import (
    Changes,
    Incarnation,
    LaunchError,
    Obstacle,
    Runs,
    Seen,
    check_order,
)
from gateway.launch.run import run
from gateway.launch.systemdbus import SystemdUnit

_JOURNAL_S: Final = 10.0
_CHANGE_S: Final = 30.0  # for the effect of a job to show, beyond the grace
_LOOK_S: Final = 1.0  # longest time between two looks, in case a signal is lost
# Enough for the tracebacks of some hundred requests that died; the cause stands above them.
_LOG_LINES: Final = 10_000

_STATES: Final = {
    "active": Runs.RUNNING,
    "reloading": Runs.RUNNING,
    "refreshing": Runs.RUNNING,
    "activating": Runs.PENDING,  # also while systemd waits before it restarts: `auto-restart`
    "deactivating": Runs.PENDING,  # on its way to a restart, or to an end that a later look shows
    "failed": Runs.ENDED,
}
_EXITED: Final = 1  # CLD_EXITED; CLD_KILLED and CLD_DUMPED give the signal as the status
_STOPS: Final = frozenset({"exit-code", "signal", "core-dump"})  # results: how the process ended
_UNLIMITED: Final = 2**64 - 1
_NO_PROGRAM: Final = 203  # EXIT_EXEC, systemd.exec(5)
_NO_FOLDER: Final = 200  # EXIT_CHDIR
# What the result of a job means: org.freedesktop.systemd1(5), `JobRemoved`.
_NOT_DONE: Final = {
    "canceled": "another job took its place",
    "dependency": "a unit that it depends on could not be started",
    "skipped": "a condition of the unit is not met (Condition...=)",
    "assert": "an assertion of the unit failed (Assert...=)",
    "timeout": "the job took too long (JobTimeoutSec=)",
    "failed": "it could not be started",
}


class SystemdLauncher:
    """Restarts one unit, whose name the settings have found valid: it stands in a command line."""

    launches = False

    def __init__(self, unit: str) -> None:
        self._name = unit
        self._unit = SystemdUnit(unit)

    async def look(self) -> Seen:
        """Return what systemd says of the unit."""
        return _seen(await self._unit.properties())

    async def restart(
        self, expected: Incarnation | None, *, grace_s: float, changes: Changes
    ) -> Incarnation | None:
        """Restart the unit, and wait until systemd shows another invocation; None if it does not in time."""
        changes.refuse(
            f"{self._name}: its command line is in the unit; change it there"
            f" (`systemctl edit {self._name}`), then `systemctl daemon-reload`"
        )
        shown = await self._unit.properties(max_age_s=0)
        seen = _seen(shown)
        check_order(self._name, seen, expected)
        if shown["ActiveState"] == "failed":
            await self._unit.reset_failed()  # its start limit might refuse the restart
        job = await self._unit.begin("Restart")
        return await self._changed(job, seen.incarnation, grace_s)

    async def stop(self, expected: Incarnation, *, grace_s: float) -> None:
        """Stop the unit: systemd ends all its processes."""
        check_order(self._name, _seen(await self._unit.properties(max_age_s=0)), expected)
        await self._unit.begin("Stop")
        try:
            async with asyncio.timeout(grace_s + _CHANGE_S):
                while not _seen(await self._unit.properties()).gone:
                    await self._unit.news(_LOOK_S)
        except TimeoutError as error:
            raise LaunchError(
                f"{self._name} did not stop within {grace_s + _CHANGE_S:.0f} s; see TimeoutStopSec"
                f" and `systemctl status {self._name}`"
            ) from error

    async def log(self, max_bytes: int) -> str:
        """Return the journal of the last invocation; empty where we may not read the journal."""
        seen = await self.look()
        program = shutil.which("journalctl")
        if seen.incarnation is None or program is None or max_bytes <= 0:
            return ""
        options = ("-o", "cat", "--no-pager", "--quiet", "-n", str(_LOG_LINES), "-u", self._name)
        invocation = f"_SYSTEMD_INVOCATION_ID={seen.incarnation}"
        words = (program, *options, invocation)
        journal = await run(words, timeout_s=_JOURNAL_S, kept_bytes=max_bytes)
        return journal.encode()[-max_bytes:].decode(errors="ignore")

    async def close(self) -> None:
        """Close the connection to the bus."""
        await self._unit.close()

    async def _changed(
        self, job: str, before: Incarnation | None, grace_s: float
    ) -> Incarnation | None:
        try:
            async with asyncio.timeout(grace_s + _CHANGE_S):
                while True:
                    result = self._unit.result_of(job)
                    seen = _seen(await self._unit.properties(max_age_s=_LOOK_S))
                    if seen.incarnation not in (None, before):
                        return seen.incarnation
                    if result in _NOT_DONE:
                        raise LaunchError(
                            f"{self._name}: systemd's job ended as `{result}`: {_NOT_DONE[result]}."
                            f" See `systemctl status {self._name}`",
                            Obstacle.TRANSIENT if result == "canceled" else Obstacle.CANNOT_HELP,
                        )
                    await self._unit.news(_LOOK_S)
        except TimeoutError:
            return None


def _seen(shown: Mapping[str, Any]) -> Seen:
    """Return the state of a unit, by its properties."""
    state = _state(shown)
    invocation = bytes(shown.get("InvocationID") or b"").hex() or None
    code = None if state is Runs.RUNNING else _exit_code(shown)
    return Seen(
        incarnation=Incarnation(invocation) if invocation else None,
        state=state,
        exit_code=code,
        detail=_oddity(shown, code),
        oom_killed=True if shown.get("Result") == "oom-kill" else None,
        own_restarts=int(shown.get("NRestarts", 0)),
        began_at=_began_at(shown),
    )


def _began_at(shown: Mapping[str, Any]) -> float | None:
    """Return when its process began, in seconds since the epoch, by the clock as it is now; None: it never did.

    The clock may have been wrong then, as it often is while a machine starts.
    """
    began_us = int(shown.get("ExecMainStartTimestampMonotonic", 0))
    return time.time() - time.monotonic() + began_us / 1e6 if began_us else None


def _state(shown: Mapping[str, Any]) -> Runs:
    """Return the state. That of a unit that is over depends on which ended first: its process, or `active`.

    A process that ends by itself with exit code 0 leaves the unit inactive, as a stop does; vLLM ends so when its
    engine dies. Then the unit leaves `active` after the end of the process, not before. And a stop leaves the unit
    failed if the process ends in an unusual way, or has to be killed.
    """
    state = _STATES.get(str(shown["ActiveState"]), Runs.ABSENT)
    began_us = int(shown.get("InactiveExitTimestampMonotonic", 0))
    ended_us = int(shown.get("ExecMainExitTimestampMonotonic", 0))
    left_us = int(shown.get("ActiveExitTimestampMonotonic", 0))
    if state is Runs.ABSENT and 0 < ended_us <= left_us:
        return Runs.ENDED
    if state is Runs.ENDED and began_us <= left_us < ended_us and _stopped(shown):
        return Runs.ABSENT
    return state


def _stopped(shown: Mapping[str, Any]) -> bool:
    """Whether a unit that left `active` before its process ended was certainly stopped by an order.

    systemd itself ends one that runs out of memory, does not feed its watchdog, or runs for longer
    than it may (RuntimeMaxSec), which has the same result as a stop that takes too long.
    """
    result, limit_us = shown.get("Result"), int(shown.get("RuntimeMaxUSec", _UNLIMITED))
    return result in _STOPS or (result == "timeout" and limit_us == _UNLIMITED)


def _exit_code(shown: Mapping[str, Any]) -> int | None:
    """Return how its process ended, if that was in the last activation; None otherwise."""
    how, status = int(shown.get("ExecMainCode", 0)), int(shown.get("ExecMainStatus", 0))
    if not how:
        return None
    waits = shown["SubState"] == "auto-restart"
    if not waits and shown["ActiveState"] not in ("failed", "inactive"):
        return None
    began_us = int(shown.get("InactiveExitTimestampMonotonic", 0))
    if not waits and int(shown.get("ExecMainExitTimestampMonotonic", 0)) < began_us:
        return None
    return status if how == _EXITED else -status


def _oddity(shown: Mapping[str, Any], code: int | None) -> str:
    state = shown["ActiveState"]
    if code == _NO_PROGRAM:
        return "systemd cannot run its program (203/EXEC); see its ExecStart"
    if code == _NO_FOLDER:
        return "systemd cannot enter its folder (200/CHDIR); see its WorkingDirectory"
    if shown["SubState"] == "auto-restart":
        return "it ended, and systemd will restart it (Restart=)"
    if state == "failed":
        return f"systemd reports it as failed: {shown.get('Result')}"
    if state == "deactivating":
        return "systemd is stopping it"
    return ""
