"""Lines on their way to standard output: a bounded queue, and the one thread that writes it.

The reader of our output may stop reading. Then the pipe is full and a write blocks, which must
never happen to the event loop. So lines wait here; once too many wait, new ones are dropped and
counted.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import stat
import threading
from collections import deque
from collections.abc import Iterator
from typing import Final

MAX_LINES: Final = 20_000  # about 10 MB of access log, or a second of it at full load
_BATCH_LINES: Final = 1000  # joined while other threads wait for the interpreter


class Outlet:
    """The only writer of one file descriptor, which it does not close. Whole lines, in order.

    `put` and `wake` never block. The thread is a daemon: a reader that is stuck cannot keep the
    process from ending, and `flush` waits for it only so long.
    """

    def __init__(self, fd: int = 1, *, max_lines: int = MAX_LINES) -> None:
        self.dropped = 0
        self._fd = fd
        self._max_lines = max_lines
        # Lines that came together, and how many. An Event in the queue is set once everything before it is
        # written; None ends the thread.
        self._lines: deque[tuple[bytes, int] | threading.Event | None] = deque()
        self.waiting = 0  # lines that are not being written yet
        self._torn = False  # the last line that was written has no end
        self._mixes = _mixes(fd)
        self._counting = threading.Lock()  # held to count, and for nothing that takes time
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._write_all, name="log writer", daemon=True)
        self._thread.start()

    def put(self, lines: bytes, count: int = 1) -> None:
        """Take so many lines in one piece, newlines included; they are written at the next `wake` or `flush`."""
        with self._counting:
            room = self._max_lines - self.waiting
            if count > room:
                self.dropped += count - room
                lines, count = b"".join(lines.splitlines(keepends=True)[:room]), room
            if count:
                self.waiting += count
                self._lines.append((lines, count))

    def wake(self) -> None:
        """Have the lines written now."""
        self._wake.set()

    def flush(self, wait_s: float = 2.0) -> bool:
        """Wait until what was put so far is written; False if that took too long."""
        if not self._thread.is_alive():
            return not self._lines
        written = threading.Event()
        self._lines.append(written)
        self._wake.set()
        return written.wait(wait_s)

    def close(self, wait_s: float = 2.0) -> bool:
        """Write what is left and end the thread; False if that took too long."""
        self._lines.append(None)
        self._wake.set()
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _write_all(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            # What is put meanwhile waits for the next `wake`: under load some always is.
            left = len(self._lines)
            while left > 0:
                taken = self._write_batch()
                if not taken:
                    return
                left -= taken

    def _write_batch(self) -> int:
        """Write up to the next mark; return how many pieces and marks were taken, 0 once the end was reached."""
        batch: list[bytes] = []
        count = taken = 0
        mark: tuple[bytes, int] | threading.Event | None = (b"", 0)
        while self._lines and count < _BATCH_LINES:
            mark = self._lines.popleft()
            taken += 1
            if not isinstance(mark, tuple):
                break
            batch.append(mark[0])
            count += mark[1]
        if batch:
            with self._counting:
                self.waiting -= count
            with self._alone():
                lost = self._write(b"".join(batch))
            if lost:
                self.dropped += min(count, lost.count(b"\n"))
        if isinstance(mark, threading.Event):
            mark.set()
        return 0 if mark is None else taken

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes from writing here meanwhile: a pipe mixes what is written at the same time.

        Workers share an output, and so do the gateways before and after an upgrade. The system ends the lock of
        a process that dies.
        """
        held = False
        if self._mixes:
            with contextlib.suppress(OSError):
                fcntl.lockf(self._fd, fcntl.LOCK_EX)
                held = True
        try:
            yield
        finally:
            if held:
                with contextlib.suppress(OSError):
                    fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def _write(self, data: bytes) -> bytes:
        """Write some lines; return what could not be written."""
        if self._torn:
            data = b"\n" + data
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:  # somebody who shares our output made it non-blocking
                select.select([], [self._fd], [])
            except OSError:  # the reader is gone, or the disk is full
                break
        if written := len(data) - len(view):
            self._torn = data[written - 1 : written] != b"\n"
        return bytes(view)


def _mixes(fd: int) -> bool:
    """Whether the output of several processes may be mixed there. In a file it is not."""
    try:
        mode = os.fstat(fd).st_mode
    except OSError:  # it is closed
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
