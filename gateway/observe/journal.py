"""Lines that outlive the process: a JSON object each, the newest last. A full file replaces the one before it.

    <folder>/NAME.jsonl      the newest lines
    <folder>/NAME.1.jsonl    the lines before them

One writer. For what happens a few times an hour: the caller writes a line at once, and waits for the disk.
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
    """One pair of files. A failure to write is logged once, and again only after a line could be written."""

    folder: Path
    name: str
    most_bytes: int  # of each file
    _logged: bool = False  # that it cannot be written
    _whole: bool = False  # the last line in the file is known to have its end

    @property
    def path(self) -> Path:
        """Where the newest lines are."""
        return self.folder / f"{self.name}.jsonl"

    @property
    def size(self) -> int:
        """Bytes of the file with the newest lines; 0: there is none."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    @property
    def _before(self) -> Path:
        return self.folder / f"{self.name}.1.jsonl"

    def read(self, decoder: msgspec.json.Decoder[Line]) -> Iterator[Line]:
        """Go through the lines on disk, the oldest first.

        A line that a killed gateway left unfinished is left out, and so are those of a newer version.
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
            if not self._logged:
                log.warning(
                    "cannot write %s, so its new lines are lost when this gateway ends: %s",
                    self.path, error.strerror, extra={"event": "journal_unwritable"},
                )  # fmt: skip
            self._logged = True
            return False
        self._logged = False
        return True

    def _write(self, line: bytes) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            # The gateway before may have been killed in the middle of a line, or the disk was full in it.
            data = (b"" if self._whole else b"\n") + line + b"\n"
            self._whole = os.write(handle, data) == len(data)
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
