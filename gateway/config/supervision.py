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
    Section,
    Size,
    SocketPath,
    setting,
)

# Names of service managers. Nothing else ever reaches their command lines or paths.
_UNIT: Final = r"^[A-Za-z0-9][A-Za-z0-9:_.@-]{0,250}$"
_CONTAINER: Final = r"^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,127}$"
_KUBERNETES: Final = (
    r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?/(pod/|deployment/|statefulset/)?"
    r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$"
)
_WINDOW: Final = re.compile(r"([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d")


class Remedy(Enum):
    """What the supervisor may change of a command line so that a server starts."""

    LOWER_MAX_MODEL_LEN = "lower_max_model_len"
    LOWER_MAX_NUM_SEQS = "lower_max_num_seqs"
    ENFORCE_EAGER = "enforce_eager"
    FP8_KV_CACHE = "fp8_kv_cache"
    ADJUST_GPU_MEMORY_UTILIZATION = "adjust_gpu_memory_utilization"
    SPAWN = "spawn"
    NCCL_P2P_OFF = "nccl_p2p_off"
    SERIAL_START = "serial_start"


class Orphan(Enum):
    """What becomes of a server that outlived the gateway that started it."""

    ADOPT = "adopt"
    STOP = "stop"


class OnExit(Enum):
    """What becomes of a launched server when the gateway is told to end."""

    STOP = "stop"
    LEAVE = "leave"


class RestartConfig(Section):
    """How to restart a backend that runs under somebody else's supervision; exactly one way."""

    systemd: Annotated[str, Field(pattern=_UNIT)] | None = setting(
        None, "systemd unit, such as vllm@2.service."
    )
    docker: Annotated[str, Field(pattern=_CONTAINER)] | None = setting(
        None, "Name of the container."
    )
    kubernetes: Annotated[str, Field(pattern=_KUBERNETES)] | None = setting(
        None,
        "namespace/name of the pod (deleted: its controller makes it anew), or"
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

    command: tuple[str, ...] = Field(
        min_length=1, description="Program and arguments, such as [vllm, serve, Qwen/Qwen3-8B]."
    )
    port: Annotated[int, Field(ge=1, le=65535)] | None = setting(
        None, "Port it listens on, on 127.0.0.1."
    )
    socket: SocketPath | None = setting(
        None,
        "UNIX socket it listens on, in place of `port`, relative to this file: vLLM's --uds. A folder"
        " that is not there is made, for this user alone.",
    )
    gpus: tuple[Annotated[int, Field(ge=0)], ...] = setting(
        (), "GPUs it may see (CUDA_VISIBLE_DEVICES). Empty: all."
    )
    args: dict[str, JsonValue] = setting(
        {}, "Further flags without their dashes, such as {max-model-len: 8192}."
    )
    env: dict[str, str] = setting({}, "Further environment variables.")
    on_exit: OnExit = setting(
        "stop", "When the gateway ends: stop it, or leave it running for the next gateway."
    )
    orphan: Orphan = setting(
        "adopt", "A server that outlived its gateway: adopt it at the next start, or stop it."
    )

    @model_validator(mode="after")
    def _one_address(self) -> LaunchConfig:
        if (self.port is None) == (self.socket is None):
            raise PydanticCustomError("one_of", "write exactly one of port and socket")
        return self


class PatienceConfig(Section):
    """How long a server may stay silent in each stage of its start before it counts as hung."""

    config: Duration = setting("3m", "Until it has read its configuration and the model's.")
    distributed: Duration = setting("3m", "Until its workers have found each other (NCCL).")
    weights: Duration = setting("20m", "While it downloads and loads weights.")
    profiling: Duration = setting("10m", "While it measures memory and makes the KV cache.")
    graphs: Duration = setting("20m", "While it compiles and captures graphs, and warms up.")
    total: Duration = setting("60m", "The whole start, whatever it says.")


def _window(value: str | None) -> str | None:
    if value is not None and not _WINDOW.fullmatch(value):
        raise PydanticCustomError("bad_window", "write it like 02:00-05:00 (local time)")
    return value


class SupervisionConfig(Section):
    """When and how the backends of a pool are restarted. Those without launch or restart are not."""

    automatic: bool = setting(
        True, "Restart backends that exited, hang or degraded. false: only operators do."
    )
    drain: DurationOrZero = setting(
        "120s", "How long requests may finish before a restart that can wait."
    )
    stop_grace: DurationOrZero = setting("30s", "From SIGTERM to SIGKILL.")
    max_unavailable: float = setting(
        0.25, "Part of a pool that may be out at a time by our doing; at least one.", gt=0, le=1
    )
    backoff: Duration = setting("10s", "Pause before the second restart in a row; it doubles.")
    max_backoff: Duration = setting("5m", "Longest such pause.")
    max_restarts: int = setting(5, "Restarts within `within` until it is suspended.", ge=1)
    within: Duration = setting("30m", "See max_restarts.")
    patience: PatienceConfig = setting({}, "How long a start may take, by stage.")
    canary: DurationOrZero = setting(
        "30s",
        "A backend is asked for one token when nothing of it moved for so long (for half of it with"
        " requests in flight); 0s: never.",
    )
    slow_ratio: float = setting(
        0.3,
        "Restart one whose tokens per second under load stay below this part of its own past and"
        " of its peers' median; 0: never.",
        ge=0,
        lt=1,
    )
    max_memory: Annotated[Size | None, EmptyIsNone] = setting(
        None, "Restart one whose processes hold more host memory. Default: no limit."
    )
    restart_every: Annotated[Duration | None, EmptyIsNone] = setting(
        None, "Restart each backend when it has run this long, one after the other."
    )
    restart_window: Annotated[str | None, EmptyIsNone, AfterValidator(_window)] = setting(
        None, "Local time in which scheduled restarts may begin, such as 02:00-05:00."
    )
