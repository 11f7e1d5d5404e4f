"""A server that systemd runs: a unit, told by `systemctl`. Its incarnation is its InvocationID.

How it is stopped (signals, TimeoutStopSec) is the unit's own; the grace given here is only waited
for. The gateway's user needs a polkit rule; deploy/systemd/ has one to copy.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from typing import Final

from gateway.launch.launcher import (
    Changes,
    Incarnation,
    LaunchError,
    Obstacle,
    Runs,
    Seen,
    Superseded,
)
from gateway.launch.run import Ran, run

_CALL_S: Final = 10.0  # for one systemctl, which answers in milliseconds
_CHANGE_S: Final = 30.0  # for a job to show, beyond the grace
_LOOK_S: Final = 0.25
_LOG_LINES: Final = 2000

_PROPERTIES: Final = "LoadState,ActiveState,SubState,Result,InvocationID,MainPID,ExecMainCode,ExecMainStatus,NRestarts"
_UNIT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9:_.@-]{0,250}")
_STATES: Final = {
    "active": Runs.RUNNING,
    "reloading": Runs.RUNNING,
    "refreshing": Runs.RUNNING,
    "activating": Runs.PENDING,  # also while systemd waits before it restarts: `auto-restart`
    "deactivating": Runs.PENDING,  # on its way to a restart, or to an end that the next look tells
    "failed": Runs.ENDED,
}  # inactive: it ended in good order or was stopped, and systemd has no reason to start it again
_EXITED: Final = "1"  # CLD_EXITED; CLD_KILLED and CLD_DUMPED give the signal as the status

_REFUSED: Final = re.compile(r"authentication|access denied|not authorized|permission denied", re.I)
_UNKNOWN: Final = re.compile(r"not (be )?found|not loaded", re.I)
_NO_BUS: Final = re.compile(r"connect to bus|booted with systemd|connect to system scope", re.I)


class SystemdLauncher:
    """Restarts one unit."""

    launches = False

    def __init__(self, unit: str) -> None:
        if not _UNIT.fullmatch(unit):  # it stands in a command line
            raise ValueError(f"not a valid unit: {unit!r}")
        self._unit = unit

    async def look(self) -> Seen:
        """Tell what systemd says of the unit."""
        return _seen(await self._show())

    async def restart(
        self, expected: Incarnation | None, *, grace_s: float, changes: Changes
    ) -> Incarnation | None:
        """Restart the unit, and wait until systemd shows another invocation, if it does in time."""
        if changes:
            raise LaunchError(
                f"{self._unit}: its command line is in the unit; change it there"
                f" (`systemctl edit {self._unit}`), then `systemctl daemon-reload`",
                Obstacle.CANNOT_HELP,
            )
        before = await self._show()
        if before.get("ActiveState") == "failed":
            await self._call("reset-failed", self._unit)  # else its start limit may refuse
            before = await self._show()
        found = self._check(before, expected)
        await self._call("--no-block", "restart", self._unit)
        return await self._changed(found, grace_s)

    async def stop(self, expected: Incarnation, *, grace_s: float) -> None:
        """Stop the unit, which systemd ends with all its processes."""
        self._check(await self._show(), expected)
        await self._call("--no-block", "stop", self._unit)
        try:
            async with asyncio.timeout(grace_s + _CHANGE_S):
                while True:
                    shown = await self._show()
                    if _seen(shown).gone:
                        return
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError as error:
            raise LaunchError(
                f"{self._unit} did not stop within {grace_s + _CHANGE_S:.0f} s; see TimeoutStopSec"
                f" and `systemctl status {self._unit}`"
            ) from error

    async def log(self, max_bytes: int) -> str:
        """Return the journal of the last invocation; empty where we may not read the journal."""
        seen = await self.look()
        program = shutil.which("journalctl")
        if seen.incarnation is None or program is None or max_bytes <= 0:
            return ""
        options = ("-o", "cat", "--no-pager", "--quiet", "-n", str(_LOG_LINES), "-u", self._unit)
        invocation = f"_SYSTEMD_INVOCATION_ID={seen.incarnation}"
        ran = await run((program, *options, invocation), timeout_s=_CALL_S)
        return ran.out.encode()[-max_bytes:].decode(errors="ignore")

    async def close(self) -> None:
        """Nothing is held between calls."""

    # --- systemctl --------------------------------------------------------------------------------

    def _check(self, shown: dict[str, str], expected: Incarnation | None) -> Incarnation | None:
        seen = _seen(shown)
        if expected is None and seen.gone:
            return seen.incarnation
        if seen.incarnation != expected:
            raise Superseded(
                f"{self._unit}: the order was for the invocation {expected or 'none'}, but it is"
                f" now {seen.incarnation or 'none'}; nothing was done"
            )
        return seen.incarnation

    async def _changed(self, before: Incarnation | None, grace_s: float) -> Incarnation | None:
        try:
            async with asyncio.timeout(grace_s + _CHANGE_S):
                while True:
                    seen = _seen(await self._show())
                    if seen.incarnation not in (None, before):
                        return seen.incarnation
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            return None

    async def _show(self) -> dict[str, str]:
        ran = await self._call("show", f"--property={_PROPERTIES}", self._unit)
        pairs = (line.partition("=") for line in ran.out.splitlines())
        shown = {name: value for name, equals, value in pairs if equals}
        match shown.get("LoadState"):
            case "not-found":
                raise _no_unit(self._unit)
            case "masked" | "bad-setting" | "error" as state:
                raise LaunchError(
                    f"systemd cannot use {self._unit}: {state}; see `systemctl status {self._unit}`",
                    Obstacle.CANNOT_HELP,
                )
            case None:
                raise LaunchError(f"unexpected output of systemctl for {self._unit}: {_said(ran)}")
        return shown

    async def _call(self, *words: str) -> Ran:
        program = shutil.which("systemctl")
        if program is None:
            raise LaunchError(
                "this machine has no systemctl; in a container, use"
                " `restart: {docker: ...}` or `restart: {command: [...]}`",
                Obstacle.CANNOT_HELP,
            )
        ran = await run(
            (program, "--no-ask-password", "--no-pager", *words[:-1], "--", words[-1]),
            timeout_s=_CALL_S,
        )
        if ran.code == 0:
            return ran
        raise self._refusal(ran)

    def _refusal(self, ran: Ran) -> LaunchError:
        said = _said(ran)
        if _REFUSED.search(said):
            return LaunchError(
                f"systemd does not let this user restart {self._unit} ({said}). Copy"
                " deploy/systemd/49-vllm-gateway.rules to /etc/polkit-1/rules.d/, which allows the"
                " user vllm-gateway to restart the units vllm@*",
                Obstacle.CANNOT_HELP,
            )
        if _NO_BUS.search(said):
            return LaunchError(f"cannot reach systemd ({said}); is this a container?")
        if _UNKNOWN.search(said):
            return _no_unit(self._unit)
        return LaunchError(f"systemctl failed for {self._unit} with code {ran.code}: {said}")


def _seen(shown: dict[str, str]) -> Seen:
    """Return what the properties of a unit mean."""
    state = _STATES.get(shown.get("ActiveState", ""), Runs.ABSENT)
    ended = state in (Runs.ABSENT, Runs.ENDED) or shown.get("SubState") == "auto-restart"
    code: int | None = None
    if ended and shown.get("ExecMainCode", "0") != "0":
        status = int(shown.get("ExecMainStatus", "0"))
        code = status if shown["ExecMainCode"] == _EXITED else -status
    invocation = shown.get("InvocationID") or None
    return Seen(
        incarnation=Incarnation(invocation) if invocation else None,
        state=state,
        exit_code=code,
        detail=_oddity(shown),
        oom_killed=True if ended and shown.get("Result") == "oom-kill" else None,
        own_restarts=int(shown.get("NRestarts", "0")),
    )


def _oddity(shown: dict[str, str]) -> str:
    state = shown.get("ActiveState")
    if shown.get("SubState") == "auto-restart":
        return "it ended, and systemd will restart it (Restart=)"
    if state == "failed":
        return f"systemd reports it as failed: {shown.get('Result')}"
    if state == "deactivating":
        return "systemd is stopping it"
    return ""


def _no_unit(unit: str) -> LaunchError:
    return LaunchError(
        f"systemd has no unit {unit}; `systemctl list-units 'vllm*' --all` lists the existing ones",
        Obstacle.CANNOT_HELP,
    )


def _said(ran: Ran) -> str:
    return " ".join((ran.err.strip() or ran.out.strip() or "nothing").split())[:300]
