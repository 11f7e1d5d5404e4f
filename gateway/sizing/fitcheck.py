"""`check --fit`: do the models of launched backends fit on their GPUs, before anything starts?

Only models in a local folder can be judged, and only where the GPUs' memory is known: given, or told
by the driver (the extra `nvidia`). Whatever is not judged is said.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from gateway.config.check import Remark
from gateway.config.findings import Finding, KeyPath, Severity
from gateway.config.load import Loaded, placed
from gateway.config.models import BackendConfig
from gateway.config.supervision import LaunchConfig
from gateway.launch import cmdline
from gateway.launch.launcher import Changes
from gateway.sizing.fit import Fit, Verdict, fit
from gateway.sizing.fitways import Way, ways
from gateway.sizing.modelfolder import ModelFolderError, read_model
from gateway.sizing.serveplan import PlanError, plan_of_args

_GIB: Final = 1 << 30


def fit_findings(
    loaded: Loaded, file: Path, gpu_memory_bytes: int | None
) -> tuple[list[str], list[Finding]]:
    """Judge every launched backend of a configuration.

    Returns:
        What each one comes to in a few words, and the findings, at their places in the file.
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
    folder = model_folder(launch)
    memory_bytes = gpu_memory_bytes or _smallest_gpu(launch.gpus)
    if folder is None or memory_bytes is None:
        why = "its model is not a local folder" if folder is None else "the GPU memory is unknown"
        hint = "" if folder is None else "name it with --gpu-memory, such as --gpu-memory 24GiB"
        message = f"{backend.name}: cannot tell whether it fits: {why}"
        return "not judged", [Remark(path, "fit-unknown", message, hint, Severity.WARNING)]
    try:
        flags = cmdline.stated(launch, Changes())
        plan = plan_of_args(flags, max(1, len(launch.gpus)), memory_bytes)
        found = fit(read_model(folder), plan)
    except (ModelFolderError, PlanError) as error:
        return "not judged", [Remark(path, "fit-unknown", f"{backend.name}: {error}")]
    return found.verdict.value, list(_remarks(path, backend.name, found))


def _remarks(path: KeyPath, name: str, found: Fit) -> Iterator[Remark]:
    for problem in found.problems:
        yield Remark(path, "cannot-start", f"{name}: {problem}")
    if found.verdict is Verdict.TOO_LARGE:
        better = next((_way(each) for each in ways(found)), "")
        yield Remark(
            path,
            "does-not-fit",
            f"{name}: a request of {found.max_model_len} tokens needs"
            f" {found.needed_bytes / _GIB:.2f} GiB of KV cache on each GPU, but"
            f" only {found.kv_memory_bytes / _GIB:.2f} GiB are left",
            better,
        )
    elif found.verdict is Verdict.TIGHT:
        yield Remark(
            path,
            "fits-tightly",
            f"{name}: it fits only if the estimates (everything except the KV cache) are right",
            f"a window of {found.surely_longest} tokens fits in any case",
            Severity.WARNING,
        )


def _way(way: Way) -> str:
    return f"{way.change}: {' '.join(way.flags)}" if way.flags else way.change


def model_folder(launch: LaunchConfig) -> Path | None:
    """Return the local folder of a launched backend's model; None where it is a name on a hub."""
    named = cmdline.stated(launch, Changes()).get("model")
    if not isinstance(named, str):
        words = [*launch.command, ""]
        named = words[words.index("serve") + 1] if "serve" in launch.command else ""
    folder = Path(named)
    return folder if named and folder.is_dir() else None


def _smallest_gpu(gpus: tuple[int, ...]) -> int | None:
    """Return the memory of the smallest of the GPUs, in bytes; None where nobody can tell."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        places = gpus or range(nvml.nvmlDeviceGetCount())
        devices = [nvml.nvmlDeviceGetHandleByIndex(place) for place in places]
        sizes = [int(nvml.nvmlDeviceGetMemoryInfo(each).total) for each in devices]
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()
    return min(sizes, default=None)
