"""What this machine allows the gateway: file descriptors, and its clock."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gateway.cli.doctor.findings import Finding, ok
from gateway.config.models import Config

_CONNECTIONS: Final = 10_000  # what `limits.connections: auto` takes at most
_OF_EACH: Final = 2  # a client's connection and a backend's
_TIMESYNC: Final = Path("/run/systemd/timesync")


def machine_findings(config: Config) -> Iterator[Finding]:
    """Yield what this machine allows; the service may have limits of its own (`LimitNOFILE`)."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OF_EACH * (config.limits.connections or _CONNECTIONS)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        yield Finding(
            verdict="note", about="file_limit",
            told=f"At most {hard:,} files may be open here; {wanted // _OF_EACH:,} clients need up to {wanted:,}",
            change=f"LimitNOFILE={max(65536, wanted)} in vllm-gateway.service, or ulimit -Hn",
        )  # fmt: skip
    else:
        yield ok("file_limit", "Enough files may be open")
    if _TIMESYNC.is_dir() and not (_TIMESYNC / "synchronized").exists():
        yield Finding(verdict="wrong", about="clock", told="The clock of this machine is not synchronized",
                      change="timedatectl set-ntp true")  # fmt: skip
