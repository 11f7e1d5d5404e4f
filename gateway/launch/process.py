"""A server that the gateway starts itself: a process group of its own, on this machine.

It does not need the gateway to live: it writes its log into a file, and may outlive us. A record on disk
has what is known of it, so any later gateway with the same state folder finds it. The first call adopts
or stops a server that outlived its gateway, as `orphan` says.

    restart:  can it start? -> end what runs -> memory free, address free -> record -> start -> record
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from gateway.config.supervision import LaunchConfig, Orphan
from gateway.launch import cmdline, gpus, proc
from gateway.launch.launcher import (
    Changes,
    Incarnation,
    LaunchError,
    Runs,
    Seen,
    Superseded,
    check_order,
    obstacle_of,
)
from gateway.launch.logfile import LogFile
from gateway.launch.members import MARK_BACKEND, MARK_START, Members
from gateway.launch.oom import OomKills
from gateway.launch.record import Record, digest, file_name, load, locked, naming, save, told
from gateway.launch.spawn import Start, check_address, exit_code, prepare, spawn

log = logging.getLogger("gateway.launch")

_ORPHAN_GRACE_S: Final = 10.0  # for a server that is stopped because it outlived its gateway
_TITLE: Final = "VLLM::"  # of engines, workers, API servers: vllm/utils/system_utils.py
_CATCH_UP_BYTES: Final = 1024 * 1024  # of an adopted server's log that is read again


class ProcessLauncher:
    """Starts, adopts and ends one backend's server, and reads its log.

    Several gateways may share a state folder: a lock file lets one act at a time, and the record
    shows each what the others did.
    """

    launches = True

    def __init__(
        self,
        launch: LaunchConfig,
        *,
        pool: str,
        backend: str,
        state: Path,
        gpu_holders: Callable[[], frozenset[int] | None] = gpus.holders,
        oom_kills: OomKills | None = None,
    ) -> None:
        self.backend_id = f"{pool}/{backend}"
        self._launch = launch
        self._settings_sha256 = digest([json.dumps(launch.started_with, sort_keys=True)])
        name = file_name(pool, backend)
        self._record_path = state / "run" / f"{name}.json"
        self._lock_path = state / "run" / f"{name}.lock"
        self._mark = f"{os.path.realpath(state)}#{self.backend_id}"
        self.log_file = LogFile(state / "logs" / f"{name}.txt")
        self._gpu_holders = gpu_holders
        self._lock = asyncio.Lock()
        self._settled = False
        self._known: Record | None = None  # as it was read last
        self._overhears = ""  # nonce of another gateway's start whose log is read here
        self._oom_kills = oom_kills or OomKills()
        self._ends: tuple[Incarnation | None, int | None, bool | None] = (None, None, None)

    async def look(self) -> Seen:
        """Return what runs; the first look adopts or stops a server that outlived its gateway."""
        record = self._load()
        if not self._settled or (record is not None and record.runs and not record.gateway_lives):
            self._settled = False
            async with self._alone():
                record = self._load()
        await self._poll_log(record)
        if record is None or record.incarnation is None:
            return Seen()
        if record.runs:
            self._oom_kills.watch(record.pid)
            odd, outdated = self._oddity(record), self._outdated(record)
            seen = Seen(record.incarnation, Runs.RUNNING, detail=odd, outdated=outdated)
            return replace(seen, others=not record.is_ours, began_at=proc.began_at(record.started))
        code, oom_killed = self._end_of(record)
        return Seen(record.incarnation, Runs.ENDED, code, oom_killed=oom_killed)

    async def restart(
        self, expected: Incarnation | None, *, grace_s: float, changes: Changes
    ) -> Incarnation | None:
        """End what runs and start anew; a start that surely fails is refused before anything ends.

        Cancel: what was ended stays ended; a start was either made and recorded, or not made.
        """
        async with self._alone():
            record = self._load()
            self._check(record, expected)
            start = prepare(self._launch, changes, {MARK_BACKEND: self._mark})
            if record is not None:  # unchanged: the disk has space for the next record
                save(self._record_path, record)
            await self._end(record, grace_s)
            check_address(self._launch)
            return self._begin(start, record)

    async def stop(self, expected: Incarnation, *, grace_s: float) -> None:
        """Send SIGTERM, then after `grace_s` SIGKILL, to all processes of the server."""
        async with self._alone():
            record = self._load()
            self._check(record, expected)
            await self._end(record, grace_s)

    async def log(self, max_bytes: int) -> str:
        """Return the end of what this start wrote; after a rotation, earlier starts may come before it."""
        record = self._load()
        if record is None:
            return ""
        text = await asyncio.to_thread(self.log_file.tail, max_bytes, record.log_offset)
        before, _, own = text.partition(self._headline(record.nonce))
        return own.partition("\n")[2] if own else before

    async def new_lines(self) -> tuple[str, ...]:
        """Return the lines since the last call, or since the start, at most 2,000.

        Each state of a progress bar is a line.
        """
        await self._poll_log(self._load())
        return self.log_file.take()

    async def memory_bytes(self) -> int:
        """Return the host memory that only the server's processes use. A thread walks through /proc."""
        members = await self._find(self._load())
        return sum(proc.private_bytes(each.pid) for each in members)

    async def vital(self) -> list[proc.Process]:
        """Return the processes without which the server cannot serve: its first one, engines, workers."""
        record = self._load()
        members = await self._find(record)
        first = {each for each in members if record is not None and record.is_of(each)}
        return [each for each in members if each in first or each.name.startswith(_TITLE)]

    def hand_over(self, heir: proc.Process) -> None:
        """Put another gateway in charge of our server; call it when nothing else goes on here."""
        try:
            record = self._load()
            if record is not None and record.is_ours:
                save(self._record_path, record.handed_to(heir))
        except (LaunchError, OSError) as error:  # the other gateway adopts it when we have ended
            why = told(error) if isinstance(error, OSError) else str(error)
            log.warning(
                "%s: cannot hand it over: %s", self.backend_id, why,
                extra={"event": "handover_failed", "backend": self.backend_id},
            )  # fmt: skip

    async def close(self) -> None:
        """Do nothing: nothing is held between calls, and the server runs on."""

    # --- what runs --------------------------------------------------------------------------------

    def _load(self) -> Record | None:
        """Return the record; if it is lost, the one that was read last, as long as its server lives."""
        found = load(self._record_path)
        if found is None and self._known is not None and self._known.runs:
            return self._known
        self._known = found
        return found

    async def _find(self, record: Record | None) -> list[proc.Process]:
        return await asyncio.to_thread(self._members().find, record)

    def _members(self) -> Members:
        return Members(self._mark, self.log_file.identity)

    def _check(self, record: Record | None, expected: Incarnation | None) -> None:
        if record is not None:  # else it was lost with its server, and no other one runs
            runs = Runs.RUNNING if record.runs else Runs.ENDED
            check_order(self.backend_id, Seen(record.incarnation, runs), expected)

    def _end_of(self, record: Record) -> tuple[int | None, bool | None]:
        """Return how our child ended: its exit code, and whether the kernel killed it for lack of memory.

        It stays a zombie until the next start, so that all gateways may ask.
        """
        incarnation, code, oom_killed = self._ends
        if incarnation != record.incarnation:
            code = exit_code(record.pid, reap=False) if record.is_ours else None
            oom_killed = self._oom_kills.killed(record.pid, code)
            self._ends = record.incarnation, code, oom_killed
        return code, oom_killed

    def _oddity(self, record: Record) -> str:
        now = digest(cmdline.argv(self._launch, Changes()))
        if record.command_sha256 and record.command_sha256 != now:
            return "still runs with its old command line; a restart applies the new one"
        return ""

    def _outdated(self, record: Record) -> bool:
        # A server that another gateway is in charge of has the settings of that gateway.
        known = record.settings_sha256
        return record.is_ours and bool(known) and known != self._settings_sha256

    async def _poll_log(self, record: Record | None) -> None:
        # Each gateway reads how a start goes on; only the one in charge rotates the log.
        if record is None:
            return
        if not record.is_ours and self._overhears != record.nonce:
            self._overhears = record.nonce
            self._catch_up(record)
        if await asyncio.to_thread(self.log_file.poll, rotates=record.is_ours):
            kept = self._load()
            if kept is not None and kept.nonce == record.nonce:
                with suppress(OSError):  # a full disk: a stale offset must not make the look fail
                    save(self._record_path, replace(kept, log_offset=0))

    # --- acting alone -----------------------------------------------------------------------------

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Let one task of one gateway act at a time; before the first, adopt or stop what was there before us."""
        async with self._lock:
            try:
                with locked(self._lock_path):
                    self.log_file.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    if not self._settled:
                        await self._settle()
                        self._settled = True
                    yield
            except Superseded:
                raise
            except LaunchError as error:
                raise LaunchError(f"{self.backend_id}: {error}", error.obstacle) from error
            except OSError as error:
                raise LaunchError(
                    f"{self.backend_id}: {told(error)}", obstacle_of(error)
                ) from error

    async def _settle(self) -> None:
        record = self._load()
        if record is not None and record.gateway_lives:
            if record.is_ours:
                self._catch_up(record)
            return
        members = await self._find(record)
        server = self._survivor(record, members)
        if server is None or self._launch.orphan is Orphan.STOP:
            if members:
                named = ", ".join(map(str, members))
                log.warning(
                    "%s: stopping what outlived its gateway: %s", self.backend_id, named,
                    extra={"event": "orphans_stopped", "backend": self.backend_id},
                )  # fmt: skip
                await self._members().end(server or record, _ORPHAN_GRACE_S)
            if server is not None:
                self._record_path.unlink(missing_ok=True)  # we ended it, so its end is no failure
            return
        adopted = {"event": "process_adopted", "backend": self.backend_id}
        log.info("%s: adopting the process %d", self.backend_id, server.pid, extra=adopted)
        save(self._record_path, server)
        self._catch_up(server)

    def _catch_up(self, record: Record) -> None:
        self.log_file.begin(max(record.log_offset, self.log_file.size - _CATCH_UP_BYTES))

    def _survivor(self, record: Record | None, members: list[proc.Process]) -> Record | None:
        """Return the record of a server that may be adopted, as ours; None where there is none.

        If its record is lost, or its gateway was killed between the start and the record, the server is found by
        its marks: it is the first process of its session. Of several with the same mark it is the oldest.
        """
        if record is not None and record.runs:
            return record.taken_over()
        members = sorted(members, key=lambda each: each.started)
        firsts = [each for each in members if each.pid == each.session]
        begun = {each: proc.variables(each.pid).get(MARK_START, "") for each in firsts}
        if record is None and len(nonces := {*begun.values()} - {""}) == 1:
            record = Record(nonces.pop(), proc.boot_id(), 0, 0)
        if record is None or record.pid or record.boot != proc.boot_id():
            return None
        for each, nonce in begun.items():
            if nonce == record.nonce:
                return replace(record, pid=each.pid, started=each.started).taken_over()
        return None

    # --- ending and starting ----------------------------------------------------------------------

    async def _end(self, record: Record | None, grace_s: float) -> None:
        ended = await self._members().end(record, grace_s)
        if record is not None and record.incarnation is not None:
            ended |= {record.pid}
            if record.is_ours:
                self._end_of(record)  # before it is reaped: later nobody knows
                exit_code(record.pid, reap=True)
        if holding := await gpus.freed(ended, self._gpu_holders):
            log.warning(
                "%s: the driver still reports GPU memory for %s, which ended %.0f s ago; continuing",
                *(self.backend_id, sorted(holding), gpus.FREED_S),
                extra={"event": "gpu_memory_held", "backend": self.backend_id},
            )

    def _begin(self, start: Start, before: Record | None) -> Incarnation:
        """Start the server and record it. No await: only our own end can come between the two."""
        output = self.log_file.open()
        try:
            nonce = secrets.token_hex(8)
            at = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            with naming(self.log_file.path):
                os.write(output, f"{self._headline(nonce)} at {at} ---\n".encode())
            base = digest(cmdline.argv(self._launch, Changes()))
            record = Record(nonce, proc.boot_id(), 0, 0, base, self.log_file.size).taken_over()
            record = replace(record, settings_sha256=self._settings_sha256)
            save(self._record_path, record)
            try:
                pid = spawn(start, {MARK_START: nonce}, output)
            except LaunchError:
                if before is not None:
                    save(self._record_path, before)
                else:
                    self._record_path.unlink(missing_ok=True)
                raise
            process = proc.find(pid)
            record = replace(record, pid=pid, started=process.started if process else 0)
            save(self._record_path, record)
            self.log_file.begin(record.log_offset)
            return record.incarnation or Incarnation("")
        finally:
            os.close(output)

    def _headline(self, nonce: str) -> str:
        return f"--- {self.backend_id}: start {nonce}"
