"""The launcher that a backend's settings ask for."""

from __future__ import annotations

from pathlib import Path

from gateway.config.models import BackendConfig
from gateway.control.launchers.launcher import Launcher
from gateway.control.launchers.process import ProcessLauncher


def make(config: BackendConfig, pool: str, state: Path) -> Launcher | None:
    """Make it; None for a backend that has neither `launch` nor `restart`."""
    if config.launch is not None:
        return ProcessLauncher(config.launch, pool=pool, backend=config.name, state=state)
    return None
