"""What remedies changed of configured command lines: kept in a file, so that a restart keeps them.

    <state>/overrides.json    {"pool/b1": {"base": ..., "args": ..., "env": ..., "applied": [...]}}

A change holds for the command line that it was made for: when an operator changes the `launch` of a
backend, what was changed of the old one is dropped.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from gateway.config.models import Config
from gateway.config.supervision import LaunchConfig
from gateway.control.cure import Cure, merged
from gateway.control.launchers.launcher import Changes
from gateway.control.statefile import read_state, write_state

FILE: Final = "overrides.json"
_APPLIED_KEPT: Final = 20


class Applied(msgspec.Struct, frozen=True):
    """One remedy that was applied."""

    remedy: str
    at: float  # seconds since the epoch
    why: str
    cause: str = ""


class Override(msgspec.Struct, frozen=True):
    """What is changed of one backend's command line, and the remedies that changed it."""

    base: str  # digest of the configured command line
    args: dict[str, object] = {}
    env: dict[str, str] = {}
    applied: tuple[Applied, ...] = ()

    @property
    def changes(self) -> Changes:
        """The changes, as a launcher takes them."""
        return Changes(self.args, self.env)  # type: ignore[arg-type]


_FORMAT: Final = msgspec.json.Decoder(dict[str, Override])


@dataclass(slots=True)
class Overrides:
    """The changes in force. Synchronous; the file is small and written when a remedy is applied.

    A file that cannot be read counts as none, with a warning; one that cannot be written is the caller's to report.
    """

    folder: Path
    _kept: dict[str, Override] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._kept = read_state(self.folder / FILE, _FORMAT) or {}

    def of(self, backend_id: str, launch: LaunchConfig | None) -> Override:
        """Return what is changed of a backend's command line as it is configured now."""
        base = _digest(launch)
        kept = self._kept.get(backend_id)
        return kept if kept is not None and kept.base == base else Override(base)

    def apply(self, backend_id: str, launch: LaunchConfig, cure: Cure, at: float) -> Override:
        """Add a remedy, and write the file.

        Raises:
            OSError: the file cannot be written; the change is in force all the same.
        """
        before = self.of(backend_id, launch)
        changes = merged(before.changes, cure.changes)
        applied = (*before.applied, Applied(cure.remedy.value, at, cure.why))[-_APPLIED_KEPT:]
        override = Override(before.base, dict(changes.args), dict(changes.env), applied)
        self._kept[backend_id] = override
        self._write()
        return override

    def drop(self, backend_id: str) -> bool:
        """Forget what is changed of a backend; returns whether there was anything.

        Raises:
            OSError: the file cannot be written.
        """
        if self._kept.pop(backend_id, None) is None:
            return False
        self._write()
        return True

    def _write(self) -> None:
        write_state(self.folder / FILE, self._kept)


def in_force(config: Config) -> list[dict[str, object]]:
    """Return what remedies changed of a configuration's command lines: setting, value, origin."""
    overrides = Overrides(config.state)
    rows: list[dict[str, object]] = []
    for pool, settings in config.pools.items():
        for backend in settings.backends:
            found = overrides.of(f"{pool}/{backend.name}", backend.launch)
            names = ", ".join(each.remedy for each in found.applied)
            for kind, values in (("args", found.args), ("env", found.env)):
                rows += [
                    {
                        "setting": f"pools.{pool}.backends.{backend.name}.launch.{kind}.{name}",
                        "value": value,
                        "origin": f"remedy {names} ({config.state / FILE})",
                    }
                    for name, value in values.items()
                ]
    return rows


def _digest(launch: LaunchConfig | None) -> str:
    """Return what tells two command lines apart."""
    if launch is None:
        return ""
    told = repr((launch.command, launch.gpus, sorted(launch.args.items(), key=str), launch.env))
    return hashlib.sha256(told.encode()).hexdigest()[:16]
