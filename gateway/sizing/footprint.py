"""What a GPU holds beside the KV cache: weights, LoRA slots, and what can only be estimated.

Weights and LoRA slots are counted. vLLM measures activations, CUDA graphs and the runtime by a trial
run at its start; here they are estimated, each with its basis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gateway.sizing.kvcaches import Dtype, State
from gateway.sizing.modelshape import ModelShape
from gateway.sizing.serveplan import Device, Plan

MIB: Final = 1 << 20

# Tensors as wide as the model that live at the same time in a layer: residual, normed input,
# output of attention, output of the MLP.
_WIDE_TENSORS: Final = 4
# Beside them the MLP holds gate and up (twice its width) and their product (once).
_MLP_TENSORS: Final = 3
# Logits of the sampler in float32: as computed, and one copy for sorting or softmax. An assumption:
# the one log with a figure for activations (vLLM 0.6.6, Qwen2.5-1.5B, 1.40 GiB) had more than twice this.
_LOGITS_COPIES: Final = 2
# Of nine starts with this figure in their logs, seven took 0.21 to 0.55 GiB ("Graph capturing finished in 8
# secs, took 0.54 GiB"); two, of vLLM 0.8 and 0.9, took 4.1. vLLM's own estimates were 2.6 GiB with
# a draft model and 4.8 GiB of a GPU for a model on eight; once 0.16 where 0.54 were taken then.
_GRAPH_BYTES: Final = 512 * MIB
_GRAPHS: Final = "most vLLM logs report 0.2 to 0.55 GiB, some up to 4.8"
# Two starts on one GPU logged non_torch_memory: 0.23 and 1.11 GiB.
_RUNTIME_BYTES: Final = 256 * MIB
# Buffers of NCCL and of the custom all-reduce. An assumption: no log at hand has the figure.
_NCCL_BYTES: Final = 896 * MIB
# The estimates may be off by half of them, and at least by the difference of those two starts.
_LEAST_DOUBT_BYTES: Final = 1024 * MIB


@dataclass(frozen=True, slots=True)
class Estimate:
    """A part that is not counted but assumed, and the basis of the assumption."""

    what: str
    size_bytes: int
    basis: str


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one GPU of a pipeline stage holds beside the KV cache."""

    weights_bytes: int
    lora_bytes: int
    estimates: tuple[Estimate, ...]

    @property
    def estimated_bytes(self) -> int:
        """All that is estimated."""
        return sum(each.size_bytes for each in self.estimates)

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weights_bytes + self.lora_bytes + self.estimated_bytes

    @property
    def doubt_bytes(self) -> int:
        """By how much the whole may be more or less."""
        return max(_LEAST_DOUBT_BYTES, self.estimated_bytes // 2) if self.estimates else 0


def footprint(model: ModelShape, plan: Plan, stage: range, length: int) -> Footprint:
    """Return what a GPU of a pipeline stage holds. `length`: the context window in tokens."""
    dtype = plan.dtype or model.dtype
    held = model.weights.loaded(dtype).stage_bytes(stage, len(model.layers)) // plan.tp
    return Footprint(
        weights_bytes=held + _replicated_bytes(model, plan, stage, dtype),
        lora_bytes=_lora_bytes(model, plan, stage, dtype),
        estimates=_estimates(model, plan, dtype, length),
    )


def caveats(model: ModelShape) -> tuple[str, ...]:
    """Return what is neither counted nor estimated, and may take room all the same."""
    if not model.multimodal:
        return ()
    return (
        "at start vLLM tries the largest images or clips, and the memory of their encoder is not"
        " estimated here; leave more room or lower --limit-mm-per-prompt",
    )


def _replicated_bytes(model: ModelShape, plan: Plan, stage: range, dtype: Dtype) -> int:
    """Return the weights that tensor parallelism does not divide, in bytes: key and value heads, if fewer than GPUs.

    Each GPU then has one head of them in place of a part of one (vLLM `QKVParallelLinear`). Norms
    and routers, also whole on each, are too small to count.
    """
    if model.latent or not model.kv_heads or model.kv_heads >= plan.tp:
        return 0
    attentive = sum(
        any(not isinstance(cache, State) for cache in model.layers[layer]) for layer in stage
    )
    numbers = 2 * model.hidden * model.head_dim * attentive
    size = 1 if model.quantized else dtype.size
    return int(numbers * size * (1 - model.kv_heads / plan.tp))


def _lora_bytes(model: ModelShape, plan: Plan, stage: range, dtype: Dtype) -> int:
    """Return the bytes of the slots for adapters, which every linear layer of attention and MLP has, used or not.

    Down-projections of column-parallel layers are whole on each GPU, up-projections of row-parallel
    layers too (vLLM lora/layers/base_linear.py, column_parallel_linear.py; fully_sharded_loras is
    off by default). Layers of experts have a slot each.
    """
    if not plan.max_loras:
        return 0
    hidden, tp = model.hidden, plan.tp
    queries = model.heads * model.head_dim // tp
    kv = max(1, model.kv_heads // tp) * model.head_dim if model.kv_heads else 0
    one = model.inner // max(1, model.experts_per_token) // tp
    attention = 3 * hidden + queries + 2 * kv + queries + hidden
    mlp = 2 * (hidden + one) + one + hidden
    per_layer = attention + mlp * max(1, model.experts)
    return plan.max_loras * plan.max_lora_rank * per_layer * len(stage) * dtype.size


def _estimates(model: ModelShape, plan: Plan, dtype: Dtype, length: int) -> tuple[Estimate, ...]:
    batch = plan.batch(length)
    wide = _WIDE_TENSORS + model.experts_per_token  # each expert has an output of its own
    per_token = (_MLP_TENSORS * model.inner // plan.tp + wide * model.hidden) * dtype.size
    logits = batch.seqs * model.vocab * 4 * _LOGITS_COPIES
    found = [
        Estimate(
            "activations",
            batch.tokens * per_token + logits,
            f"{batch.tokens} tokens a step through the widest layer, logits of {batch.seqs}"
            " requests; vLLM measures it at start",
        )
    ]
    if plan.device is Device.CPU:
        return tuple(found)
    if not plan.enforce_eager:
        found.append(Estimate("CUDA graphs", _GRAPH_BYTES, _GRAPHS))
    many = plan.tp * plan.pp > 1
    size = _RUNTIME_BYTES + (_NCCL_BYTES if many else 0)
    basis = "vLLM logs with one GPU report 0.23 and 1.11 GiB"
    basis += "; NCCL is assumed" if many else ""
    found.append(Estimate("CUDA runtime", size, basis))
    return tuple(found)
