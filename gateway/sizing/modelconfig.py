"""Read a config.json as vLLM does: names that differ between models, defaults, sub-configs.

Source: vLLM 0.32, transformers_utils/model_arch_config_convertor.py (names, head sizes, MLA,
longest context) and config/model.py (`_get_and_verify_max_len`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gateway.sizing.kvcaches import Dtype
from gateway.sizing.modeldefaults import DEFAULTS

_TEXT_PARTS: Final = ("text_config", "llm_config", "language_config", "thinker_config")
_ENCODERS: Final = ("vision_config", "audio_config", "vit_config", "encoder_config")
_LENGTHS: Final = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
# Rope types whose max_position_embeddings is the scaled length already.
_SCALED_ALREADY: Final = frozenset(
    {"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"}
)
_MLA: Final = frozenset(
    {
        *("axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite"),
        *("kimi_k2", "kimi_linear", "longcat_flash", "pangu_ultra_moe", "bailing_hybrid"),
    }
)
_DEFAULT_LEN: Final = 2048  # what vLLM assumes where a config has none


class ModelShapeError(ValueError):
    """A config.json lacks what memory depends on, or has what is not known here."""


class ModelConfig:
    """The part of a config.json that is the language model, with defaults filled in."""

    def __init__(self, config: Mapping[str, object]) -> None:
        """Wrap a parsed config.json."""
        self.outer = config
        self._text = _text_part(config)
        self.model_type = str(self._text.get("model_type") or config.get("model_type") or "")
        self._defaults = DEFAULTS.get(self.model_type, {})

    def get(self, *names: str) -> object:
        """Return the first of the names that is there and not null, else its default, else None."""
        for source in (self._text, self._defaults):
            for name in names:
                if source.get(name) is not None:
                    return source[name]
                if name in source and source is self._text:
                    return None  # null is meant, not the default
        return None

    def count(self, *names: str) -> int:
        """Return a whole number. ModelShapeError: there is none, or not a number."""
        found = self.maybe(*names)
        if found is None:
            raise ModelShapeError(f"config.json has no {names[0]}")
        return found

    def maybe(self, *names: str) -> int | None:
        """Return a whole number, or None where there is none. ModelShapeError: not a number."""
        found = self.get(*names)
        if isinstance(found, list) and len({str(each) for each in found}) == 1:
            found = found[0]
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, int | float) or found < 0:
            raise ModelShapeError(f"{names[0]} in config.json is not a number: {found!r}")
        return int(found)

    def words(self, name: str) -> list[str] | None:
        """Return a list of words, such as layer_types; None where there is none."""
        found = self.get(name)
        return [str(word) for word in found] if isinstance(found, list) and found else None

    def part(self, name: str) -> Mapping[str, object]:
        """Return a mapping inside the config; empty where there is none."""
        found = self.get(name)
        return found if isinstance(found, Mapping) else {}

    @property
    def hidden(self) -> int:
        """The width of the model."""
        return self.count("hidden_size", "n_embd", "d_model")

    @property
    def layers(self) -> int:
        """How many layers it has."""
        return self.count("num_hidden_layers", "n_layer", "num_layers", "n_layers")

    @property
    def heads(self) -> int:
        """How many attention heads; 0 for a model without attention."""
        return self.maybe("num_attention_heads", "n_head", "n_heads", "num_heads") or 0

    @property
    def kv_heads(self) -> int:
        """How many heads of keys and values; by default as many as heads."""
        if self.get("multi_query") and not self.get("new_decoder_architecture"):
            return 1  # Falcon
        stated = self.maybe("n_head_kv", "num_kv_heads", "num_key_value_heads")
        stated = stated or self.maybe("multi_query_group_num", "num_attention_groups")
        in_part = self.part("attn_config").get("kv_n_heads")  # DBRX
        return stated or (in_part if isinstance(in_part, int) else 0) or self.heads

    @property
    def head_dim(self) -> int:
        """The size of a head: stated, or the width divided by the heads."""
        stated = self.maybe("head_dim", "attention_head_dim", "hidden_size_per_head")
        if stated:
            return stated
        return self.hidden // self.heads if self.heads else 0

    @property
    def multimodal(self) -> bool:
        """Whether there is an encoder of images, clips or sound beside the language model."""
        inside = self.outer.get("thinker_config")
        places = (self.outer, inside if isinstance(inside, Mapping) else {})
        return any(isinstance(place.get(name), Mapping) for place in places for name in _ENCODERS)

    @property
    def is_mla(self) -> bool:
        """Whether keys and values are cached as one compressed vector."""
        return self.model_type in _MLA and self.get("kv_lora_rank") is not None

    @property
    def window(self) -> int | None:
        """The sliding window, where one is stated and in use."""
        if self.get("use_sliding_window") is False:
            return None
        return self.maybe("sliding_window") or None

    @property
    def dtype(self) -> Dtype:
        """The format that `--dtype auto` comes to: float32 weights are loaded as bfloat16."""
        stated = self.get("dtype", "torch_dtype") or self.outer.get("dtype")
        stated = stated or self.outer.get("torch_dtype")
        try:
            dtype = Dtype.parse(str(stated))
        except ValueError:
            return Dtype.BFLOAT16
        return Dtype.BFLOAT16 if dtype is Dtype.FLOAT32 else dtype

    @property
    def quantization(self) -> Mapping[str, object] | None:
        """How the weights are quantised; None: they are not."""
        for source in (self.outer, self._text):
            for name in ("quantization_config", "compression_config"):
                found = source.get(name)
                if isinstance(found, Mapping):
                    return found
        return None

    @property
    def longest(self) -> int:
        """The context window that vLLM derives: positions, times the scaling of the rope."""
        stated = [found for name in _LENGTHS if (found := self.maybe(name))]
        length: float = self.maybe("model_max_length") or min(stated, default=_DEFAULT_LEN)
        rope = self.part("rope_parameters") or self.part("rope_scaling")
        ropes = [each for each in rope.values() if isinstance(each, Mapping)] or [rope]
        types = {str(each.get("rope_type", each.get("type", "default"))) for each in ropes}
        if "longrope" in types or "su" in types:
            return self.maybe("original_max_position_embeddings") or int(length)
        if "gemma3" not in self.model_type and not types & _SCALED_ALREADY:
            factors = [each.get("factor") for each in ropes]
            length *= next((f for f in factors if isinstance(f, int | float)), 1.0)
        return int(length)


def _text_part(config: Mapping[str, object]) -> Mapping[str, object]:
    for name in _TEXT_PARTS:
        part = config.get(name)
        if isinstance(part, Mapping):
            return _text_part(part) if name == "thinker_config" else part
    return config
