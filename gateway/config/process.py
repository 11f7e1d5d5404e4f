"""Settings of the process itself: its admin listener, its keys, how it watches backends, how it ends."""

from __future__ import annotations

from typing import Annotated

from pydantic import SecretStr

from gateway.config.units import (
    Address,
    Duration,
    DurationOrZero,
    EmptyIsNone,
    FilePath,
    Section,
    setting,
)

Secret = Annotated[SecretStr | None, EmptyIsNone]


class AdminConfig(Section):
    """The admin listener: metrics, overview, operations. It is separate from the public one."""

    listen: Address = setting("127.0.0.1:9090", "Address, or unix:/path.")
    token: Secret = setting(
        None, "Required bearer token. Without one, only loopback and UNIX sockets are allowed."
    )


class KeysConfig(Section):
    """Where the API keys are stored (hashes only)."""

    file: FilePath = setting("keys.yaml", "Path of the keys file, relative to this file.")


class HealthConfig(Section):
    """How backends are monitored."""

    interval: Duration = setting("2s", "Time between two health checks (/health).")
    timeout: Duration = setting("2s", "Deadline of a health check or a metrics scrape.")
    fall: int = setting(3, "Failed health checks in a row after which a backend is down.", ge=1)
    rise: int = setting(2, "Passed health checks in a row after which it is ready again.", ge=1)
    scrape_interval: Duration = setting("1s", "Time between two scrapes of /metrics.")
    scrape_stale: Duration = setting("3s", "Age at which load figures count as unknown.")
    models_interval: Duration = setting("10s", "Time between two reads of /v1/models.")
    progress: Duration = setting(
        "30s", "With requests running, no progress for this long means that the engine hangs."
    )


class ShutdownConfig(Section):
    """How the gateway shuts down."""

    grace: DurationOrZero = setting("120s", "How long running requests may take to finish.")
