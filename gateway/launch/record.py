"""The record of a launched server: what the next gateway knows of it.

It is written before the start, with the start's nonce, and again with the process. So a gateway
that is killed at any moment leaves either a record of the process, or one whose nonce the process
carries in its environment.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from gateway.launch.launcher import Incarnation
from gateway.launch.proc import Process

_PLAIN: Final = re.compile(r"[A-Za-z0-9.-]{1,100}")


@dataclass(frozen=True, slots=True)
class Record:
    """One start of one backend's server. `pid` 0: begun, and not known to have succeeded."""

    nonce: str
    boot: str
    keeper_pid: int  # the gateway that started or adopted it
    keeper_started: int
    command_sha256: str = ""  # of the configured command line, without what the start changed
    log_offset: int = 0  # where this start's output begins in the log file
    pid: int = 0
    started: int = 0

    @property
    def incarnation(self) -> Incarnation | None:
        """What names the process; None while there is none."""
        if not self.pid:
            return None
        return Incarnation(f"{self.pid}-{self.started}-{self.boot[:8]}")

    def is_of(self, process: Process) -> bool:
        """Return whether this is the process that the record is about."""
        return (process.pid, process.started) == (self.pid, self.started)


def load(path: Path) -> Record | None:
    """Return the record in a file; None where there is none that can be read."""
    try:
        return Record(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


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
def naming(path: Path) -> Iterator[None]:
    """Have an error of the system's name the file, as a failed write does not."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def digest(words: list[str]) -> str:
    """Return what tells two command lines apart without telling them: they may hold keys."""
    return hashlib.sha256("\0".join(words).encode()).hexdigest()


def file_name(pool: str, backend: str) -> str:
    """Return a file name for a backend, `pool--backend`: safe, and no other backend's.

    What a file name cannot hold, or could be read in two ways, becomes `_` and a hash; the `~` in
    front of it is in no pool's or backend's name.
    """
    if _PLAIN.fullmatch(pool) and "--" not in pool + "-" + backend:
        return f"{pool}--{backend}"
    exact = hashlib.sha256(f"{pool}\0{backend}".encode()).hexdigest()[:10]
    return f"{re.sub(r'[^A-Za-z0-9.-]', '_', pool)[:80]}--{backend}~{exact}"
