"""Which adapters each supervised server held when it was last seen serving: its next one is given them again.

    <state>/held.json    {"pool/b1": {"base": ..., "adapters": {"sql": "/loras/sql"}}}

On disk, so that a gateway that starts, or takes over while a server restarts, knows them too: nothing else
tells of adapters that somebody loaded without the gateway. They hold for the server that was configured then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from gateway.config.models import BackendConfig, Config
from gateway.heal.statefile import digest, read_state, write_state
from gateway.pools.table import Backend
from gateway.watch.adapters import held_by

FILE: Final = "held.json"


class Held(msgspec.Struct, frozen=True):
    """The adapters of one server, name to path."""

    base: str  # digest of what it was started or reached by
    adapters: dict[str, str]


_FORMAT: Final = msgspec.json.Decoder(dict[str, Held])


@dataclass(slots=True)
class HeldAdapters:
    """The adapters of all servers. Synchronous; the file is small, and written when a list changes."""

    folder: Path
    _kept: dict[str, Held] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._kept = read_state(self.folder / FILE, _FORMAT) or {}

    def of(self, backend_id: str, config: BackendConfig) -> dict[str, str]:
        """Return what was seen last; none where the server is another one."""
        kept = self._kept.get(backend_id)
        return {} if kept is None or kept.base != _digest(config) else kept.adapters

    def see(self, backend: Backend, config: BackendConfig) -> dict[str, str]:
        """Note and return what its server holds now."""
        seen = held_by(backend)
        if seen != self.of(backend.id, config):
            self._kept.pop(backend.id, None)
            if seen:
                self._kept[backend.id] = Held(_digest(config), seen)
            self._save()
        return seen

    def follow(self, config: Config) -> None:
        """Forget servers that are no longer configured so."""
        bases = {
            f"{pool}/{backend.name}": _digest(backend)
            for pool, settings in config.pools.items()
            for backend in settings.backends
        }
        kept = {each: held for each, held in self._kept.items() if held.base == bases.get(each)}
        if len(kept) < len(self._kept):
            self._kept = kept
            self._save()

    def _save(self) -> None:
        write_state(self.folder / FILE, self._kept, "which adapters servers hold")


def _digest(config: BackendConfig) -> str:
    """Return what tells two servers of one name apart."""
    launch = config.launch
    line = None if launch is None else (launch.command, launch.args)
    return digest((config.url, line, config.restart))
