"""How a model is to be served: the flags of `vllm serve` that decide memory, with its defaults.

Source: vLLM 0.32, engine/arg_utils.py (`get_batch_defaults`), config/cache.py, config/vllm.py
(`max_concurrent_batches`).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from gateway.config.flags import DEFAULT_UTILIZATION, UTILIZATION_FLAG, whole_number
from gateway.sizing.kvcaches import Dtype

if TYPE_CHECKING:
    from pydantic import JsonValue

GIB: Final = 1 << 30
AUTO_LEN: Final = -1  # as long as the memory allows
BLOCK_TOKENS: Final = 16
CPU_BLOCK_TOKENS: Final = 128  # platforms/cpu.py
ONLINE_FP8: Final = "fp8"  # a quantization: vLLM makes it of 16-bit weights as it loads them
MLA_BLOCK_TOKENS: Final = 64  # FlashMLA; others take 32 or 128


class PlanError(ValueError):
    """The value of a flag cannot be read, or is not known here. The message names both."""


class Device(Enum):
    """What vLLM runs on."""

    GPU = "gpu"
    CPU = "cpu"


class KvDtype(Enum):
    """The format of the KV cache: that of the model, or 8 bits."""

    AUTO = "auto"
    FP8 = "fp8"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"

    def size(self, model: Dtype) -> int:
        """Bytes of one number, for the format that the model runs in."""
        if self is KvDtype.AUTO:
            return model.size
        return 1 if self is KvDtype.FP8 else Dtype(self.value).size


@dataclass(frozen=True, slots=True)
class Batch:
    """The most that one step of the engine takes."""

    seqs: int  # requests
    tokens: int
    in_flight_tokens: int  # scheduled and not yet settled, over all steps under way


@dataclass(frozen=True, slots=True)
class Plan:
    """The flags that decide memory; sizes and counts are above 0. None: vLLM's own default."""

    gpu_memory_bytes: int  # of one GPU, all of it
    tp: int = 1
    pp: int = 1
    dp: int = 1  # engines of one server, each with all of a dense model
    dtype: Dtype | None = None
    quantization: str | None = None  # of the weights; a checkpoint that has one keeps it
    kv_dtype: KvDtype = KvDtype.AUTO
    state_dtype: Dtype | None = None  # of recurrent layers; None: that of the model
    max_model_len: int | None = None  # tokens; AUTO_LEN: as long as fits
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float = DEFAULT_UTILIZATION
    kv_cache_memory_bytes: int | None = None  # per GPU; then the utilisation does not count
    num_gpu_blocks: int | None = None  # of the KV cache; then neither of the two above counts
    block_size: int | None = None
    enforce_eager: bool = False
    prefix_caching: bool = True
    max_loras: int = 0  # 0: LoRA is off
    max_lora_rank: int = 16
    device: Device = Device.GPU

    def batch(self, length: int) -> Batch:
        """Return the most that one step takes, for a context window. vLLM's defaults go by the GPU's memory.

        An A100 of 80 GiB has the defaults of a smaller GPU: state both flags for it.
        """
        seqs, tokens = self._default_batch()
        seqs = self.max_num_seqs or seqs
        tokens = self.max_num_batched_tokens or min(tokens, seqs * length)
        seqs = self.max_num_seqs or min(seqs, tokens)
        # One batch a stage is under way, and on GPUs one ahead (asynchronous scheduling).
        ahead = 1 if self.device is Device.GPU else 0
        return Batch(seqs, tokens, (self.pp + ahead) * tokens)

    def _default_batch(self) -> tuple[int, int]:
        if self.device is Device.CPU:
            return 128 * self.tp * self.pp, 2048 * self.tp * self.pp
        if self.gpu_memory_bytes >= 160 * GIB:
            return 1024, 16384
        return (1024, 8192) if self.gpu_memory_bytes >= 70 * GIB else (256, 2048)


# Methods of speculative decoding without a draft model, or heads that draft: config/speculative.py.
_WITHOUT_MODEL: Final = frozenset({"ngram", "[ngram]", "ngram_gpu", "suffix"})
_CPU_VARIABLES: Final = "VLLM_CPU_"  # envs.py: all of them are read by the CPU backend alone
# vllm/platforms/cpu.py: it wins over --kv-cache-memory-bytes.
_CPU_CACHE_GIB: Final = "VLLM_CPU_KVCACHE_SPACE"


def plan_of_args(
    flags: Mapping[str, JsonValue],
    gpus: int = 1,
    gpu_memory_bytes: int = 0,
    env: Mapping[str, str] | None = None,
) -> Plan:
    """Return the plan of `vllm serve` flags, by their long names as in `config.flags.in_force`.

    Args:
        flags: such as {"max-model-len": "32k", "enforce-eager": true}. Flags that do not decide memory are ignored.
        gpus: how many GPUs it may see. Tensor parallelism takes all of them, unless flags say
            otherwise; with `data-parallel-size` each engine has one.
        gpu_memory_bytes: of one of them.
        env: its environment. A variable of the CPU backend says that it runs on a CPU.

    Raises:
        PlanError: a value cannot be read, or is not known here.
    """
    if str(flags.get("cpu-offload-gb", 0)) not in ("0", "0.0"):
        raise PlanError(
            "cpu-offload-gb: how much of the weights stays on the GPU is not known here"
        )
    if _has_drafter(flags):
        raise PlanError("speculative-config: how much its draft model takes is not known here")
    pp = _whole(flags, "pipeline-parallel-size") or 1
    dp = _whole(flags, "data-parallel-size") or 1
    tp = _whole(flags, "tensor-parallel-size")
    env = env or {}
    cpu = "cpu" in str(flags.get("device", "")) or any(
        name.startswith(_CPU_VARIABLES) for name in env
    )
    if env.get(_CPU_CACHE_GIB):
        flags = {**flags, "kv-cache-memory-bytes": GIB * (_whole(env, _CPU_CACHE_GIB) or 0)}
    return Plan(
        gpu_memory_bytes=gpu_memory_bytes,
        tp=tp or (1 if dp > 1 else max(1, gpus // pp)),
        pp=pp,
        dp=dp,
        dtype=_dtype(flags, "dtype"),
        quantization=_quantization(flags),
        kv_dtype=_kv_dtype(flags),
        state_dtype=_dtype(flags, "mamba-ssm-cache-dtype"),
        max_model_len=_length(flags),
        max_num_seqs=_whole(flags, "max-num-seqs"),
        max_num_batched_tokens=_whole(flags, "max-num-batched-tokens"),
        gpu_memory_utilization=_ratio(flags),
        kv_cache_memory_bytes=_whole(flags, "kv-cache-memory-bytes"),
        num_gpu_blocks=_whole(flags, "num-gpu-blocks-override"),
        block_size=_whole(flags, "block-size"),
        enforce_eager=_is_on(flags, "enforce-eager"),
        prefix_caching=flags.get("enable-prefix-caching") is not False
        and not _is_on(flags, "disable-prefix-caching"),  # the last: 0.33
        max_loras=(_whole(flags, "max-loras") or 1) if _is_on(flags, "enable-lora") else 0,
        max_lora_rank=_whole(flags, "max-lora-rank") or 16,
        device=Device.CPU if cpu else Device.GPU,
    )


def _whole(flags: Mapping[str, JsonValue], name: str) -> int | None:
    value = flags.get(name)
    if value is None:
        return None
    try:
        number = whole_number(value) if isinstance(value, str) else int(str(value))
    except ValueError as error:
        raise PlanError(
            f"{name}: {value} is not a whole number; write it like 8192 or 8K"
        ) from error
    if number <= 0:
        raise PlanError(f"{name}: {value} must be more than 0")
    return number


def _length(flags: Mapping[str, JsonValue]) -> int | None:
    if str(flags.get("max-model-len")).lower() in ("auto", "-1"):
        return AUTO_LEN
    return _whole(flags, "max-model-len")


def _ratio(flags: Mapping[str, JsonValue]) -> float:
    value = flags.get(UTILIZATION_FLAG, DEFAULT_UTILIZATION)
    try:
        ratio = float(str(value))
    except ValueError as error:
        raise PlanError(
            f"gpu-memory-utilization: {value} is not a number; write it like 0.9"
        ) from error
    if not 0 < ratio <= 1:
        raise PlanError(f"gpu-memory-utilization: {value} must be above 0 and at most 1")
    return ratio


def _dtype(flags: Mapping[str, JsonValue], name: str) -> Dtype | None:
    value = str(flags.get(name, "auto"))
    try:
        return None if value == "auto" else Dtype.parse(value)
    except ValueError as error:
        known = "auto, half, float16, bfloat16, float, float32"
        raise PlanError(f"{name}: {value} is not one of {known}") from error


def _quantization(flags: Mapping[str, JsonValue]) -> str | None:
    value = flags.get("quantization")
    return None if value is None or str(value).lower() == "none" else str(value)


def _has_drafter(flags: Mapping[str, JsonValue]) -> bool:
    """Whether it drafts with weights and a KV cache of their own."""
    config = flags.get("speculative-config")
    if isinstance(config, str):
        with contextlib.suppress(ValueError):
            config = json.loads(config)
    told = config if isinstance(config, dict) else {}
    method, model = (
        flags.get(f"spec-{name}") or flags.get(f"speculative-config.{name}") or told.get(name)
        for name in ("method", "model")
    )
    drafts_by = method or model
    return bool(config or drafts_by) and str(drafts_by) not in _WITHOUT_MODEL


def _kv_dtype(flags: Mapping[str, JsonValue]) -> KvDtype:
    value = str(flags.get("kv-cache-dtype", "auto"))
    if value in ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla"):
        return KvDtype.FP8
    try:
        return KvDtype(value)
    except ValueError as error:
        known = ", ".join(each.value for each in KvDtype)
        raise PlanError(f"kv-cache-dtype: {value} is not supported; known: {known}") from error


def _is_on(flags: Mapping[str, JsonValue], name: str) -> bool:
    value = flags.get(name, False)
    return value is True or str(value).lower() in ("", "true", "1", "yes")
