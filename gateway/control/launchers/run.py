"""Run a program of a service manager: an argv, a deadline, a bounded answer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gateway.control.launchers.launcher import LaunchError

_OUTPUT_BYTES: Final = 512 * 1024  # of each stream, its end
_PIPE_S: Final = 0.5  # for the pipes to close once the program has ended


@dataclass(frozen=True, slots=True)
class Ran:
    """How a program ended, and the end of what it wrote."""

    code: int
    out: str
    err: str


async def run(words: Sequence[str], *, timeout_s: float) -> Ran:
    """Run a program without a shell and without input, in a group of its own.

    Raises:
        LaunchError: it could not be started, or did not end in time; its group is killed then.
    Cancel: its group is killed.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchError(f"cannot run {words[0]}: {error.strerror}") from error
    try:
        async with asyncio.timeout(timeout_s):
            out, err = await _answer(process)
    except TimeoutError as error:
        said = f"`{' '.join(words)}` did not end within {timeout_s:.0f} s and was killed"
        raise LaunchError(said) from error
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return Ran(process.returncode or 0, out, err)


async def _answer(process: asyncio.subprocess.Process) -> tuple[str, str]:
    """Read both streams until the program has ended; a child of it may hold them open for ever."""
    ends = bytearray(), bytearray()
    streams = process.stdout, process.stderr
    async with asyncio.TaskGroup() as group:
        readers = [
            group.create_task(_drain(stream, end), name=f"read {process.pid}")
            for stream, end in zip(streams, ends, strict=True)
            if stream is not None
        ]
        await process.wait()
        await asyncio.wait(readers, timeout=_PIPE_S)
        for reader in readers:
            reader.cancel()
    out, err = (bytes(end).decode(errors="replace") for end in ends)
    return out, err


async def _drain(stream: asyncio.StreamReader, end: bytearray) -> None:
    while chunk := await stream.read(65536):
        end += chunk
        del end[:-_OUTPUT_BYTES]
