"""How far a start of vLLM has come, read from one line of its log.

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
from enum import IntEnum
from typing import Final

from gateway.vllmlog.lines import Line, parse


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


# That the weights are in memory.
LOADED: Final = re.compile(
    r"^(?:Model loading|Loading model weights) took -?[\d.,]{1,20} ?Gi?B"
    r"|^Loading weights took -?[\d.,]{1,20} seconds"
)
# In each stage, how the lines begin that tell of it, or what they hold; tried in order.
_PATTERNS: Final = tuple(
    (stage, re.compile(pattern))
    for stage, pattern in (
        (Stage.SERVING, r"Application startup complete|^Uvicorn running on "),
        (Stage.LAUNCHED, r"vLLM API server version \S|[█▄▀]\s+version \S"),
        (Stage.LAUNCHED, r"^non-default args: |^args: Namespace\("),
        (Stage.CONFIG, r"^(?:Using max model len -?[\d.,]|Resolved architecture: |Chunked prefill is enabled"
                       r"|This model supports multiple tasks)"),
        (Stage.DISTRIBUTED_INIT, r"^(?:Initializing an? (?:V\d )?LLM engine \(v[^)]{1,60}\)|world_size=\d"
                                 r"|rank \d+ in world size |vLLM is using nccl|Started engine process)"),
        (Stage.LOADING_WEIGHTS, LOADED.pattern),
        (Stage.LOADING_WEIGHTS, r"^Loading \w+ checkpoint shards: +\d{1,3}%|^Starting to load model "),
        (Stage.PROFILING, r"^torch\.compile (?:takes|took) -?[\d.,]{1,20} s"),
        (Stage.PROFILING, r"^(?:Dynamo bytecode transform|Compiling a graph|Encoder cache will be|Memory profiling "
                          r"|Initial profiling|Profiling CUDA graph memory|Warming up model for the comp|saved AOT)"),
        (Stage.KV_CACHE, r"^Available KV cache memory: -?[\d.,]{1,20} GiB|^\w+ KV cache size: [\d.,]{1,20} tokens"
                         r"|^Maximum concurrency for [\d.,]{1,20} tokens per request: |^# \w+ blocks: "
                         r"|^Explicitly set \([\d.,]{1,20}/[\d.,]{1,20}\) GiB for KV cache"),
        (Stage.GRAPHS, r"^(?:Graph capturing finished in |Capturing )"),
        (Stage.WARM_UP, r"^init engine \(profile.{0,80} took [\d.,]"),
        (Stage.WARM_UP, r"^Supported[_ ]tasks: |^Starting vLLM (?:API )?server (?:\d+ )?on "
            r"|^Started server process "),
    )
)  # fmt: skip
_TOLD_AT: Final = frozenset({"INFO", "WARNING", ""})  # the levels of milestones


def _joined(anchored: bool) -> re.Pattern[str]:
    told = (each.pattern for _, each in _PATTERNS if (each.pattern[0] == "^") is anchored)
    return re.compile("|".join(told))


_BEGINS, _HOLDS = _joined(True), _joined(False)  # most lines are none: two looks tell


def stage_of(line: str) -> Stage | None:
    """Return the stage that a line of a log tells of, whatever its prefixes; None for most lines.

    Pure, and bounded in the length of the line. Nothing raises.
    """
    return stage_told(parse(line))


def stage_told(said: Line) -> Stage | None:
    """Return the stage that a line tells of; None for most lines."""
    if said.level not in _TOLD_AT or not (_BEGINS.match(said.text) or _HOLDS.search(said.text)):
        return None
    return next((stage for stage, pattern in _PATTERNS if pattern.search(said.text)), None)
