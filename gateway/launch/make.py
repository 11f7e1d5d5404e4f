"""Make the launcher of a backend."""

from __future__ import annotations

from pathlib import Path

from gateway.config.models import BackendConfig
from gateway.launch.command import CommandLauncher
from gateway.launch.kubernetes import KubernetesLauncher
from gateway.launch.launcher import Launcher
from gateway.launch.process import ProcessLauncher
from gateway.launch.record import file_name
from gateway.launch.systemd import SystemdLauncher


def make(backend: BackendConfig, pool: str, state: Path) -> Launcher | None:
    """Return the launcher of a backend of `pool`; None where nobody may restart it.

    This touches neither files nor sockets. Close the launcher when the backend leaves.
    """
    if backend.launch is not None:
        return ProcessLauncher(backend.launch, pool=pool, backend=backend.name, state=state)
    restart = backend.restart
    if restart is None:
        return None
    if restart.systemd is not None:
        return SystemdLauncher(restart.systemd)
    if restart.docker is not None:
        # Its HTTP client takes a fifth of the gateway's time to start.
        from gateway.launch.docker import DockerLauncher

        return DockerLauncher(restart.docker)
    if restart.kubernetes is not None:
        return KubernetesLauncher(restart.kubernetes)
    if restart.command is not None:
        log = state / "logs" / f"{file_name(pool, backend.name)}.txt"
        return CommandLauncher(restart.command, log)
    return None
