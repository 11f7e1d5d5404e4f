"""What decides how much GPU memory a model takes: its caches, its weights, its widths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gateway.sizing.kvcaches import Dtype, Heads, State
from gateway.sizing.modelconfig import ModelConfig
from gateway.sizing.modellayers import Layers, layers_of


@dataclass(frozen=True, slots=True)
class Weights:
    """The bytes of a model's weights that vLLM loads, as stored."""

    total_bytes: int
    embedding_bytes: int = 0  # of the input
    head_bytes: int = 0  # of the output; 0 where it is the embedding (tied)
    layer_bytes: tuple[int, ...] = ()  # by layer; empty: all alike
    stored: Dtype | None = None  # loaded in the format of the plan; None: as they are (quantised)

    def loaded(self, dtype: Dtype) -> Weights:
        """Return the weights as loaded for a format: float weights are converted, others are not."""
        if self.stored is None or self.stored.size == dtype.size:
            return self
        times, parts = dtype.size, self.stored.size
        return Weights(
            self.total_bytes * times // parts,
            self.embedding_bytes * times // parts,
            self.head_bytes * times // parts,
            tuple(each * times // parts for each in self.layer_bytes),
            dtype,
        )

    def stage_bytes(self, stage: range, layers: int) -> int:
        """Return the bytes of a pipeline stage: its layers, and the embedding or head at its end of the model.

        The last stage has the output head; a tied one is a second copy of the embedding there (vLLM
        models/llama.py: `embed_tokens` on the first and, if tied, the last rank).
        """
        ends = self.embedding_bytes + self.head_bytes
        each = self.layer_bytes or (max(0, self.total_bytes - ends) // max(1, layers),) * layers
        held = sum(each[stage.start : stage.stop])
        rest = max(0, self.total_bytes - ends - sum(each)) if self.layer_bytes else 0
        if stage.start == 0:
            held += self.embedding_bytes + rest  # vision towers and the like
        if stage.stop == layers and stage.start > 0:
            held += self.head_bytes or self.embedding_bytes
        elif stage.stop == layers:
            held += self.head_bytes
        return held


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What decides how much memory a model takes. All sizes are of the whole model."""

    layers: Layers  # the caches of each layer
    weights: Weights
    hidden: int
    vocab: int
    heads: int  # of attention; what tensor parallelism must divide
    inner: int  # width of the MLP that one token passes
    longest: int  # context window in tokens, as vLLM derives it
    dtype: Dtype = Dtype.BFLOAT16  # of `--dtype auto`
    kv_heads: int = 0
    head_dim: int = 0
    experts: int = 0
    experts_per_token: int = 0
    quantized: bool = False
    kv_fp8: bool = False  # the checkpoint asks for an fp8 KV cache
    multimodal: bool = False  # it has an encoder of images, clips or sound

    @property
    def recurrent(self) -> bool:
        """Whether any layer keeps a state in place of tokens."""
        return any(isinstance(cache, State) for layer in self.layers for cache in layer)

    @property
    def attentive(self) -> bool:
        """Whether any layer keeps tokens."""
        return any(not isinstance(cache, State) for layer in self.layers for cache in layer)

    @property
    def latent(self) -> bool:
        """Whether its attention is MLA."""
        caches = [c for layer in self.layers for c in layer if not isinstance(c, State)]
        return bool(caches) and not any(isinstance(cache, Heads) for cache in caches)

    def at_bits(self, bits: int) -> ModelShape:
        """Return the model with the linear weights of its layers at so many bits.

        Embedding and head stay as they are, as in checkpoints made with llm-compressor or AutoAWQ.
        Scales of groups of 128 weights are counted: 16 bits each.
        """
        old = self.weights.loaded(Dtype.BFLOAT16)
        share = (bits + 16 / 128) / 16
        ends = old.embedding_bytes + old.head_bytes
        weights = Weights(
            total_bytes=ends + int((old.total_bytes - ends) * share),
            embedding_bytes=old.embedding_bytes,
            head_bytes=old.head_bytes,
            layer_bytes=tuple(int(each * share) for each in old.layer_bytes),
        )
        return replace(self, weights=weights, quantized=True)

    @staticmethod
    def of_config(
        config: Mapping[str, object], weights_bytes: int, weights: Weights | None = None
    ) -> ModelShape:
        """Return the shape of a parsed config.json.

        Args:
            config: as in the file; what transformers has defaults for may be missing.
            weights_bytes: of all weights as stored.
            weights: how they are divided, where that is known; otherwise that is estimated.

        Raises:
            ModelShapeError: the config leaves out what is needed, or its kind is not known.
        """
        model = ModelConfig(config)
        layers = layers_of(model)
        experts = model.maybe("num_experts", "moe_num_experts", "n_routed_experts") or 0
        experts = experts or model.maybe("num_local_experts") or 0
        per_token = model.maybe("num_experts_per_tok", "num_experts_per_token", "moe_topk") or 0
        return ModelShape(
            layers=layers,
            weights=weights or _estimated(model, weights_bytes),
            hidden=model.hidden,
            vocab=model.maybe("vocab_size") or 0,
            heads=model.heads,
            inner=_inner(model, per_token if experts else 0),
            longest=model.longest,
            dtype=model.dtype,
            kv_heads=model.kv_heads if model.heads else 0,
            head_dim=model.head_dim,
            experts=experts,
            experts_per_token=per_token if experts else 0,
            quantized=model.quantization is not None,
            kv_fp8=_asks_for_fp8(model.quantization),
            multimodal=model.multimodal,
        )


def _estimated(model: ModelConfig, total: int) -> Weights:
    """Divide the weights: the embedding by the sizes in the config; the layers share the rest."""
    stored = None if model.quantization is not None else model.dtype
    embedding = min((model.maybe("vocab_size") or 0) * model.hidden * model.dtype.size, total // 2)
    tied = is_tied(model)
    return Weights(total, embedding, 0 if tied else embedding, stored=stored)


def is_tied(model: ModelConfig) -> bool:
    """Whether the output head is the input embedding; it is then loaded once."""
    outer = model.outer.get("tie_word_embeddings")
    return bool(model.get("tie_word_embeddings") if outer is None else outer)


def _inner(model: ModelConfig, per_token: int) -> int:
    stated = model.maybe("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim")
    dense = stated or 4 * model.hidden
    if not per_token:
        return dense
    one = model.maybe("moe_intermediate_size") or dense
    shared = model.maybe("shared_expert_intermediate_size") or 0
    return per_token * one + shared + one * (model.maybe("n_shared_experts") or 0)


def _asks_for_fp8(quantization: Mapping[str, object] | None) -> bool:
    """Whether a checkpoint sets the format of its KV cache (ModelOpt, llm-compressor).

    Source: vLLM utils/torch_utils.py, `get_kv_cache_quant_algo_string`; attention.py,
    `kv_cache_scheme`.
    """
    if quantization is None:
        return False
    inner = quantization.get("quantization")
    schemes = [quantization.get("kv_cache_scheme"), quantization.get("kv_cache_quant_algo")]
    if isinstance(inner, Mapping):
        schemes.append(inner.get("kv_cache_quant_algo"))
    for each in schemes:
        if isinstance(each, Mapping) and each.get("num_bits") == 8 and each.get("type") == "float":
            return True
        if isinstance(each, str) and each.lower().startswith("fp8"):
            return True
    return False
