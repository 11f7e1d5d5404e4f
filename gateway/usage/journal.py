"""The ledger on disk: a line of JSON for each request, in files of which a new one begins when the last is full.

    <state>/usage/0/ledger-000000000001.jsonl     named by the number of its first line
    <state>/usage/0/id                            names the ledger, also to Redis
    <state>/usage/0/lock                          held by the process that writes

Each process has a ledger of its own: the first folder that no other process holds, and that has no file of another
user. The newest files that fit the bound are kept. Every method does I/O and blocks: call it from a thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from gateway.usage.entries import Entry

_FILE_PARTS: Final = 8  # files that share the bound
_MOST_LEDGERS: Final = 256  # in one state folder, as many as processes at a time
_ID: Final = re.compile(rb"[0-9a-f]{16}")
_NAMES: Final = "ledger-*.jsonl"

_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(Entry)


class UsageJournal:
    """One ledger. `last` is the number of its last line, 0 while it has none.

    `found` is the value of `last` when this process opened the ledger.
    """

    def __init__(self, folder: Path, most_bytes: int, place: int | None = None) -> None:
        """Take a ledger of a folder: the first free one, made if need be, or the one at a place.

        Raises:
            BlockingIOError: the one at that place is taken, by another process or this one.
            OSError: it cannot be made, or written.
        """
        self._most_bytes = most_bytes
        self._file_bytes = max(1, most_bytes // _FILE_PARTS)
        self._folder, self._lock = _first_free(folder) if place is None else _taken(folder, place)
        try:
            self._read()
        except OSError:
            self.close()
            raise
        self._began = False  # a line was written by this process
        # Up to where each file was read; None: nothing was read.
        self._unread: dict[Path, int] | None = None

    def _read(self) -> None:
        self.id = _named_by(self._folder / "id")
        files, self.last = self._files(), 0
        if files:
            self.last = _first(files[-1]) - 1
            for each in _entries(files[-1]):
                self.last = max(self.last, each.n)
        self.found = self.last
        self._found = (1, files[0] if files else self._folder, 0)  # where a line was found last

    def append(self, entries: Sequence[Entry]) -> None:
        """Write lines; their numbers follow on `last`.

        Raises:
            OSError: the disk is full, or similar. None of them counts as written.
        """
        if not os.fstat(self._lock).st_nlink:
            self._make_anew()
        files = self._files()
        path = files[-1] if files else self._named(entries[0].n)
        if files and path.stat().st_size >= self._file_bytes:
            path = self._named(entries[0].n)
            for old in files[: max(0, len(files) - _FILE_PARTS + 1)]:
                old.unlink()
        lines = _ENCODER.encode_lines(entries)
        # The process before may have been killed in the middle of a line.
        end = b"" if self._began or not path.exists() else b"\n"
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            begins = os.fstat(handle).st_size
            try:
                left = end + lines
                while left:
                    left = left[os.write(handle, left) :]
            except OSError:
                os.ftruncate(handle, begins)
                raise
        finally:
            os.close(handle)
        self._began = True
        self.last = entries[-1].n

    def _make_anew(self) -> None:
        """Make the ledger again that somebody deleted. Its name and its numbers go on, for Redis knows them."""
        _, lock = _taken(self._folder.parent, int(self._folder.name))
        os.close(self._lock)
        self._lock = lock
        (self._folder / "id").write_text(self.id)

    def after(self, n: int, most: int) -> list[Entry]:
        """Return the oldest lines that are kept with numbers above `n`; empty: there are none."""
        files = self._files()
        wanted, path, offset = self._found
        if wanted != n + 1 or path not in files:
            older = [each for each in files if _first(each) <= n + 1]
            path, offset = (older or files or [self._folder])[-1 if older else 0], 0
        found: list[Entry] = []
        for file in files[files.index(path) :] if path in files else ():
            at = offset if file == path else 0
            with file.open("rb") as opened:
                opened.seek(at)
                for line in opened:
                    if not line.endswith(b"\n"):
                        break  # it is being written
                    at += len(line)
                    each = _decoded(line)
                    if each is not None and each.n > n:
                        found.append(each)
                    if len(found) >= most:
                        self._found = found[-1].n + 1, file, at
                        return found
        if found:
            self._found = found[-1].n + 1, file, at
        return found

    def unread(self, *, anew: bool = False) -> Iterator[Entry]:
        """Go through the lines of all ledgers of the folder; from the second time on, only what others wrote since.

        After a failure, the next call reads the same lines again; `anew`, as the first call.
        """
        known = None if anew else self._unread
        first, unread = known is None, dict(known or {})
        for file in _files(self._folder.parent, f"*/{_NAMES}"):
            if first or file.parent != self._folder:
                yield from _entries(file, unread)
        self._unread = unread

    def left_behind(self) -> list[UsageJournal]:
        """Take all other ledgers that no process holds; the caller closes them.

        A ledger that cannot be read is left out.
        """
        folder, found = self._folder.parent, list[UsageJournal]()
        for named in sorted(folder.glob("*/id")):
            with contextlib.suppress(OSError, ValueError):
                found.append(UsageJournal(folder, self._most_bytes, int(named.parent.name)))
        return found

    def close(self) -> None:
        """Release the ledger for another process."""
        os.close(self._lock)

    def _named(self, first: int) -> Path:
        return self._folder / f"ledger-{first:012d}.jsonl"

    def _files(self) -> list[Path]:
        return _files(self._folder, _NAMES)


def _first_free(folder: Path) -> tuple[Path, int]:
    others: OSError | None = None
    for place in range(_MOST_LEDGERS):
        try:
            return _taken(folder, place)
        except BlockingIOError:
            pass
        except (PermissionError, IsADirectoryError) as error:
            others = others or error
    raise others or OSError(f"all {_MOST_LEDGERS} ledgers are in use")


def _taken(folder: Path, place: int) -> tuple[Path, int]:
    """Take a ledger of which this process may write each file.

    Raises:
        BlockingIOError: it is taken.
        PermissionError: it, or a file of it, is another user's.
    """
    mine = folder / str(place)
    mine.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(mine / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for each in (mine / "id", *_files(mine, _NAMES)):
            with contextlib.suppress(FileNotFoundError):
                os.close(os.open(each, os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        os.close(lock)
        raise
    return mine, lock


def _named_by(file: Path) -> str:
    """Return the name of a ledger; a new one where a full disk or a power failure left none."""
    name = file.read_bytes() if file.exists() else b""
    if not _ID.fullmatch(name):
        name = secrets.token_hex(8).encode()
        file.write_bytes(name)
    return name.decode()


def every_entry(folder: Path) -> Iterator[Entry]:
    """Go through the lines of all ledgers of a folder."""
    for file in _files(folder, f"*/{_NAMES}"):
        yield from _entries(file)


def _files(folder: Path, names: str) -> list[Path]:
    """Return the files of ledgers in their order; a copy under another name is left out."""
    return sorted(each for each in folder.glob(names) if _number(each).isdecimal())


def _first(path: Path) -> int:
    return int(_number(path))


def _number(path: Path) -> str:
    return path.stem.removeprefix("ledger-")


def _entries(path: Path, unread: dict[Path, int] | None = None) -> Iterator[Entry]:
    """Go through the lines of a file, from its position in `unread`, and note the new position there."""
    at = 0 if unread is None else unread.get(path, 0)
    # A file may be gone by now: the oldest of a full ledger, whose process goes on writing.
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(at)
        for line in file:
            each = _decoded(line)
            if each is not None:
                yield each
            elif not line.endswith(b"\n"):
                break  # it is being written
            at += len(line)
    if unread is not None:
        unread[path] = at


def _decoded(line: bytes) -> Entry | None:
    """Return a line's entry; None where a process was killed in the middle of it."""
    try:
        return _DECODER.decode(line)
    except msgspec.DecodeError:
        return None
