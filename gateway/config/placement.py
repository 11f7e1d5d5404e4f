"""Check where launched backends go: GPUs and their memory, addresses, targets, and remedies that fit. Pure.

Checks of meaning like those of `config.check`, for `launch`, `restart` and `remedies`. What vLLM
itself decides at its start (does the model fit?) is for the fit planner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from pydantic import JsonValue

from gateway.config.findings import KeyPath, Remark, Severity, warning
from gateway.config.flags import DEFAULT_UTILIZATION, UTILIZATION_FLAG, in_force
from gateway.config.models import BackendConfig, Config, PoolConfig
from gateway.config.supervision import LaunchConfig, Remedy, RestartConfig
from gateway.config.units import Listen

# Above this sum of shares, what CUDA itself holds for each process leaves the last engine too little.
_MOST_SHARED: Final = 0.97
_HOST: Final = "127.0.0.1"
_ANY_HOST: Final = frozenset({"0.0.0.0", "::", "localhost", _HOST})
# With one of these, a process holds one rank only, or the sizes are those of several machines.
_SPREAD: Final = (
    "data-parallel-external-lb",
    "data-parallel-hybrid-lb",
    "data-parallel-multi-port-external-lb",
    "data-parallel-rank",
    "data-parallel-start-rank",
    "node-rank",
    "nnodes",
)


@dataclass(frozen=True, slots=True)
class _Launched:
    """One backend that the gateway starts."""

    pool: str
    path: KeyPath  # of its `launch`
    backend: BackendConfig
    launch: LaunchConfig
    flags: Mapping[str, JsonValue]

    @property
    def id(self) -> str:
        return f"{self.pool}/{self.backend.name}"

    @property
    def kind(self) -> str:
        return "port" if self.launch.socket is None else "socket"

    @property
    def address(self) -> str:
        return f"{self.kind} {self.launch.socket or self.launch.port}"


def check_placement(config: Config) -> Iterator[Remark]:
    """Yield everything that is wrong or doubtful with where and how backends are started."""
    launched = list(_launched(config))
    for each in launched:
        yield from _gpus(each)
        yield from _address(each, config)
    yield from _addresses(launched)
    yield from _memory(launched)
    yield from _targets(config)
    for name, pool in config.pools.items():
        yield from _remedies(name, pool, [each for each in launched if each.pool == name])


def _launched(config: Config) -> Iterator[_Launched]:
    for name, pool in config.pools.items():
        for place, backend in enumerate(pool.backends):
            if (launch := backend.launch) is not None:
                path: KeyPath = ("pools", name, "backends", place, "launch")
                flags = in_force(launch.command, launch.args)
                yield _Launched(name, path, backend, launch, flags)


# --- GPUs -----------------------------------------------------------------------------------------


def _gpus(each: _Launched) -> Iterator[Remark]:
    gpus = each.launch.gpus
    twice = sorted({gpu for gpu in gpus if gpus.count(gpu) > 1})
    if twice:
        yield Remark(
            (*each.path, "gpus"),
            "duplicate-gpu",
            f"GPU {', '.join(map(str, twice))} is listed twice for {each.id}",
            "list each GPU once",
        )
    elif gpus and (taken := gpus_taken(each.flags)) and taken[1] and taken[0] != len(gpus):
        yield Remark(
            (*each.path, "gpus"),
            "parallel-size",
            f"`gpus` of {each.id} lists {len(gpus)}, but {taken[1]} needs {taken[0]}",
            "list as many GPUs as it needs; without parallel sizes,"
            " tensor-parallel-size is the number of `gpus`",
        )
    if gpus and "CUDA_VISIBLE_DEVICES" in each.launch.env:
        yield warning(
            (*each.path, "env"),
            "gpus-overridden",
            f"CUDA_VISIBLE_DEVICES in `env` overrides the `gpus` of {each.id}",
            "use only `gpus`: the gateway reads it to see which servers share a GPU",
        )


def gpus_taken(flags: Mapping[str, JsonValue]) -> tuple[int, str] | None:
    """Return how many GPUs vLLM takes, and by which sizes (empty: none is stated); None where that does not follow."""
    if any(name in flags for name in _SPREAD) or flags.get("distributed-executor-backend") == "ray":
        return None
    here = "data-parallel-size-local"
    replicas = here if here in flags else "data-parallel-size"
    names = ("tensor-parallel-size", "pipeline-parallel-size", replicas)
    stated = [(name, _whole(flags[name])) for name in names if name in flags]
    product = 1
    for _, size in stated:
        if size is None:
            return None
        product *= size
    return product, " x ".join(f"{name} {size}" for name, size in stated)


def _memory(launched: list[_Launched]) -> Iterator[Remark]:
    """Judge each GPU by the backends that share it; report each group of backends once."""
    reported: set[tuple[str, ...]] = set()
    for gpu in sorted({gpu for each in launched for gpu in each.launch.gpus}):
        sharing = [each for each in launched if gpu in each.launch.gpus]
        ids = tuple(each.id for each in sharing)
        if len(sharing) > 1 and ids not in reported:
            remark = _crowded(gpu, sharing)
            if remark is not None:
                reported.add(ids)
                yield remark


def _crowded(gpu: int, sharing: list[_Launched]) -> Remark | None:
    # --kv-cache-memory-bytes makes vLLM ignore its share: what it takes is weights plus those bytes.
    fixed = [each for each in sharing if "kv-cache-memory-bytes" in each.flags]
    shares = {each.id: share_of(each.flags) for each in sharing if each not in fixed}
    known = [share for share in shares.values() if share is not None]
    if len(known) < len(shares):
        return None  # vLLM will say what is wrong with that number
    total = sum(known)
    if total < DEFAULT_UTILIZATION or (total <= _MOST_SHARED and not fixed):
        return None
    parts = ", ".join(f"{name} {share:g}" for name, share in shares.items())
    path = (*sharing[-1].path, "gpus")
    hint = f"set gpu-memory-utilization so that the shares add up to less than {_MOST_SHARED:g}"
    if fixed and total <= _MOST_SHARED:
        besides = ", ".join(each.id for each in fixed)
        message = f"GPU {gpu}: {parts} of its memory leaves too little for {besides}"
        return warning(path, "gpu-memory", message, hint)
    asleep = all(each.flags.get("enable-sleep-mode") is True for each in sharing)
    return Remark(
        path,
        "gpu-memory",
        f"GPU {gpu}: {parts} add up to {total:.2f} of its memory (the default share is"
        f" {DEFAULT_UTILIZATION:g})",
        "only one of them can be awake at a time" if asleep else hint,
        Severity.WARNING if asleep else Severity.ERROR,
    )


def share_of(flags: Mapping[str, JsonValue]) -> float | None:
    """Return the share of a GPU's memory that flags give an engine; None: it is no number."""
    value = flags.get(UTILIZATION_FLAG, DEFAULT_UTILIZATION)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def _whole(value: JsonValue) -> int | None:
    try:
        return int(value) if isinstance(value, int | str) and not isinstance(value, bool) else None
    except ValueError:
        return None


# --- addresses and targets ------------------------------------------------------------------------


def _address(each: _Launched, config: Config) -> Iterator[Remark]:
    launch = each.launch
    if launch.socket is None and "uds" in each.flags:
        yield Remark(
            each.path,
            "launch-address",
            f"--uds {each.flags['uds']} of {each.id} is not the address that the gateway uses",
            "write it as `socket`, instead of `port`",
        )
    ours = {"host": _HOST, "port": str(launch.port)}
    if launch.socket is not None:
        ours = {"uds": str(launch.socket), "host": "", "port": ""}
    for name, kept in ours.items():
        wanted = each.flags.get(name)
        if wanted is not None and str(wanted) != kept:
            by = f"replaced with --{name} {kept}" if kept else "dropped: it listens on a socket"
            yield warning(
                each.path,
                "launch-address",
                f"--{name} {wanted} of {each.id} is {by}",
                "launched servers listen on 127.0.0.1 and `launch.port`, or on `launch.socket`",
            )
    for path, listen in ((("listen",), config.listen), (("admin", "listen"), config.admin.listen)):
        if _clashes(listen, launch):
            yield Remark(
                (*each.path, each.kind),
                f"duplicate-{each.kind}",
                f"{each.address} of {each.id} is used by the gateway itself (`{'.'.join(path)}: {listen}`)",
                f"choose another {each.kind}",
            )


def _clashes(listen: Listen, launch: LaunchConfig) -> bool:
    if listen.unix is not None or launch.socket is not None:
        return listen.unix == launch.socket
    return listen.port == launch.port and listen.host in _ANY_HOST


def _addresses(launched: list[_Launched]) -> Iterator[Remark]:
    owners: dict[str, _Launched] = {}
    for each in launched:
        first = owners.setdefault(each.address, each)
        # Within a pool, `config.check` says that the backend is listed twice.
        if first is not each and first.pool != each.pool:
            yield Remark(
                (*each.path, each.kind),
                f"duplicate-{each.kind}",
                f"{each.address} of {each.id} is already used by {first.id}",
                f"give each launched server its own {each.kind}",
            )


def _targets(config: Config) -> Iterator[Remark]:
    owners: dict[str, str] = {}
    for name, pool in config.pools.items():
        for place, backend in enumerate(pool.backends):
            target = _target(backend.restart) if backend.restart is not None else None
            if target is None:
                continue
            first = owners.setdefault(target, f"{name}/{backend.name}")
            if first != f"{name}/{backend.name}":
                yield Remark(
                    ("pools", name, "backends", place, "restart"),
                    "duplicate-target",
                    f"{target} already restarts {first}, so both would restart at once",
                    "give each backend its own unit, container or pod",
                )


def _target(restart: RestartConfig) -> str | None:
    if restart.systemd is not None:
        known = restart.systemd.endswith((".service", ".target", ".scope", ".slice"))
        return f"the unit {restart.systemd if known else restart.systemd + '.service'}"
    if restart.docker is not None:
        return f"the container {restart.docker}"
    if restart.kubernetes is not None:
        return f"{restart.kubernetes.replace('/pod/', '/')} in Kubernetes"
    return None


# --- remedies -------------------------------------------------------------------------------------


def _fp8(each: _Launched) -> bool:
    return str(each.flags.get("kv-cache-dtype", "")).startswith("fp8")


# When a remedy would change nothing of a backend, and why.
_DONE: Final[Mapping[Remedy, tuple[Callable[[_Launched], bool], str]]] = {
    Remedy.ENFORCE_EAGER: (
        lambda each: each.flags.get("enforce-eager") is True,
        "enforce-eager is already set",
    ),
    Remedy.FP8_KV_CACHE: (_fp8, "the KV cache is already fp8"),
    Remedy.ADJUST_GPU_MEMORY_UTILIZATION: (
        lambda each: "kv-cache-memory-bytes" in each.flags,
        "vLLM ignores the utilization when kv-cache-memory-bytes is set",
    ),
    Remedy.NCCL_P2P_OFF: (
        lambda each: len(each.launch.gpus) == 1,
        "with one GPU there is no peer-to-peer traffic",
    ),
}


def _remedies(name: str, pool: PoolConfig, launched: list[_Launched]) -> Iterator[Remark]:
    path: KeyPath = ("pools", name, "remedies")
    if pool.remedies and not launched:
        yield warning(
            path,
            "idle-remedy",
            f"remedies change the command line of launched backends, but `{name}` has none",
            "use `launch`, or remove `remedies`",
        )
        return
    for place, remedy in enumerate(pool.remedies):
        why = _idle(remedy, pool, launched)
        if why:
            message = f"{remedy.value} has no effect on `{name}`: {why}"
            yield warning((*path, place), "idle-remedy", message)
        if remedy in pool.remedies[:place]:
            yield warning((*path, place), "idle-remedy", f"{remedy.value} is listed twice")


def _idle(remedy: Remedy, pool: PoolConfig, launched: list[_Launched]) -> str:
    if remedy is Remedy.LOWER_MAX_MODEL_LEN:
        windows = [_whole(each.flags.get("max-model-len")) for each in launched]
        if all(window is not None and window <= pool.min_context for window in windows):
            return f"no backend has a max-model-len above min_context ({pool.min_context})"
    elif remedy is Remedy.LOWER_MAX_NUM_SEQS:
        seqs = [_whole(each.flags.get("max-num-seqs")) for each in launched]
        if all(count is not None and count <= pool.min_num_seqs for count in seqs):
            return f"no backend has a max-num-seqs above min_num_seqs ({pool.min_num_seqs})"
    elif remedy in _DONE:
        idle, why = _DONE[remedy]
        if all(idle(each) for each in launched):
            return why
    return ""
