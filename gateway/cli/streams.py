"""What a process finds at its start: streams that are closed or take few characters, and signals that nobody heeds.

And what it leaves behind at its end: output that is written.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator
from typing import Final

# How a stream may treat what it cannot write: both fail. The second is that of the locale C.
_FAILING: Final = ("strict", "surrogateescape")


def make_ready() -> None:
    """Make of what is there what the program expects. Before anything else."""
    open_closed()
    replace_unwritable()
    if os.getpid() == 1:
        # Of a container's first process Linux drops a signal that it has not asked for. One that still starts
        # would start, and run until it is killed.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def open_closed() -> None:
    """Open what is closed of standard input, output and error, on the null device.

    Else the next file or socket that is opened gets that number, and what is meant for the log is
    written into it.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - open as long as the program
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def replace_unwritable() -> None:
    """Have a `?` written for a character that standard output cannot take, in place of a failure."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in _FAILING:
        sys.stdout.reconfigure(errors="replace")


@contextlib.contextmanager
def written_out() -> Iterator[None]:
    """Write what is left for standard output at the end, while a failure can still be told.

    Raises:
        OSError: it cannot be written, and nothing else failed before.
    """
    failed = False
    try:
        yield
    except Exception:
        failed = True
        raise
    finally:
        try:
            sys.stdout.flush()
        except OSError:
            # The end of the process would try it again, and tell of it in Python's words.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if not failed:
                raise
