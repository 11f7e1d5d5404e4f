"""A keys file that changes while a gateway runs: it is read again, and one that is wrong does not cost a core."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gateway.access.keyfile import stamp_of
from gateway.access.keys import KeyRing, OpenRing
from gateway.core.errors import ConfigError

log = logging.getLogger("gateway.keys")

# What is wrong, and stays as it is, is read again after so many times as long as that took: something else may
# have been wrong, such as too many open files.
_RESTS: Final = 20.0


@dataclass(slots=True)
class Rereading:
    """See the module. `now` tells monotonic seconds."""

    now: Callable[[], float]
    trouble: str = ""  # why the file is not in force, but the keys before it
    _refused: object = None  # the stamp of what was wrong
    _again_at: float = 0.0

    async def look(self, before: KeyRing | OpenRing) -> KeyRing | None:
        """Return the keys of the file of a ring; None: they are as before, or cannot be used."""
        if not isinstance(before, KeyRing) or before.path is None or not before.changed():
            self.trouble = ""
            return None
        began, stamp = self.now(), stamp_of(before.path)
        if self.trouble and stamp == self._refused and began < self._again_at:
            return None
        try:
            keys = await asyncio.to_thread(KeyRing.load, before.path, before.tiers, before.tokens)
        except ConfigError as error:
            ended = self.now()
            self._refused, self._again_at = stamp, ended + (ended - began) * _RESTS
            self._tell("; ".join(error.findings))
            return None
        self.trouble = ""
        log.info("keys reloaded", extra={"event": "keys_reloaded", "keys": len(keys)})
        return keys

    def _tell(self, trouble: str) -> None:
        """Log what is wrong, once."""
        if trouble != self.trouble:
            log.error(trouble, extra={"event": "keys_invalid"})
        self.trouble = trouble
