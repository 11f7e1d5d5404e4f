"""How far a start of vLLM has come, read from one line of its log, with the numbers that it tells.

    LAUNCHED -> CONFIG -> DISTRIBUTED_INIT -> LOADING_WEIGHTS -> PROFILING -> KV_CACHE -> GRAPHS
      -> WARM_UP -> SERVING

A stage begins with its first milestone. Not every start has all of them: `--enforce-eager` captures
no graphs, and torch.compile runs within the profiling run, so it counts as PROFILING. Several
workers tell the same stages; the stage of a start is the latest that was told.

Source: log messages of vLLM 0.5 to 0.32 (engine/arg_utils, v1/engine/core, v1/worker,
v1/core/kv_cache_utils, model_loader) and uvicorn.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from gateway.vllmlog.lines import Line, parse
from gateway.vllmlog.verdict import as_number


class Stage(IntEnum):
    """The stages of starting up, in order."""

    LAUNCHED = 0
    CONFIG = 1
    DISTRIBUTED_INIT = 2
    LOADING_WEIGHTS = 3
    PROFILING = 4
    KV_CACHE = 5
    GRAPHS = 6
    WARM_UP = 7
    SERVING = 8

    @property
    def words(self) -> str:
        """What is done in it, for people."""
        return _WORDS[self]


_WORDS: Final = {
    Stage.LAUNCHED: "launched",
    Stage.CONFIG: "reading its configuration",
    Stage.DISTRIBUTED_INIT: "connecting its workers (NCCL)",
    Stage.LOADING_WEIGHTS: "loading weights",
    Stage.PROFILING: "measuring memory",
    Stage.KV_CACHE: "making the KV cache",
    Stage.GRAPHS: "compiling and capturing graphs",
    Stage.WARM_UP: "warming up",
    Stage.SERVING: "serving",
}


@dataclass(frozen=True, slots=True)
class Milestone:
    """What one line tells; numbers that are not in it are None."""

    stage: Stage
    version: str | None = None  # of vLLM
    max_model_len: int | None = None  # tokens
    loaded_ratio: float | None = None  # checkpoint shards read, 0..1
    weights_gib: float | None = None  # per GPU
    weights_s: float | None = None  # to load them
    compile_s: float | None = None
    kv_cache_gib: float | None = None  # per GPU; negative when the weights left nothing
    kv_cache_tokens: int | None = None
    max_concurrency: float | None = None  # requests of max_model_len that the cache holds
    graphs_s: float | None = None  # to capture them
    graphs_gib: float | None = None
    engine_s: float | None = None  # profiling, cache, graphs and warm-up together


# Patterns are tried in order; named groups are fields of `Milestone`.
_N: Final = r"-?[\d.,]{1,20}"
_PATTERNS: Final = tuple(
    (stage, re.compile(pattern))
    for stage, pattern in (
        (Stage.SERVING, r"Application startup complete|^Uvicorn running on "),
        (Stage.LAUNCHED, r"vLLM API server version (?P<version>\S{1,60})|[█▄▀]\s+version (?P<version2>\S{1,60})"),
        (Stage.LAUNCHED, r"^non-default args: |^args: Namespace\("),
        (Stage.CONFIG, rf"^Using max model len (?P<max_model_len>{_N})"),
        (Stage.CONFIG, r"^(?:Resolved architecture: |Chunked prefill is enabled|This model supports multiple tasks)"),
        (Stage.DISTRIBUTED_INIT, r"^Initializing an? (?:V\d )?LLM engine \(v(?P<version>[^)]{1,60})\)"),
        (Stage.DISTRIBUTED_INIT, r"^(?:world_size=\d|rank \d+ in world size |vLLM is using nccl"
            r"|Started engine process)"),
        (Stage.LOADING_WEIGHTS, rf"^(?:Model loading|Loading model weights) took (?P<weights_gib>{_N}) ?Gi?B"
                                rf"(?: memory)?(?: and (?P<weights_s>{_N}) seconds)?"),
        (Stage.LOADING_WEIGHTS, rf"^Loading weights took (?P<weights_s>{_N}) seconds"),
        (Stage.LOADING_WEIGHTS, r"^Loading \w+ checkpoint shards: +(?P<loaded_ratio>\d{1,3})%"),
        (Stage.LOADING_WEIGHTS, r"^Starting to load model "),
        (Stage.PROFILING, rf"^torch\.compile (?:takes|took) (?P<compile_s>{_N}) s"),
        (Stage.PROFILING, r"^(?:Dynamo bytecode transform|Compiling a graph|Encoder cache will be|Memory profiling "
                          r"|Initial profiling|Profiling CUDA graph memory|Warming up model for the comp|saved AOT)"),
        (Stage.KV_CACHE, rf"^Available KV cache memory: (?P<kv_cache_gib>{_N}) GiB"),
        (Stage.KV_CACHE, rf"^\w+ KV cache size: (?P<kv_cache_tokens>{_N}) tokens"
                         rf"(?:, Maximum concurrency for {_N} tokens per request: (?P<max_concurrency>{_N})x)?"),
        (Stage.KV_CACHE, rf"^Maximum concurrency for {_N} tokens per request: (?P<max_concurrency>{_N})x"),
        (Stage.KV_CACHE, rf"^(?:# \w+ blocks: |Explicitly set \((?P<kv_cache_gib>{_N})/{_N}\) GiB for KV cache)"),
        (Stage.GRAPHS, rf"^Graph capturing finished in (?P<graphs_s>{_N}) secs(?:, took (?P<graphs_gib>{_N}) GiB)?"),
        (Stage.GRAPHS, r"^Capturing "),
        (Stage.WARM_UP, rf"^init engine \(profile.{{0,80}} took (?P<engine_s>{_N})"),
        (Stage.WARM_UP, r"^Supported[_ ]tasks: |^Starting vLLM (?:API )?server (?:\d+ )?on "
            r"|^Started server process "),
    )
)  # fmt: skip
_WHOLE: Final = frozenset({"kv_cache_tokens", "max_model_len"})
_TOLD_AT: Final = frozenset({"INFO", "WARNING", ""})  # the levels of milestones


def _joined(anchored: bool) -> re.Pattern[str]:
    told = (each.pattern for _, each in _PATTERNS if (each.pattern[0] == "^") is anchored)
    return re.compile("|".join(re.sub(r"\?P<\w+>", "?:", each) for each in told))


_BEGINS, _HOLDS = _joined(True), _joined(False)  # most lines are none: two looks tell


def stage_of(line: str) -> Milestone | None:
    """Return the milestone that a line of a log is, whatever its prefixes; None for most lines.

    Pure, and bounded in the length of the line. Nothing raises.
    """
    return milestone_of(parse(line))


def milestone_of(said: Line) -> Milestone | None:
    """Return the milestone that a line is; None for most lines."""
    if said.level not in _TOLD_AT or not (_BEGINS.match(said.text) or _HOLDS.search(said.text)):
        return None
    for stage, pattern in _PATTERNS:
        found = pattern.search(said.text)
        if found is not None:
            return _milestone(stage, found.groupdict())
    return None


def _milestone(stage: Stage, groups: dict[str, str | None]) -> Milestone:
    told = {name.rstrip("2"): text for name, text in groups.items() if text}
    version = told.pop("version", None)
    numbers = {name: as_number(text) for name, text in told.items()}
    whole = {name: int(number) for name, number in numbers.items() if name in _WHOLE and number}
    real = {name: number for name, number in numbers.items() if name not in _WHOLE}
    if (percent := real.get("loaded_ratio")) is not None:
        real["loaded_ratio"] = min(1.0, percent / 100)
    return Milestone(stage, version=version, **whole, **real)  # type: ignore[arg-type]
