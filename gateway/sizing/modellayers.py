"""Which caches each layer of a model has, from its config.json.

Source: vLLM 0.32, model_executor/models/*.py (`layer_types`, `per_layer_sliding_window`,
`get_mamba_state_shape_from_config`), engine/arg_utils.py (a window without layer_types is that of
every layer) and config/vllm.py (chunked attention takes room as full attention does).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway.sizing.kvcaches import Cache, Dtype, Heads, Latent, State
from gateway.sizing.modelconfig import ModelConfig, ModelShapeError

Layers = tuple[tuple[Cache, ...], ...]

_FULL: Final = frozenset(
    {
        *("attention", "full_attention", "chunked_attention", "indexed_attention"),
        *("deepseek_sparse_attention", "qwen_sparse_attention", "hybrid", "*"),
    }
)
_SLIDING: Final = frozenset({"sliding_attention", "local_attention", "sliding_window"})
_RECURRENT: Final = frozenset({"linear_attention", "mamba", "mamba2", "conv", "hybrid", "M"})
_NOTHING: Final = frozenset({"mlp", "moe", "-", "E"})
# Kinds of attention whose memory is not known here: no answer is better than a wrong one.
_UNKNOWN: Final = {
    "compress_ratios": "compressed sparse attention (DeepSeek-V4)",
    "attn_type_list": "lightning attention (MiniMax)",
    "block_sparse_attention": "block-sparse attention",
}
_INDEX_SCALE_TOKENS: Final = 128  # numbers that share an fp32 scale in the index of sparse MLA


def layers_of(config: ModelConfig) -> Layers:
    """Return the caches of each layer, in order.

    Raises:
        ModelShapeError: the config leaves out what is needed, or is of a kind not known here.
    """
    for name, what in _UNKNOWN.items():
        if config.get(name) is not None:
            raise ModelShapeError(f"config.json has {name}: {what} is not supported")
    if config.outer.get("is_encoder_decoder"):
        raise ModelShapeError("encoder-decoder models are not supported")
    if config.part("block_configs") or isinstance(config.get("block_configs"), list):
        return _blocks_of_their_own(config)
    shared = config.maybe("num_kv_shared_layers") or 0
    kinds = _kinds(config)
    own = len(kinds) - shared  # the last layers read the caches of earlier ones (Gemma-3n)
    return tuple(_caches(config, kind) if number < own else () for number, kind in enumerate(kinds))


def _kinds(config: ModelConfig) -> list[str]:
    """Return the kind of each layer, by the words of config.json."""
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return list(pattern)
    for name in ("layers_block_type", "layer_types"):
        if words := config.words(name):
            return words[: config.layers] if len(words) >= config.layers else words
    derived = _BY_TYPE.get(config.model_type, _plain)
    return derived(config)


def _caches(config: ModelConfig, kind: str) -> tuple[Cache, ...]:
    if kind in _NOTHING:
        return ()
    found: list[Cache] = []
    if kind in _FULL:
        found += _full(config)
    elif kind in _SLIDING:
        found.append(_heads(config, _window(config)))
    if kind in _RECURRENT:
        found.append(_state(config))
    if config.model_type == "falcon_h1":  # both, side by side, in every layer
        found = [_heads(config, None), _state(config)]
    if not found:
        raise ModelShapeError(f"layers of kind {kind!r} are not supported")
    return tuple(found)


def _full(config: ModelConfig) -> list[Cache]:
    if not config.is_mla:
        return [_heads(config, None)]
    dim = config.count("kv_lora_rank") + config.count("qk_rope_head_dim")
    index = config.maybe("index_head_dim")
    if not index or not config.maybe("index_topk"):
        return [Latent(dim)]
    return [
        Latent(dim, sparse=True),
        Latent(index, fixed_bytes=index + index // _INDEX_SCALE_TOKENS * 4),
    ]


def _heads(config: ModelConfig, window: int | None) -> Heads:
    kv_heads, key_dim = config.kv_heads, config.head_dim
    if not kv_heads or not key_dim:
        raise ModelShapeError("config.json has no num_attention_heads")
    if window is None:  # Gemma-4: layers that see everything have heads of their own size
        key_dim = config.maybe("global_head_dim") or key_dim
        kv_heads = config.maybe("num_global_key_value_heads") or kv_heads
    value_dim = config.maybe("v_head_dim") if config.model_type.startswith("mimo_v2") else None
    return Heads(kv_heads, key_dim, value_dim or key_dim, window)


def _window(config: ModelConfig) -> int:
    window = config.maybe("sliding_window")
    if not window:
        raise ModelShapeError("config.json has layers with a sliding window, but no sliding_window")
    return window + 1 if config.model_type == "cohere2" else window  # vLLM models/commandr.py


# --- recurrent layers -----------------------------------------------------------------------------


def _state(config: ModelConfig) -> State:
    if config.get("linear_num_value_heads") is not None:
        return _gated_delta(config)
    if config.part("linear_attn_config"):
        return _kimi_delta(config)
    if config.get("conv_L_cache") is not None:
        width = config.maybe("conv_dim") or config.hidden
        return State(width, config.count("conv_L_cache") - 1)
    heads = config.maybe("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
    if heads is None and config.model_type == "mamba2":
        heads = config.count("num_heads")
    return _mamba1(config) if heads is None else _mamba2(config, heads)


def _gated_delta(config: ModelConfig) -> State:
    """Qwen3-Next, Qwen3.5, OLMo-hybrid."""
    keys = config.count("linear_num_key_heads") * config.count("linear_key_head_dim")
    value_dim = config.count("linear_value_head_dim")
    values = config.count("linear_num_value_heads") * value_dim
    return State(
        conv_channels=2 * keys + values,
        conv_steps=config.count("linear_conv_kernel_dim") - 1,
        recurrent=values * config.count("linear_key_head_dim"),
        recurrent_dtype=_state_dtype(config, "mamba_ssm_dtype"),
    )


def _kimi_delta(config: ModelConfig) -> State:
    part = config.part("linear_attn_config")
    heads, dim, kernel = (part.get(n) for n in ("num_heads", "head_dim", "short_conv_kernel_size"))
    if not (isinstance(heads, int) and isinstance(dim, int) and isinstance(kernel, int)):
        raise ModelShapeError("linear_attn_config in config.json has no num_heads or head_dim")
    return State(3 * heads * dim, kernel - 1, heads * dim * dim, recurrent_dtype=Dtype.FLOAT32)


def _mamba1(config: ModelConfig) -> State:
    """Jamba, Mamba, Falcon-Mamba."""
    width = config.maybe("mamba_expand", "expand")
    inner = width * config.hidden if width else config.count("intermediate_size")
    return State(
        conv_channels=inner,
        conv_steps=config.count("mamba_d_conv", "conv_kernel") - 1,
        recurrent=inner * config.count("mamba_d_state", "state_size"),
    )


def _mamba2(config: ModelConfig, heads: int) -> State:
    """Bamba, Granite-4, Falcon-H1, Nemotron-H, Zamba2, Mamba2. One checkpoint beside its blocks."""
    width = config.maybe("mamba_expand", "expand") or 2
    inner = config.maybe("mamba_d_ssm") or width * config.hidden
    stated = config.get("mamba_d_head", "mamba_head_dim", "mamba_headdim")
    dim = stated if isinstance(stated, int) else inner // heads  # it may be "auto"
    if config.model_type == "nemotron_h":
        inner = heads * dim
    state = config.count("mamba_d_state", "ssm_state_size", "state_size")
    return State(
        conv_channels=inner,
        conv_steps=config.count("mamba_d_conv", "conv_kernel") - 1,
        recurrent=heads * dim * state,
        groups=config.maybe("mamba_n_groups", "n_groups", "mamba_ngroups") or 1,
        group_channels=2 * state,
        recurrent_dtype=_state_dtype(config, "mamba_ssm_cache_dtype"),
        checkpoints=1,
    )


def _state_dtype(config: ModelConfig, name: str) -> Dtype | None:
    stated = config.get(name)
    return Dtype.parse(stated) if isinstance(stated, str) and stated != "auto" else None


# --- models whose config.json states no kinds -----------------------------------------------------


def _plain(config: ModelConfig) -> list[str]:
    """All layers are alike: with the window, where one is stated and in use."""
    sliding = config.window is not None and not config.is_mla
    return ["sliding_attention" if sliding else "full_attention"] * config.layers


def _from_max_window_layers(config: ModelConfig) -> list[str]:
    """Qwen2, Qwen3: the first layers see everything, where a window is in use at all."""
    first = config.maybe("max_window_layers")
    whole = config.layers if config.window is None or first is None else first
    return [
        "full_attention" if number < whole else "sliding_attention"
        for number in range(config.layers)
    ]


def _every(default: int, name: str, other: str) -> Callable[[ModelConfig], list[str]]:
    """Every n-th layer sees everything; the others are of the other kind. `name` is the key of n."""

    def kinds(config: ModelConfig) -> list[str]:
        period = config.maybe(name) or default
        return [
            other if number % period else "full_attention" for number in range(1, config.layers + 1)
        ]

    return kinds


def _jamba(config: ModelConfig) -> list[str]:
    period, offset = config.count("attn_layer_period"), config.count("attn_layer_offset")
    return [
        "attention" if number % period == offset else "mamba" for number in range(config.layers)
    ]


def _listed(name: str, other: str, first: int = 0) -> Callable[[ModelConfig], list[str]]:
    """The layers with attention are listed by number."""

    def kinds(config: ModelConfig) -> list[str]:
        stated = config.get(name)
        part = config.part("linear_attn_config").get(name)
        numbers = stated if isinstance(stated, list) else part if isinstance(part, list) else []
        return [
            "attention" if number in numbers else other
            for number in range(first, config.layers + first)
        ]

    return kinds


def _recurrent_only(config: ModelConfig) -> list[str]:
    return ["mamba"] * config.layers


_BY_TYPE: Final[dict[str, Callable[[ModelConfig], list[str]]]] = {
    "bamba": _listed("attn_layer_indices", "mamba"),
    "cohere2": _every(4, "sliding_window_pattern", "sliding_attention"),
    "falcon_h1": _recurrent_only,
    "falcon_mamba": _recurrent_only,
    "gemma2": _every(2, "sliding_window_pattern", "sliding_attention"),
    "gemma3_text": _every(6, "sliding_window_pattern", "sliding_attention"),
    "gpt_oss": _every(2, "sliding_window_pattern", "sliding_attention"),
    "jamba": _jamba,
    "kimi_linear": _listed("full_attn_layers", "linear_attention", first=1),
    "lfm2": _listed("full_attn_idxs", "conv"),
    "mamba": _recurrent_only,
    "mamba2": _recurrent_only,
    "qwen2": _from_max_window_layers,
    "qwen3": _from_max_window_layers,
    "qwen3_next": _every(4, "full_attention_interval", "linear_attention"),
    "qwen3_5_text": _every(4, "full_attention_interval", "linear_attention"),
}


def _blocks_of_their_own(config: ModelConfig) -> Layers:
    """Llama-Nemotron (NAS): each layer says whether it has attention, and heads a group."""
    blocks = config.get("block_configs")
    layers: list[tuple[Cache, ...]] = []
    for block in blocks if isinstance(blocks, list) else []:
        attention = block.get("attention", {}) if isinstance(block, dict) else {}
        per_group = attention.get("n_heads_in_group")
        if attention.get("no_op") or attention.get("replace_with_linear") or not per_group:
            layers.append(())
        else:
            layers.append((Heads(config.heads // per_group, config.head_dim, config.head_dim),))
    return tuple(layers)
