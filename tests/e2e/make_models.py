"""Make a tiny random Llama, two LoRA adapters for it, and a tokenizer: make_models.py FOLDER.

Two million parameters are enough to exercise every endpoint, metric and error of a real vLLM on a
CPU. The weights are noise; nothing is downloaded.
"""

import json
import pathlib
import random
import sys

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HIDDEN, LAYERS, KV = 256, 2, 128
SPECIAL = ["<s>", "</s>", "<|turn|>", "<|over|>"]
TEMPLATE = """\
{%- if tools %}<|turn|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|over|>
{% endif %}
{%- for message in messages %}<|turn|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}<|over|>
{% endfor %}
{%- if add_generation_prompt %}<|turn|>assistant
{% endif %}"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of 2,048 tokens on text made up here."""
    rng = random.Random(7)
    syllables = [a + b for a in "bdfgklmnprstv" for b in ("a", "e", "i", "o", "u", "an", "er")]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(900)]
    lines = [" ".join(rng.choices(words, k=30)) for _ in range(600)]
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        lines,
        trainers.BpeTrainer(vocab_size=2048, special_tokens=SPECIAL, initial_alphabet=alphabet),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    fast.chat_template = TEMPLATE
    return fast


def make_model(folder: pathlib.Path, head_dim: int = 64) -> None:
    """Write the model; vLLM's CPU attention needs heads of 64: with 16 the engine dies of its first token."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=HIDDEN, intermediate_size=512, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=head_dim, max_position_embeddings=2048,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def make_adapter(folder: pathlib.Path, seed: int) -> None:
    """Write a rank-8 LoRA strong enough to change what the model says."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for name, width in (("q_proj", HIDDEN), ("v_proj", KV), ("o_proj", HIDDEN)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = (torch.randn(8, HIDDEN) * 0.1).to(torch.bfloat16)
            weights[f"{prefix}.lora_B.weight"] = (torch.randn(width, 8) * 0.1).to(torch.bfloat16)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny", "bias": "none", "r": 8,
        "lora_alpha": 64, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj", "o_proj"],
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    root = pathlib.Path(sys.argv[1])
    make_model(root / "tiny")
    make_model(root / "tiny-broken", head_dim=16)
    make_adapter(root / "lora-a", seed=11)
    make_adapter(root / "lora-b", seed=12)
