"""The settings: one tree that is the source of defaults, units, help and JSON Schema.

Sections are frozen, and unknown keys are errors. Durations are float seconds here and `30s` in the file, sizes
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
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gateway.config.adapters import AdapterConfig
from gateway.config.kvevents import KvEventsConfig
from gateway.config.limits import CorsConfig, LimitsConfig, Proxy, TimeoutsConfig
from gateway.config.log import LogConfig, LogFormat, LogLevel
from gateway.config.names import BackendName, HeaderName, ModelName
from gateway.config.parameters import ParametersConfig, PrefixCache, PrefixRouting, Resume
from gateway.config.process import AdminConfig, HealthConfig, KeysConfig, Secret, ShutdownConfig
from gateway.config.supervision import LaunchConfig, Remedy, RestartConfig, SupervisionConfig
from gateway.config.traffic import (
    CanaryConfig,
    FallbackConfig,
    Labels,
    PreferConfig,
    Revision,
    ShadowConfig,
    Weight,
)
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
from gateway.core.traffic import Engine
from gateway.core.types import Endpoint

_SOCKET: Final = TypeAdapter[Any](SocketPath)


class OverflowPolicy(Enum):
    """What happens when prompt plus requested output exceed the context window."""

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
        description="Scheme, host and port, or unix:/path. Omit it with `launch`.",
    )
    api_key: Secret = setting(None, "Bearer token sent to the backend (vLLM's --api-key).")
    engine: Engine | None = setting(None, "What kind of server it is. Default: that of the pool.")
    max_in_flight: Annotated[int, Field(ge=1)] | None = setting(
        None, "Most requests in flight from this gateway. Default: no fixed limit."
    )
    weight: Weight = setting(
        1.0,
        "Its share of the pool's work: twice as much as 1 at 2; at 0 none unless no other serves.",
    )
    revision: Revision | None = setting(None, "What it runs, such as v2; see `canary` of the pool.")
    labels: Labels = setting(
        {}, "Where or what it is, such as {zone: eu-1}; see `prefer` of the pool."
    )
    max_cpu_loras: Annotated[int, Field(ge=1)] | None = setting(
        None,
        "Most LoRA adapters to load on it (its --max-cpu-loras). Default: as its `launch` says, else no limit.",
    )
    endpoints: tuple[Endpoint, ...] | None = setting(
        None, "Endpoints it serves. Default: those of the pool, or what the backend reports."
    )
    restart: RestartConfig | None = setting(
        None, "How to restart a server that something else starts."
    )
    launch: LaunchConfig | None = setting(None, "Start the server from here, instead of `url`.")
    kv_events: Annotated[KvEventsConfig | None, OrText("endpoint")] = setting(
        None, "Where it publishes KV events. Default: what the server, or its command line, tells."
    )

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


class QueueConfig(Section):
    """How many requests may wait for a backend, and how long. Tenants share the queue fairly."""

    max_requests: int = setting(1024, "Most waiting requests; 0: requests never wait.", ge=0)
    max_tokens: Tokens = setting("4M", "Most waiting tokens (prompts plus expected outputs).")
    max_bytes: Size = setting("256MiB", "Most bytes of waiting request bodies.")
    max_wait: DurationOrZero = setting(
        "30s",
        "Longest wait before a request is refused. Under overload it is shorter: as long as is of use.",
    )
    tenant_share: float = setting(
        0.5, "Largest share of each limit that one tenant may use (0..1].", gt=0, le=1
    )
    announce: bool = setting(
        False, "Answer waiting streams with 200 and comments that show their queue position."
    )


class KvConfig(Section):
    """When the KV cache of a backend counts as full. The gap between the two prevents flapping."""

    stop_admitting: float = setting(
        0.95, "At or above this KV cache usage (0..1), no new requests.", gt=0, le=1
    )
    resume: float = setting(
        0.85, "Below this KV cache usage (0..1), requests are admitted again.", ge=0, lt=1
    )


class Admission(Enum):
    """Whether the gateway decides when a request may enter an engine."""

    ON = "on"
    OFF = "off"


class SloConfig(Section):
    """Latency targets; the concurrency limits adapt to them."""

    ttft: Duration = setting(
        "2.5s", "Time to first token of a short prompt, at the 90th percentile."
    )
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

    aliases: tuple[ModelName, ...] = setting((), "Other model names that clients may use.")
    backends: Annotated[
        tuple[Annotated[BackendConfig, OrText("url")], ...], BeforeValidator(_named_by_position)
    ] = Field(min_length=1, description="The vLLM servers: URLs, or mappings with url or launch.")
    served_model: ModelName | None = setting(
        None,
        "The model's name on the backends. Default: the pool's name or an alias if a backend serves"
        " it, otherwise the backend's only base model.",
    )
    engine: Engine = setting(
        "vllm",
        "vllm, or openai: any other server with OpenAI's API (llama.cpp, Ollama, TGI, SGLang). Nothing"
        " that only vLLM knows is asked of it, and its load is judged by its concurrency limit.",
    )
    max_context: Annotated[Tokens | None, OrWord("auto", None)] = setting(
        "auto",
        "Largest prompt plus output, in tokens. auto: what the backends report. A number lowers it;"
        " prompts that cannot be counted must then fit by their size in bytes.",
    )
    on_overflow: OverflowPolicy = setting(
        "reject",
        "When more output is asked for than context or key allow: reject (400) or clamp it.",
    )
    adapters: Annotated[
        Literal["auto"] | tuple[Annotated[AdapterConfig, OrText("name")], ...],
        OrWord("auto", "auto"),
    ] = setting("auto", "LoRA adapters: auto (all that the backends list), or a list.")
    tokenizer: Annotated[FilePath | None, EmptyIsNone] = setting(
        None,
        "Folder with tokenizer.json, used to count prompts in the gateway. Default: the folder of the"
        " launched model, if it is local and no flag changes prompts; otherwise a backend counts.",
    )
    endpoints: tuple[Endpoint, ...] | None = setting(
        None, "Endpoints this pool serves. Default: what the backends report."
    )
    parameters: ParametersConfig = setting({}, "What requests to this pool may ask for.")
    prefix_cache: PrefixCache = setting(
        "shared",
        "shared: tenants share the prefix cache. per_tenant: each tenant has its own (by a cache salt)"
        " and `cached_tokens` is hidden, so nobody can probe what others asked.",
    )
    resume: Resume = setting(
        "exact",
        "exact: a stream whose backend fails goes on at another one, token for token, where that can be"
        " exact. off: it ends with an error.",
    )
    fallback: FallbackConfig = setting({}, "Pools that answer when this one cannot. Default: none.")
    prefer: PreferConfig = setting({}, "Backends that are nearer than others. Default: none.")
    prefix: PrefixRouting = setting(
        "approximate",
        "approximate: requests go where much of their prompt was sent before, if that saves more than"
        " the wait there. precise: where the engines tell that they hold it, by vLLM's KV events (needs"
        " `tokenizer` and the extra kvevents). off: the choice goes by load alone.",
    )
    canary: CanaryConfig | None = setting(None, "A revision on trial. Default: none.")
    shadow: ShadowConfig | None = setting(
        None, "A pool that gets copies of requests. Default: none."
    )
    queue: QueueConfig = setting({}, "The queue of this pool.")
    kv: KvConfig = setting({}, "When a KV cache counts as full.")
    slo: SloConfig = setting({}, "Latency targets.")
    admission: Admission = setting(
        "on", "on: requests wait here until a backend has room. off: requests are sent at once."
    )
    slow_start: DurationOrZero = setting(
        "60s", "Time over which a restarted backend ramps up to its full share of requests."
    )
    supervision: SupervisionConfig = setting({}, "When and how backends are restarted.")
    remedies: tuple[Remedy, ...] = setting(
        (),
        "Changes to the command line that the gateway may try, in this order, when vLLM does not start.",
    )
    min_context: Tokens = setting(4096, "No remedy lowers the context window below this.")
    min_num_seqs: int = setting(8, "No remedy lowers max-num-seqs below this.", ge=1)
    min_gpu_memory: float = setting(
        0.8,
        "No remedy lowers gpu-memory-utilization below this part of the configured value (0..1].",
        gt=0,
        le=1,
    )


def _check_redis(value: SecretStr | None) -> SecretStr | None:
    schemes = ("redis://", "rediss://", "unix://")
    if value is not None and not value.get_secret_value().startswith(schemes):
        raise PydanticCustomError("bad_url", "write it like redis://host:6379/0 or rediss://...")
    return value


class Config(Section):
    """The settings file."""

    version: Literal[1] = setting(1, "Format version of this file.")
    listen: Address = setting("127.0.0.1:8080", "Public address, or unix:/path.")
    admin: AdminConfig = setting({}, "The admin listener.")
    redis: Secret = setting(
        None,
        "URL of a Redis shared by replicas. Empty: one replica, state in memory. Accepted and checked,"
        " but not used by this version yet.",
    )
    keys: Annotated[KeysConfig | None, OrWord("none", None)] = setting(
        {}, "The API keys; `none` turns authentication off."
    )
    pools: dict[ModelName, PoolConfig] = Field(
        min_length=1, description="Pools of backends, by the model name that clients use."
    )
    parameters: ParametersConfig = setting(
        {}, "What requests may ask for, in all pools. See `vllm-gateway config policy`."
    )
    limits: LimitsConfig = setting({}, "Limits on what a client may send or leave unread.")
    timeouts: TimeoutsConfig = setting({}, "Deadlines of each step of a request.")
    trusted_proxies: tuple[Proxy, ...] = setting(
        (),
        "Proxies that tell the client's address in X-Forwarded-For: addresses, networks such as"
        " 10.0.0.0/8, or unix. Wrong keys count against the last address that none of them has."
        " Each must set or append to the header. Default: none, and the header is not read.",
    )
    session_header: HeaderName = setting(
        "x-session-id", "The header in which clients name the session that a request belongs to."
    )
    cors: CorsConfig = setting({}, "Which web pages may call from a browser. Default: none.")
    health: HealthConfig = setting({}, "How backends are monitored.")
    log: LogConfig = setting({}, "What is logged.")
    state: FilePath = setting(
        "state", "Folder for launched backends: logs, process records, remedies in force."
    )
    shutdown: ShutdownConfig = setting({}, "How the gateway shuts down.")

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
    "PrefixRouting",
    "Resume",
    "QueueConfig",
    "RestartConfig",
    "Section",
    "ShutdownConfig",
    "SloConfig",
    "TimeoutsConfig",
]
