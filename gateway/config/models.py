"""The settings: one tree that is the source of defaults, units, help and JSON Schema.

Frozen, and unknown keys are errors. Durations are float seconds here and `30s` in the file, sizes
are bytes and `64MiB`, token counts are ints and may be `32k`. What spans several settings (unique
names, an open admin listener) is in `config.check`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BeforeValidator,
    Field,
    SecretStr,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gateway.config.limits import LimitsConfig, TimeoutsConfig
from gateway.config.parameters import ParametersConfig, PrefixCache
from gateway.config.supervision import LaunchConfig, Remedy, RestartConfig, SupervisionConfig
from gateway.config.units import (
    Address,
    BackendUrl,
    Duration,
    DurationOrZero,
    EmptyIsNone,
    FilePath,
    Listen,
    OrText,
    OrWord,
    Section,
    Size,
    SocketPath,
    Tokens,
    setting,
)
from gateway.core.types import Endpoint

MODEL_NAME: Final = r"^[a-zA-Z0-9][a-zA-Z0-9._:/-]{0,127}$"
BACKEND_NAME: Final = r"^[a-z0-9][a-z0-9-]{0,62}$"

ModelName = Annotated[str, StringConstraints(pattern=MODEL_NAME)]
BackendName = Annotated[str, StringConstraints(pattern=BACKEND_NAME)]
Secret = Annotated[SecretStr | None, EmptyIsNone]

_SOCKET: Final = TypeAdapter[Any](SocketPath)

# Settings are accepted before the part that uses them exists, so that files need not change later.
_LATER: Final = "Accepted and checked; this version does not act on it yet."


class OverflowPolicy(Enum):
    """What happens when the stated output does not fit beside the prompt."""

    REJECT = "reject"
    CLAMP = "clamp"


class BackendConfig(Section):
    """One vLLM server. A plain URL is short for {url: ...}."""

    name: BackendName = Field(
        default_factory=lambda: "b1",
        description="Short name, unique in the pool. Default: b1, b2, ... by position.",
    )
    url: BackendUrl = Field(
        default_factory=str,
        validate_default=True,
        description="Its scheme, host and port, or unix:/path. With `launch`: taken from there.",
    )
    api_key: Secret = setting(None, "Sent to the backend as a bearer token (vLLM's --api-key).")
    max_in_flight: Annotated[int, Field(ge=1)] | None = setting(
        None, "Most requests at a time from this gateway. Default: no limit of its own."
    )
    endpoints: tuple[Endpoint, ...] | None = setting(
        None, "Endpoints it serves. Default: those of the pool, else what the backend says."
    )
    restart: RestartConfig | None = setting(None, "How to restart it, where others start it.")
    launch: LaunchConfig | None = setting(None, "Start it from here, in place of `url`.")

    @model_validator(mode="before")
    @classmethod
    def _address_of_launch(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, Mapping) or not isinstance(data.get("launch"), Mapping):
            return data
        if "url" in data:
            raise PydanticCustomError("one_of", "write either url or launch, not both")
        # A bad address is reported by `launch` itself; it must not add a second finding here.
        port, socket = data["launch"].get("port"), data["launch"].get("socket")
        good = isinstance(port, int | str) and str(port).isdecimal()
        url = f"http://127.0.0.1:{port if good else 1}"
        if socket is not None:
            with suppress(ValidationError):
                url = f"unix:{_SOCKET.validate_python(socket, context=info.context)}"
        return {**data, "url": url}


class AdapterConfig(Section):
    """One LoRA adapter. A plain name is short for {name: ...}."""

    name: ModelName = Field(description="The model name that clients use for it.")
    path: str | None = setting(
        None, "Where the backend finds it: it is loaded there, and again after a restart."
    )


class QueueConfig(Section):
    """What may wait for room on a backend, and how long. Waiting is fair between tenants."""

    max_requests: int = setting(1024, "Most requests that wait at a time; 0: none ever.", ge=0)
    max_tokens: Tokens = setting("4M", "Most tokens (prompts and expected outputs) that wait.")
    max_bytes: Size = setting("256MiB", "Most bytes of request bodies that wait.")
    max_wait: DurationOrZero = setting("30s", "Longest wait before a request is shed.")
    tenant_share: float = setting(0.5, "Most of each that one tenant may hold (0..1].", gt=0, le=1)
    announce: bool = setting(
        False, "Answer waiting streams with 200 and comments that tell their position."
    )


class KvConfig(Section):
    """When the KV cache of a backend counts as full. The gap keeps it from flapping."""

    stop_admitting: float = setting(0.90, "From this usage (0..1) on, no new work.", gt=0, le=1)
    resume: float = setting(0.80, "Below this usage (0..1), work again.", ge=0, lt=1)


class Admission(Enum):
    """Whether the gateway decides when a request may enter an engine."""

    ON = "on"
    OFF = "off"


class SloConfig(Section):
    """What clients should see; the concurrency limits adapt to it."""

    ttft: Duration = setting("2.5s", "Time to the first token of a short prompt, for 9 of 10.")
    itl: Duration = setting("80ms", "Mean time between tokens.")


def _named_by_position(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        return value
    widened = ({"url": item} if isinstance(item, str) else item for item in value)
    return [
        {"name": f"b{place}", **item} if isinstance(item, Mapping) else item
        for place, item in enumerate(widened, start=1)
    ]


class PoolConfig(Section):
    """The backends that serve one model, under the name that clients use."""

    aliases: tuple[ModelName, ...] = setting((), "Further names that clients may use.")
    backends: Annotated[
        tuple[Annotated[BackendConfig, OrText("url")], ...], BeforeValidator(_named_by_position)
    ] = Field(min_length=1, description="The vLLM servers: URLs, or mappings with url or launch.")
    served_model: ModelName | None = setting(
        None,
        "The name the backends know the model by. Default: the pool's name or an alias where a"
        " backend has it, else the only base model it serves.",
    )
    max_context: Annotated[Tokens | None, OrWord("auto", None)] = setting(
        "auto",
        "Largest prompt plus output in tokens. auto: as the backends say; a number caps it, and what"
        " nobody can count must then fit by its bytes.",
    )
    on_overflow: OverflowPolicy = setting(
        "reject", "Output that does not fit beside the prompt: reject (400) or clamp it."
    )
    adapters: Annotated[
        Literal["auto"] | tuple[Annotated[AdapterConfig, OrText("name")], ...],
        OrWord("auto", "auto"),
    ] = setting("auto", "LoRA names: auto (those the backends have), or a list.")
    tokenizer: Annotated[FilePath | None, EmptyIsNone] = setting(
        None,
        "Folder with tokenizer.json, to count prompts here. Default: the folder of the model that is"
        " launched, where it is on this machine and no flag changes prompts; else ask a backend.",
    )
    endpoints: tuple[Endpoint, ...] | None = setting(
        None, "Endpoints it serves. Default: what the backends say."
    )
    parameters: ParametersConfig = setting({}, "What requests to this pool may ask for.")
    prefix_cache: PrefixCache = setting(
        "shared",
        "shared: all tenants. per_tenant: each has its own, by a salt, and `cached_tokens` is hidden:"
        " nobody can find out what another tenant has asked.",
    )
    queue: QueueConfig = setting({}, "What may wait for a free place.")
    kv: KvConfig = setting({}, "When a KV cache counts as full.")
    slo: SloConfig = setting({}, "What clients should see.")
    admission: Admission = setting(
        "on", "on: requests wait here until a backend has room. off: all are sent at once."
    )
    slow_start: DurationOrZero = setting(
        "60s", "A restarted backend gets its full share of requests only after this time."
    )
    supervision: SupervisionConfig = setting({}, "When and how its backends are restarted.")
    remedies: tuple[Remedy, ...] = setting(
        (), "What may be changed of a command line whose server does not start, in this order."
    )
    min_context: Tokens = setting(4096, "No remedy lowers the context window below this.")
    min_num_seqs: int = setting(8, "No remedy lowers max-num-seqs below this.", ge=1)


class AdminConfig(Section):
    """The operators' listener: metrics, overview, readiness. Never on the public one."""

    listen: Address = setting("127.0.0.1:9090", "Address, or unix:/path.")
    token: Secret = setting(None, "Bearer token it asks for. Without one: loopback or UNIX only.")


class KeysConfig(Section):
    """Where the API keys are (hashes only)."""

    file: FilePath = setting("keys.yaml", "The keys file, relative to this file.")


class HealthConfig(Section):
    """How backends are watched."""

    interval: Duration = setting("2s", "Between two probes of /health.")
    timeout: Duration = setting("2s", "For a probe or a scrape to answer.")
    fall: int = setting(3, "Failed probes in a row until a backend is down.", ge=1)
    rise: int = setting(2, "Passed probes in a row until it is ready again.", ge=1)
    scrape_interval: Duration = setting("1s", "Between two reads of /metrics.")
    scrape_stale: Duration = setting("3s", "Age from which its load counts as unknown.")
    models_interval: Duration = setting("10s", "Between two reads of /v1/models.")
    progress: Duration = setting("30s", "No progress for this long with work running: it hangs.")


class LogFormat(Enum):
    """How log lines are written."""

    JSON = "json"
    TEXT = "text"


class LogLevel(Enum):
    """The least urgent lines that are written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogConfig(Section):
    """What is written about requests and events. Never prompt text, never keys."""

    access: bool = setting(True, "One line per request on standard output.")
    format: LogFormat = setting("json", "json or text, for lines that are not the access log.")
    level: LogLevel = setting("info", "debug, info, warning or error.")


class ShutdownConfig(Section):
    """How the gateway ends."""

    grace: DurationOrZero = setting("120s", "How long running streams may finish.")


def _check_redis(value: SecretStr | None) -> SecretStr | None:
    schemes = ("redis://", "rediss://", "unix://")
    if value is not None and not value.get_secret_value().startswith(schemes):
        raise PydanticCustomError("bad_url", "write it like redis://host:6379/0 or rediss://...")
    return value


class Config(Section):
    """The whole file."""

    version: Literal[1] = setting(1, "Version of this file's format.")
    listen: Address = setting("127.0.0.1:8080", "Public address, or unix:/path.")
    admin: AdminConfig = setting({}, "The operators' listener.")
    redis: Secret = setting(
        None, f"URL of a Redis that replicas share. Empty: one replica, in memory. {_LATER}"
    )
    keys: Annotated[KeysConfig | None, OrWord("none", None)] = setting(
        {}, "The API keys; `none` turns authentication off."
    )
    pools: dict[ModelName, PoolConfig] = Field(
        min_length=1, description="Pools of backends by the model name that clients use."
    )
    parameters: ParametersConfig = setting(
        {}, "What requests may ask for, in all pools. See `vllm-gateway config policy`."
    )
    limits: LimitsConfig = setting({}, "Bounds of what one client may make us hold.")
    timeouts: TimeoutsConfig = setting({}, "Deadlines of each step.")
    health: HealthConfig = setting({}, "How backends are watched.")
    log: LogConfig = setting({}, "What is written.")
    state: FilePath = setting(
        "state", "Folder for launched backends: their logs, what runs, remedies in force."
    )
    shutdown: ShutdownConfig = setting({}, "How the gateway ends.")

    check_redis = field_validator("redis")(_check_redis)


__all__ = [
    "Admission",
    "AdapterConfig",
    "AdminConfig",
    "BackendConfig",
    "Config",
    "HealthConfig",
    "KeysConfig",
    "KvConfig",
    "LaunchConfig",
    "LimitsConfig",
    "Listen",
    "LogConfig",
    "LogFormat",
    "LogLevel",
    "OverflowPolicy",
    "ParametersConfig",
    "PoolConfig",
    "PrefixCache",
    "QueueConfig",
    "RestartConfig",
    "Section",
    "ShutdownConfig",
    "SloConfig",
    "TimeoutsConfig",
]
