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
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gateway.config.adapters import AdapterConfig
from gateway.config.admission import Admission, KvConfig, QueueConfig, SloConfig
from gateway.config.keylimits import PricesConfig, TenantConfig
from gateway.config.keysettings import KeySettings, TierName
from gateway.config.kvevents import KvEventsConfig
from gateway.config.limits import CorsConfig, LimitsConfig, Proxy, TimeoutsConfig
from gateway.config.log import LogConfig
from gateway.config.names import BackendName, HeaderName, ModelName
from gateway.config.parameters import ParametersConfig, PrefixCache, PrefixRouting, Resume
from gateway.config.process import (
    AdminConfig,
    Bearer,
    HealthConfig,
    KeysConfig,
    RedisUrl,
    ShutdownConfig,
)
from gateway.config.supervision import LaunchConfig, Remedy, RestartConfig, SupervisionConfig
from gateway.config.traces import TracesConfig
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
    DurationOrZero,
    EmptyIsNone,
    FilePath,
    OrText,
    OrWord,
    Section,
    SocketPath,
    Tokens,
    setting,
)
from gateway.config.usage import UsageConfig
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
        description="Short name, unique in the pool. Default: b1, b2, ... by position at first; an address then"
        " keeps its name, unless gateways share a Redis.",
    )
    url: BackendUrl = Field(
        default_factory=str,
        validate_default=True,
        description="Scheme, host and port, or unix:/path. Omit it with `launch`.",
    )
    api_key: Bearer = setting(None, "Bearer token sent to the backend (vLLM's --api-key).")
    engine: Engine | None = setting(None, "What kind of server it is. Default: that of the pool.")
    max_in_flight: Annotated[int, Field(ge=1)] | None = setting(
        None,
        "Most requests in flight, of all workers and of gateways that share a store; each may have an even part "
        "of it, so for a while there may be more. Default: no fixed limit.",
    )
    weight: Weight = setting(
        1.0,
        "Its share of the pool's work, relative to the others. 0: used only when no other backend can serve.",
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
        if not isinstance(data, Mapping) or data.get("launch") is None:
            return data
        if "url" in data:
            raise PydanticCustomError("one_of", "write either url or launch, not both")
        # What is wrong with `launch` is reported there; it must not add a second finding here.
        launch = data["launch"] if isinstance(data["launch"], Mapping) else {}
        port, socket = launch.get("port"), launch.get("socket")
        good = isinstance(port, int | str) and str(port).isdecimal()
        url = f"http://127.0.0.1:{port if good else 1}"
        if socket is not None:
            with suppress(ValidationError):
                url = f"unix:{_SOCKET.validate_python(socket, context=info.context)}"
        return {**data, "url": url}


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
        "vllm, or openai: any other server with OpenAI's API (llama.cpp, Ollama, TGI, SGLang). No vLLM"
        " extension is used with it, and a concurrency limit alone bounds its load.",
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
        "exact: if a backend fails in the middle of a stream, another one continues it, token for token,"
        " where that can be exact. text: it continues the text, which is not exact, for engines that tell no"
        " token ids (continue_final_message). off: the stream ends with an error.",
    )
    resume_replies: Annotated[Tokens | None, OrWord("off", None)] = setting(
        "off",
        "Replies that are not streamed, and are expected to be at least this long, are streams inside: with"
        " `resume: exact` another backend can continue them. It costs an engine what a stream costs.",
    )
    move_after: DurationOrZero = setting(
        "10s",
        "A backend that was drained this long ago loses the streams that others can go on with (`resume`).",
    )
    fallback: FallbackConfig = setting({}, "Pools that answer when this one cannot. Default: none.")
    prefer: PreferConfig = setting({}, "Which backends to prefer, by labels. Default: none.")
    prefix: PrefixRouting = setting(
        "approximate",
        "approximate: a request goes to a backend that got much of the same prompt before, unless the wait"
        " there costs more than it saves. precise: the same, by vLLM's KV events (needs `tokenizer` and the"
        " extra kvevents). off: requests go by load alone.",
    )
    canary: CanaryConfig | None = setting(
        None, "A new revision that gets some requests. Default: none."
    )
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


class Config(Section):
    """The settings file."""

    version: Literal[1] = setting(1, "Format version of this file.")
    listen: Address = setting("127.0.0.1:8080", "Public address, or unix:/path.")
    workers: int = setting(
        1,
        "Processes that serve, best one for each core. With more than one, a parent process starts them.",
        ge=1,
        le=64,
    )
    admin: AdminConfig = setting({}, "The admin listener.")
    redis: RedisUrl = setting(
        None,
        "URL of the Redis or Valkey that replicas share, so that one of them restarts a backend, and"
        " what operators order holds at all. Empty: one replica, state in memory.",
    )
    keys: Annotated[KeysConfig | None, OrWord("none", None)] = setting(
        {}, "The API keys; `none` turns authentication off."
    )
    tiers: dict[TierName, KeySettings] = setting(
        {},
        "Templates of what keys may do. A key names one (`tier`), and may set single values itself.",
    )
    tenants: dict[str, TenantConfig] = setting({}, "Tenants that have limits, by name.")
    prices: PricesConfig = setting({}, "What tokens cost, for budgets and usage.")
    usage: UsageConfig = setting({}, "What is kept of usage.")
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
    traces: TracesConfig = setting({}, "Traces of requests. Default: none.")
    state: FilePath = setting(
        "state", "Folder for launched backends: logs, process records, remedies in force."
    )
    shutdown: ShutdownConfig = setting({}, "How the gateway shuts down.")


# Other packages import these from here, too.
__all__ = ["Admission", "HealthConfig", "PrefixCache", "QueueConfig"]
