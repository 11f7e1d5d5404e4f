"""What may be changed so that a server starts: what policy names first and the diagnosis offers.

Pure. A remedy is taken only with a value that can be computed, never below the pool's floors, and
never one that is in force already: what did not help once does not help again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pydantic import JsonValue

from gateway.config.flags import DEFAULT_UTILIZATION, UTILIZATION_FLAG, Flags, whole_number
from gateway.config.models import PoolConfig
from gateway.config.supervision import LaunchConfig, Remedy
from gateway.launch import cmdline
from gateway.launch.launcher import Changes
from gateway.vllmlog.diagnosis import Diagnosis

MAX_MODEL_LEN: Final = "max-model-len"
MAX_NUM_SEQS: Final = "max-num-seqs"

_ENV: Final[Mapping[Remedy, tuple[str, str]]] = {
    Remedy.SPAWN: ("VLLM_WORKER_MULTIPROC_METHOD", "spawn"),
    Remedy.NCCL_P2P_OFF: ("NCCL_P2P_DISABLE", "1"),
}


@dataclass(frozen=True, slots=True)
class Cure:
    """One remedy that is to be applied: what it changes, and why."""

    remedy: Remedy
    changes: Changes  # this one alone
    why: str


def cure(
    diagnosis: Diagnosis, pool: PoolConfig, launch: LaunchConfig, applied: Changes
) -> Cure | None:
    """Return the first remedy in the pool's own order that the diagnosis offers and that changes anything.

    Args:
        diagnosis: of the start that failed.
        pool: its settings: `remedies`, and the floors.
        launch: the command line as it is configured.
        applied: what earlier remedies changed of it.
    """
    configured, in_force = cmdline.stated(launch, Changes()), cmdline.stated(launch, applied)
    offers = {each.action: each for each in reversed(diagnosis.remedies) if each.action}
    for remedy in pool.remedies:
        offered = offers.get(remedy)
        if offered is None:
            continue
        changes = _changes(remedy, offered.value, pool, configured, in_force)
        if changes is None or _in_force(changes, in_force, applied):
            continue
        return Cure(remedy, changes, offered.why)
    return None


def merged(before: Changes, after: Changes) -> Changes:
    """Return both; what `after` says wins."""
    return Changes({**before.args, **after.args}, {**before.env, **after.env})


def _changes(
    remedy: Remedy, value: str | None, pool: PoolConfig, configured: Flags, in_force: Flags
) -> Changes | None:
    """Return what a remedy changes; None when its value is unknown or below a floor."""
    match remedy:
        case Remedy.LOWER_MAX_MODEL_LEN:
            return _lowered(MAX_MODEL_LEN, value, pool.min_context, in_force)
        case Remedy.LOWER_MAX_NUM_SEQS:
            return _lowered(MAX_NUM_SEQS, value, pool.min_num_seqs, in_force)
        case Remedy.ENFORCE_EAGER:
            return Changes({"enforce-eager": True})
        case Remedy.FP8_KV_CACHE:
            # fp8_e4m3 and the like are as small.
            is_fp8 = str(in_force.get("kv-cache-dtype", "")).startswith("fp8")
            return None if is_fp8 else Changes({"kv-cache-dtype": "fp8"})
        case Remedy.ADJUST_GPU_MEMORY_UTILIZATION:
            return _utilization(value, pool.min_gpu_memory, configured)
        case Remedy.SPAWN | Remedy.NCCL_P2P_OFF:
            name, word = _ENV[remedy]
            return Changes(env={name: word})
        case Remedy.SERIAL_START:
            return Changes()


def _utilization(value: str | None, floor_part: float, configured: Flags) -> Changes | None:
    """Return the utilization that the diagnosis offers, unless too little of the configured one is left.

    What the diagnosis offers follows from the memory that is free at this moment. The floor counts
    from the configured value, so that remedies in a row do not go lower and lower.
    """
    wanted = _ratio(value)
    before = _ratio(configured.get(UTILIZATION_FLAG, DEFAULT_UTILIZATION))
    if wanted is None or before is None or wanted < round(floor_part * before, 4):
        return None
    return Changes({UTILIZATION_FLAG: wanted})


def _ratio(value: JsonValue) -> float | None:
    try:
        ratio = float(str(value))
    except ValueError:
        return None
    return ratio if 0 < ratio < 1 else None


def _lowered(flag: str, value: str | None, floor: int, in_force: Flags) -> Changes | None:
    wanted, now = _tokens(value), _tokens(in_force.get(flag))
    if wanted is None or wanted < floor or (now is not None and wanted >= now):
        return None
    return Changes({flag: wanted})


def _tokens(value: JsonValue) -> int | None:
    try:
        return whole_number(str(value))
    except ValueError:
        return None  # `auto`, `-1`, or a form of another version


def _in_force(changes: Changes, in_force: Flags, applied: Changes) -> bool:
    return all(in_force.get(name) == value for name, value in changes.args.items()) and all(
        applied.env.get(name) == value for name, value in changes.env.items()
    )
