"""How long the stages of a start usually take: those of the last good one, kept in a file.

    <state>/starts.json    {"pool/b1": {"base": ..., "took_s": {"loading_weights": 41.2, ...}}}

They hold for the way in which the server was started: after a change of its command line, by an
operator or by a remedy, nothing is known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from gateway.config.models import BackendConfig
from gateway.heal.statefile import digest, read_state, write_state
from gateway.launch.launcher import Changes
from gateway.vllmlog.milestones import Stage

FILE: Final = "starts.json"


class StartTimes(msgspec.Struct, frozen=True):
    """One good start: how it was begun, and how long its stages took."""

    base: str  # digest of the command line, or of the way to restart it
    took_s: dict[str, float]  # by the stage's name, lower case


_FORMAT: Final = msgspec.json.Decoder(dict[str, StartTimes])
_STAGES: Final = {stage.name.lower(): stage for stage in Stage}


@dataclass(slots=True)
class UsualTimes:
    """The last good start of each backend. Synchronous; the file is small and starts are rare."""

    folder: Path
    _kept: dict[str, StartTimes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._kept = read_state(self.folder / FILE, _FORMAT) or {}

    def of(self, backend_id: str, config: BackendConfig, changes: Changes) -> dict[Stage, float]:
        """Return how long each stage took when it was last started in this way; empty: unknown."""
        kept = self._kept.get(backend_id)
        if kept is None or kept.base != _digest(config, changes):
            return {}
        return {
            _STAGES[name]: took_s
            for name, took_s in kept.took_s.items()
            if name in _STAGES and 0.0 <= took_s < math.inf
        }

    def learn(
        self,
        backend_id: str,
        config: BackendConfig,
        changes: Changes,
        took_s: Mapping[Stage, float],
    ) -> None:
        """Note a good start, and write the file."""
        rounded = {stage.name.lower(): round(each, 2) for stage, each in took_s.items()}
        self._kept[backend_id] = StartTimes(_digest(config, changes), rounded)
        write_state(self.folder / FILE, self._kept, "how long starts take")


def _digest(config: BackendConfig, changes: Changes) -> str:
    """Return what tells two ways to start a server apart."""
    launch = config.launch
    line = None if launch is None else (launch.command, launch.gpus, launch.args, launch.env)
    return digest((line, config.restart, dict(changes.args), dict(changes.env)))
