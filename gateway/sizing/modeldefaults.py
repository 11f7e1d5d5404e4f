"""What a published config.json may leave out, because transformers has a default for it.

Sub-configs of multimodal models often hold only what differs: gemma-3-4b states neither its heads
nor their size. Only what memory depends on is listed.

Source: transformers 5.x, models/*/configuration_*.py, as installed beside vLLM 0.32; the test
tests/e2e/test_fit_real.py compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_GEMMA: Final = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_LLAMA: Final = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_QWEN: Final = {
    "vocab_size": 151936,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_LINEAR: Final = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "head_dim": 256,
}

DEFAULTS: Final[Mapping[str, Mapping[str, object]]] = {
    "cohere2": {"sliding_window": 4096, "tie_word_embeddings": True},
    "gemma": {"head_dim": 256, "tie_word_embeddings": True},
    "gemma2": {**_GEMMA, "vocab_size": 256000, "max_position_embeddings": 8192},
    "gemma3_text": {**_GEMMA, "vocab_size": 262208, "max_position_embeddings": 131072},
    "gpt_oss": {"head_dim": 64, "sliding_window": 128},
    "granitemoehybrid": {"mamba_expand": 2, "mamba_d_conv": 4},
    "jamba": {
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    "lfm2": {"tie_word_embeddings": True, "conv_L_cache": 3},
    "llama": _LLAMA,
    "llama4_text": {"head_dim": 128, "num_key_value_heads": 8, "num_attention_heads": 40},
    "mistral": {
        **_LLAMA,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "mixtral": {
        **_LLAMA,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "nemotron_h": {"head_dim": 128, "mamba_ssm_cache_dtype": "float32"},
    "phi3": {"num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 4096},
    "qwen2": {**_QWEN, "hidden_size": 4096, "intermediate_size": 22016},
    "qwen3": {**_QWEN, "hidden_size": 4096, "intermediate_size": 22016, "head_dim": 128},
    "qwen3_next": {**_LINEAR, "num_key_value_heads": 2, "num_attention_heads": 16},
    "qwen3_5_text": {**_LINEAR, "num_key_value_heads": 4, "num_attention_heads": 16},
}
