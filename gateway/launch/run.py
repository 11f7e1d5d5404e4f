"""Run a program to its end: with an argv, a deadline, and a bounded output.

Not by asyncio's subprocesses: when the call that starts one is cancelled, only the program is
killed, and its children go on. Here no await comes between the start and the `try`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Final

from gateway.core.aio import InTime
from gateway.launch import proc
from gateway.launch.launcher import LaunchError, obstacle_of
from gateway.launch.record import told

_FILE_BYTES: Final = 64 * 1024 * 1024  # a program that writes more is ended by SIGXFSZ
_KILLED_S: Final = 1.0  # for a killed program to be gone


async def run(words: Sequence[str], *, timeout_s: float, kept_bytes: int) -> str:
    """Run a program without a shell and without input, and return the last `kept_bytes` of its standard output.

    Raises:
        LaunchError: it could not be started, or did not end in time; its group is killed then.
    Cancel: its group is killed.
    """
    try:
        with tempfile.TemporaryFile() as out:
            await execute(words, (out.fileno(), subprocess.DEVNULL), timeout_s, _FILE_BYTES)
            out.seek(max(0, out.seek(0, os.SEEK_END) - kept_bytes))
            return out.read().decode(errors="replace")
    except OSError as error:  # there is no space for its output, or no descriptor is left
        said = f"cannot keep what {words[0]} writes: {told(error)}"
        raise LaunchError(said, obstacle_of(error)) from error


async def execute(
    words: Sequence[str], output: tuple[int, int], timeout_s: float, most_bytes: int | None = None
) -> int:
    """Run a program, in a group of its own, into two open files or the null device; return its exit code.

    `most_bytes` limits the files that it may write.

    Raises:
        LaunchError: it could not be started, or did not end in time; its group is killed then.
    Cancel: its group is killed.
    """
    process = _start(words, output)
    try:
        if most_bytes is not None:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
        async with InTime(timeout_s):
            if (found := proc.find(process.pid)) is not None:
                await proc.end_of(found)
    except TimeoutError as error:
        # Its arguments may hold secrets.
        said = f"`{words[0]}` did not end within {timeout_s:.0f} s and was killed"
        raise LaunchError(said) from error
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the pid is not reused until it is waited for
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILLED_S)
    return process.returncode


def _start(words: Sequence[str], output: tuple[int, int]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output[0],
            stderr=output[1],
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchError(f"cannot run {words[0]}: {error.strerror}", obstacle_of(error)) from error
