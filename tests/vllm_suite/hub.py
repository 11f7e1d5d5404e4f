"""Make tiny random models under the names that vLLM's tests ask for: hub.py HF_HOME

They lie where `huggingface_hub` keeps what it downloaded, so both vLLM and its tests find them by
name while offline. The weights are noise: a test that reads meaning from an answer fails, and it
fails alike with and without a gateway in between.
"""

import pathlib
import sys

import torch
from tokenizers import AddedToken, processors
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "e2e"))
import make_models as tiny

REVISION = "0" * 40
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_start|>", "<|im_end|>"]
LABELS = ["yes", "no"]  # each is one token, or vLLM makes no structured decisions
SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
DECODER = {
    **SIZES, "num_key_value_heads": 2, "head_dim": 64, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 1, "max_position_embeddings": 32768,
}  # fmt: skip
ENCODER = {**SIZES, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 1}

# What the tests' own token ids need as vocabulary.
MODELS: dict[str, tuple[type[PreTrainedModel], object]] = {
    "HuggingFaceH4/zephyr-7b-beta": (
        MistralForCausalLM,
        MistralConfig(**DECODER, vocab_size=32000),
    ),
    "HuggingFaceTB/SmolLM2-135M-Instruct": (
        LlamaForCausalLM,
        LlamaConfig(**DECODER, vocab_size=49152),
    ),
    "facebook/opt-125m": (
        OPTForCausalLM,
        OPTConfig(
            hidden_size=256, ffn_dim=512, num_hidden_layers=2, num_attention_heads=4, vocab_size=50272,
            max_position_embeddings=2048, word_embed_proj_dim=256, bos_token_id=0, eos_token_id=1, pad_token_id=1,
        ),
    ),
    "openai-community/gpt2": (
        GPT2LMHeadModel,
        GPT2Config(n_embd=256, n_layer=2, n_head=4, vocab_size=50257, bos_token_id=0, eos_token_id=1),
    ),
    "hmellor/tiny-random-LlamaForCausalLM": (
        LlamaForCausalLM,
        LlamaConfig(**DECODER, vocab_size=32000),
    ),
    **{
        name: (Qwen2ForCausalLM, Qwen2Config(**DECODER, vocab_size=151936))
        for name in ("Qwen/Qwen2-1.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct")
    },
    **{
        name: (Qwen3ForCausalLM, Qwen3Config(**DECODER, vocab_size=151936))
        for name in ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-8B")
    },
    "jason9693/Qwen2.5-1.5B-apeach": (
        Qwen2ForSequenceClassification,
        Qwen2Config(**DECODER, vocab_size=151936, num_labels=2),
    ),
    "intfloat/multilingual-e5-small": (
        BertModel,
        BertConfig(**ENCODER, vocab_size=250037, max_position_embeddings=512),
    ),
    "BAAI/bge-reranker-base": (
        XLMRobertaForSequenceClassification,
        XLMRobertaConfig(
            **ENCODER, vocab_size=250037, max_position_embeddings=514, type_vocab_size=1, num_labels=1,
            position_embedding_type="absolute",
        ),
    ),
    **{
        name: (BertModel, BertConfig(**ENCODER, vocab_size=30522, max_position_embeddings=512))
        for name in (
            "BAAI/bge-base-en-v1.5",
            "Snowflake/snowflake-arctic-embed-m-v1.5",
            "sentence-transformers/all-MiniLM-L12-v2",
        )
    },
}  # fmt: skip
ADAPTERS = {
    "typeof/zephyr-7b-beta-lora": 11,
    "charent/self_cognition_Alice": 12,
    "Jackmin108/Qwen3-0.6B-Meow-LoRA": 13,
    "Jackmin108/Qwen3-0.6B-Woof-LoRA": 14,
}


def folder_of(home: pathlib.Path, name: str) -> pathlib.Path:
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs/main").write_text(REVISION)
    return repository / "snapshots" / REVISION


def make_model(folder: pathlib.Path, kind: type[PreTrainedModel], config: object) -> None:
    tokenizer = tiny.make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.add_tokens([AddedToken(each, single_word=True) for each in LABELS])
    if not kind.__name__.endswith(("CausalLM", "LMHeadModel", "Qwen2ForSequenceClassification")):
        # An encoder frames what it reads, and knows a pair by the mark between.
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>",
            pair="<s> $A </s> </s> $B </s>",
            special_tokens=[("<s>", 0), ("</s>", 1)],
        )
        tokenizer.chat_template = None
    tokenizer.model_max_length = min(getattr(config, "max_position_embeddings", 1024), 8192)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(7)
    model = kind(config)
    if kind.__name__.endswith(("ForCausalLM", "LMHeadModel")):
        make_readable(model, tokenizer)
    model.to(torch.bfloat16).save_pretrained(folder)


def make_readable(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Have noise consist of words, and come to an end: what closes a string, an object, a reply is likely.

    Tokens that the tokenizer lacks would be read as nothing; a reply under a JSON schema would run on to
    the context's end. One dimension of the residual stream is a constant here, so its column of the
    head is a bias for each token; another one says that the token before closed something.
    """
    head, embed = (
        each.weight.data for each in (model.get_output_embeddings(), model.get_input_embeddings())
    )
    head[len(tokenizer) :] = 0.0
    if head.data_ptr() == embed.data_ptr():
        return
    constant, closed = 0, 1
    embed[:, constant], embed[:, closed] = 1.0, 0.0
    head.mul_(10)
    head[:, [constant, closed]] = 0.0
    head[len(tokenizer) :, constant] = -2.0
    for text, bias in (("</s>", 1.2), ('"', 1.0), ("}", 1.0), ("]", 1.0)):
        for token in {tokenizer.convert_tokens_to_ids(text), *tokenizer.encode(text)} - {None}:
            head[token, constant] = bias
            embed[token, closed] = 1.0 if text in "}]" else 0.0
    head[tokenizer.convert_tokens_to_ids("</s>"), closed] = 2.5


if __name__ == "__main__":
    root = pathlib.Path(sys.argv[1])
    for name, (kind, config) in MODELS.items():
        folder = folder_of(root, name)
        if not (folder / "config.json").exists():
            make_model(folder, kind, config)
    for name, seed in ADAPTERS.items():
        tiny.make_adapter(folder_of(root, name), seed)
