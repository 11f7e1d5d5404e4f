"""When keys were last used: noted as requests are settled, written seldom, and never while one waits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from gateway.access.keystore import KeyStore
from gateway.access.records import ID_CHARS
from gateway.core.aio import periodic
from gateway.core.errors import ConfigError
from gateway.core.types import RequestRecord
from gateway.store.shared import StoreUnavailable

log = logging.getLogger("gateway.keys")

WRITE_S: Final = 60.0


@dataclass(slots=True)
class LastUsed:
    """See the module. `store` tells where keys are kept; None: nowhere."""

    store: Callable[[], KeyStore | None]
    wall: Callable[[], float]
    _at: dict[str, float] = field(default_factory=dict)  # by id, not yet written
    _failed: bool = False

    def posted(self, records: Iterable[RequestRecord]) -> None:
        """Note the keys of requests that ended."""
        now = self.wall()
        for key_id in {each.caller.key_id for each in records if each.caller is not None}:
            if len(key_id) == ID_CHARS:  # no token
                self._at[key_id] = now

    async def run(self) -> None:
        """Write now and then, until cancelled."""
        await periodic(self.write, every_s=WRITE_S, name="last use of keys")

    async def write(self) -> None:
        """Write what was noted; where that fails, the next time."""
        store = self.store()
        noted, self._at = self._at, {}
        if store is None or not noted:
            return
        try:
            await store.note_use(noted)
            self._failed = False
        except (StoreUnavailable, ConfigError) as error:
            self._at = noted | self._at
            if not self._failed:
                why = error.findings[0] if isinstance(error, ConfigError) else str(error)
                log.warning(
                    "when keys were last used cannot be written: %s",
                    why,
                    extra={"event": "last_use_not_written"},
                )
            self._failed = True
