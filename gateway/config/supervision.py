"""The settings of supervision: how backends are started, watched while they start, and restarted."""

from __future__ import annotations

import re
from enum import Enum
from typing import Annotated, Final

from pydantic import AfterValidator, ConfigDict, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from gateway.config.units import (
    Duration,
    DurationOrZero,
    EmptyIsNone,
    Hides,
    Section,
    Size,
    SocketPath,
    setting,
)

# Names of service managers. Nothing else ever reaches their command lines or paths.
UNIT: Final = r"^[A-Za-z0-9][A-Za-z0-9:_.@-]{0,250}$"
CONTAINER: Final = r"^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,127}$"
KUBERNETES: Final = (
    r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?/(pod/|deployment/|statefulset/)?"
    r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$"
)
_WINDOW: Final = re.compile(r"([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d")


class Remedy(Enum):
    """A change to the command line that may help a server start."""

    LOWER_MAX_MODEL_LEN = "lower_max_model_len"
    LOWER_MAX_NUM_SEQS = "lower_max_num_seqs"
    ENFORCE_EAGER = "enforce_eager"
    FP8_KV_CACHE = "fp8_kv_cache"
    ADJUST_GPU_MEMORY_UTILIZATION = "adjust_gpu_memory_utilization"
    SPAWN = "spawn"
    NCCL_P2P_OFF = "nccl_p2p_off"
    SERIAL_START = "serial_start"


class Orphan(Enum):
    """What happens to a server that outlived the gateway that started it."""

    ADOPT = "adopt"
    STOP = "stop"


class OnExit(Enum):
    """What happens to a launched server when the gateway shuts down."""

    STOP = "stop"
    LEAVE = "leave"


class RestartConfig(Section):
    """How to restart a server that something else starts. Name exactly one way."""

    systemd: Annotated[str, Field(pattern=UNIT)] | None = setting(
        None, "systemd unit, such as vllm@2.service."
    )
    docker: Annotated[str, Field(pattern=CONTAINER)] | None = setting(
        None, "Name of the container."
    )
    kubernetes: Annotated[str, Field(pattern=KUBERNETES)] | None = setting(
        None,
        "namespace/name of a pod (it is deleted, and its controller creates it again), or"
        " namespace/deployment/name or namespace/statefulset/name (restarted by a rollout).",
    )
    command: Annotated[tuple[str, ...], Field(min_length=1)] | None = setting(
        None, "Program and arguments, run without a shell."
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> RestartConfig:
        if len(self.model_fields_set) != 1:
            raise PydanticCustomError(
                "one_of", "name exactly one of systemd, docker, kubernetes and command"
            )
        return self


class LaunchConfig(Section):
    """A vLLM server that the gateway starts itself, on this machine."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    command: Annotated[tuple[str, ...], Hides.ARGUMENTS] = Field(
        min_length=1, description="Program and arguments, such as [vllm, serve, Qwen/Qwen3-8B]."
    )
    port: Annotated[int, Field(ge=1, le=65535)] | None = setting(
        None, "Port it listens on, on 127.0.0.1."
    )
    socket: SocketPath | None = setting(
        None,
        "UNIX socket it listens on, instead of `port` (vLLM's --uds), relative to this file. A missing"
        " folder is created, private to this user.",
    )
    gpus: tuple[Annotated[int, Field(ge=0)], ...] = setting(
        (), "GPUs it may use (CUDA_VISIBLE_DEVICES). Empty: all."
    )
    args: Annotated[dict[str, JsonValue], Hides.ARGUMENTS] = setting(
        {}, "More flags, without their dashes, such as {max-model-len: 8192}."
    )
    env: Annotated[dict[str, str], Hides.VALUES] = setting({}, "More environment variables.")
    on_exit: OnExit = setting(
        "stop",
        "When the gateway shuts down: stop the server, or leave it running for the next gateway.",
    )
    orphan: Orphan = setting(
        "adopt", "At the next start, adopt a server that is still running, or stop it."
    )

    @model_validator(mode="after")
    def _one_address(self) -> LaunchConfig:
        if (self.port is None) == (self.socket is None):
            raise PydanticCustomError("one_of", "write exactly one of port and socket")
        return self

    @property
    def started_with(self) -> dict[str, object]:
        """The settings that a running server was started with; the others are about its end.

        Settings at their defaults are left out, so that a new setting changes no server.
        """
        ends = {"on_exit", "orphan"}
        return self.model_dump(mode="json", exclude=ends, exclude_defaults=True)


class PatienceConfig(Section):
    """How long a start may log nothing in each stage before it counts as hung."""

    config: Duration = setting("3m", "Reading its own and the model's configuration.")
    distributed: Duration = setting("3m", "Connecting its workers (NCCL).")
    weights: Duration = setting("20m", "Downloading and loading weights.")
    profiling: Duration = setting("10m", "Measuring memory and creating the KV cache.")
    graphs: Duration = setting("20m", "Compiling, capturing graphs and warming up.")
    total: Duration = setting("60m", "The whole start, whatever it logs.")


def _window(value: str | None) -> str | None:
    if value is not None and not _WINDOW.fullmatch(value):
        raise PydanticCustomError("bad_window", "write it like 02:00-05:00 (local time)")
    return value


class SupervisionConfig(Section):
    """When and how backends are restarted. Backends without `launch` or `restart` are not."""

    automatic: bool = setting(
        True, "Restart backends that exit, hang or degrade. false: only operators restart them."
    )
    drain: DurationOrZero = setting(
        "120s", "Before a planned restart, how long running requests may take to finish."
    )
    stop_grace: DurationOrZero = setting("30s", "Time between SIGTERM and SIGKILL.")
    max_unavailable: float = setting(
        0.25,
        "Largest part of a pool that the gateway takes out at a time (0..1]; at least one backend.",
        gt=0,
        le=1,
    )
    backoff: Duration = setting(
        "10s", "Pause before the second restart in a row; it doubles each time."
    )
    max_backoff: Duration = setting("5m", "Longest pause between restarts.")
    max_restarts: int = setting(
        5, "Restarts within `within` after which a backend is suspended.", ge=1, le=10_000
    )
    within: Duration = setting("30m", "Time over which `max_restarts` counts.")
    patience: PatienceConfig = setting({}, "Deadlines of a start, by stage.")
    canary: DurationOrZero = setting(
        "30s",
        "After this long without progress (half of it with requests in flight), the gateway asks the"
        " backend for one token to see whether it works; 0s: never.",
    )
    slow_ratio: float = setting(
        0.3,
        "Restart a backend whose tokens per second under load stay below this fraction of its own past"
        " and of the median of its peers; 0: never.",
        ge=0,
        lt=1,
    )
    max_memory: Annotated[Size | None, EmptyIsNone] = setting(
        None, "Restart a backend whose processes use more host memory than this. Default: no limit."
    )
    restart_every: Annotated[Duration | None, EmptyIsNone] = setting(
        None, "Restart each backend after it has run this long, one at a time. Default: never."
    )
    restart_window: Annotated[str | None, EmptyIsNone, AfterValidator(_window)] = setting(
        None,
        "Local time in which scheduled restarts may begin, such as 02:00-05:00. Default: any time.",
    )
