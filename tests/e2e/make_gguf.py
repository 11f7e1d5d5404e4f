"""Write a tiny Llama with random weights and one token for each byte: make_gguf.py FILE [WINDOW].

Runs where `gguf` is installed; needs no download.
"""

from __future__ import annotations

import sys

import gguf
import numpy

WIDTH, INNER, HEADS, LAYERS = 64, 128, 4, 2
TOKENS = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % byte for byte in range(256))]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "


def write(path: str, window: int) -> None:
    chance = numpy.random.default_rng(7)
    model = gguf.GGUFWriter(path, "llama")
    model.add_name("tiny")
    model.add_context_length(window)
    model.add_embedding_length(WIDTH)
    model.add_block_count(LAYERS)
    model.add_feed_forward_length(INNER)
    model.add_head_count(HEADS)
    model.add_head_count_kv(HEADS)
    model.add_layer_norm_rms_eps(1e-5)
    model.add_rope_dimension_count(WIDTH // HEADS)
    model.add_file_type(0)
    model.add_vocab_size(len(TOKENS))
    model.add_tokenizer_model("llama")
    model.add_token_list(TOKENS)
    model.add_token_scores([0.0] * len(TOKENS))
    model.add_token_types([2, 3, 3] + [6] * 256)  # unknown, control, bytes
    model.add_bos_token_id(1)
    model.add_eos_token_id(2)
    model.add_unk_token_id(0)
    model.add_chat_template(TEMPLATE)

    def add(name: str, *shape: int) -> None:
        model.add_tensor(name, (chance.standard_normal(shape) * 0.08).astype(numpy.float32))

    ones = numpy.ones(WIDTH, numpy.float32)
    add("token_embd.weight", len(TOKENS), WIDTH)
    add("output.weight", len(TOKENS), WIDTH)
    model.add_tensor("output_norm.weight", ones)
    for layer in range(LAYERS):
        at = f"blk.{layer}"
        model.add_tensor(f"{at}.attn_norm.weight", ones)
        model.add_tensor(f"{at}.ffn_norm.weight", ones)
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"{at}.{part}.weight", WIDTH, WIDTH)
        add(f"{at}.ffn_gate.weight", INNER, WIDTH)
        add(f"{at}.ffn_up.weight", INNER, WIDTH)
        add(f"{at}.ffn_down.weight", WIDTH, INNER)
    model.write_header_to_file()
    model.write_kv_data_to_file()
    model.write_tensors_to_file()
    model.close()


if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 512)
