"""Whether a model fits, how long requests may be, how many at a time: vLLM's arithmetic, before it runs.

vLLM has for the KV cache `gpu_memory_utilization` of a GPU's memory, less what it holds
besides (v1/worker/gpu_worker.py, `determine_available_memory`; v1/worker/utils.py,
`request_memory`). It starts if one request of the full context window fits into that, and one block
more (v1/core/kv_cache_utils.py, `get_kv_cache_configs`). How many such requests fit, and the tokens
that the cache holds, are what it logs as `KV cache size` and `Maximum concurrency`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from gateway.sizing.footprint import Footprint, caveats, footprint
from gateway.sizing.kvcaches import Heads, State
from gateway.sizing.kvlayout import KvLayout, Sizing, lay_out, split_layers
from gateway.sizing.modelshape import ModelShape
from gateway.sizing.serveplan import (
    AUTO_LEN,
    BLOCK_TOKENS,
    CPU_BLOCK_TOKENS,
    MLA_BLOCK_TOKENS,
    ONLINE_FP8,
    Device,
    KvDtype,
    Plan,
)


class Verdict(Enum):
    """Whether it starts, as far as can be known."""

    FITS = "fits"
    TIGHT = "tight"  # only if the estimates are not too low
    TOO_LARGE = "too_large"
    INVALID = "invalid"  # vLLM refuses the flags, whatever the memory


@dataclass(frozen=True, slots=True)
class Fit:
    """The answer. Bytes are of one GPU of the fullest pipeline stage."""

    model: ModelShape
    plan: Plan
    verdict: Verdict
    problems: tuple[str, ...]  # why vLLM refuses the flags
    caveats: tuple[str, ...]  # what is neither counted nor estimated
    max_model_len: int  # tokens; that of the plan, else the model's, or for AUTO_LEN what fits
    longest: int  # longest context window that fits, whole blocks; 0: none
    surely_longest: int  # the same, if the estimates are too low by all of their doubt
    held: Footprint
    budget_bytes: int  # what vLLM may take of the GPU
    kv_memory_bytes: int  # what is left of it for the KV cache; below 0: not even the weights fit
    needed_bytes: int  # of the KV cache, for one request of max_model_len
    token_bytes: int  # of one token, while it is inside every window
    far_token_bytes: int  # of one token that sliding windows have left behind
    state_bytes: int  # of one request, however long
    block_tokens: int
    blocks: int
    kv_tokens: int  # what vLLM logs as KV cache size
    concurrency: float  # requests of max_model_len at a time

    @property
    def fits(self) -> bool:
        """Whether it starts, by the middle of the estimates."""
        return self.verdict in (Verdict.FITS, Verdict.TIGHT)


def fit(model: ModelShape, plan: Plan) -> Fit:
    """Return whether a model fits as planned, and with how much room. Pure; never raises."""
    if plan.quantization == ONLINE_FP8 and not model.quantized:
        model = model.at_bits(8)
    problems = _problems(model, plan)
    wanted = plan.max_model_len or model.longest
    cap = model.longest if wanted == AUTO_LEN else wanted
    stages = split_layers(len(model.layers), max(1, min(plan.pp, len(model.layers))))
    layout = lay_out(model.layers, sizing(model, plan, cap), stages)
    held = [footprint(model, plan, stage, cap) for stage in stages]
    budget = math.ceil(plan.gpu_memory_bytes * plan.gpu_memory_utilization)
    fixed = _fixed(plan, layout)
    memory = fixed or [budget - each.total_bytes for each in held]
    longest = layout.longest(model.longest, memory)
    pessimistic = [each - beside.doubt_bytes for each, beside in zip(memory, held, strict=True)]
    surely = layout.longest(model.longest, fixed or pessimistic)
    length = max(1, layout.longest(cap, memory)) if wanted == AUTO_LEN else wanted
    fullest = min(range(len(stages)), key=lambda stage: memory[stage])
    near, far, state = _sizes(model, layout, stages[fullest])
    blocks = layout.pool_blocks(memory)
    per_request = layout.blocks(length)
    concurrency = blocks / per_request if per_request else float(plan.batch(length).seqs)
    return Fit(
        model=model,
        plan=plan,
        verdict=Verdict.INVALID if problems else _verdict(plan, layout, length, memory, held),
        problems=problems,
        caveats=caveats(model),
        max_model_len=length,
        longest=_whole_blocks(longest, model.longest, layout.block_tokens),
        surely_longest=_whole_blocks(surely, model.longest, layout.block_tokens),
        held=held[fullest],
        budget_bytes=budget,
        kv_memory_bytes=memory[fullest],
        needed_bytes=layout.needed_bytes(length, fullest),
        token_bytes=near,
        far_token_bytes=far,
        state_bytes=state,
        block_tokens=layout.block_tokens,
        blocks=blocks,
        kv_tokens=int(concurrency * length) if model.attentive else 0,
        concurrency=concurrency,
    )


def sizing(model: ModelShape, plan: Plan, length: int) -> Sizing:
    """Return what of a plan decides the layout of the KV cache."""
    dtype = plan.dtype or model.dtype
    kv = plan.kv_dtype
    if kv is KvDtype.AUTO and model.kv_fp8:
        kv = KvDtype.FP8
    if plan.device is Device.CPU:
        default = BLOCK_TOKENS if model.latent else CPU_BLOCK_TOKENS
    else:
        default = MLA_BLOCK_TOKENS if model.latent and not model.recurrent else BLOCK_TOKENS
    return Sizing(
        tp=plan.tp,
        block_tokens=plan.block_size or default,
        kv_bytes=kv.size(dtype),
        dtype=dtype,
        in_flight_tokens=plan.batch(length).in_flight_tokens,
        # vLLM has none for models without attention, whatever the flag says.
        prefix_caching=plan.prefix_caching and model.attentive,
        recurrent_dtype=plan.state_dtype,
    )


def _fixed(plan: Plan, layout: KvLayout) -> list[int] | None:
    """Return the bytes of the KV cache on a GPU of each stage, where a flag sets them; None: vLLM measures."""
    stages = range(len(layout.stages))
    if plan.num_gpu_blocks is not None:
        return [plan.num_gpu_blocks * layout.block_bytes(stage) for stage in stages]
    if plan.kv_cache_memory_bytes is not None:
        return [plan.kv_cache_memory_bytes for _ in stages]
    return None


def _verdict(
    plan: Plan, layout: KvLayout, length: int, memory: list[int], held: list[Footprint]
) -> Verdict:
    fixed = _fixed(plan, layout)
    if fixed is None:
        left = [each - layout.needed_bytes(length, stage) for stage, each in enumerate(memory)]
    elif plan.gpu_memory_bytes:
        # The utilisation does not count then; the GPU itself is the limit.
        left = [
            plan.gpu_memory_bytes - beside.total_bytes - each
            for each, beside in zip(fixed, held, strict=True)
        ]
        if min(left) < 0:
            return Verdict.TOO_LARGE
    else:
        left = [each.doubt_bytes for each in held]  # nothing is known of the GPU
    if not layout.fits(length, memory):
        return Verdict.TOO_LARGE
    sure = all(room >= each.doubt_bytes for room, each in zip(left, held, strict=True))
    return Verdict.FITS if sure else Verdict.TIGHT


def _whole_blocks(longest: int, most: int, block_tokens: int) -> int:
    """Round down to a block, unless it is all that the model can do."""
    return longest if longest >= most else longest // block_tokens * block_tokens


def _sizes(model: ModelShape, layout: KvLayout, stage: range) -> tuple[int, int, int]:
    """Return bytes of a token within and beyond windows, and of a request's state."""
    near = far = state = 0
    how = layout.sizing
    for cache in (cache for layer in stage for cache in model.layers[layer]):
        if isinstance(cache, State):
            state += how.state_bytes(cache)
            continue
        token = cache.token_bytes(how.tp, how.kv_bytes)
        near += token
        far += 0 if isinstance(cache, Heads) and cache.window is not None else token
    return near, far, state


def _problems(model: ModelShape, plan: Plan) -> tuple[str, ...]:
    """Return what vLLM refuses before it looks at memory.

    Source: vLLM config/model.py, `verify_with_parallel_config`, `_get_and_verify_max_len`;
    config/scheduler.py, `verify_max_model_len`.
    """
    found = []
    tp, pp = plan.tp, plan.pp
    if model.heads and model.heads % tp:
        found.append(f"{model.heads} attention heads cannot be divided evenly among {tp} GPUs")
    elif model.kv_heads and not model.latent and max(model.kv_heads, tp) % min(model.kv_heads, tp):
        found.append(f"{model.kv_heads} key/value heads cannot be divided evenly among {tp} GPUs")
    if pp > len(model.layers):
        found.append(f"{len(model.layers)} layers cannot be divided evenly among {pp} stages")
    wanted = plan.max_model_len or model.longest
    if wanted > model.longest:
        found.append(f"max-model-len {wanted} is more than the model's own {model.longest}")
    seqs, tokens = plan.max_num_seqs or 0, plan.max_num_batched_tokens
    if tokens and tokens < seqs:
        found.append(f"max-num-batched-tokens {tokens} is less than max-num-seqs {seqs}")
    return tuple(found)
