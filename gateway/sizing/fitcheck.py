"""`check --fit`: check that the models of launched backends fit on their GPUs, before anything starts.

Only models in a local folder can be judged, and only where the memory of the GPUs is known: given, or read
from the driver (the extra `nvidia`). A warning names each backend that is not judged.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from gateway.config.findings import Finding, KeyPath, Remark, warning
from gateway.config.launched import model_of
from gateway.config.load import Loaded, placed
from gateway.config.models import BackendConfig
from gateway.config.supervision import LaunchConfig
from gateway.launch import cmdline
from gateway.launch.gpus import smallest_bytes
from gateway.launch.launcher import Changes
from gateway.sizing.fit import Fit, Verdict, fit
from gateway.sizing.fitways import Way, ways
from gateway.sizing.modelfolder import ModelFolderError, read_model
from gateway.sizing.modelshape import ModelShape
from gateway.sizing.serveplan import ONLINE_FP8, Device, Plan, PlanError, plan_of_args

_GIB: Final = 1 << 30


def fit_findings(
    loaded: Loaded, file: Path, gpu_memory_bytes: int | None
) -> tuple[list[str], list[Finding]]:
    """Judge every launched backend of a configuration.

    Returns:
        A few words about each backend, and the findings, at their places in the file.
    """
    words: list[str] = []
    findings: list[Finding] = []
    for pool, settings in loaded.config.pools.items():
        for place, backend in enumerate(settings.backends):
            if backend.launch is None:
                continue
            path: KeyPath = ("pools", pool, "backends", place, "launch")
            word, remarks = _judged(path, backend, backend.launch, gpu_memory_bytes)
            words.append(f"{pool}/{backend.name} {word}")
            findings += [placed(remark, loaded, file) for remark in remarks]
    return words, findings


def _judged(
    path: KeyPath, backend: BackendConfig, launch: LaunchConfig, gpu_memory_bytes: int | None
) -> tuple[str, list[Remark]]:
    folder = _model_folder(launch)
    try:
        flags, gpus = cmdline.stated(launch, Changes()), max(1, len(launch.gpus))
        plan = plan_of_args(flags, gpus, env=launch.env)
        if plan.device is Device.GPU:
            memory_bytes = gpu_memory_bytes or smallest_bytes(launch.gpus) or 0
            plan = replace(plan, gpu_memory_bytes=memory_bytes)
        why, hint = _unknown(plan, folder)
        if why or folder is None:
            return "not judged", [_not_judged(path, backend.name, why, hint)]
        model = read_model(folder)
        if why := _unknown_weights(plan, model):
            return "not judged", [_not_judged(path, backend.name, why)]
        found = fit(model, plan)
    except (ModelFolderError, PlanError) as error:
        return "not judged", [_not_judged(path, backend.name, str(error))]
    return found.verdict.value, list(_remarks(path, backend.name, found))


def _not_judged(path: KeyPath, name: str, why: str, hint: str = "") -> Remark:
    message = f"{name}: cannot tell whether it fits: {why}"
    return warning(path, "fit-unknown", message, hint)


def _unknown(plan: Plan, folder: Path | None) -> tuple[str, str]:
    """Return what the arithmetic needs and nobody knows, and what helps; empty where all is known."""
    if folder is None:
        return "its model is not a local folder", ""
    if plan.device is Device.CPU and plan.kv_cache_memory_bytes is None:
        hint = "set VLLM_CPU_KVCACHE_SPACE in `env`, in GiB"
        return "how much host memory vLLM takes for the KV cache is unknown", hint
    if plan.device is Device.GPU and not plan.gpu_memory_bytes:
        return "the GPU memory is unknown", "name it with --gpu-memory, such as --gpu-memory 24GiB"
    return "", ""


def _unknown_weights(plan: Plan, model: ModelShape) -> str:
    """Return why it is not known how large the weights on a GPU are; empty where it is."""
    if plan.dp > 1 and model.experts:
        return "how its engines share the experts (data-parallel-size) is not known here"
    if plan.quantization not in (None, ONLINE_FP8) and not model.quantized:
        return f"how small {plan.quantization} makes its weights is not known here"
    return ""


def _remarks(path: KeyPath, name: str, found: Fit) -> Iterator[Remark]:
    for problem in found.problems:
        yield Remark(path, "cannot-start", f"{name}: {problem}")
    if found.verdict is Verdict.TOO_LARGE:
        better = next((_way(each) for each in ways(found)), "")
        yield Remark(
            path,
            "does-not-fit",
            f"{name}: {_too_large(found)}",
            better,
        )
    elif found.verdict is Verdict.TIGHT:
        yield warning(
            path,
            "fits-tightly",
            f"{name}: it fits only if the estimates (everything except the KV cache) are right",
            _sure_way(found),
        )


def _sure_way(found: Fit) -> str:
    plan = found.plan
    if not found.surely_longest or plan.kv_cache_memory_bytes or plan.num_gpu_blocks:
        return ""  # no shorter window helps
    return f"a window of {found.surely_longest} tokens fits in any case"


def _too_large(found: Fit) -> str:
    plan, memory_bytes = found.plan, found.kv_memory_bytes
    if found.needed_bytes <= memory_bytes:  # a cache of a fixed size does not fit beside the rest
        return (
            f"{memory_bytes / _GIB:.2f} GiB of KV cache, as its flags say, do not fit beside"
            f" {found.held.total_bytes / _GIB:.2f} GiB of weights and the rest on each GPU"
        )
    where = "in host memory" if plan.device is Device.CPU else "on each GPU"
    left = f"only {memory_bytes / _GIB:.2f} GiB are left"
    if plan.num_gpu_blocks is not None:
        left = (
            f"--num-gpu-blocks-override {plan.num_gpu_blocks} makes {memory_bytes / _GIB:.2f} GiB"
        )
    elif plan.kv_cache_memory_bytes is not None:
        left = f"its settings give it {memory_bytes / _GIB:.2f} GiB"
    return (
        f"a request of {found.max_model_len} tokens needs {found.needed_bytes / _GIB:.2f} GiB of KV"
        f" cache {where}, but {left}"
    )


def _way(way: Way) -> str:
    return f"{way.change}: {' '.join(way.flags)}" if way.flags else way.change


def _model_folder(launch: LaunchConfig) -> Path | None:
    """Return the local folder of a launched backend's model; None where it is a name on a hub."""
    named = model_of(launch)
    return Path(named) if named is not None and os.path.isdir(named) else None
