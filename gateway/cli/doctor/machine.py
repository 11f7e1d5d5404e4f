"""What this machine allows a gateway: file descriptors, and its clock."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gateway.cli.doctor.findings import Finding, ok
from gateway.config.models import Config
from gateway.ingress.descriptors import files_for, most_connections

_ENDLESS: Final = 1 << 30  # descriptors; more than any system has
_TIMESYNC: Final = Path("/run/systemd/timesync")


def most_clients(config: Config) -> int:
    """Return how many clients' connections a gateway takes at a time where nothing else limits it. Pure."""
    return most_connections(_ENDLESS, _backends(config), config.limits.connections)


def files_finding(config: Config, limit: int, whose: str) -> Finding:
    """Return whether so many open files are enough for the clients and backends of a configuration. Pure."""
    backends = _backends(config)
    most = most_clients(config)
    possible = most_connections(limit, backends, most)
    if possible >= most:
        return ok("file_limit", f"{whose} may open {limit:,} files, enough for {most:,} clients")
    return Finding(
        verdict="note", about="file_limit",
        told=f"{whose} may open {limit:,} files, enough for {possible:,} of {most:,} clients (`limits.connections`)",
        change=f"LimitNOFILE={max(65536, files_for(most, backends))} in vllm-gateway.service, or ulimit -Hn",
    )  # fmt: skip


def shell_findings(config: Config) -> Iterator[Finding]:
    """Yield what a gateway could open that is started from this shell."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _ENDLESS if hard == resource.RLIM_INFINITY else hard
    yield files_finding(config, limit, "A gateway started from this shell")


def machine_clock() -> Iterator[Finding]:
    """Yield that nothing keeps the clock of this machine right, as far as systemd tells."""
    if _TIMESYNC.is_dir() and not (_TIMESYNC / "synchronized").exists():
        yield Finding(verdict="wrong", about="clock", told="The clock of this machine is not synchronized",
                      change="timedatectl set-ntp true")  # fmt: skip


def _backends(config: Config) -> int:
    return sum(len(pool.backends) for pool in config.pools.values())
