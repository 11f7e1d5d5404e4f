"""Whether the state folder can be written. Warn before its disk is full: then no server can be launched."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gateway.core.aio import periodic
from gateway.launch.folderlock import FolderLock
from gateway.launch.logfile import KEPT, ROTATE_BYTES

log = logging.getLogger("gateway.launch")

# The most that the log of one server takes: the file, its older ones, and the copy during a rotation.
LOW_BYTES: Final = (KEPT + 2) * ROTATE_BYTES
_EVERY_S: Final = 5.0
_MIB: Final = 1024 * 1024


async def watch(space: DiskSpace) -> None:
    """Look at the disk now and each 5 s, until cancelled; warn once each time it runs low."""
    await periodic(space.look, every_s=_EVERY_S, name="disk")


class DiskSpace:
    """What is left on the disk of the state folder, and whether this gateway alone writes there."""

    def __init__(self, folder: Path, free: Callable[[Path], int | None] | None = None) -> None:
        self.left: int | None = None  # bytes, when it was last looked at; None: not known
        self.lock = FolderLock(folder)
        self.unwritable = ""  # why nothing can be written there; empty: it can
        self._folder = folder
        self.free = free or free_bytes
        self._is_low = False

    async def look(self) -> None:
        """Warn if less is left than a server's log may need, and say when that is over."""
        self.unwritable = await asyncio.to_thread(why_unwritable, self._folder)
        left = self.left = await asyncio.to_thread(self.free, self._folder)
        if left is None:
            return
        was_low, self._is_low = self._is_low, left < LOW_BYTES
        if self._is_low and not was_low:
            log.warning(
                "the disk of %s is nearly full: %d MiB (%d bytes) are left, and the log of one"
                " launched server may need %d MiB. When it is full, nothing can be launched. Free"
                " some space, or set `state` to a folder on another disk",
                *(self._folder, left // _MIB, left, LOW_BYTES // _MIB),
                extra={"event": "disk_low", "path": str(self._folder), "free_bytes": left},
            )
        elif was_low and not self._is_low:
            log.info(
                "the disk of %s has %d MiB free again",
                *(self._folder, left // _MIB),
                extra={"event": "disk_free", "path": str(self._folder), "free_bytes": left},
            )


def why_unwritable(folder: Path) -> str:
    """Return why no file can be written in a folder, or where the folder would be made; empty: one can.

    Blocking: it makes a file without a name, which leaves nothing behind.
    """
    for each in (folder, *folder.absolute().parents):
        try:
            with tempfile.TemporaryFile(dir=each):
                return ""
        except OSError as error:
            if not isinstance(error, FileNotFoundError) or each.exists():
                return f"{each}: {error.strerror}"
    return ""


def free_bytes(folder: Path) -> int | None:
    """Return what this user may still write on the disk of a folder, which need not exist yet.

    Blocking. None where the system does not say.
    """
    for each in (folder, *folder.absolute().parents):
        try:
            found = os.statvfs(each)
        except FileNotFoundError:
            continue
        except OSError:
            return None
        return found.f_bavail * found.f_frsize
    return None
