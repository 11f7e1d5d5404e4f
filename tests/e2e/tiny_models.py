"""Models of every layout of KV cache, small enough to start in seconds with random weights."""

from __future__ import annotations

import json
import pathlib
import shutil

_BASE = {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "head_dim": 32,
    "hidden_size": 128,
    "intermediate_size": 128,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "torch_dtype": "bfloat16",
    "vocab_size": 2048,
}

TINY = {
    "llama": {
        **_BASE,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 3,
    },
    "mistral": {
        **_BASE,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "num_hidden_layers": 3,
        "sliding_window": 256,
    },
    "gemma2": {
        **_BASE,
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "num_hidden_layers": 6,
        "query_pre_attn_scalar": 32,
        "sliding_window": 256,
    },
    "gemma3": {
        **_BASE,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 8,
        "query_pre_attn_scalar": 32,
        "sliding_window": 256,
        "sliding_window_pattern": 4,
    },
    "deepseek": {
        **{name: value for name, value in _BASE.items() if name != "head_dim"},
        "architectures": ["DeepseekV2ForCausalLM"],
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "model_type": "deepseek_v2",
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    "qwen3_next": {
        **_BASE,
        "architectures": ["Qwen3NextForCausalLM"],
        "decoder_sparse_step": 1,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 64,
        "model_type": "qwen3_next",
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 8,
        "shared_expert_intermediate_size": 64,
    },
    "jamba": {
        **_BASE,
        "architectures": ["JambaForCausalLM"],
        "attn_layer_offset": 2,
        "attn_layer_period": 4,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_dt_rank": 8,
        "mamba_expand": 2,
        "model_type": "jamba",
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 8,
        "use_mamba_kernels": False,
    },
    "granite4": {
        **_BASE,
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["mamba", "attention", "mamba", "mamba", "attention", "mamba"],
        "mamba_chunk_size": 64,
        "mamba_d_conv": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 32,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 8,
        "model_type": "granitemoehybrid",
        "num_experts_per_tok": 1,
        "num_hidden_layers": 6,
        "num_local_experts": 2,
        "shared_intermediate_size": 64,
    },
}


def write(folder: pathlib.Path, name: str, tokenizer: pathlib.Path) -> pathlib.Path:
    """Write the folder of one of them, with the tokenizer of another model. It has no weights."""
    made = folder / name
    made.mkdir()
    (made / "config.json").write_text(json.dumps(TINY[name]))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, made / file)
    return made
