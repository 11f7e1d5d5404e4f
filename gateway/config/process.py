"""Settings of the process itself: its admin listener, its keys, how it watches backends, how it ends."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import AfterValidator, Field, SecretStr
from pydantic_core import PydanticCustomError

from gateway.config.oidc import OidcConfig
from gateway.config.units import (
    Address,
    Duration,
    DurationOrZero,
    EmptyIsNone,
    FilePath,
    Section,
    setting,
)
from gateway.core.roles import Role

Secret = Annotated[SecretStr | None, EmptyIsNone]

TOKEN_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}$"
TOKEN_CHARS: Final = 16
_REDIS: Final = ("redis://", "rediss://", "redis+", "rediss+", "unix://")


def _check_redis(value: SecretStr | None) -> SecretStr | None:
    if value is not None and not value.get_secret_value().startswith(_REDIS):
        raise PydanticCustomError("bad_url", "write it like redis://host:6379/0 or rediss://...")
    return value


def _check_sendable(value: SecretStr | None) -> SecretStr | None:
    if value is not None and not value.get_secret_value().isprintable():
        raise PydanticCustomError(
            "bad_value", "it has a line end or another control character, which no header can hold"
        )
    return value


def _check_token(value: SecretStr) -> SecretStr:
    if len(value.get_secret_value()) < TOKEN_CHARS:
        raise PydanticCustomError(
            "too_small", "must be at least {least} characters", {"least": TOKEN_CHARS}
        )
    return value


TokenName = Annotated[str, Field(pattern=TOKEN_NAME)]
Bearer = Annotated[SecretStr | None, AfterValidator(_check_sendable), EmptyIsNone]
RedisUrl = Annotated[SecretStr | None, AfterValidator(_check_redis), EmptyIsNone]


class AdminToken(Section):
    """Who may use the admin listener, and for what."""

    name: TokenName = Field(description="Names who it is for, in the audit log.")
    role: Role = Field(
        description="metrics: reads /metrics. viewer: reads everything. operator: also gives orders."
        " admin: also manages keys, and upgrades."
    )
    token: Annotated[SecretStr, AfterValidator(_check_token), AfterValidator(_check_sendable)] = (
        Field(description="The bearer token, such as ${ADMIN_TOKEN_OF_CI}; at least 16 characters.")
    )


class AdminConfig(Section):
    """The admin listener: metrics, overview, operations. It is separate from the public one."""

    listen: Address = setting("127.0.0.1:9090", "Address, or unix:/path.")
    token: Bearer = setting(
        None,
        "Required bearer token, of the role admin. Without any token, only loopback and UNIX sockets are allowed.",
    )
    tokens: tuple[AdminToken, ...] = setting((), "Further bearer tokens, each with a role.")


class KeysConfig(Section):
    """Where the API keys are stored (hashes only)."""

    file: FilePath = setting("keys.yaml", "Path of the keys file, relative to this file.")
    shared: bool = setting(
        False,
        "true: keys are kept in Redis (`redis`) for all gateways, not in `file`. A copy of the hashes is in"
        " `state`, so that a gateway starts without Redis. `vllm-gateway keys import` takes those of a file.",
    )
    pepper: Secret = setting(
        None,
        "With `shared`: what hashes are made with, the same for every gateway: 32 bytes in base64, such as"
        " ${GATEWAY_PEPPER}. It is never sent to Redis. Default: the content of `file` with .pepper at its"
        " end.",
    )
    oidc: OidcConfig | None = setting(
        None,
        "An identity provider whose tokens are accepted beside keys (needs the extra oidc). Default: none.",
    )


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

    announce: DurationOrZero = setting(
        "5s",
        "After SIGTERM, how long new connections are still taken, while /readyz says 503 and each reply closes its "
        "connection. So a load balancer learns of it before a connection is refused. This time counts towards `grace`.",
    )
    grace: DurationOrZero = setting("120s", "How long running requests may take to finish.")
