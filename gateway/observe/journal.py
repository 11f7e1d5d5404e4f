"""Lines that outlive the process: a JSON object each, the newest last, in two files that take turns.

    <folder>/NAME.jsonl      the newest lines
    <folder>/NAME.1.jsonl    the lines before them

One writer. For what happens a few times an hour: a line is written at once, by the one who calls.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeVar

import msgspec

log = logging.getLogger("gateway.journal")

Line = TypeVar("Line")


@dataclass(slots=True)
class Journal:
    """One pair of files. What cannot be written is told in the log, once until it can be again."""

    folder: Path
    name: str
    most_bytes: int  # of each file
    _told: bool = False
    _whole: bool = False  # the last line in the file

    @property
    def path(self) -> Path:
        """Where the newest lines are."""
        return self.folder / f"{self.name}.jsonl"

    @property
    def _before(self) -> Path:
        return self.folder / f"{self.name}.1.jsonl"

    def read(self, decoder: msgspec.json.Decoder[Line]) -> Iterator[Line]:
        """Go through what is on disk, the oldest first.

        The last line of a gateway that was killed is left out, and so are those of a newer version.
        """
        for line in chain.from_iterable(map(_lines, (self._before, self.path))):
            try:
                yield decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue

    def append(self, line: bytes) -> bool:
        """Write one line. False: it could not be written."""
        try:
            self._write(line)
        except OSError as error:
            if not self._told:
                log.warning(
                    "cannot write %s, so what it would tell ends with this gateway: %s",
                    self.path, error.strerror, extra={"event": "journal_unwritable"},
                )  # fmt: skip
            self._told = True
            return False
        self._told = False
        return True

    def _write(self, line: bytes) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            # The gateway before may have been killed in the middle of a line, or the disk was full in it.
            told = (b"" if self._whole else b"\n") + line + b"\n"
            self._whole = os.write(handle, told) == len(told)
            if not self._whole:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            full = os.fstat(handle).st_size >= self.most_bytes
        finally:
            os.close(handle)
        if full:
            self.path.replace(self._before)


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines()
    except OSError:
        return []
