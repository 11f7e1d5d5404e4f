"""The log file of a launched server: written by the server itself, read and rotated by us.

The server itself holds the file open for appending. So it outlives the gateway, and no pipe of ours can
block it. Rotation copies the file and then truncates it while the server writes: lines written in the instant
between the two are lost.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections import deque
from pathlib import Path
from typing import Final

ROTATE_BYTES: Final = 32 * 1024 * 1024
KEPT: Final = 2  # older files, as NAME.1 and NAME.2
_FRESH_LINES: Final = 2000
_LINE_BYTES: Final = 8 * 1024  # longer lines are cut
_READ_BYTES: Final = 1024 * 1024
_UNREAD_BYTES: Final = _FRESH_LINES * _LINE_BYTES  # more would be lines that are not kept
# Progress bars end their lines with \r: each is a sign of life.
_BREAK: Final = re.compile(rb"[\r\n]+")


class LogFile:
    """One server's log: the file, and in memory its lines that nobody has taken yet.

    Blocking: a call reads at most 16 MiB, or what `tail` is asked for; a rotation copies three times
    `rotate_bytes`. Of more than that, the end is read or copied. Threads may share it.
    """

    def __init__(self, path: Path, rotate_bytes: int = ROTATE_BYTES) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._rotate_bytes = self._rotate_at = rotate_bytes
        self._position = 0
        self._half = b""
        self._fresh: deque[str] = deque(maxlen=_FRESH_LINES)

    def open(self) -> int:
        """Open it for a server to write to, made if needed, readable by its user only.

        Raises:
            OSError: it cannot be opened.
        """
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        return os.open(self.path, flags, 0o600)

    @property
    def identity(self) -> tuple[int, int] | None:
        """Device and inode, by which the processes that write to it are found."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    @property
    def size(self) -> int:
        """Its length in bytes; 0 where there is none."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def begin(self, offset: int) -> None:
        """Forget the lines of the last start; those of the new one begin at `offset`."""
        with self._lock:
            self._position, self._half = offset, b""
            self._fresh.clear()

    def poll(self, *, rotates: bool = True) -> bool:
        """Read the new lines. If `rotates`, also rotate a file that is too large; return whether that was done."""
        with self._lock:
            size = self.size
            if size < self._position:
                self._position, self._half = 0, b""  # truncated by somebody else
            if size - self._position > _UNREAD_BYTES:
                self._position, self._half = size - _UNREAD_BYTES, b""
            with contextlib.suppress(OSError):
                self._read(self.path, size)
            if not rotates or self.size <= self._rotate_at:
                return False
            try:
                self._rotate()
            except OSError:  # the disk is full, say: try again once it has grown by as much again
                self._rotate_at = self.size + self._rotate_bytes
                return False
            self._rotate_at = self._rotate_bytes
            return True

    def take(self) -> tuple[str, ...]:
        """Return the lines since the last call, at most 2,000."""
        with self._lock:
            lines = tuple(self._fresh)
            self._fresh.clear()
        return lines

    def tail(self, max_bytes: int, since: int = 0) -> str:
        """Return the end of what was written from `since` on, at most `max_bytes` of it.

        If the file was rotated since, the end of the older file comes first, which may hold other starts, too.
        """
        with self._lock:
            rotated = not 0 < since <= self.size
            end = _end(self.path, 0 if rotated else since, max_bytes)
            if rotated:
                end = _end(self._older(1), 0, max_bytes - len(end)) + end
        return end.decode(errors="replace")

    def _read(self, path: Path, end: int) -> None:
        """Read up to `end`: a server may write faster than this reads."""
        with path.open("rb") as file:
            file.seek(self._position)
            while self._position < end and (chunk := file.read(_READ_BYTES)):
                self._position += len(chunk)
                *lines, self._half = _BREAK.split(self._half + chunk)
                texts = (line[:_LINE_BYTES].decode(errors="replace") for line in lines)
                self._fresh.extend(filter(None, texts))
                self._half = self._half[:_LINE_BYTES]

    def _older(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

    def _rotate(self) -> None:
        older = [self._older(number) for number in range(1, KEPT + 1)]
        fresh = self.path.with_name(self.path.name + ".new")
        begin = max(0, self.size - 3 * self._rotate_bytes)
        try:
            self._copy_to(fresh, begin)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise
        for source, target in reversed(list(zip(older, older[1:], strict=False))):
            with contextlib.suppress(FileNotFoundError):
                source.replace(target)
        fresh.replace(older[0])
        os.truncate(self.path, 0)
        self._position = max(0, self._position - begin)
        self._read(older[0], older[0].stat().st_size)  # lines that came while it was copied
        self._position = 0

    def _copy_to(self, fresh: Path, begin: int) -> None:
        handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with open(handle, "wb") as copy, self.path.open("rb") as file:
            file.seek(begin)
            while copy.tell() < 4 * self._rotate_bytes and (chunk := file.read(_READ_BYTES)):
                copy.write(chunk)


def _end(path: Path, since: int, max_bytes: int) -> bytes:
    """Return the end of a file from `since` on; empty where there is no file."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(since, file.seek(0, os.SEEK_END) - max(0, max_bytes)))
        return file.read(max(0, max_bytes))
    return b""
