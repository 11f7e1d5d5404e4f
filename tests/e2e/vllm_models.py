"""Run by the Python of a vLLM: what vLLM itself reads of config.json files.

Standard input: folders by name, which of them are recurrent, and fields of configs by model type.
Standard output, last line: what vLLM reads of each folder, and transformers' defaults of the fields.
"""

import json
import math
import pathlib
import sys

from transformers import AutoConfig
from vllm.config import set_current_vllm_config
from vllm.config.model import _get_and_verify_max_len
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import ModelRegistry
from vllm.transformers_utils.config import get_config, get_hf_text_config
from vllm.transformers_utils.model_arch_config_convertor import (
    MODEL_ARCH_CONFIG_CONVERTORS,
    ModelArchConfigConvertorBase,
)


def reading(folder):
    config = get_config(folder, trust_remote_code=False)
    text = get_hf_text_config(config)
    kind = MODEL_ARCH_CONFIG_CONVERTORS.get(config.model_type, ModelArchConfigConvertorBase)
    arch = kind(config, text).convert()
    return {
        "longest": _get_and_verify_max_len(config, arch, None, None, False, None),
        "heads": arch.total_num_attention_heads,
        "head_size": arch.head_size,
        "kv_heads": arch.total_num_kv_heads,
        "layers": arch.total_num_hidden_layers,
        "hidden": arch.hidden_size,
        "vocab": arch.vocab_size,
        "experts": arch.num_experts,
        "mla": arch.is_deepseek_mla,
        "window": getattr(text, "sliding_window", None),
        "kinds": getattr(text, "layer_types", None),
    }


def import_here(folder):
    """Import the code of a model into this process; by itself vLLM starts one for a look at it."""
    (name,) = json.loads((pathlib.Path(folder) / "config.json").read_text())["architectures"]
    ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def state_bytes(folder):
    """Return the bytes of a recurrent layer's state, at the model's own format."""
    import_here(folder)
    # A state is as large without prefix caching, which a CPU without AMX refuses some of them.
    args = EngineArgs(
        model=folder, skip_tokenizer_init=True, load_format="dummy", enable_prefix_caching=False
    )
    how = args.create_engine_config()
    if how.model_config.hf_config.model_type != "nemotron_h":
        how.cache_config.mamba_ssm_cache_dtype = "auto"  # on some CPUs it is set to float32
    model = how.model_config
    kind, _ = ModelRegistry.resolve_model_cls(model.architecture, model_config=model)
    with set_current_vllm_config(how):
        shapes = kind.get_mamba_state_shape_from_config(how)
        dtypes = kind.get_mamba_state_dtype_from_config(how)
    return sum(
        math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)
    )


def defaults(model_type, names):
    config = AutoConfig.for_model(model_type)
    return {name: getattr(config, name, None) for name in names}


told = json.load(sys.stdin)
answers = {name: reading(folder) for name, folder in told["all"].items()}
for name in told["recurrent"]:
    answers[name]["state_bytes"] = state_bytes(told["all"][name])
by_type = {each: defaults(each, names) for each, names in told["defaults"].items()}
print(json.dumps({"models": answers, "defaults": by_type}))
