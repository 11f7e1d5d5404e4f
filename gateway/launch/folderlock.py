"""Whether this gateway alone writes its state folder: the lock on a file there, which ends with its process.

Drains, holds, remedies and the like are kept as whole files, each written from what one gateway knows. Of two
gateways with one folder, each undoes what the other kept. Both serve all the same, so the second one only warns.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
from pathlib import Path
from typing import Final

from gateway.core.aio import periodic

log = logging.getLogger("gateway.launch")

_FILE: Final = "gateway.lock"
EVERY_S: Final = 5.0  # between two tries
_MOST_BYTES: Final = 200  # of what the other gateway wrote into it


class FolderLock:
    """See the module. `other` is the gateway that has it; empty: none has, or that is not known."""

    def __init__(self, folder: Path, every_s: float = EVERY_S) -> None:
        self.other = ""
        self._path = folder / _FILE
        self._handle: int | None = None
        self._every_s = every_s

    async def hold(self) -> None:
        """Hold the lock until cancelled; while another gateway has it, try again from time to time."""
        try:
            await periodic(self._take, every_s=self._every_s, name="state folder")
        finally:
            self._release()

    async def _take(self) -> None:
        if self._handle is not None:
            return
        # Why nothing can be written there is told by `launch.disk`.
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            opened.callback(os.close, handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._warn(os.pread(handle, _MOST_BYTES, 0).decode(errors="replace").strip())
                return
            opened.pop_all()
            self._handle, self.other = handle, ""
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def _warn(self, other: str) -> None:
        before, self.other = self.other, other or "another gateway"
        if not before:
            log.warning(
                "the state folder %s is used by another gateway, too: %s. Each undoes what the other keeps there."
                " Give each gateway a `state` folder of its own, or stop one of them",
                *(self._path.parent, self.other),
                extra={"event": "state_shared", "path": str(self._path.parent)},
            )

    def _release(self) -> None:
        handle, self._handle, self.other = self._handle, None, ""
        if handle is not None:
            os.close(handle)
