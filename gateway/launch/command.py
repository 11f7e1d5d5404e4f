"""A server that an operator's command restarts: only its argv is known.

Nobody can tell from outside what the command started, so its incarnation is only a count of our own
orders since the gateway started. The count keeps one gateway from restarting twice by one order, but
knows nothing of other gateways: the lease of the pool keeps two replicas apart. Probes show whether
the server runs.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from pathlib import Path
from typing import Final

from gateway.launch.launcher import (
    Changes,
    Incarnation,
    LaunchError,
    Obstacle,
    Runs,
    Seen,
    Superseded,
    obstacle_of,
)
from gateway.launch.logfile import LogFile
from gateway.launch.run import execute

CALL_S: Final = 30.0  # for the command to end, beyond the grace
# Of the output, in the message about a failure: both streams share a file, and some programs flush stdout last.
_LAST_LINES: Final = 3


class CommandLauncher:
    """Runs one command, which is to start the server and return.

    Its output goes to a file, so what it leaves running can write on when it has returned.
    """

    launches = False

    def __init__(self, words: tuple[str, ...], log: Path, call_s: float = CALL_S) -> None:
        self._words = words
        self._call_s = call_s
        self._log = LogFile(log)
        self._begun = 0  # offset in the log at which the output of the last run begins
        self._orders = 0
        self._life = secrets.token_hex(4)  # so that no other gateway has the same incarnations
        self._lock = asyncio.Lock()

    async def look(self) -> Seen:
        """Return the count of our orders, and RUNNING, as nothing proves otherwise."""
        if await asyncio.to_thread(self._log.poll):
            self._begun = 0  # what it wrote so far is in the older file
        return Seen(
            self._incarnation, Runs.RUNNING, detail="only health checks show whether it runs"
        )

    async def restart(
        self, expected: Incarnation | None, *, grace_s: float, changes: Changes
    ) -> Incarnation | None:
        """Run the command, which returns once it has told the server to restart.

        Raises:
            LaunchError: it failed, or did not end within `grace_s` and 30 s; then it was killed.
        Cancel: it is killed, with its group.
        """
        changes.refuse(f"`{self._words[0]}` builds the command line; the gateway cannot change it")
        async with self._lock:
            if expected is not None and expected != self._incarnation:
                raise Superseded(f"`{self._words[0]}` has run since that order; nothing was done")
            await self._run(grace_s + self._call_s)
            self._orders += 1
            return self._incarnation

    async def stop(self, expected: Incarnation, *, grace_s: float) -> None:
        """Refuse: the command can only restart the server."""
        raise LaunchError(
            "a backend with `restart: {command: ...}` can be restarted but not stopped",
            Obstacle.CANNOT_HELP,
        )

    async def log(self, max_bytes: int) -> str:
        """Return the end of what the command wrote since it was last run."""
        return await asyncio.to_thread(self._log.tail, max_bytes, self._begun)

    async def close(self) -> None:
        """Nothing is held between calls."""

    @property
    def _incarnation(self) -> Incarnation:
        return Incarnation(f"{self._life}-order-{self._orders}")

    async def _run(self, timeout_s: float) -> None:
        try:
            self._log.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            output = self._log.open()
        except OSError as error:
            raise LaunchError(
                f"cannot write {self._log.path}: {error.strerror}", obstacle_of(error)
            ) from error
        try:
            self._begun = self._log.size
            self._log.begin(self._begun)
            code = await execute(self._words, (output, output), timeout_s)
        finally:
            os.close(output)
        if code:
            last = (await self.log(600)).strip().splitlines()[-_LAST_LINES:]
            said = "; ".join(last) if last else "no output"
            raise LaunchError(f"`{self._words[0]}` failed with exit code {code}: {said}")
