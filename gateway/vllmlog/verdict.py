"""The verdict on a log, and its JSON form, which scripts rely on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import msgspec

from gateway.config.supervision import Remedy

_EVIDENCE_CHARS: Final = 2_000
_WORDS_CHARS: Final = 200

# Narrower than `observe.redact`: evidence is of use only as it stands, names like hf_overrides too.
_SECRETS: Final = tuple(
    (re.compile(pattern), shown)
    for pattern, shown in (
        (r"(--[\w-]{0,40}(?:key|token|password|secret)[= ]+)[^\s-]\S*", r"\1***"),
        (r"\b(?:hf_|sk-|pk-|rk-|ghp_|nvapi-|gw_)[A-Za-z0-9_-]{16,}", "***"),
        (r"\b([Bb]earer|[Bb]asic) +[^\s\"',;]{8,}", r"\1 ***"),
        (
            r"\b(\w{0,30}(?:API_KEY|TOKEN|PASSWORD|SECRET|api_key|password)['\"]?[=:] ?['\"]?)[^\s\"',;}]{4,}",
            r"\1***",
        ),
        (r"(://)[^/\s@]{1,200}@", r"\1***@"),
    )
)


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


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to do about it.

    `flag` is an option of vLLM (`--max-model-len`), an environment variable (`HF_TOKEN`), or empty
    for what no option does. `value` is None for an option without one, or when the log has no
    number to compute it from; `why` says what it is for, in the second case also how to choose it.
    """

    flag: str
    value: str | None
    why: str
    action: Remedy | None = None
    remove: bool = False  # the flag is to be taken away, not added


class Confidence(Enum):
    """How sure the answer is."""

    HIGH = "high"  # a message that means just this
    MEDIUM = "medium"  # a message that can mean more, or an error without a rule
    LOW = "low"  # inferred from what is not in the log


_KEYS: Final = {"class": "kind", "phase": "when"}  # of the JSON form, where they differ
_ORDER: Final = ("class", "phase", "evidence", "cause", "remedies", "restart_helps", "confidence")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a log says about the last start in it."""

    kind: Kind
    when: When
    cause: str  # one sentence, with the numbers
    evidence: str = ""  # the line of the log that proves it; empty when none does
    line: int = 0  # its number, from 1, in what was read; 0: none
    remedies: tuple[Advice, ...] = ()  # the best first
    restart_helps: bool | None = None  # alone, with nothing changed; None: cannot be told
    confidence: Confidence = Confidence.MEDIUM
    rule: str = ""  # which message it was, finer than the class
    secondary: tuple[Kind, ...] = ()  # what else the log shows
    look_at: str = ""  # where to look if unsure

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong."""
        return self.kind is Kind.HEALTHY

    def fields(self) -> dict[str, Any]:
        """Return the JSON form; keys and values are stable, keys may be added."""
        told = msgspec.json.decode(msgspec.json.encode(self))
        first = {key: told.pop(_KEYS.get(key, key)) for key in _ORDER}
        return first | {key: told[key] for key in ("rule", "line", "secondary", "look_at")}


def without_secrets(text: str) -> str:
    """Return the text with credentials blotted out."""
    for pattern, shown in _SECRETS:
        text = pattern.sub(shown, text)
    return text


def shown(raw: str) -> str:
    """Return a line as it may be shown: as it stands in the log, credentials blotted out."""
    return without_secrets(raw[:_EVIDENCE_CHARS])


def proof(raw: str, number: int) -> tuple[str, int]:
    """Return a line and its number as evidence."""
    return shown(raw), number


def short(text: str) -> str:
    """Return words of a log for a sentence of ours."""
    return without_secrets(text.strip()[:_WORDS_CHARS].rstrip("."))


def as_number(text: str | None) -> float | None:
    """Read a number as logs write them; None if it is none."""
    try:
        return float((text or "").replace(",", "").rstrip("."))
    except ValueError:
        return None
