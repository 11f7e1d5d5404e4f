"""GET /metrics: the families of vLLM 0.32 that a gateway can read load and progress from.

With `old_metrics` it has the names of vLLM <= 0.9: `gpu_` prefixes and no `engine` label.
"""

from __future__ import annotations

import time
from typing import Final

from gateway.sim.engine import Engine
from gateway.sim.shown import FINISH_REASONS
from gateway.sim.state import SimState

CONTENT_TYPE: Final = "text/plain; version=1.0.0; charset=utf-8"
_STARTED_AT: Final = time.time()

Labels = dict[str, str]
Sample = tuple[str, Labels, float]  # suffix, labels, value


class _Page:
    """A metrics page that is being written."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def family(self, name: str, kind: str, text: str, samples: list[Sample]) -> None:
        """Write the two comment lines and the samples of one metric."""
        self._lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        for suffix, labels, value in samples:
            inside = ",".join(f'{key}="{labels[key]}"' for key in sorted(labels))
            braces = f"{{{inside}}}" if inside else ""
            self._lines.append(f"{name}{suffix}{braces} {float(value)}")

    def body(self) -> bytes:
        """Return the whole page."""
        return ("\n".join(self._lines) + "\n").encode()


def render_metrics(state: SimState) -> bytes:
    """Write the page for all engines."""
    page = _Page()
    page.family(
        "process_start_time_seconds", "gauge", "Start of the process.", [("", {}, _STARTED_AT)]
    )
    _gauges(page, state)
    _counters(page, state)
    _histograms(page, state)
    _lora(page, state)
    _cache_config(page, state)
    return page.body()


def _each(state: SimState) -> list[tuple[Engine, Labels]]:
    """Pair each engine with its labels."""
    base = {"model_name": state.config.model}
    if state.config.old_metrics:
        return [(state.engines[0], base)]
    return [(e, base | {"engine": str(i)}) for i, e in enumerate(state.engines)]


def _gauges(page: _Page, state: SimState) -> None:
    each = _each(state)
    running: list[Sample] = [("", labels, e.gauges.running) for e, labels in each]
    waiting: list[Sample] = [("", labels, e.gauges.waiting) for e, labels in each]
    usage: list[Sample] = [("", labels, e.gauges.kv_usage_ratio) for e, labels in each]
    page.family("vllm:num_requests_running", "gauge", "Requests in the batch.", running)
    page.family("vllm:num_requests_waiting", "gauge", "Requests in the queue.", waiting)
    if state.config.old_metrics:
        page.family("vllm:gpu_cache_usage_perc", "gauge", "KV cache in use, 0 to 1.", usage)
        return
    page.family("vllm:kv_cache_usage_perc", "gauge", "KV cache in use, 0 to 1.", usage)
    reasons: list[Sample] = [
        ("", labels | {"reason": reason}, e.gauges.waiting if reason == "capacity" else 0)
        for e, labels in each
        for reason in ("capacity", "deferred")
    ]
    name = "vllm:num_requests_waiting_by_reason"
    page.family(name, "gauge", "Requests in the queue, by what they wait for.", reasons)
    asleep: list[Sample] = [
        ("", labels | {"sleep_state": word}, word == "awake")
        for _, labels in each
        for word in ("awake", "weights_offloaded", "discard_all")
    ]
    page.family("vllm:engine_sleep_state", "gauge", "1 for the state the engine is in.", asleep)


def _counters(page: _Page, state: SimState) -> None:
    each = _each(state)
    prefix = "vllm:gpu_prefix_cache" if state.config.old_metrics else "vllm:prefix_cache"
    table = [
        (f"{prefix}_queries_total", "Tokens looked up.", "prefix_queries"),
        (f"{prefix}_hits_total", "Tokens found.", "prefix_hits"),
        ("vllm:num_preemptions_total", "Preemptions.", "preemptions"),
        ("vllm:prompt_tokens_total", "Prompt tokens.", "prompt_tokens"),
        ("vllm:prompt_tokens_cached_total", "Prompt tokens not computed.", "cached_tokens"),
        ("vllm:generation_tokens_total", "Generated tokens.", "generation_tokens"),
    ]
    for name, text, attribute in table:
        samples: list[Sample] = [("", lab, getattr(e.totals, attribute)) for e, lab in each]
        page.family(name, "counter", text, samples)
    finished: list[Sample] = [
        ("", labels | {"finished_reason": reason}, e.totals.finished[reason])
        for e, labels in each
        for reason in FINISH_REASONS
    ]
    page.family("vllm:request_success_total", "counter", "Requests that ended.", finished)
    if not state.config.old_metrics:
        base = {"model_name": state.config.model}
        refused: list[Sample] = [
            ("", base | {"reason": "max_num_queued_reqs"}, state.admission_rejections),
            ("", base | {"reason": "max_num_queued_tokens"}, 0),
        ]
        page.family("vllm:admission_rejections_total", "counter", "Refused requests.", refused)


def _histograms(page: _Page, state: SimState) -> None:
    table = [
        ("vllm:iteration_tokens_total", "Tokens per step.", "iterations", "iteration_tokens"),
        ("vllm:time_to_first_token_seconds", "Time to first token.", "first_tokens", "ttft_s"),
    ]
    for name, text, count_of, sum_of in table:
        samples: list[Sample] = []
        for engine, labels in _each(state):
            count = getattr(engine.totals, count_of)
            samples.append(("_bucket", labels | {"le": "+Inf"}, count))
            samples.append(("_count", labels, count))
            samples.append(("_sum", labels, getattr(engine.totals, sum_of)))
        page.family(name, "histogram", text, samples)


def _lora(page: _Page, state: SimState) -> None:
    if not state.loaded:
        return
    running = sorted({a for e in state.engines for a in e.gauges.running_adapters})
    waiting = sorted({a for e in state.engines for a in e.gauges.waiting_adapters})
    shown = ",".join(running), ",".join(waiting)
    steps = sum(e.gauges.steps for e in state.engines)
    if shown not in state.lora_seen or steps != state.lora_steps:
        state.lora_seen[shown], state.lora_steps = time.time(), steps
    names = ("running_lora_adapters", "waiting_lora_adapters")
    most = {"max_lora": str(state.config.max_loras)}
    samples: list[Sample] = [
        ("", most | dict(zip(names, both, strict=True)), at) for both, at in state.lora_seen.items()
    ]
    text = "Adapters with requests; the series with the largest value is the present one."
    page.family("vllm:lora_requests_info", "gauge", text, samples)


def _cache_config(page: _Page, state: SimState) -> None:
    config = state.config
    blocks = 1 if config.encoder_only else config.blocks
    labels = {
        "block_size": str(config.block_size),
        "cache_dtype": "auto",
        "enable_prefix_caching": "True",
        "gpu_memory_utilization": "0.92",
        "num_gpu_blocks": str(blocks * config.dp),  # the only one that is summed over the engines
    }
    if not config.old_metrics:
        tokens = blocks * config.block_size
        most = None if config.encoder_only else tokens / config.max_model_len
        labels["kv_cache_size_tokens"] = str(tokens if most else None)
        labels["kv_cache_max_concurrency"] = str(most)
    samples: list[Sample] = [
        ("", labels | {"engine": str(i)}, 1.0) for i in range(len(_each(state)))
    ]
    page.family("vllm:cache_config_info", "gauge", "Sizes of the KV cache.", samples)
