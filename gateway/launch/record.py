"""The record of a launched server, by which the next gateway knows it.

It is written before the start, with a nonce, and again after it, with the process. So a gateway
that is killed at any moment leaves either a record of the process, or one with the nonce that the process
has in its environment.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Final

from gateway.launch import proc
from gateway.launch.launcher import Incarnation, LaunchError, obstacle_of
from gateway.launch.proc import Process

_PLAIN: Final = re.compile(r"[A-Za-z0-9.-]{1,100}")


@dataclass(frozen=True, slots=True)
class Record:
    """One start of one backend's server. `pid` 0: the start was begun, and is not known to have succeeded."""

    nonce: str
    boot: str
    gateway_pid: int  # of the gateway that started or adopted it
    gateway_started: int
    command_sha256: str = ""  # of the configured command line, without what the start changed
    log_offset: int = 0  # where this start's output begins in the log file
    pid: int = 0
    started: int = 0
    settings_sha256: str = ""  # of `LaunchConfig.started_with`; empty: unknown

    @property
    def incarnation(self) -> Incarnation | None:
        """The id of the process; None while there is none."""
        if not self.pid:
            return None
        return Incarnation(f"{self.pid}-{self.started}-{self.boot[:8]}")

    @property
    def runs(self) -> bool:
        """Whether its process lives."""
        return self.pid > 0 and self._is_of_this_boot and proc.runs(self.pid, self.started)

    @property
    def gateway_lives(self) -> bool:
        """Whether the gateway that is in charge of it lives."""
        return self._is_of_this_boot and proc.runs(self.gateway_pid, self.gateway_started)

    @property
    def is_ours(self) -> bool:
        """Whether this process is the gateway in charge of it."""
        return self.gateway_pid == os.getpid() and self.gateway_lives

    def taken_over(self) -> Record:
        """Return the record with this process as the gateway in charge."""
        me = proc.find(os.getpid())
        return replace(self, gateway_pid=os.getpid(), gateway_started=me.started if me else 0)

    def handed_to(self, heir: Process) -> Record:
        """Return the record with another process as the gateway in charge."""
        return replace(self, gateway_pid=heir.pid, gateway_started=heir.started)

    @property
    def _is_of_this_boot(self) -> bool:
        return self.boot == proc.boot_id()

    def is_of(self, process: Process) -> bool:
        """Return whether this is the process that the record is about."""
        return (process.pid, process.started) == (self.pid, self.started)


_FIELDS: Final = frozenset(each.name for each in fields(Record))


def load(path: Path) -> Record | None:
    """Return the record in a file; None where there is none, or it is damaged.

    Unknown fields, of another version of the gateway, are ignored.

    Raises:
        LaunchError: it cannot be read just now, which proves nothing about what runs.
    """
    try:
        found = json.loads(path.read_text()).items()
        return Record(**{name: value for name, value in found if name in _FIELDS})
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, AttributeError):
        return None
    except OSError as error:
        raise LaunchError(f"cannot read {path}: {error.strerror}", obstacle_of(error)) from error


def save(path: Path, record: Record) -> None:
    """Write a record so that a reader sees the old one or the new one, never half of it.

    Raises:
        OSError: it cannot be written.
    """
    fresh = path.with_name(path.name + ".new")
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with naming(fresh), open(handle, "w") as file:
        json.dump(asdict(record), file)
    fresh.replace(path)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other gateways out with a lock file, whose folder is made if need be.

    Raises:
        LaunchError: another gateway has it, or it cannot be made.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise LaunchError(
            f"cannot write to the state folder: {told(error)}."
            " `state` must be a folder that the gateway may write to.",
            obstacle_of(error),
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise LaunchError(
            "another gateway with the same state folder is starting or stopping it now"
        ) from error
    try:
        yield
    finally:
        os.close(handle)


def told(error: OSError) -> str:
    """Return the system's message, and the file that it is about."""
    where = f" ({error.filename})" if error.filename else ""
    return f"{error.strerror or error}{where}"


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file to a system error: a failed write does not name it."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def digest(words: list[str]) -> str:
    """Return a hash of a command line, which itself must not be stored: it may hold keys."""
    return hashlib.sha256("\0".join(words).encode()).hexdigest()


def file_name(pool: str, backend: str) -> str:
    """Return a file name for a backend, `pool--backend`: safe, and different for each backend.

    Characters that a file name cannot hold become `_`. Such a name, or one that could be read in two ways, gets a
    hash; the `~` in front of it is in no pool's or backend's name.
    """
    if _PLAIN.fullmatch(pool) and "--" not in pool + "-" + backend:
        return f"{pool}--{backend}"
    exact = hashlib.sha256(f"{pool}\0{backend}".encode()).hexdigest()[:10]
    return f"{re.sub(r'[^A-Za-z0-9.-]', '_', pool)[:80]}--{backend}~{exact}"
