"""What remedies changed of configured command lines: kept in a file, so that a restart keeps them.

    <state>/overrides.json    {"pool/b1": {"base": ..., "args": ..., "env": ..., "applied": [...]}}

A remedy may outlive what made it necessary: another process held the memory, a driver was old. So
once a server has served for a day with its remedies, its next start tries the configured command
line again. If that start fails, the one after it has the remedies back, and the next trial waits
twice as long.

A remedy for a start that hangs is found while that start goes on without it. If it comes to a good end
after all, the remedy was not needed, and is dropped.

A change belongs to the command line that it was made for. When an operator changes the `launch` of a
backend, what was changed of the old one is dropped, and does not come back with it: what made it
necessary may be gone by then, and a start that fails again finds its remedy again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from gateway.config.models import Config
from gateway.config.supervision import LaunchConfig
from gateway.heal.cure import Cure, merged
from gateway.heal.statefile import digest, read_state, write_state
from gateway.launch.launcher import Changes

FILE: Final = "overrides.json"
TRIAL_S: Final = 86_400.0  # of service with remedies; doubles with each trial that failed
_MOST_DOUBLINGS: Final = 5  # 32 days
_APPLIED_KEPT: Final = 20


class Applied(msgspec.Struct, frozen=True):
    """One remedy that was applied."""

    remedy: str
    at: float  # seconds since the epoch
    why: str


class Override(msgspec.Struct, frozen=True):
    """What is changed of one backend's command line, and the remedies that changed it."""

    base: str  # digest of the configured command line
    args: dict[str, object] = {}
    env: dict[str, str] = {}
    applied: tuple[Applied, ...] = ()
    failed_trials: int = 0
    on_trial: bool = False  # the configured command line is tried; the changes wait for its outcome
    before: Override | None = None  # what the last start had, where remedies were added since

    @property
    def changes(self) -> Changes:
        """The changes, as a launcher takes them; none while the configured command line is tried."""
        return Changes() if self.on_trial else Changes(self.args, self.env)  # type: ignore[arg-type]

    def back(self) -> Override:
        """Return it with its changes in force again, if a trial without them has failed."""
        if not self.on_trial:
            return self
        return replace(self, on_trial=False, failed_trials=self.failed_trials + 1)

    def beyond(self, other: Override) -> Override:
        """Return only what it has and another one lacks."""
        return replace(
            self,
            args={
                name: value for name, value in self.args.items() if other.args.get(name) != value
            },
            env={name: value for name, value in self.env.items() if other.env.get(name) != value},
            applied=tuple(each for each in self.applied if each not in other.applied),
        )

    def told(self) -> str:
        """Return for people what is changed, and by which remedies."""
        flags = [f"--{name} {value}" for name, value in self.args.items()]
        variables = [f"{name}={value}" for name, value in self.env.items()]
        remedies = dict.fromkeys(each.remedy for each in self.applied)
        return f"{' '.join([*flags, *variables]) or 'nothing'} ({', '.join(remedies)})"


_FORMAT: Final = msgspec.json.Decoder(dict[str, Override])


@dataclass(slots=True)
class Overrides:
    """The changes in force. Synchronous; the file is small and written when a remedy is applied.

    A file that cannot be read counts as none. One that cannot be written changes nothing about what is
    in force here. Both are told in the log.
    """

    folder: Path
    kept: dict[str, Override] = field(default_factory=dict)  # what is changed, by backend

    def __post_init__(self) -> None:
        self.kept = read_state(self.folder / FILE, _FORMAT) or {}

    def of(self, backend_id: str, launch: LaunchConfig | None) -> Override:
        """Return what is changed of a backend's command line as it is configured now."""
        base = _digest(launch)
        kept = self.kept.get(backend_id)
        return kept if kept is not None and kept.base == base else Override(base)

    def apply(self, backend_id: str, launch: LaunchConfig, cure: Cure, at: float) -> Override:
        """Add a remedy, and write the file."""
        kept = self.of(backend_id, launch)
        back = kept.back()
        changes = merged(back.changes, cure.changes)
        applied = (*back.applied, Applied(cure.remedy.value, at, cure.why))[-_APPLIED_KEPT:]
        override = replace(
            back,
            args=dict(changes.args),
            env=dict(changes.env),
            applied=applied,
            before=kept.before or kept,
        )
        self.kept[backend_id] = override
        self._save()
        return override

    def starting(self, backend_id: str, launch: LaunchConfig | None, served_s: float) -> Override:
        """Return what is changed for the start that comes; once it is made, call `began`.

        Args:
            backend_id: whose server is to start.
            launch: its command line as it is configured.
            served_s: how long the server before it served without a break.
        """
        kept = replace(self.of(backend_id, launch), before=None)
        due_s = TRIAL_S * 2 ** min(kept.failed_trials, _MOST_DOUBLINGS)
        if not kept.on_trial and kept.applied and served_s >= due_s:
            return replace(kept, on_trial=True)
        return kept.back()

    def began(self, backend_id: str, override: Override) -> None:
        """Note that a start was made with this, unless its remedies were dropped or changed meanwhile."""
        kept = self.kept.get(backend_id)
        if kept is not None and kept != override and kept.applied == override.applied:
            self.kept[backend_id] = override
            self._save()

    def served(self, backend_id: str, launch: LaunchConfig | None) -> Override | None:
        """Note a start that came to its good end. Return what was dropped, if it did so without that."""
        kept = self.of(backend_id, launch)
        had = kept.before or kept
        if had.on_trial or (kept.before is not None and not had.applied):
            return self.drop(backend_id)
        if kept.before is None:
            return None
        self.kept[backend_id] = had
        self._save()
        return kept.beyond(had)

    def drop(self, backend_id: str) -> Override | None:
        """Take all changes of a backend back, for its next start; return what they were."""
        gone = self.kept.pop(backend_id, None)
        if gone is not None:
            self._save()
        return gone

    def follow(self, config: Config) -> dict[str, Override]:
        """Drop what was changed of command lines that are no longer configured, and return that."""
        bases = {
            f"{pool}/{backend.name}": _digest(backend.launch)
            for pool, settings in config.pools.items()
            for backend in settings.backends
        }
        gone = {
            backend_id: kept
            for backend_id, kept in self.kept.items()
            if kept.base != bases.get(backend_id)
        }
        for backend_id in gone:
            del self.kept[backend_id]
        if gone:
            self._save()
        return gone

    def _save(self) -> None:
        write_state(self.folder / FILE, self.kept, "the remedies in force")


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
    args, env = sorted(launch.args.items(), key=str), dict(sorted(launch.env.items()))
    return digest((launch.command, launch.gpus, args, env))
