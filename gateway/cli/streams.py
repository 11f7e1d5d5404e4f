"""Standard streams as they are at the start: closed by a supervisor, or for few characters only."""

from __future__ import annotations

import io
import os
import sys


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
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")
