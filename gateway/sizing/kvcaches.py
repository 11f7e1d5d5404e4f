"""What the layers of a model keep per token and per request: the caches, as vLLM allocates them.

A layer has any number of caches: `Heads` (keys and values of grouped-query attention, all tokens or
a window of them), `Latent` (MLA: one compressed vector, the same on every GPU) and `State` (Mamba,
gated delta nets, short convolutions: a fixed size per request). Sizes are per GPU; `tp` is the
tensor-parallel size.

Source: vLLM 0.32, v1/kv_cache_interface.py (the page sizes), model_executor/layers/attention/
attention.py and mla_attention.py (`get_kv_cache_spec`), model_executor/layers/mamba/mamba_utils.py
(`MambaStateShapeCalculator`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final


class Dtype(Enum):
    """A floating point format of weights, activations or states, by vLLM's name for it."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"

    @property
    def size(self) -> int:
        """Bytes of one number."""
        return 4 if self is Dtype.FLOAT32 else 2

    @staticmethod
    def parse(text: str) -> Dtype:
        """Return the format by vLLM's or torch's name for it. ValueError: the name is not known."""
        short = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32"}
        name = text.lower().removeprefix("torch.")
        return Dtype(short.get(name, name))


# Of flashmla_sparse: NoPE part in fp8, RoPE part in bf16, scales. vLLM mla_attention.py.
SPARSE_MLA_FP8_BYTES: Final = 656


@dataclass(frozen=True, slots=True)
class Heads:
    """Keys and values of one attention layer; `window` tokens of them, or all."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None

    def token_bytes(self, tp: int, kv_bytes: int) -> int:
        """Return the bytes of one token on one GPU.

        With more GPUs than heads the heads are replicated: each GPU holds at least one
        (vLLM config/model.py, `get_num_kv_heads`).
        """
        return max(1, self.kv_heads // tp) * (self.key_dim + self.value_dim) * kv_bytes


@dataclass(frozen=True, slots=True)
class Latent:
    """The compressed vector of one MLA layer, whole on every GPU.

    Its size is kv_lora_rank + qk_rope_head_dim numbers. `fixed_bytes` counts where the format is
    its own: the index of sparse attention (DeepSeek-V3.2) is always fp8 with fp32 scales.
    `sparse`: with an fp8 cache the layer packs its own record of 656 bytes.
    """

    dim: int
    fixed_bytes: int | None = None
    sparse: bool = False

    def token_bytes(self, tp: int, kv_bytes: int) -> int:
        """Return the bytes of one token on one GPU; `tp` makes no difference."""
        del tp
        if self.fixed_bytes is not None:
            return self.fixed_bytes
        if self.sparse and kv_bytes == 1:
            return SPARSE_MLA_FP8_BYTES
        return self.dim * kv_bytes


@dataclass(frozen=True, slots=True)
class State:
    """What a recurrent layer keeps of one request, however long it is.

    It is a convolution over the last `conv_steps` inputs of `conv_channels` channels and of `groups` groups of
    `group_channels`, and `recurrent` numbers. `recurrent_dtype`: None takes that
    of the model. `checkpoints`: blocks kept beside the two of a request when prefixes are cached.
    """

    conv_channels: int
    conv_steps: int
    recurrent: int = 0
    groups: int = 0
    group_channels: int = 0
    conv_dtype: Dtype | None = None
    recurrent_dtype: Dtype | None = None
    checkpoints: int = 0

    def request_bytes(self, tp: int, dtype: Dtype, recurrent: Dtype | None = None) -> int:
        """Return the bytes of one request on one GPU. `recurrent`: the format that a flag sets.

        Groups that `tp` does not divide are extended, so that each GPU has those its heads need
        (vLLM mamba_utils.py, `extra_groups_for_head_shards`).
        """
        extra = 0 if not self.groups or self.groups % tp == 0 else tp - self.groups
        channels = self.conv_channels + (self.groups + extra) * self.group_channels
        conv = channels // tp * self.conv_steps * (self.conv_dtype or dtype).size
        chosen = recurrent or self.recurrent_dtype or dtype
        return conv + self.recurrent // tp * chosen.size


Cache = Heads | Latent | State
