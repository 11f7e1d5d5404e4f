"""What a rule of the diagnosis is, and what it finds: the values that all rule tables share."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Final

from gateway.vllmlog.lines import Line
from gateway.vllmlog.starts import Start


class Kind(Enum):
    """What is wrong. The values are part of the JSON that scripts read."""

    HEALTHY = "healthy"
    UNKNOWN = "unknown"
    KV_CACHE_TOO_SMALL = "kv_cache_too_small_for_max_model_len"
    NO_CACHE_MEMORY = "no_memory_for_cache_blocks"
    FREE_MEMORY_LOW = "insufficient_free_memory_at_start"
    OOM_LOAD = "cuda_oom_load"
    OOM_RUNTIME = "cuda_oom_runtime"
    HOST_MEMORY = "out_of_host_memory"
    DRIVER_TOO_OLD = "driver_too_old"
    NOT_ENOUGH_GPUS = "not_enough_gpus"
    NO_KERNEL = "cuda_no_kernel_image_unsupported_arch"
    CUDA_FAULT = "illegal_memory_access_or_device_assert"
    NCCL = "nccl_error_or_watchdog_timeout"
    TP_NOT_DIVISIBLE = "tp_not_divisible"
    MODEL_NOT_FOUND = "model_not_found"
    MODEL_GATED = "model_gated_auth"
    TRUST_REMOTE_CODE = "trust_remote_code_required"
    UNSUPPORTED_ARCHITECTURE = "unsupported_architecture"
    WEIGHTS = "weights_corrupt_or_shape_mismatch"
    TOKENIZER = "tokenizer_mismatch_or_load_error"
    CHAT_TEMPLATE = "chat_template_missing"
    QUANTIZATION = "quantization_unsupported_or_mismatch"
    DTYPE = "dtype_unsupported"
    LORA = "lora_misconfigured"
    NETWORK = "model_download_failed"
    DISK = "disk_full_or_hf_cache_corrupt"
    BAD_ARGUMENT = "bad_cli_argument"
    CONTEXT_LENGTH = "context_length_exceeded"
    PORT = "port_in_use"
    HANG = "engine_hang"
    EXECUTE_TIMEOUT = "execute_model_timeout"
    ENGINE_DEAD = "engine_dead_runtime"
    ENGINE_INIT = "engine_core_init_failed"
    OTHER = "other"


class When(Enum):
    """When it went wrong."""

    STARTUP = "startup"
    SERVING = "serving"


class Action(Enum):
    """The remedies that a supervisor may be allowed to apply by itself; the names of the policy."""

    LOWER_MAX_MODEL_LEN = "lower_max_model_len"
    LOWER_MAX_NUM_SEQS = "lower_max_num_seqs"
    ENFORCE_EAGER = "enforce_eager"
    FP8_KV_CACHE = "fp8_kv_cache"
    ADJUST_GPU_MEMORY_UTILIZATION = "adjust_gpu_memory_utilization"
    SPAWN = "spawn"
    NCCL_P2P_OFF = "nccl_p2p_off"
    SERIAL_START = "serial_start"


@dataclass(frozen=True, slots=True)
class Remedy:
    """One thing to do about it.

    `flag` is an option of vLLM (`--max-model-len`), an environment variable (`HF_TOKEN`), or empty
    for what no option does. `value` is None for an option without one, or when the log has no
    number to compute it from; `why` says what it is for, in the second case also how to choose it.
    """

    flag: str
    value: str | None
    why: str
    action: Action | None = None
    remove: bool = False  # the flag is to be taken away, not added


@dataclass(frozen=True)
class Found:
    """A line that a rule matched, where it stands, and what the start says around it."""

    start: Start
    place: int  # of the line in the start
    groups: Mapping[str, str] = field(default_factory=dict)

    @property
    def line(self) -> Line:
        """The line itself."""
        return self.start.lines[self.place]

    @cached_property
    def before(self) -> str:
        """The frames above the line, of its own process: where in the engine it happened."""
        lines = self.start.lines[max(0, self.place - _FRAMES) : self.place]
        return "\n".join(each.text for each in lines if each.process == self.line.process)

    def number(self, name: str) -> float | None:
        """Return a matched number, commas aside; None when it was not in the line."""
        return as_number(self.groups.get(name))

    def setting(self, name: str) -> float | None:
        """Return a number from the start's arguments, such as max_model_len; None if not given."""
        told = re.search(rf"['\"]?\b{name}['\"]?[=:] ?'?(-?[\d.]{{1,20}})", self.start.arguments)
        return None if told is None else as_number(told[1])


_FRAMES: Final = 150  # lines above an error that are looked at for frames


def as_number(text: str | None) -> float | None:
    """Read a number as logs write them; None if it is none."""
    try:
        return float((text or "").replace(",", "").rstrip("."))
    except ValueError:
        return None


HINT: Final = 2  # from this rank on, a rule is told only when nothing else explains it


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of a table: a message, and what it means.

    `pattern` is searched in lines that are not frames; its named groups fill `cause`.
    """

    name: str  # unique, short: which message it was
    kind: Kind
    pattern: str
    cause: str | Callable[[Found], str]
    remedies: tuple[Remedy, ...] | Callable[[Found], tuple[Remedy, ...]] = ()
    rank: int = 0  # the lowest wins, then the earliest: 0 specific, 1 broad, 2 and more a hint
    serving: bool = False  # may also be the cause of what happens while it serves
    request: bool = False  # harms one request only; the server goes on
    even_stopped: bool = False  # not normal even after it was asked to stop
    any_level: bool = False  # vLLM logs it at INFO or WARNING
    restart: bool | None = None  # whether a restart alone can help; None: as the stage says
    refine: Callable[[Found], Kind] | None = None  # the class, when it depends on the place
    look_at: str = ""
